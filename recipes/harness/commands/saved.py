"""What a folder with a saved model or adapter has, of a run, a checkpoint or --merge, and loading it."""

import sys
import warnings
from pathlib import Path
from typing import Any

from harness.compat.bitsandbytes import keep_4bit_layout
from harness.folder import CHECKPOINT, PROMPT, RESULTS, read_json
from harness.hub import TOKENIZER, hub_errors
from harness.messages import UserError


def read_prompt(folder: Path) -> dict[str, Any]:
    """How a prompt looks for the model in `folder`; {} if it is not known."""
    folder = folder.absolute()
    return read_json((folder.parent if CHECKPOINT.fullmatch(folder.name) else folder) / PROMPT, "rows")


def read_adapter_settings(folder: Path) -> Any:
    """The `peft.PeftConfig` of an adapter. Raises UserError if it names modules to import."""
    from peft import PeftConfig

    file = folder / "adapter_config.json"
    if read_json(file).get("megatron_config"):
        raise UserError(f"{file} has a megatron_config, with which PEFT would import any module: it is not loaded")
    with hub_errors("adapter", str(folder)):
        settings = PeftConfig.from_pretrained(folder)
    return settings


def check_has_model(folder: Path) -> bool:
    """Raises UserError for a folder with neither a model nor an adapter. Returns whether it has an adapter."""
    is_adapter = (folder / "adapter_config.json").is_file()
    if not is_adapter and not (folder / "config.json").is_file():
        raise UserError(
            f"{folder} has no model and no adapter: pass the output directory of a finished run, or one of its checkpoints; "
            "./launch.sh --merge makes a model of a sharded one"
        )
    return is_adapter


def load_model(folder: Path) -> Any:
    """The model in a folder, with its adapter if it has one, on the GPUs of this machine or on its CPU.

    An adapter stays one: its model is loaded as it was trained on, in 4 bits from the folder of --prepare if it was, so that a
    70B model fits the two 24 GB GPUs that it was trained on. One process uses all GPUs, one after the other.
    """
    from harness.compat.transformers import use_no_gpu_kernels
    from harness.model.attention import class_of_model
    from harness.model.models import check_adapter_weights, check_found

    import torch
    import transformers
    from huggingface_hub.constants import HF_HOME
    from peft import PeftModel
    from transformers import AutoConfig, BitsAndBytesConfig

    is_adapter = check_has_model(folder)
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in a run
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    base = str(folder)
    options = {"device_map": "auto", "dtype": "auto", "revision": "main"}
    if is_adapter:
        settings = read_adapter_settings(folder)
        results = read_json(folder / RESULTS)
        base = settings.base_model_name_or_path
        if results.get("quantized_weights"):
            recorded = Path(results["quantized_weights"])
            # Its name is the same on every machine.
            base = str(recorded if recorded.is_dir() else Path(HF_HOME, "quantized", recorded.name))
            if not Path(base).is_dir():
                recipe = results.get("recipe")
                raise UserError(f"{recorded} is missing: ./launch.sh --prepare {recipe} makes it, with the flags of the run")
        else:
            options["revision"] = settings.revision or "main"
            if results.get("quantization"):
                options["quantization_config"] = quantization = BitsAndBytesConfig.from_dict(results["quantization"])
                options["dtype"] = quantization.bnb_4bit_compute_dtype  # what the run has loaded the rest of the model in
    if not torch.cuda.is_available():
        options["device_map"] = {"": "cpu"}
        keep_4bit_layout()
        use_no_gpu_kernels()
    with hub_errors("model", base):
        config = AutoConfig.from_pretrained(base, revision=options["revision"])
        model, found = class_of_model(config).from_pretrained(base, output_loading_info=True, **options)
    check_found(found, base)
    if is_adapter:
        with hub_errors("adapter", str(folder)):
            model = PeftModel.from_pretrained(model, folder)
            check_adapter_weights(model, folder)
    return model.eval()


def load_saved_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    with hub_errors(TOKENIZER, str(folder)):
        return AutoTokenizer.from_pretrained(folder)


def load_saved_processor(folder: Path) -> Any:
    """The processor of a run that was trained on images."""
    from transformers import AutoProcessor

    with hub_errors("processor", str(folder)):
        return AutoProcessor.from_pretrained(folder)
