"""What can be asked of the hub and of a data set before anything large is downloaded."""

import contextlib
from pathlib import Path

from harness.launched import fail


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


def dataset(data, text_field: str | None = None, name: str = ""):
    """Fails unless the training split can be opened, has a first row, and that row has the text column.

    `name` is what to call the data set in messages.
    """
    from datasets import load_dataset
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE and not Path(data.dataset_name).exists():
        return  # only `datasets` knows what its cache holds
    with errors("data set", data.dataset_name):
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
def errors(kind: str, name: str):
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
