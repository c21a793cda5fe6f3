"""What can be asked of the hub before anything large is downloaded, and its errors in one line."""

import contextlib
import os
import ssl
from pathlib import Path
from urllib import error, request

from harness.launched import fail


def answers(seconds: float = 5.0) -> bool:
    """Whether anybody answers at the hub's address within `seconds`; asked before a library is imported that asks for long."""
    address = request.Request(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), method="HEAD")
    try:
        request.urlopen(address, timeout=seconds).close()
    except OSError as failure:
        return isinstance(failure, error.HTTPError) or isinstance(getattr(failure, "reason", None), ssl.SSLError)
    return True


def reachable(model: str, revision: str):
    """Fails unless the model's config can be read: from a folder, from the cache or from the hub."""
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    if Path(model).is_dir():
        if not Path(model, "config.json").is_file():
            fail(f"{model} has no config.json: it is not a model folder")
        return
    if model[:1] in ("/", ".", "~"):
        fail(f"there is no folder {model}: give a model folder, or an id of the hub (OWNER/NAME)")
    with errors("model", model):
        if not isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str):
            HfApi().model_info(model, revision=revision)  # says at once when nobody answers; a download tries for long
            hf_hub_download(model, "config.json", revision=revision)


@contextlib.contextmanager
def errors(kind: str, name: str):
    """Turns the exceptions of the hub's libraries into one line that says which it was and what to do."""
    try:
        yield
    except Exception as problem:
        causes = [problem]
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
                "(HF_ENDPOINT and HF_HUB_OFFLINE are obeyed) or call ./launch.sh --prepare where there is one, or give the path "
                "of a folder that has it"
            )
        if "StopIteration" in names:
            fail(f"{kind} {name} is empty")
        fail(f"{kind} {name}: {str(problem).strip() or type(problem).__name__}"[:400])


def size(kind: str, name: str, suffixes: tuple[str, ...]) -> int | None:
    """Bytes of a repository's files with one of `suffixes`; None when the hub does not say. `kind` is "model" or "dataset"."""
    from huggingface_hub import HfApi

    with contextlib.suppress(Exception):  # a plan goes on without it
        files = HfApi().repo_info(name, repo_type=kind, files_metadata=True, timeout=10).siblings
        return sum(file.size for file in files if file.rfilename.endswith(suffixes) and file.size) or None
    return None
