"""--push_to_hub: uploads what a run or --merge has made to a repository of the Hub."""

import fnmatch
import os
from dataclasses import dataclass
from pathlib import Path

from harness.hub import is_reachable, without_progress_bars
from harness.messages import UserError, last_line, print_once

from huggingface_hub import HfApi, get_token, utils
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils import httpx, validate_repo_id
from transformers import TrainingArguments

# Of the output directory: no checkpoints, and no rows of the dataset (held_out.parquet, samples.txt).
FILES = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json"),
    *("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("preprocessor_config.json", "processor_config.json", "prompt.json", "README.md", "train_results.json", "loss.png"),
)
SAME_COMMAND = "the same command again, which does not train again"


@dataclass(frozen=True)
class Repository:
    """A model repository of the Hub."""

    name: str  # OWNER/NAME, or NAME of the user whose token is used
    is_private: bool


def take_repository(training_args: TrainingArguments) -> Repository | None:
    """The repository of --push_to_hub, None without it. The trainer itself gets none: it would upload checkpoints."""
    if not training_args.push_to_hub:
        return None
    training_args.push_to_hub = False
    return Repository(
        training_args.hub_model_id or Path(training_args.output_dir).name, training_args.hub_private_repo is not False
    )


def check_repository(repository: Repository) -> None:
    """Raises UserError unless the token may write to the repository. If the Hub cannot be reached, prints it."""
    try:
        validate_repo_id(repository.name)
    except HFValidationError as error:
        raise UserError(f"--hub_model_id: {repository.name} is no name of a repository, expected OWNER/NAME or NAME") from error
    token = get_token()
    if not token:
        raise UserError("--push_to_hub needs a token with the right to write: `.venv/bin/hf auth login`, or set HF_TOKEN")
    if os.environ.get("HF_HUB_OFFLINE") == "1" or not is_reachable():
        print_once("--push_to_hub: the Hub cannot be reached now, so nothing is checked; the upload is tried after the training.")
        return
    try:
        check_rights(HfApi(), repository, token)
    except (httpx.HTTPError, OSError, ValueError) as error:  # also an answer that is not the Hub's
        print_once(f"--push_to_hub: the token was not checked ({last_line(error)}). The upload is tried anyway.")


def check_rights(api: HfApi, repository: Repository, token: str) -> None:
    """Raises UserError unless the token may write to the repository, and the repository is as private as asked for."""
    try:
        user = api.whoami(token)
    except HfHubHTTPError as error:
        if error.response.status_code not in (401, 403):
            raise
        raise UserError(f"--push_to_hub: the Hub refuses the token ({last_line(error)}): `.venv/bin/hf auth login`") from error
    access = user.get("auth", {}).get("accessToken", {})
    if access.get("role") == "read":
        raise UserError(
            "--push_to_hub: the token may only read: make one that may write at https://huggingface.co/settings/tokens"
        )
    owner = repository.name.split("/")[0] if "/" in repository.name else user["name"]
    owners = [user["name"], *(org["name"] for org in user.get("orgs", []))]
    if owner not in owners:
        raise UserError(
            f"--hub_model_id: the token belongs to {user['name']}, who cannot write to {owner}, only to {', '.join(owners)}"
        )
    name = f"{owner}/{repository.name.split('/')[-1]}"
    if repository.is_private and is_public(api, name):
        raise UserError(
            f"--push_to_hub: {name} is public: pass --hub_private_repo false to upload there, or another --hub_model_id"
        )


def is_public(api: HfApi, name: str) -> bool:
    try:
        return api.model_info(name).private is False
    except RepositoryNotFoundError:
        return False


def publish(folder: Path, repository: Repository, how_to_repeat: str) -> bool:
    """Uploads the model in `folder`, and prints where it is. If that fails, prints why and how to repeat it; returns False."""
    try:
        files = [path for path in folder.iterdir() if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in FILES)]
        names, size = sorted(path.name for path in files), sum(path.stat().st_size for path in files)
        print_once(f"Uploading {len(names)} files, {size / 1e9:.2f} GB, to {repository.name} …")
        api = HfApi()
        name = api.create_repo(repository.name, private=repository.is_private, exist_ok=True).repo_id
        if repository.is_private and is_public(api, name):
            raise UserError(f"{name} is public")
        with without_progress_bars(utils):
            url = api.upload_folder(
                repo_id=name, folder_path=folder, allow_patterns=names, commit_message="Upload the trained model"
            )
        print_once(f"Uploaded to {url.repo_url.url}{' (private)' if repository.is_private else ''}")
        return True
    except Exception as error:  # the run is finished, whatever happens here
        reason = "the Hub cannot be reached" if isinstance(error, OfflineModeIsEnabled) else last_line(error)
        print_once(f"warning: the upload to {repository.name} failed: {reason}\nTo repeat it: {how_to_repeat}")
        return False
