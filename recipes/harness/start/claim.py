"""Who may write into an output directory, and with which settings and commits a run continues: its lock, run.json.

run.json names every argument whose value is not the default of transformers or TRL, wherever the value came from, the command
(without tokens and passwords), and the name, size and modification time of each local file of the dataset, by which a changed
file is found.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.data import reading
from harness.folder import DATA, LOCK, RESULTS, RUN, has_trained, newest_complete_checkpoint, read_json, trained_files, write_json
from harness.hub import find_commit, hub_errors
from harness.launched import launched
from harness.messages import UserError, print_once
from harness.nodes.network import answer_of_first
from harness.rehearsal import tiny
from harness.run.saving import Repository
from harness.runs import PROJECT, Run
from harness.start.arguments import Arguments, default_output_dir
from harness.start.machine import digest_of_file

from accelerate.utils import gather_object
from filelock import FileLock, Timeout
from huggingface_hub import HfApi

SECONDS_TO_SEE_IT = 75  # NFS can show a new file 60 s later (its option acdirmax)
SECRET_VARIABLE = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD)$")
# In JSON, with its value.
SECRET_KEY = re.compile(r'("(?:(?:hf_|hub_|auth_|access_)?token|[^"]*(?:key|secret|password))": )"[^"]*"', re.IGNORECASE)

# The arguments that decide which rows a run trains on, and which it evaluates on.
CHOICE_OF_ROWS = (
    "max_samples",
    "max_eval_samples",
    "dataset_streaming",
    "column_map",
    "chat_template_kwargs",
    "split_conversations",
    "text_rows",
    "dataset_config",
    "dataset_train_split",
)
# What another value of a setting means for a run that continues. All other settings are free.
SETTINGS = {
    # It would give what the run has learned another meaning, or another loss, or could not be loaded.
    "must be equal": (
        *("recipe", "tiny", "sharded", "model", "datasets", "dataset_weights", *CHOICE_OF_ROWS),
        # the model and the adapter
        *("use_peft", "model_revision", "dtype", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"),
        *("lora_r", "lora_alpha", "lora_target_modules", "lora_target_parameters", "lora_modules_to_save"),
        *("use_rslora", "use_dora", "chat_template_path", "eos_token"),
        # the states of the optimizer and of the gradient scaler
        *("optim", "optim_args", "optim_target_modules", "fp16"),
        # which tokens count in the loss, and how
        *("assistant_only_loss", "completion_only_loss", "loss_type", "label_smoothing_factor"),
        *("teacher_model_name_or_path", "teacher_model_revision"),
        # how many prompts a step has, and how many tokens an image
        *("num_generations", "max_pixels"),
    ),
    # It has no effect: a checkpoint of the optimizer has the value of before, which is loaded with it.
    "is kept": ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    # It changes the losses from here on.
    "changes losses": (
        *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_grad_norm", "bf16", "beta", "lora_dropout"),
        *("neftune_noise_alpha", "router_aux_loss_coef", "temperature", "max_completion_length", "reward_weights"),
        *("scale_rewards", "teacher_model_init_kwargs"),
    ),
    # `run/checkpoints.py` prints what it changes about the rows.
    "changes rows": (
        *("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size", "max_length", "packing", "seed"),
    ),
}
# These schedulers save another state than all others, which compute the learning rate from the step alone.
SCHEDULERS_WITH_STATE = {"reduce_lr_on_plateau", "greedy"}


def claim_folder(run: Run, arguments: Arguments) -> tuple[Run, str]:
    """Makes the output directory this run's, and the arguments name the commits that it uses. Collective.

    Returns the run, with its lock, and the date of its first start.
    """
    _, training_args, _ = arguments
    output_dir = Path(training_args.output_dir)
    run = dataclasses.replace(run, lock=FileLock(output_dir / LOCK))
    date, *commits = answer_of_first("claim", lambda: claim_run(run, arguments))
    use_commits(arguments, *commits)
    if run.nodes > 1 and training_args.save_strategy != "no":
        check_folder_is_shared(output_dir)
    return run, date


def claim_run(run: Run, arguments: Arguments) -> tuple[str, str, str | None]:
    """What the first process does: locks the output directory, compares run.json with this start, and writes it.

    Returns the date of the run's first start, and the commits of model and teacher that it used, which a run that continues uses
    again. Raises UserError for what the user can fix. Exits if the run is finished. Prints what differs from what was asked for.
    """
    _, training_args, _ = arguments
    output_dir = Path(training_args.output_dir)
    acquire(run.lock)
    identity = identity_of_run(run, arguments)
    before = read_json(output_dir / RUN, "config", "sharded", "data_files", "settings")
    is_another = not identity.items() <= before.items()
    if run.tiny and before and is_another and training_args.output_dir == default_output_dir(run):
        delete_training(output_dir)
        print_once(f"The earlier rehearsal in {output_dir} was deleted: it is another one.")
    continued = before if has_trained(output_dir) else {}
    check_same_run(output_dir, before, identity)
    exit_if_finished(output_dir, identity, training_args.max_steps, training_args.num_train_epochs)
    if commit := continued.get("commit"):
        use_commits(arguments, commit, continued.get("teacher_commit"))
    commit, teacher_commit = find_commits(run, arguments)
    date = continued.get("date") or datetime.now().isoformat(timespec="seconds")
    of_start = {"date": date, "commit": commit, "teacher_commit": teacher_commit, "command": command_of(run)}
    write_run(output_dir, before, identity | of_start)
    if run.tiny:
        tiny.print_notice(run.data, *arguments[1:])
    return date, commit, teacher_commit


def find_commits(run: Run, arguments: Arguments) -> tuple[str, str | None]:
    """The commits of the model and of the teacher, of which only config.json is read. A rehearsal makes known ones itself."""
    _, training_args, model_args = arguments
    commit, teacher_commit = model_args.model_revision, None
    name = model_args.model_name_or_path
    teacher = getattr(training_args, "teacher_model_name_or_path", None)
    if name and not (run.tiny and tiny.family_of(name)):
        commit = find_commit(name, commit)
    if teacher and not (run.tiny and tiny.family_of(teacher)):
        teacher_commit = find_commit(teacher, training_args.teacher_model_revision or "main", "--teacher_model_name_or_path")
    return commit, teacher_commit


def use_commits(arguments: Arguments, commit: str, of_teacher: str | None = None) -> None:
    """Makes the arguments name a commit of the models: a branch can change while a run trains, or before it resumes."""
    _, training_args, model_args = arguments
    options = getattr(training_args, "model_init_kwargs", None) or {}
    if model_args.model_name_or_path and options.get("revision", model_args.model_revision) == model_args.model_revision:
        tiny.use_model(training_args, model_args, model_args.model_name_or_path, commit)
    if of_teacher:
        training_args.teacher_model_revision = of_teacher


def check_folder_is_shared(output_dir: Path) -> None:
    """Raises UserError unless all nodes see the run.json that the first process has written. Collective.

    Otherwise their checkpoints could not be put together.
    """
    deadline = time.monotonic() + SECONDS_TO_SEE_IT
    file = output_dir / RUN
    written = answer_of_first("shared folder", lambda: digest_of_file(str(file)))
    while not (sees := file.is_file() and digest_of_file(str(file)) == written) and time.monotonic() < deadline:
        time.sleep(0.5)
        with contextlib.suppress(OSError):  # the folder is not there
            os.scandir(output_dir).close()
    if not all(gather_object([sees])):
        raise UserError(
            f"--output_dir: {output_dir} is not the same folder on all nodes: pass a folder on a file system that all nodes "
            "share, or --save_strategy no"
        )


def identity_of_run(run: Run, arguments: Arguments) -> dict[str, Any]:
    """The content of run.json."""
    script_args, _, model_args = arguments
    sources = run.data.sources
    identity = {
        "settings": settings_of(run.values, tuple(map(type, arguments))),
        "recipe": Path(run.recipe).stem,
        "config": run.config.name,
        "model": model_args.model_name_or_path,
        "dataset": run.data.display_name,
        "datasets": [reading.absolute_name(source.name) for source in sources],
        "dataset_weights": [round(source.weight, 9) for source in sources],
        "sharded": run.config.is_fsdp,
        "tiny": run.tiny,
        "use_peft": model_args.use_peft,
        "load_in_4bit": model_args.load_in_4bit,
        "recipe_digest": digest_of_file(run.recipe),
        "data_files": [file for source in sources for file in reading.file_versions(source.name)],
        **{name: getattr(script_args, name) for name in CHOICE_OF_ROWS},
    }
    return json.loads(json.dumps(identity))  # as it is in the file, with which it is compared


def acquire(lock: FileLock) -> None:
    """Locks an output directory, which it makes, until `lock` is released, or this process ends.

    Raises UserError if another run has locked it: two runs would overwrite each other's checkpoints.
    """
    folder = Path(lock.lock_file).parent
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            f"--output_dir: another run is writing into {folder}: wait for it, stop it, or choose another folder"
        ) from error


def write_run(folder: Path, before: dict, identity: dict) -> None:
    """Writes run.json into a locked folder. Prints what is different from `before`, the content that it had.

    `identity`: the new content. Afterwards it says what this start uses.
    """
    if newest_complete_checkpoint(folder):
        keep_settings(before, identity)
    if not has_trained(folder):
        (folder / DATA).unlink(missing_ok=True)  # of a start that has trained nothing
    elif before.get("recipe_digest") != identity["recipe_digest"]:
        print_once(f"{identity['recipe']}.py has changed since {folder} was last trained; the run resumes with the new version.")
    if before != identity:
        write_json(folder / RUN, identity)


def delete_training(folder: Path) -> None:
    """Deletes what a rehearsal in its default folder has trained."""
    for path in [*trained_files(folder), folder / "adapter_config.json"]:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def check_same_run(folder: Path, before: dict, identity: dict) -> None:
    """Raises UserError, with the differences, unless `folder` is free, or its run is the one that `identity` describes.

    Otherwise two runs would be mixed, or rows that a run is evaluated on would be trained on. `before`: the content of its
    run.json.
    """
    if not before and any(not path.name.startswith((LOCK, f".{RUN}.")) for path in folder.iterdir()):
        raise UserError(f"--output_dir: {folder} has files that are not from a run: choose an empty or new folder")
    if not before or not has_trained(folder):
        return
    if changes := must_be_equal(before, identity):
        old, new = before_and_now(changes)
        problem = f"it holds a run with {old}, this run has {new}"
    elif names := changed_files(before, identity):
        problem = f"{', '.join(names)} of the dataset has changed since the run began"
    else:
        return
    raise UserError(
        f"--output_dir: {folder}: {problem}: pass the same values, choose another --output_dir, or move that folder away"
    )


def changed_files(before: dict, now: dict) -> list[str]:
    """The names of the files of the dataset of which only one of two run.json has one of this size."""
    old, new = ({(name, size) for name, size, _ in run["data_files"]} for run in (before, now))
    return sorted({name for name, _ in old ^ new})


def finished_results(folder: Path, max_steps: int, num_train_epochs: float) -> dict:
    """The results of the run in `folder` if it has trained as far as is asked for now, else {}."""
    results = read_json(folder / RESULTS, "global_step", "epoch", "final_loss")
    if not results:
        return {}
    is_finished = results["global_step"] >= max_steps if max_steps > 0 else (results["epoch"] or 0) >= num_train_epochs
    stopped_early = results.get("stopped_early_of") == [max_steps, num_train_epochs]  # by a callback of the recipe
    if is_finished or stopped_early:
        return results
    return {}


def exit_if_finished(folder: Path, identity: dict, max_steps: int, num_train_epochs: float) -> None:
    """Exits with code 0 if the run has trained as far as is asked for. Raises UserError if it has not and cannot resume.

    Also raises UserError if it is finished with other settings than `identity` has.
    """
    if results := finished_results(folder, max_steps, num_train_epochs):
        loss = "" if results["final_loss"] is None else f", final loss {results['final_loss']:.4f}"
        flag = "--max_steps" if max_steps > 0 else "--num_train_epochs"
        end = f"{folder} is finished: {results['global_step']} steps{loss}."
        if changes := changed_settings(read_json(folder / RUN), identity, *SETTINGS):  # they would train nothing
            before, now = before_and_now(changes)
            raise UserError(
                f"--output_dir: {end} It was trained with {before}, this run has {now}: choose another --output_dir to train "
                "with that"
            )
        print_once(f"{end}\nTo train further: a larger {flag}. To start over: another --output_dir, or rm -r {folder}")
        sys.exit(0)
    if (folder / RESULTS).exists() and not list(folder.glob("checkpoint-*")):
        raise UserError(
            f"--output_dir: {folder} is finished and its checkpoints were deleted, so it cannot resume: train its model with "
            f"--model_name_or_path {folder} and another --output_dir"
        )


def command_of(run: Run) -> str:
    """The command line of this start."""
    words = [Path(sys.executable).name, *sys.argv]
    if launched():
        files = [Path(run.recipe), Path(run.config.path)]
        names = [file.stem if file.resolve().is_relative_to(PROJECT) else str(file) for file in files]
        words = ["./launch.sh", *(["--tiny"] if run.tiny else []), *names, *sys.argv[1:]]
    return without_secrets(shlex.join(words))


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


def plain(value: Any) -> Any:
    """A value of an argument as JSON has it; a list of one is what it contains, as TRL reads it."""
    if isinstance(value, str) and value.startswith("{"):  # the JSON of a flag
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    return json.loads(json.dumps(value, default=str))


def without_secrets(value: Any) -> Any:
    """A plain value without tokens and passwords: those of environment variables become `env:NAME`."""
    text = SECRET_KEY.sub(r'\1"hidden"', json.dumps(value))
    for name, secret in os.environ.items():
        if SECRET_VARIABLE.search(name) and len(secret) > 7:
            text = text.replace(secret, f"env:{name}")
    text = re.sub(r"\bhf_[A-Za-z0-9]{30,}", "hidden", text)
    text = re.sub(r"(://)[^/@\s\"]+@", r"\1", text)  # name and password
    return json.loads(re.sub(r"(https?://[^\s?\"]*)\?[^\s\"'\\]*", r"\1", text))  # the signature of a URL


def settings_of(values: argparse.Namespace, classes: tuple[type, ...]) -> dict[str, Any]:
    """The values of arguments that are not defaults, sorted by name. `classes`: those of the arguments."""
    found = {}
    for argument in (argument for cls in classes for argument in dataclasses.fields(cls) if argument.init):
        default = plain(argument.default if argument.default_factory is dataclasses.MISSING else argument.default_factory())
        value = plain(getattr(values, argument.name, default))
        if value != default and argument.name != "disable_tqdm":
            found[argument.name] = value
    return without_secrets(dict(sorted(found.items())))


Changes = dict[str, tuple[Any, Any]]  # the values before and now, by the names of the settings; None: the default


def changed_settings(before: dict, now: dict, *rules: str) -> Changes:
    """Which settings with one of these rules differ between two run.json."""
    changes = {}
    for name in [name for rule in rules for name in SETTINGS[rule]]:
        old, new = (run.get(name, run["settings"].get(name)) for run in (before, now))
        if old != new:
            changes[name] = (old, new)
    return changes


def must_be_equal(before: dict, now: dict) -> Changes:
    """The changed settings with which a run cannot continue."""
    changes = changed_settings(before, now, "must be equal")
    schedulers = changed_settings(before, now, "changes losses").get("lr_scheduler_type", ())
    if SCHEDULERS_WITH_STATE.intersection(schedulers):
        changes["lr_scheduler_type"] = schedulers
    return changes


def keep_settings(before: dict, identity: dict) -> None:
    """Makes `identity` say what a run that continues from a checkpoint will use. Prints which settings are others than before."""
    if kept := changed_settings(before, identity, "is kept"):
        old, new = before_and_now(kept)
        print_once(
            f"warning: the run began with {old} and continues with it: {new} has no effect; pass another --output_dir to "
            "train with it from the start"
        )
        settings = identity["settings"] | {name: value for name, (value, _) in kept.items()}
        identity["settings"] = {name: value for name, value in settings.items() if value is not None}
    if changes := changed_settings(before, identity, "changes losses"):
        old, new = before_and_now(changes)
        print_once(f"{old} until now, {new} from here on.")


def before_and_now(changes: Changes) -> tuple[str, str]:
    """Names and values for a message."""
    return tuple(", ".join(f"{name} {setting_in_words(pair[n])}" for name, pair in changes.items()) for n in (0, 1))


def setting_in_words(value: Any) -> str:
    """A setting as a flag has it."""
    if value is None:
        return "not set"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)
