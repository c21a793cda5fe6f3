"""The output directory of a run: which run it belongs to, whether it may be used, whether the run is finished.

`run.json` is written before the first process starts. It names the recipe, config, model and dataset, and has the settings that
are not defaults, and the name, size and modification time of each local file of the dataset, by which a changed file is found.
`starts.json` has an entry for each start of the run, see `start/record.py`.
`train_results.json` is written last and marks a finished run.
"""

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import NoneType
from typing import Any, NotRequired

from harness.json_types import Types, shorten, wrong_type
from harness.messages import UserError, last_line, print_once
from harness.patterns import problem_of_pattern
from harness.restarts import LENGTHS, Changes, before_and_now, changed_settings, keep_settings, must_be_equal

from filelock import FileLock, Timeout

RUN = "run.json"
RESULTS = "train_results.json"
STARTS = "starts.json"
DATA = "data.json"  # what `load` read and skipped
PROMPT = "prompt.json"  # how a prompt for the model looks, see `run/prompts.py`
CONVERSATIONS, TEXTS, PROMPTS = "conversations", "texts", "prompts"  # what a run was trained on, in PROMPT
LOCK = ".lock"
COMPLETION_MARKER = "complete.json"  # in a checkpoint: every process has written its part
SHARDED = "pytorch_model_fsdp_0"  # the folder of the weights in a sharded checkpoint
CHECKPOINT = re.compile(r"checkpoint-[0-9]{1,15}")
NOT_WRITABLE = 74  # exit code of a run that could not write into its output directory (EX_IOERR)
# The arguments that decide which rows a run trains on, and which it evaluates on.
CHOICE_OF_ROWS = (
    *("max_samples", "max_eval_samples", "dataset_streaming", "column_map", "chat_template_kwargs", "split_conversations"),
    "text_rows",
)
# The keys of run.json that may differ between two starts of a run, under the conditions of `check_same_run`.
MAY_DIFFER = ("config", "sharded", "recipe_digest", "data_files", "date", "settings", "defaults", *CHOICE_OF_ROWS)
# What is there once a run has trained: such a folder belongs to its run.
TRAINED = ("checkpoint-*", "damaged-checkpoint-*", "*.safetensors", RESULTS)

# What this project reads from run.json, and from train_results.json.
RUN_TYPES: Types = {
    "recipe": str,
    "config": str,
    "tiny": bool,
    "model": NotRequired[str | None],
    "datasets": NotRequired[list[str]],
    "data_files": list[tuple[str, int, int]],  # name, size and time
    "settings": NotRequired[dict],
    "defaults": NotRequired[dict],
    "chat_template_kwargs": NotRequired[dict[str, Any] | None],
}
RESULT_TYPES: Types = {
    "global_step": int,
    "epoch": float | None,
    "final_loss": float | None,
    "quantization": NotRequired[dict[str, Any]],
    "quantized_weights": NotRequired[str],
}
PROMPT_TYPES: Types = {
    "rows": str | None,
    "begins": NotRequired[str],
    "ends": NotRequired[str],
    "chat_template_kwargs": NotRequired[dict[str, Any] | None],
}


ADAPTER_TYPES: Types = {
    "peft_type": str,
    "base_model_name_or_path": str | None,
    "revision": NotRequired[str | None],
    "r": NotRequired[int],
    "lora_alpha": NotRequired[float],
    "lora_dropout": NotRequired[float],
    "bias": NotRequired[str],
    "rank_pattern": NotRequired[dict[str, int]],
    "alpha_pattern": NotRequired[dict[str, float]],
    "modules_to_save": NotRequired[list[str] | None],
    "target_modules": NotRequired[list[str] | str | None],
    "exclude_modules": NotRequired[list[str] | str | None],
    "target_parameters": NotRequired[list[str] | None],
    "layers_to_transform": NotRequired[list[int] | int | None],
    "layers_pattern": NotRequired[list[str] | str | None],
    **dict.fromkeys(("use_dora", "use_rslora", "fan_in_fan_out", "ensure_weight_tying", "lora_bias"), NotRequired[bool]),
    "megatron_config": NotRequired[NoneType],  # with which PEFT imports any module that `megatron_core` names
}

# What a run reads from data.json at its end: of a mixture, each dataset.
DATASET_TYPES: Types = {"label": str, "epoch_rows": NotRequired[int], "used_rows": NotRequired[int]}
DATA_TYPES: Types = {"datasets": NotRequired[list[DATASET_TYPES]]}


class DamagedFile(UserError, ValueError):
    """A JSON file of a run that cannot be read."""


def write_json(path: Path, content: dict) -> None:
    """Writes a file so that it is complete or missing, also after a power failure."""
    with draft_of(path) as draft:
        draft.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        sync(draft)
    sync(path.parent)


@contextlib.contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """A file to write, which is then moved to `path`: that is complete or missing, and a link there is replaced."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft{path.suffix}")
    draft.unlink(missing_ok=True)
    try:
        yield draft
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    draft.replace(path)


def remove_link(path: Path) -> None:
    """Removes a link to somewhere else, so that what is written next stays in this folder."""
    if path.is_symlink():
        path.unlink(missing_ok=True)


def read_json(path: Path, expected: Types | None = None) -> dict:
    """The content of a file of `write_json`, {} if there is none. Raises DamagedFile if it is something else."""
    return parse_json(path.read_bytes(), str(path), expected) if path.is_file() else {}


def parse_json(text: str | bytes, name: str, expected: Types | None = None) -> dict:
    """A JSON object that has at least the keys in `expected`, with values of these types. Raises DamagedFile for anything else.

    `name`: of the file, for the message.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{name} is damaged ({error}): restore it from a copy, or delete it") from error
    if not isinstance(content, dict):
        raise DamagedFile(f"{name} is damaged (it holds no JSON object): restore it from a copy, or delete it")
    check_types(content, expected or {}, name)
    return content


def check_types(content: Any, expected: Types, name: str) -> None:
    """Raises DamagedFile, with the `name` of the file, unless `content` has the keys in `expected`, with such values."""
    if wrong := wrong_type(content, expected):
        raise DamagedFile(f"{name} is damaged: {wrong}: restore it from a copy, or delete it")


def sync(path: Path) -> None:
    """Waits until a file, or the list of names of a folder, is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoint folders of a run, complete or not, the newest first."""
    found = [path for path in folder.glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def newest_complete_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that has a completion marker. `run/checkpoints.py` also compares checksums."""
    return next((path for path in checkpoints(folder) if (path / COMPLETION_MARKER).is_file()), None)


def best_checkpoint(folder: Path, saved: object) -> Path | None:
    """The best checkpoint of a run in `folder`. `saved`: what trainer_state.json has of it, a path of where the run was then.

    None if there is none, or if it is not a path of a checkpoint.
    """
    name = Path(saved).name if isinstance(saved, str) else ""
    return folder / name if CHECKPOINT.fullmatch(name) else None


def resume_hint(folder: Path) -> str:
    """The end of every message about a run that stopped."""
    checkpoint = newest_complete_checkpoint(folder)
    return f"The same command resumes from {checkpoint}." if checkpoint else "No checkpoint was written yet."


def date_of(run: dict) -> datetime | None:
    """When a run was started for the first time. `run`: the content of run.json; None if that does not say it."""
    try:
        return datetime.fromisoformat(run.get("date", ""))
    except (TypeError, ValueError):
        return None


def lock(folder: Path) -> FileLock:
    """Locks the output directory, as long as the returned lock is kept. Raises UserError if another run has locked it."""
    held = FileLock(folder / LOCK)
    try:
        held.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            f"--output_dir: another run is writing into {folder}: wait for it, stop it, or choose another folder"
        ) from error
    except OSError as error:
        raise UserError(f"--output_dir: {folder} cannot be written ({error.strerror}): choose another folder") from error
    return held


def lock_run(folder: Path, identity: dict) -> FileLock:
    """Locks the output directory of the run that `claim_output_dir` has written `identity` for.

    Raises UserError if another run is writing into the folder, or has replaced that rehearsal since.
    """
    replaced = UserError(f"--output_dir: another run has started in {folder}: wait for it, stop it, or choose another folder")
    if not _is_same_run(read_json(folder / RUN), identity):  # before the lock, which that run is about to take
        raise replaced
    held = lock(folder)
    if not _is_same_run(read_json(folder / RUN), identity):
        held.release()
        raise replaced
    return held


def check_output_dir(folder: Path, identity: dict, is_default: bool) -> None:
    """Raises UserError if the folder belongs to another run, or if another process is writing into it. Writes nothing.

    `identity` is the content of run.json for the run that is about to start. `is_default`: no --output_dir was given.
    """
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:  # a model card with this name could not be saved
        raise UserError(f"--output_dir: {str(folder)!r} is not UTF-8: choose another name") from error
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output_dir: {folder} is a file, expected a folder")
    existing = _read_run_file(folder)
    if existing:
        lock(folder).release()  # raises UserError if another process holds it
    _check_same_run(folder, existing, identity, is_default)


def claim_output_dir(folder: Path, identity: dict, is_default: bool) -> None:
    """Writes run.json into a folder that passed `check_output_dir`. Safe if two runs start at the same time.

    Prints what is different from the run that the folder has; `identity` then says what this start uses of it.
    """
    existing = _read_run_file(folder)
    try:
        if is_replaced_rehearsal(folder, identity, is_default):
            held = lock(folder)  # raises UserError if it has started since `check_output_dir`
            config = re.sub(r"[^\w.+-]", "_", Path(existing["config"]).name)
            moved, replaced = folder.with_name(f"{folder.name}.{config}"), ""
            if read_json(moved / RUN).get("tiny"):
                shutil.rmtree(moved)
                replaced = ", in place of an older one"
            folder.rename(moved)
            held.release()
            print_once(f"The earlier rehearsal with {existing['config']} was moved from {folder} to {moved}{replaced}.")
            existing = {}
        folder.mkdir(parents=True, exist_ok=True)
        held = lock(folder)
        _check_same_run(folder, _read_run_file(folder), identity, is_default)
        messages = keep_settings(existing, identity) if newest_complete_checkpoint(folder) else []
        written = read_json(folder / RUN)
        if written and not has_trained(folder) and not _is_same_run(written, identity):
            for name in (DATA, STARTS):  # of a run that has trained nothing
                (folder / name).unlink(missing_ok=True)
        if written != identity:
            write_json(folder / RUN, identity)
        held.release()
    except OSError as error:
        raise UserError(f"--output_dir: {folder} cannot be written ({error.strerror}): choose another folder") from error
    for message in messages:
        print_once(message)
    if existing.get("recipe_digest", identity["recipe_digest"]) != identity["recipe_digest"] and has_trained(folder):
        print_once(f"{identity['recipe']}.py has changed since {folder} was last trained; the run resumes with the new version.")


def has_trained(folder: Path) -> bool:
    """Whether there is something of a run that another run must not replace."""
    return any(path for pattern in TRAINED for path in folder.glob(pattern))


def read_starts(folder: Path) -> list[dict]:
    """The starts of a run, the last one at the end. Nothing depends on them, so a damaged file counts as none."""
    with contextlib.suppress(DamagedFile):
        starts = read_json(folder / STARTS, {"starts": list}).get("starts", [])
        return [start for start in starts if isinstance(start, dict)]
    return []


def _read_run_file(folder: Path) -> dict:
    try:
        return read_json(folder / RUN, RUN_TYPES)
    except ValueError as error:
        raise UserError(f"--output_dir: {error}, or choose another folder") from error


def is_replaced_rehearsal(folder: Path, identity: dict, is_default: bool) -> bool:
    """Whether a rehearsal in the default folder is moved away: it is another one, or it ended with other settings."""
    existing = _read_run_file(folder) if is_default and identity["tiny"] else {}
    if not existing.get("tiny"):
        return False
    return not _is_same_run(existing, identity) or bool(changed_since_end(read_json(folder / RESULTS), identity))


def changed_since_end(results: dict, identity: dict) -> Changes:
    """Which settings of a finished run with these results differ, but for how far it trains; {} for a run without results."""
    return {name: values for name, values in changed_settings(results, identity).items() if name not in LENGTHS}


def _is_same_run(existing: dict, identity: dict) -> bool:
    """Whether two run.json are equal, but for their dates, the paths and times of the same files, and what may change."""
    keys = (existing.keys() | identity.keys()) - {"date", "settings", "defaults"}
    different = [key for key in keys if existing.get(key) != identity.get(key)]
    is_same = all(names_same_files(key, existing, identity) for key in different)
    return is_same and not must_be_equal(changed_settings(existing, identity))


def names_same_files(key: str, existing: dict, identity: dict) -> bool:
    """Whether `key` is about the dataset, and both runs have local files of the same names and sizes; or about the same model.

    Their paths can differ, relative and absolute ones. On another machine their modification times differ too.
    """
    if key == "model":
        return _is_same_path(str(existing.get(key)), str(identity.get(key)))
    if key == "datasets":
        before, now = (run.get(key) or [] for run in (existing, identity))
        return len(before) == len(now) and all(
            one == other or _is_same_path(one, other) for one, other in zip(before, now, strict=True)
        )
    if key not in ("dataset", "data_files") or (key == "dataset" and "datasets" in identity):
        return False
    before, now = ([file[:2] for file in run.get("data_files", [])] for run in (existing, identity))
    return before == now != []


def _is_same_path(before: str, now: str) -> bool:
    """Whether the path that a run has recorded can be that of the folder `now`: it was moved, or is on another machine."""
    path = Path(before)
    return path.is_absolute() and Path(now).is_absolute() and path.name == Path(now).name and not path.exists()


def _check_same_run(folder: Path, existing: dict, identity: dict, is_default: bool) -> None:
    """Raises UserError unless `folder` is free, or its run is the one that `identity` describes."""
    if is_replaced_rehearsal(folder, identity, is_default):
        return
    if not existing:
        if folder.is_dir() and any(not path.name.startswith((LOCK, f".{RUN}.")) for path in folder.iterdir()):
            raise UserError(f"--output_dir: {folder} has files that are not from a run: choose an empty or new folder")
        return
    if has_trained(folder):
        check_same_run(folder, existing, identity)


def check_same_run(folder: Path, existing: dict, identity: dict) -> None:
    """Raises UserError, with all differences, unless `existing` is of the run that `identity` describes.

    `existing`: the run.json of a folder whose run has trained.
    """
    keys = [key for key in identity if key not in MAY_DIFFER and not names_same_files(key, existing, identity)]
    differences = {key: (existing.get(key), identity[key]) for key in keys}
    rows = {key: (existing.get(key, identity[key]), identity[key]) for key in CHOICE_OF_ROWS}
    differences |= {f"--{key}": values for key, values in rows.items()}
    differences |= {f"--{key}": values for key, values in must_be_equal(changed_settings(existing, identity)).items()}
    differences = {name: values for name, values in differences.items() if values[0] != values[1]}
    problems = []
    if differences:
        before, now = before_and_now(differences)
        problems.append(f"it holds a run with {before}, this run has {now}")
    problems += _changed_data_files(existing, identity)
    if list(folder.glob("checkpoint-*")) and existing.get("sharded") != identity["sharded"]:
        kinds = {True: "FSDP", False: "unsharded"}
        problems.append(
            f"it holds {kinds[not identity['sharded']]} checkpoints of {existing.get('config')}, which {identity['config']} "
            f"({kinds[identity['sharded']]}) cannot resume"
        )
    if problems:
        of_rows = any(values[0] != values[1] for values in rows.values()) or "has changed since" in " ".join(problems)
        reason = ". Evaluation rows might be trained on" if of_rows else ""
        choose = "pass the same values, choose another --output_dir, or move that folder away"
        raise UserError(f"--output_dir: {folder}: {'; '.join(problems)}{reason}: {choose}")


def _changed_data_files(existing: dict, identity: dict) -> list[str]:
    """Which local files of the dataset have changed since run.json was written."""
    before, now = existing["data_files"], identity["data_files"]
    names = dict.fromkeys(file[0] for file in [*now, *before] if file not in now or file not in before)
    problems = []
    for name in names:
        sizes = {size for other, size, _ in now if other == name}
        times = [time for other, size, time in before if other == name and size in sizes]
        same = (
            f" (if only its time has: `touch -d @{times[0] // 10**9}.{times[0] % 10**9:09} FILE` sets it back)" if times else ""
        )
        problems.append(f"{name} of {identity['dataset']} has changed since the run began{same}")
    return problems


def check_saved_model(folder: Path) -> None:
    """Raises UserError for a folder that is not that of a run with a saved model or adapter."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: pass the output directory of a finished run")
    has_model = (folder / "config.json").is_file() and not (folder / SHARDED).is_dir()
    if not (folder / "adapter_config.json").is_file() and not has_model:
        raise UserError(
            f"{folder} has no model and no adapter: pass the folder of a finished run or of a checkpoint that is not sharded; "
            "./launch.sh --merge makes a model of a sharded one"
        )


def read_prompt(folder: Path) -> dict:
    """How a prompt looks for the model in `folder`, that of a run, a checkpoint or a merged model; {} if it is not known."""
    folder = folder.absolute()
    run = folder.parent if CHECKPOINT.fullmatch(folder.name) else folder
    if prompt := read_json(run / PROMPT, PROMPT_TYPES):
        return prompt
    if not (run / RUN).is_file():  # may have been downloaded
        return {}
    return {"rows": None, "chat_template_kwargs": read_json(run / RUN, RUN_TYPES).get("chat_template_kwargs")}


def read_adapter_settings(folder: Path) -> Any:
    """The `peft.PeftConfig` of an adapter. Raises UserError if its file is damaged or names no base model."""
    from peft import PeftConfig

    read_json(folder / "adapter_config.json", ADAPTER_TYPES)
    try:
        settings = PeftConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise UserError(f"{folder / 'adapter_config.json'} is damaged: {last_line(error)}") from error
    if not settings.base_model_name_or_path:
        raise UserError(f"{folder / 'adapter_config.json'} is damaged: base_model_name_or_path is missing")
    return settings


def check_patterns(settings: Any, names: list[str], folder: Path) -> None:
    """Raises UserError if a regular expression in the settings of an adapter is none, or does not end with a name in `names`."""
    for key in ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save", "rank_pattern", "alpha_pattern"):
        value = getattr(settings, key, None) or ()
        for pattern in [value] if isinstance(value, str) else value:
            if problem := problem_of_pattern(pattern, names):
                raise UserError(f"{folder / 'adapter_config.json'} is damaged: {key} has {shorten(pattern)}: {problem}")


def finished_results(folder: Path, max_steps: int, num_train_epochs: float) -> dict:
    """The results of the run in `folder` if it has trained as far as is asked for now, else {}."""
    results = read_json(folder / RESULTS, RESULT_TYPES)
    if not results:
        return {}
    is_finished = results["global_step"] >= max_steps if max_steps > 0 else (results["epoch"] or 0) >= num_train_epochs
    stopped_early = results.get("stopped_early_of") == [max_steps, num_train_epochs]  # by a callback of the recipe
    return results if is_finished or stopped_early else {}


def describe_end(results: dict) -> str:
    loss = "" if results["final_loss"] is None else f", final loss {results['final_loss']:.4f}"
    return f"{results['global_step']} steps{loss}"


def exit_if_finished(folder: Path, identity: dict, max_steps: int, num_train_epochs: float) -> None:
    """Exits with code 0 if the run has trained as far as is asked for. Raises UserError if it has not and cannot resume.

    Also raises UserError if it is finished with other settings than `identity` has.
    """
    if results := finished_results(folder, max_steps, num_train_epochs):
        if changes := changed_since_end(results, identity):  # they would train nothing
            before, now = before_and_now({f"--{name}": values for name, values in changes.items()})
            raise UserError(
                f"--output_dir: {folder} is finished: {describe_end(results)}. It was trained with {before}, this run has {now}: "
                "choose another --output_dir to train with that"
            )
        flag = "--max_steps" if max_steps > 0 else "--num_train_epochs"
        print_once(
            f"{folder} is finished: {describe_end(results)}.\n"
            f"To train further: the same command with a larger {flag}. To start over: another --output_dir, or rm -r {folder}"
        )
        sys.exit(0)
    if (folder / RESULTS).exists() and not list(folder.glob("checkpoint-*")):
        raise UserError(
            f"--output_dir: {folder} is finished and its checkpoints were deleted, so it cannot resume: train its model with "
            f"--model_name_or_path {folder} and another --output_dir"
        )
