"""--push_to_hub: uploads what a run has made to a repository of the Hub."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from harness.hub import hub_errors
from harness.messages import UserError, last_line, print_once

from huggingface_hub import HfApi
from transformers import TrainingArguments

# Of the output directory: no checkpoints, and nothing of the rows (held_out.parquet, samples.txt, their system message in
# prompt.json).
FILES = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json"),
    *("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("preprocessor_config.json", "processor_config.json", "README.md", "train_results.json", "loss.png"),
)


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


def make_repository(repository: Repository) -> None:
    """Makes the repository if there is none, before the training.

    Raises UserError if the token must not write, so that no model is lost at the end, or if the repository is public unasked.
    """
    api = HfApi()
    with hub_errors("--push_to_hub:", repository.name):
        name = api.create_repo(repository.name, private=repository.is_private, exist_ok=True).repo_id
        api.auth_check(name, write=True)
        is_public = api.model_info(name).private is False
    if repository.is_private and is_public:
        raise UserError(
            f"--push_to_hub: {name} is public: pass --hub_private_repo false to upload there, or another --hub_model_id"
        )


def publish(folder: Path, repository: Repository) -> None:
    """Uploads the model in `folder`. If that fails, prints why and how to repeat it."""
    api = HfApi()
    try:
        name = api.create_repo(repository.name, private=repository.is_private, exist_ok=True).repo_id
        commit = api.upload_folder(repo_id=name, folder_path=folder, allow_patterns=list(FILES), ignore_patterns="*/*")
        print_once(f"Uploaded to {commit.repo_url.url}")
    except Exception as error:  # the run is finished, whatever happens here
        print_once(
            f"warning: the upload to {repository.name} failed: {last_line(error)}\nTo repeat it: .venv/bin/hf upload "
            f"{repository.name} {shlex.quote(str(folder))} --exclude 'checkpoint-*' --exclude '*.parquet' --exclude samples.txt "
            "--exclude prompt.json"
        )
