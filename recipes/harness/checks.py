"""Everything that can be known to be wrong before a process is spawned, a model downloaded or a file written."""

import contextlib
import dataclasses
import importlib.metadata
import sys
from pathlib import Path

from harness import folder, tiny
from harness.launched import fail, say

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements.txt"
TESTED_PYTHON = (3, 11)


def versions():
    """Warns, in one line, about a Python or package version the tests did not run with."""
    differing = [] if sys.version_info[:2] == TESTED_PYTHON else [f"Python {sys.version_info[0]}.{sys.version_info[1]}"]
    pins = [line.split() for line in REQUIREMENTS.read_text("utf-8").splitlines()] if REQUIREMENTS.is_file() else []
    for pin in pins:
        if pin and "==" in pin[0]:
            package, wanted = pin[0].split("==")
            try:
                found = importlib.metadata.version(package).split("+")[0]
            except importlib.metadata.PackageNotFoundError:
                continue
            if found != wanted:
                differing.append(f"{package} {found} (tested: {wanted})")
    if differing:
        say(f"warning: not tested with {', '.join(differing)}")


def gpu_count() -> int:
    """GPUs this process may use."""
    import torch

    return torch.cuda.device_count()


def bf16(config: dict, name: str, gpus: int):
    """Fails for bf16 on a GPU that only emulates it (`torch.cuda.is_bf16_supported` says yes to those)."""
    import torch

    if config.get("mixed_precision") != "bf16":
        return
    for index in range(gpus):
        major, minor = torch.cuda.get_device_capability(index)
        if major < 8:
            fail(
                f"{torch.cuda.get_device_name(index)} has compute capability {major}.{minor} and no bf16 arithmetic, which "
                f"{name} asks for: use a config with mixed_precision: fp16"
            )


def arguments(data, args, model):
    """The arguments against each other."""
    if args.hub_token:
        fail("--hub_token would be saved with the run and seen in the process list: use `hf auth login` or HF_TOKEN")
    if args.push_to_hub:
        fail("--push_to_hub would upload checkpoints: when the run is done, `hf upload OWNER/NAME` its folder")
    if args.resume_from_checkpoint:
        fail("--resume_from_checkpoint is not needed: the same command goes on from the newest checkpoint in --output_dir")
    if args.save_only_model:
        fail("--save_only_model leaves out the optimizer, so the run could not go on: leave the flag out")
    if args.save_total_limit == 1:
        fail("--save_total_limit 1 deletes the last checkpoint before the next one is whole: give 2 or more")
    if data.dataset_streaming and args.max_steps <= 0:
        fail("a stream has no length: give --max_steps, or --max_tokens for a token budget")
    if (model.load_in_4bit or model.load_in_8bit) and not model.use_peft:
        fail("quantized weights are frozen, so nothing would train: add --use_peft")


def quantization(model, args):
    """4-bit weights that FSDP could not shard, or would destroy."""
    if not model.load_in_4bit:
        return
    if model.bnb_4bit_quant_storage not in ("float32", "bfloat16", "float16"):
        fail(
            f"--bnb_4bit_quant_storage {model.bnb_4bit_quant_storage} cannot be sharded: FSDP2 shards floating-point "
            "parameters only and would leave the whole model on every GPU; leave the flag out (float32)"
        )
    if (args.bf16 or args.fp16) and any(word.split("=")[0] in ("--bf16", "--fp16") for word in sys.argv):
        fail(
            "--bf16 and --fp16 ask for a cast of the weights, which would destroy packed 4-bit ones: leave the flag out; "
            "the model already computes in the dtype it is loaded in (bf16)"
        )


def reachable(model: str, revision: str):
    """Fails unless the model's config can be read: from a folder, from the cache or from the hub."""
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    if Path(model).is_dir():
        if not Path(model, "config.json").is_file():
            fail(f"{model} has no config.json: it is not a model folder")
        return
    if model[:1] in ("/", ".", "~"):
        fail(f"there is no folder {model}: give a model folder, or an id of the hub (OWNER/NAME)")
    with hub_errors("model", model):
        if not isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str):
            HfApi().model_info(model, revision=revision)  # says at once when nobody answers; a download tries for long
            hf_hub_download(model, "config.json", revision=revision)


def dataset(data, text_field: str | None = None, name: str = ""):
    """Fails unless the training split can be opened, has a first row, and that row has the text column.

    `name` is what to call the data set in messages.
    """
    from datasets import load_dataset
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE and not Path(data.dataset_name).exists():
        return  # only `datasets` knows what its cache holds
    with hub_errors("data set", data.dataset_name):
        if not Path(data.dataset_name).exists():
            HfApi().dataset_info(data.dataset_name)
        stream = load_dataset(data.dataset_name, data.dataset_config, split=data.dataset_train_split, streaming=True)
        row = next(iter(stream), None)
    name = name or data.dataset_name
    if row is None:
        fail(f"data set {name} ({data.dataset_train_split}) is empty")
    if text_field and text_field not in row:
        fail(f"data set {name} has no column {text_field!r}, it has {', '.join(row)}: name the text with --dataset_text_field")


@contextlib.contextmanager
def hub_errors(kind: str, name: str):
    """Turns the exceptions of the hub's libraries into one line that says which it was and what to do."""
    try:
        yield
    except Exception as error:
        causes = [error]
        while cause := causes[-1].__cause__ or causes[-1].__context__:
            causes.append(cause)
        names = {cls.__name__ for cause in causes for cls in type(cause).__mro__}
        if "GatedRepoError" in names:
            fail(f"{kind} {name} is gated: accept its terms on its hub page, then `hf auth login` (or set HF_TOKEN)")
        if names & {"RepositoryNotFoundError", "HFValidationError"}:
            fail(f"{kind} {name} is unknown to the hub, or private: check the name; for a private one `hf auth login`")
        if names & {"TransportError", "ConnectionError", "OfflineModeIsEnabled"}:
            fail(
                f"{kind} {name} is not on this machine and the hub cannot be reached: connect to the network "
                "(HF_ENDPOINT and HF_HUB_OFFLINE are obeyed), or give the path of a folder that has it"
            )
        fail(f"{kind} {name}: {str(error).strip() or type(error).__name__}"[:400])


def run(data, args, model, launched, config: dict, text_field: str | None):
    """Checks a run as a whole; then takes its folder and, in a rehearsal, makes its stand-ins."""
    arguments(data, args, model)
    if config.get("distributed_type") == "FSDP":
        quantization(model, args)
    path, is_default = Path(args.output_dir), args.output_dir == folder.default(launched, sys.argv[0])
    identity = {
        "recipe": Path(launched.recipe or sys.argv[0]).stem,
        "config": Path(launched.config).stem,
        "model": model.model_name_or_path,
        "dataset": data.dataset_name,
        "dataset_config": data.dataset_config,
        "dataset_train_split": data.dataset_train_split,
        "sharded": config.get("distributed_type") == "FSDP",
        "tiny": launched.tiny,
        "use_peft": model.use_peft,
        "load_in_4bit": model.load_in_4bit,
    }
    folder.check(path, identity, is_default)
    if launched.tiny:
        tiny.prepare(data, model)
        stand_in = dataclasses.replace(data, dataset_name=str(tiny.data_folder(data)))
        dataset(stand_in, text_field, name=data.dataset_name)
    else:
        reachable(model.model_name_or_path, model.model_revision)
        dataset(data, text_field)
    folder.claim(path, identity, is_default)
    flag = "--max_steps" if args.max_steps > 0 else "--num_train_epochs"
    if results := folder.finished(path, args.max_steps, args.num_train_epochs):
        say(
            f"{path} is finished: {results['global_step']} steps, final loss {results['final_loss']:.4f}.\n"
            f"To go on: the same command with a larger {flag}. To start over: another --output_dir, or rm -r {path}"
        )
        sys.exit(0)
    if (path / folder.RESULTS).exists() and not list(path.glob("checkpoint-*")):
        fail(
            f"{path} is finished and its checkpoints are gone, so it cannot go on: train its model further with "
            f"--model_name_or_path {path} and another --output_dir"
        )
    if launched.tiny:
        tiny.announce(data, args, model)
