"""The Hugging Face Hub: is it reachable, is a model on it, and what its errors mean."""

import contextlib
import os
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib import error, request

from harness.folder import read_json
from harness.messages import UserError

TEMPORARY = (408, 429, 500, 502, 503, 504)  # HTTP status codes after which the Hub may answer again
TOKENIZER = "the tokenizer of"  # a `kind` of `hub_errors`; the name of a model follows
OWN_CODE = (
    "the model brings Python code of its own (auto_map in its JSON files), which is not run here: use a model whose architecture "
    "is part of transformers"
)


def is_reachable(seconds: float = 5.0) -> bool:
    """Whether the Hub's address answers within `seconds`. Does not import huggingface_hub, which would retry for long."""
    address = request.Request(os.environ.get("HF_ENDPOINT") or "https://huggingface.co", method="HEAD")
    try:
        request.urlopen(address, timeout=seconds).close()
    except OSError as failure:  # huggingface_hub has certificates of its own
        return isinstance(failure, error.HTTPError) or isinstance(getattr(failure, "reason", None), ssl.SSLError)
    return True


def use_cache_if_unreachable() -> None:
    """Sets HF_HUB_OFFLINE if the Hub cannot be reached: otherwise every process would retry for long."""
    if "HF_HUB_OFFLINE" not in os.environ and not is_reachable():
        os.environ["HF_HUB_OFFLINE"] = "1"
        print("The Hub cannot be reached: using the files on this machine.", file=sys.stderr, flush=True)


def find_commit(model: str, revision: str, flag: str = "--model_name_or_path") -> str:
    """The commit of a revision of a model, such as "main", whose config.json is read; of a folder, the revision itself.

    Raises UserError if there is none in the folder, on the Hub, or without network in the cache. Also for the folder of an
    adapter: transformers would load its base model too, and train neither. `flag`: names the model.
    """
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
    from transformers import AutoConfig

    adapter = read_json(Path(model, "adapter_config.json"))
    if adapter:
        base = adapter.get("base_model_name_or_path")
        raise UserError(
            f"{flag}: {model} is an adapter: pass its base model, {base}, or the folder that ./launch.sh --merge {model} writes. "
            "--chat, --merge and --verify take the adapter itself"
        )
    with hub_errors("model", model):
        if Path(model).is_dir():
            AutoConfig.from_pretrained(model)
            return revision
        if not isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str):
            HfApi().model_info(model, revision=revision)  # fails at once if the Hub is unreachable; a download retries
        folder = Path(hf_hub_download(model, "config.json", revision=revision)).parent
        AutoConfig.from_pretrained(folder)
    return folder.name


@contextlib.contextmanager
def hub_errors(kind: str, name: str) -> Iterator[None]:
    """Turns the exceptions of loading a model or dataset into a UserError that says which one failed and what to do.

    `kind` and `name` are the first words of its message: "dataset" and the dataset's name, TOKENIZER and the model's name.
    In it, and in everything that this process loads later, a model that brings code of its own is an error instead of a question.
    Other exceptions (TypeError, AttributeError, KeyError …) are bugs and pass through.
    """
    from datasets.exceptions import DatasetGenerationError, DatasetsError
    from huggingface_hub import errors
    from huggingface_hub.utils import httpx
    from pyarrow import ArrowException
    from safetensors import SafetensorError

    unreachable = (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, httpx.TransportError, ConnectionError)
    damaged = (EOFError, ArrowException, SafetensorError)
    if kind != "dataset":
        from harness.compat.transformers import never_ask_for_code

        never_ask_for_code()
    try:
        yield
    except (OSError, ValueError, StopIteration, DatasetsError, httpx.HTTPError, *damaged) as problem:
        causes = [problem]
        while cause := causes[-1].__cause__ or causes[-1].__context__:
            causes.append(cause)
        for cause in causes:
            if isinstance(cause, UserError):  # about a file, from the reader that `datasets` called
                raise cause from problem
        # transformers only says that it cannot make a tokenizer, and names a package.
        lacks_tokenizer = kind == TOKENIZER and not Path(name).is_dir() and not is_reachable()
        if lacks_tokenizer or any(isinstance(cause, unreachable) for cause in causes):
            reason = (
                "not on this machine, and the Hub cannot be reached: connect to the network (HF_ENDPOINT and HF_HUB_OFFLINE "
                "apply), or run ./launch.sh --prepare on a machine with a network, or give the path of a local folder"
            )
        elif "trust_remote_code" in str(problem):
            reason = OWN_CODE
        else:
            known = causes[-1] if isinstance(problem, DatasetGenerationError) else problem  # which only says that there is one
            reason = str(known).strip()[:400] or type(known).__name__
        raise UserError(f"{kind} {name}: {reason}") from problem


def temporary_failure(failure: BaseException) -> str:
    """Why the Hub did not answer, "" for an error that waiting does not mend."""
    from huggingface_hub.utils import httpx

    if (response := getattr(failure, "response", None)) is not None:
        if response.status_code in TEMPORARY:
            return f"HTTP status {response.status_code}"
        return ""
    is_of_network = isinstance(failure, httpx.TransportError | TimeoutError | ConnectionError)
    if is_of_network:
        return str(failure) or type(failure).__name__
    return ""
