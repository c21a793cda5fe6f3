"""The Hugging Face Hub: is it reachable, is a model on it, what its errors mean, and how long a run waits for it."""

import contextlib
import errno
import logging
import os
import re
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib import error, request

from harness.folder import read_json
from harness.messages import UserError

FIRST_MESSAGE, NEXT_MESSAGE = 5, 30  # seconds of waiting before the first message, and between two messages
TEMPORARY = (408, 429, 500, 502, 503, 504)  # HTTP status codes after which the Hub may answer again
TOKENIZER = "the tokenizer of"  # a `kind` of `hub_errors`; the name of a model follows
OWN_CODE = (
    "the model brings Python code of its own (auto_map in its JSON files), which is not run here: use a model whose architecture "
    "is part of transformers"
)
LOGIN = "`.venv/bin/hf auth login` (or set HF_TOKEN)"
DATASET_FILES = re.compile(r"/datasets/.+/(resolve|paths-info|tree)/")  # in the address of a request


class HubLost(Exception):
    """The Hub stayed unreachable for too long."""


def is_reachable(seconds: float = 5.0) -> bool:
    """Whether the Hub's address answers within `seconds`. Does not import huggingface_hub, which would retry for long."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if not endpoint.startswith(("http://", "https://")):
        raise UserError(
            f"HF_ENDPOINT is {endpoint}, expected an address such as https://huggingface.co: set another one, or unset it"
        )
    address = request.Request(endpoint, method="HEAD")
    try:
        request.urlopen(address, timeout=seconds).close()
    except OSError as failure:
        return isinstance(failure, error.HTTPError) or isinstance(getattr(failure, "reason", None), ssl.SSLError)
    return True


@contextlib.contextmanager
def without_progress_bars(library: ModuleType) -> Iterator[None]:
    """Hides the progress bars of `datasets`, or of `huggingface_hub.utils`."""
    was_disabled = library.are_progress_bars_disabled()
    library.disable_progress_bars()
    try:
        yield
    finally:
        if not was_disabled:
            library.enable_progress_bars()


def use_cache_if_unreachable() -> None:
    """Sets HF_HUB_OFFLINE if the Hub cannot be reached: otherwise every process would retry for long."""
    if "HF_HUB_OFFLINE" not in os.environ and not (is_reachable() or is_reachable()):  # a slow answer is asked for twice
        os.environ["HF_HUB_OFFLINE"] = "1"


def check_model_exists(model: str, revision: str) -> None:
    """Raises UserError unless the model's config.json can be read, in a folder, the cache or the Hub, and needs no other code."""
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
    from transformers import CONFIG_MAPPING

    if Path(model).is_dir():
        file = str(Path(model, "config.json"))
        if not Path(file).is_file():
            raise UserError(f"--model_name_or_path: {model} has no config.json, so it is not a model folder")
    elif model.startswith(("/", ".", "~")):
        raise UserError(f"--model_name_or_path: folder not found: {model}. Give a model folder, or a Hub ID (OWNER/NAME)")
    else:
        with hub_errors("model", model):
            file = try_to_load_from_cache(model, "config.json", revision=revision)
            if not isinstance(file, str):
                HfApi().model_info(model, revision=revision)  # fails at once when the Hub is unreachable; a download retries
                file = hf_hub_download(model, "config.json", revision=revision)
    config = read_json(Path(file))
    if config.get("auto_map") and config.get("model_type") not in CONFIG_MAPPING:
        raise UserError(f"--model_name_or_path: {model}: {OWN_CODE}")


def file_sizes(kind: str, name: str, suffixes: tuple[str, ...]) -> int | None:
    """Bytes of a repository's files with one of `suffixes`; None when the Hub does not say. `kind`: "model" or "dataset"."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import httpx

    try:
        files = HfApi().repo_info(name, repo_type=kind, files_metadata=True, timeout=10).siblings
    except (OSError, ValueError, httpx.HTTPError):
        return None
    return sum(file.size for file in files if file.rfilename.endswith(suffixes) and file.size) or None


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

    damaged = (EOFError, ArrowException, SafetensorError)
    if kind != "dataset":
        from harness.compat.transformers import never_ask_for_code

        never_ask_for_code()
    try:
        yield
    except (OSError, ValueError, StopIteration, DatasetsError, httpx.HTTPError, *damaged) as problem:
        causes = [problem]
        while cause := causes[-1].__cause__ or (None if causes[-1].__suppress_context__ else causes[-1].__context__):
            causes.append(cause)

        def is_caused_by(*kinds: type) -> bool:
            return any(isinstance(cause, kinds) for cause in causes)

        if is_caused_by(UserError):  # about a file, from the reader that `datasets` called
            raise next(cause for cause in causes if isinstance(cause, UserError)) from problem
        # transformers only says that it cannot make a tokenizer, and names a package.
        lacks_tokenizer = kind == TOKENIZER and not Path(name).is_dir() and not is_reachable()
        if is_caused_by(errors.GatedRepoError):
            reason = f"access is gated: accept its terms on its Hub page, then {LOGIN}"
        elif is_caused_by(errors.RepositoryNotFoundError, errors.HFValidationError):
            reason = f"not found on the Hub, or private: check the name; for a private one {LOGIN}"
        elif lacks_tokenizer or is_caused_by(httpx.TransportError, ConnectionError, errors.OfflineModeIsEnabled):
            reason = (
                "not on this machine, and the Hub cannot be reached: connect to the network (HF_ENDPOINT and HF_HUB_OFFLINE "
                "apply), or run ./launch.sh --prepare on a machine with a network, or give the path of a local folder"
            )
        elif is_caused_by(StopIteration):
            reason = "it is empty"
        elif "trust_remote_code" in str(problem):
            reason = OWN_CODE
        elif blocked := next(filter(None, map(_unwritable_cache, causes)), ""):
            raise UserError(f"HF_HOME: {blocked}: set HF_HOME to a folder that you can write to") from problem
        else:
            known = causes[-1] if isinstance(problem, DatasetGenerationError) else problem  # which only says that there is one
            reason = str(known).strip()[:400] or type(known).__name__
        raise UserError(f"{kind} {name}: {reason}") from problem


def _unwritable_cache(error: BaseException) -> str:
    """Which folder of the caches of the Hub's libraries cannot be written, and why; "" for any other error."""
    from datasets.config import HF_DATASETS_CACHE
    from huggingface_hub.constants import HF_HOME, HF_HUB_CACHE

    file = str(getattr(error, "filename", None) or "")
    is_cache = any(file == str(folder) or file.startswith(f"{folder}/") for folder in (HF_HOME, HF_HUB_CACHE, HF_DATASETS_CACHE))
    kinds = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOSPC, errno.EDQUOT)
    is_blocked = isinstance(error, OSError) and error.errno in kinds
    return f"{file} cannot be written ({error.strerror})" if is_cache and is_blocked else ""


def wait_for_hub() -> None:
    """Makes every request for the files of a dataset wait, up to HUB_PATIENCE seconds, when the Hub fails.

    huggingface_hub alone gives up after about 23 seconds of status 503, so a short outage would end a run of days.
    """
    from huggingface_hub import get_session, set_client_factory
    from huggingface_hub.utils import httpx

    class PatientClient(httpx.Client):
        def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
            if not DATASET_FILES.search(request.url.path):
                return super().send(request, **options)
            return retry(self._send_once, request, **options)

        def _send_once(self, request: httpx.Request, **options: Any) -> httpx.Response:
            response = super().send(request, **options)
            if response.status_code in TEMPORARY:
                response.close()
                raise httpx.HTTPStatusError(f"HTTP status {response.status_code}", request=request, response=response)
            return response

    patience()
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)  # the messages of `retry` replace its own
    hooks = get_session().event_hooks  # they refuse requests offline
    set_client_factory(lambda: PatientClient(event_hooks=hooks, follow_redirects=True, timeout=None))


def patience() -> int:
    """Seconds to wait for a Hub that fails."""
    text = os.environ.get("HUB_PATIENCE", "600")
    if not text.isdecimal():
        raise UserError(f"HUB_PATIENCE is {text!r}, expected a whole number of seconds")
    return int(text)


def retry(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `function` until the Hub answers. Raises HubLost after `patience()` seconds; other errors at once."""
    began, next_message, pause = time.monotonic(), FIRST_MESSAGE, 1.0
    while True:
        try:
            return function(*args, **kwargs)
        except Exception as failure:
            reason, requested_pause = temporary_failure(failure)
            if not reason:
                raise
            waited = time.monotonic() - began
            if waited + requested_pause > patience():
                message = f"the Hub has not answered for {waited:.0f} of {patience()} s (HUB_PATIENCE): {reason}"
                raise HubLost(message) from failure
        if waited >= next_message:
            next_message = waited + NEXT_MESSAGE
            process = f"Process {os.environ['RANK']} is" if "RANK" in os.environ else "This run is"
            print(f"{process} waiting for the Hub ({reason}), {waited:.0f} of {patience()} s (HUB_PATIENCE) so far.", flush=True)
        time.sleep(requested_pause or min(pause, patience() - waited))
        pause = min(2 * pause, 30)


def temporary_failure(failure: Exception) -> tuple[str, float]:
    """Why the Hub did not answer and how many seconds it asks to wait; ("", 0) for an error that waiting does not mend.

    A `Retry-After` that is a date counts as 0.
    """
    from huggingface_hub.utils import httpx

    response = getattr(failure, "response", None)
    if response is not None:
        seconds = response.headers.get("Retry-After", "")
        if response.status_code not in TEMPORARY:
            return "", 0.0
        return f"HTTP status {response.status_code}", float(seconds) if seconds.isdecimal() else 0.0
    if isinstance(failure, httpx.TransportError | TimeoutError | ConnectionError):
        return str(failure) or type(failure).__name__, 0.0
    return "", 0.0
