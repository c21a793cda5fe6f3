"""Who may write into an output directory, and with which settings a run continues: run.json, its lock, what may differ.

run.json names every argument whose value is not the default of transformers or TRL, wherever the value came from, the command
(without tokens and passwords), and the name, size and modification time of each local file of the dataset.
"""

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from harness.data import reading
from harness.folder import DATA, LOCK, RESULTS, RUN, has_trained, newest_complete_checkpoint, read_json, trained_files, write_json
from harness.hub import commit_of
from harness.launched import launched
from harness.messages import UserError, print_once
from harness.model.loading import check_models
from harness.nodes.network import answer_of_first
from harness.rehearsal import tiny
from harness.run.saving import make_repository
from harness.runs import PROJECT, Run, without_secrets
from harness.start import machine
from harness.start.arguments import Arguments

from accelerate.utils import gather_object
from filelock import FileLock, Timeout

SECONDS_TO_SEE_IT = 75  # NFS can show a new file 60 s later (its option acdirmax)


class Claim(NamedTuple):
    """What all processes need to know of the run that the first one has claimed."""

    date: str  # of its first start
    commit: str  # of the model
    teacher_commit: str | None  # None without a teacher, and in a rehearsal


def claim_run(run: Run, arguments: Arguments) -> Claim:
    """What the first process does: locks the output directory, checks the run and writes run.json.

    A run that continues uses the commit of its first start. Raises UserError for what the user can fix. Exits if the run is
    finished. Prints what differs from what was asked for.
    """
    _, training_args, model_args = arguments
    output_dir = Path(training_args.output_dir)
    if not training_args.use_cpu:
        machine.check_bf16(training_args, model_args, run)
    identity = identity_of_run(run, arguments)
    acquire(run.lock)
    before = read_json(output_dir / RUN, "config", "sharded", "data_files", "settings")
    is_another = not identity.items() <= before.items()
    if run.tiny and before and is_another and training_args.output_dir == run.default_output_dir:
        delete_training(output_dir)
        print_once(f"The earlier rehearsal in {output_dir} was deleted: it is another one.")
    check_same_run(output_dir, before, identity)
    exit_if_finished(output_dir, identity, training_args.max_steps, training_args.num_train_epochs)
    if before.get("commit") and has_trained(output_dir):
        use_commit(arguments, before["commit"], before.get("teacher_commit"))
    check_models(run, arguments)
    if run.repository and not run.tiny:
        make_repository(run.repository)

    commit = model_args.model_revision
    teacher_commit = None
    teacher = getattr(training_args, "teacher_model_name_or_path", None)
    if model_args.model_name_or_path and not run.tiny:
        commit = commit_of(model_args.model_name_or_path, commit)
    if teacher and not run.tiny:
        teacher_commit = commit_of(teacher, training_args.teacher_model_revision or "main")
    date = before.get("date") or datetime.now().isoformat(timespec="seconds")
    of_start = {"date": date, "commit": commit, "teacher_commit": teacher_commit, "command": command_of(run)}
    write_run(output_dir, before, identity | of_start)
    if run.tiny:
        tiny.print_notice(run.data, training_args, model_args)
    return Claim(date, commit, teacher_commit)


def use_commit(arguments: Arguments, commit: str, of_teacher: str | None = None) -> None:
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
        "recipe": Path(run.recipe).stem,
        "config": run.config.name,
        "model": model_args.model_name_or_path,
        "dataset": run.data.display_name,
        "datasets": [reading.absolute_name(source.name) for source in sources],
        "dataset_weights": [round(source.weight, 9) for source in sources],
        "sharded": run.is_sharded,
        "tiny": run.tiny,
        "use_peft": model_args.use_peft,
        "load_in_4bit": model_args.load_in_4bit,
        "recipe_digest": digest_of_file(run.recipe),
        "settings": run.settings,
        "data_files": [file for source in sources for file in reading.file_versions(source.name)],
        **{name: getattr(script_args, name) for name in CHOICE_OF_ROWS},
    }
    return json.loads(json.dumps(identity))  # as it is in the file, with which it is compared


def lock_of(folder: Path) -> FileLock:
    """The lock of an output directory, which is not acquired yet."""
    return FileLock(folder / LOCK)


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
        for message in keep_settings(before, identity):
            print_once(message)
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
    problem = ""
    if changes := must_be_equal(before, identity):
        old, new = before_and_now(changes)
        problem = f"it holds a run with {old}, this run has {new}"
    else:
        old, new = ({(name, size) for name, size, _ in run["data_files"]} for run in (before, identity))
        if names := sorted({name for name, _ in old ^ new}):
            problem = f"{', '.join(names)} of the dataset has changed since the run began"
    if problem:
        raise UserError(
            f"--output_dir: {folder}: {problem}: pass the same values, choose another --output_dir, or move that folder away"
        )


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
        if changes := changed_settings(read_json(folder / RUN), identity, ALL_SETTINGS):  # they would train nothing
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


def digest_of_file(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8]


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
# Another value would give what the run has learned another meaning, or another loss, or could not be loaded.
MUST_BE_EQUAL = (
    "recipe",
    "tiny",
    "sharded",
    "model",
    "datasets",
    "dataset_weights",
    *CHOICE_OF_ROWS,
    # the model and the adapter
    "use_peft",
    "model_revision",
    "dtype",
    "load_in_4bit",
    "load_in_8bit",
    "bnb_4bit_quant_type",
    "use_bnb_nested_quant",
    "lora_r",
    "lora_alpha",
    "lora_target_modules",
    "lora_target_parameters",
    "lora_modules_to_save",
    "use_rslora",
    "use_dora",
    "chat_template_path",
    "eos_token",
    # the states of the optimizer and of the gradient scaler
    "optim",
    "optim_args",
    "optim_target_modules",
    "fp16",
    # which tokens count in the loss, and how
    "assistant_only_loss",
    "completion_only_loss",
    "loss_type",
    "label_smoothing_factor",
    "teacher_model_name_or_path",
    "teacher_model_revision",
    # how many prompts a step has, and how many tokens an image
    "num_generations",
    "max_pixels",
)
# These schedulers save another state than all others, which compute the learning rate from the step alone.
SCHEDULERS_WITH_STATE = {"reduce_lr_on_plateau", "greedy"}
# A checkpoint of the optimizer has them, and they are loaded with it.
KEPT = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
# They change the losses from here on.
OF_LOSS = (
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "max_grad_norm",
    "bf16",
    "beta",
    "lora_dropout",
    "neftune_noise_alpha",
    "router_aux_loss_coef",
    "temperature",
    "max_completion_length",
    "reward_weights",
    "scale_rewards",
    "teacher_model_init_kwargs",
)
# `run/checkpoints.py` prints what they change about the rows.
OF_ROWS = ("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size", "max_length", "packing", "seed")
ALL_SETTINGS = (*MUST_BE_EQUAL, *KEPT, *OF_LOSS, *OF_ROWS)

Changes = dict[str, tuple[Any, Any]]  # the values before and now, by the names of the settings; None: the default


def changed_settings(before: dict, now: dict, names: tuple[str, ...]) -> Changes:
    """Which of these settings differ between two run.json."""
    changes = {}
    for name in names:
        old, new = (run.get(name, run["settings"].get(name)) for run in (before, now))
        if old != new:
            changes[name] = (old, new)
    return changes


def must_be_equal(before: dict, now: dict) -> Changes:
    """The changed settings with which a run cannot continue."""
    changes = changed_settings(before, now, MUST_BE_EQUAL)
    scheduler = changed_settings(before, now, ("lr_scheduler_type",))
    if SCHEDULERS_WITH_STATE.intersection(scheduler.get("lr_scheduler_type", ())):
        return changes | scheduler
    return changes


def keep_settings(before: dict, identity: dict) -> list[str]:
    """Makes `identity` say what a run that continues from a checkpoint will use; returns messages about other settings."""
    messages = []
    if kept := changed_settings(before, identity, KEPT):
        old, new = before_and_now(kept)
        messages.append(
            f"warning: the run began with {old} and continues with it: {new} has no effect; pass another --output_dir to "
            "train with it from the start"
        )
        settings = identity["settings"] | {name: value for name, (value, _) in kept.items()}
        identity["settings"] = {name: value for name, value in settings.items() if value is not None}
    if changes := changed_settings(before, identity, OF_LOSS):
        old, new = before_and_now(changes)
        messages.append(f"{old} until now, {new} from here on.")
    return messages


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
