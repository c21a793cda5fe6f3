"""A model that llama.cpp has converted to a GGUF file, for --verify."""

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.commands.saved import load_saved_tokenizer
from harness.messages import UserError

FLOATS = {"F32", "F16", "BF16"}  # the types of weights that are not quantized


def read_gguf(file: Path) -> Any:
    """The `gguf.GGUFReader` of a file: its settings and the types of its weights."""
    if not find_spec("gguf"):
        raise UserError(f"{file}: reading it needs the package gguf: .venv/bin/pip install gguf")
    from gguf import GGUFReader

    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise UserError(f"{file} is not a GGUF file: give one that convert_hf_to_gguf.py or llama-quantize has written")
    try:
        return GGUFReader(file)
    except (ValueError, KeyError, IndexError) as error:  # also a type of weights that the package does not know
        raise UserError(
            f"{file} is incomplete, or newer than the package gguf ({error}): convert it again, or update gguf"
        ) from error


def is_quantized(reader: Any) -> bool:
    return any(tensor.tensor_type.name not in FLOATS for tensor in reader.tensors)


def load_tokenizer_of(reader: Any, run: Path) -> Any:
    """The tokenizer that `run` has saved, with the chat template of the GGUF file."""
    tokenizer, field = load_saved_tokenizer(run), reader.fields.get("tokenizer.chat_template")
    tokenizer.chat_template = field.contents() if field else None
    return tokenizer


def check_vocabulary(reader: Any, tokenizer: Any) -> tuple[str, str]:
    """The run's vocabulary in words, and that of the file: how many tokens are those of the run, and with which an answer ends.

    Without the added tokens that are not special, whose blanks llama.cpp's program writes in another way. Equal texts for a file
    without a vocabulary.
    """
    field = reader.fields.get("tokenizer.ggml.tokens")
    if field is None:
        return "none", "none"
    texts = field.contents()
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if not token.special}
    known = {index: token for token, index in tokenizer.get_vocab().items() if index not in added}
    equal = sum(index < len(texts) and texts[index] == token for index, token in known.items())
    ends = set()
    for name in ("eos", "eot"):
        if end := reader.fields.get(f"tokenizer.ggml.{name}_token_id"):
            ends.add(int(end.contents()))
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else min(ends, default=None)
    return f"{len(known):,} tokens, end {tokenizer.eos_token_id}", f"{equal:,} tokens, end {end}"


def load_gguf(file: Path, trained: Any) -> Any:
    """The model in a GGUF file, its weights in the dtype of `trained`, on the GPUs of this machine or on its CPU.

    `trained`: the config of the model that was trained. The file's settings replace its settings, so that a wrong one changes the
    loss. transformers reads only some: not how positions are scaled, for example.
    """
    from harness.model.weight_files import check_found

    import torch
    from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedConfig

    config = copy.deepcopy(trained.get_text_config())
    options: dict[str, Any] = {"gguf_file": str(file.absolute())}
    vars(config).pop("quantization_config", None)  # after QLoRA
    try:
        settings, _ = PreTrainedConfig.get_config_dict(file.parent, **options)
        if settings["model_type"] != config.model_type:
            raise UserError(f"{file} has the architecture {settings['model_type']}, but the run has trained {config.model_type}")
        positions = settings.pop("rope_parameters", {})
        if "rope_theta" in settings:
            positions["rope_theta"] = settings.pop("rope_theta")
        config.update(settings)
        if "rope_theta" in (getattr(config, "rope_parameters", None) or {}):
            config.rope_parameters |= positions
        options["quantization_config"] = GgufConfig(dequantize=True)
        options["device_map"] = "auto" if torch.cuda.is_available() else {"": "cpu"}
        model, found = AutoModelForCausalLM.from_pretrained(
            file.parent, config=config, dtype=config.dtype, output_loading_info=True, **options
        )
    except (ValueError, NotImplementedError) as error:
        raise UserError(
            f"{file}: transformers cannot read this architecture or quantization, so it is not compared: {error}"
        ) from error
    check_found(found, str(file))
    return model.eval()
