"""Everything that can be known to be wrong before a process is spawned, a model downloaded or a file written."""

import importlib.metadata
import sys
from pathlib import Path

from harness.launched import Launched, fail, say

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements.txt"
TESTED_PYTHON = (3, 11)
CONNECTION = "Is this machine online? HF_ENDPOINT and HF_HUB_OFFLINE are read too"


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


def gpus(config: dict) -> bool:
    """Whether this machine has the GPUs that `config` asks of one machine."""
    import torch

    return torch.cuda.device_count() >= config["num_processes"] // config["num_machines"]


def bf16(config: dict, name: str):
    """Fails for bf16 on a GPU that only emulates it (`torch.cuda.is_bf16_supported` says yes to those)."""
    import torch

    if config["mixed_precision"] != "bf16":
        return
    for index in range(config["num_processes"] // config["num_machines"]):
        major, minor = torch.cuda.get_device_capability(index)
        if major < 8:
            fail(
                f"{torch.cuda.get_device_name(index)} has compute capability {major}.{minor} and no bf16 arithmetic, which "
                f"{name} asks for: use a config with mixed_precision: fp16"
            )


def arguments(data, args, model, launched: Launched):
    """The arguments against each other."""
    if args.hub_token:
        fail("--hub_token would be saved with the run and seen in the process list: use `hf auth login` or HF_TOKEN")
    if data.dataset_streaming and args.max_steps <= 0:
        fail("a stream has no length: give --max_steps, or --max_tokens for a token budget")
    if (model.load_in_4bit or model.load_in_8bit) and not model.use_peft:
        fail("quantized weights are frozen, so nothing would train: add --use_peft")


def reachable(model: str, revision: str):
    """Fails unless the model's config can be read: from a folder, from the cache or from the hub."""
    from huggingface_hub import hf_hub_download

    if Path(model).is_dir():
        if not Path(model, "config.json").is_file():
            fail(f"{model} has no config.json: it is not a model folder")
        return
    with hub_errors("model", model):
        hf_hub_download(model, "config.json", revision=revision)


def dataset(data, text_field: str | None):
    """Fails unless the training split can be opened, has a first row, and that row has the text column."""
    from datasets import load_dataset

    with hub_errors("data set", data.dataset_name):
        stream = load_dataset(data.dataset_name, data.dataset_config, split=data.dataset_train_split, streaming=True)
        row = next(iter(stream), None)
    if row is None:
        fail(f"data set {data.dataset_name} ({data.dataset_train_split}) is empty")
    if text_field and text_field not in row:
        fail(
            f"data set {data.dataset_name} has no column {text_field!r}, it has {', '.join(row)}: "
            "name the text with --dataset_text_field"
        )


class hub_errors:
    """Turns the hub's exceptions into one line that says which it was and what to do."""

    def __init__(self, kind: str, name: str):
        self.what = f"{kind} {name}"

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if error is None or not isinstance(error, (OSError, ValueError, RuntimeError)):
            return
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        causes = []
        while error is not None:
            causes.append(error)
            error = error.__cause__ or error.__context__
        if any(isinstance(cause, GatedRepoError) for cause in causes):
            fail(f"{self.what} is gated: accept its terms on its hub page, then `hf auth login` (or set HF_TOKEN)")
        if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
            fail(f"{self.what} is unknown to the hub, or private: check the name; for a private one `hf auth login`")
        message = str(causes[0]).strip().splitlines()[0] if str(causes[0]).strip() else type(causes[0]).__name__
        online = any("onnect" in type(cause).__name__ or "Offline" in type(cause).__name__ for cause in causes)
        fail(f"{self.what} cannot be reached: {message[:200]}. {CONNECTION if online else ''}")
