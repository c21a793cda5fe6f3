"""What a rehearsal (--tiny) and a plan (--plan) train instead of the recipe's model and dataset.

A rehearsal replaces the model by one of two layers and a dataset of the Hub by a small one, once per working directory and before
any process starts, below `outputs/tiny/.made`. Of files on this machine `load` reads the first
rows. A plan needs the model's config.json only, next to a small tokenizer.
"""

import contextlib
import functools
import hashlib
import os
import re
import shutil
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

from harness.data import reading
from harness.data.loading import REHEARSED_ROWS
from harness.data.script_arguments import ScriptArguments, change_each, each_dataset
from harness.folder import write_json
from harness.hub import check_model_exists
from harness.launched import UserError, print_once
from harness.rehearsal import tiny_data, tiny_model

from transformers import TrainingArguments
from trl import ModelConfig

FOLDER = Path("outputs/tiny/.made")
PLANNED = "planned.json"  # next to the config.json of a plan: the names of the model and the datasets it is about

# The values of a rehearsal, unless a flag says otherwise: the recipe's own are for days on GPUs.
VALUES = {
    "max_steps": 30,
    "max_length": 128,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "global_batch_size": None,  # follows from the two above
    "learning_rate": 1e-2,
    "warmup_steps": 4,
    "logging_first_step": True,
    "logging_steps": 5,
    "eval_steps": 15,
    "save_steps": 15,
    "max_eval_samples": 16,
    "report_to": "none",
}


def make_replacements(script_args: ScriptArguments, model_args: ModelConfig) -> None:
    """Makes the tiny model and dataset of a rehearsal, unless they exist."""
    import datasets

    if set("[]*?") & set(str(FOLDER.absolute())):
        raise UserError(f"`datasets` cannot read files below {Path.cwd()}, whose name has one of [ ] * ?: work in another folder")
    datasets.disable_progress_bars()
    name, revision = model_args.model_name_or_path, model_args.model_revision
    _make_once(tiny_model_folder(model_args), lambda draft: tiny_model.make(name, revision, draft))
    for one in each_dataset(script_args):
        if not reading.is_local(one.dataset_name):
            _make_once(tiny_dataset_folder(one), functools.partial(tiny_data.make, one))


def _make_once(folder: Path, make: Callable[[Path], None]) -> None:
    if folder.is_dir():
        return
    draft = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        make(draft)
        with contextlib.suppress(OSError):  # another rehearsal may have been faster
            draft.rename(folder)
    except NotADirectoryError as error:
        raise UserError(f"{FOLDER} cannot be made: {error.filename} is in the way") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def print_notice(script_args: ScriptArguments, training_args: TrainingArguments, model_args: ModelConfig) -> None:
    """Prints what a rehearsal replaces."""
    missing = object()
    changed = [f"{name} {value}" for name, value in VALUES.items() if getattr(training_args, name, missing) == value]
    datasets = tiny_data.describe([one.dataset_name for one in each_dataset(script_args)])
    notice = (
        f"This is a rehearsal. The model is not {model_args.model_name_or_path} but a two-layer model of its architecture with "
        f"random weights; the data is {datasets}. "
        f"Values that are not the recipe's: {', '.join(changed)}."
    )
    print_once(textwrap.fill(notice, 110))
    is_known = tiny_model.family_of(model_args.model_name_or_path) is not None
    if not is_known and getattr(training_args, "packing", False) and "flash" not in (model_args.attn_implementation or ""):
        tiny_model.check_packing(tiny_model_folder(model_args), model_args.attn_implementation)


def use_replacements(script_args: ScriptArguments, training_args: TrainingArguments, model_args: ModelConfig) -> None:
    """Makes the arguments name the tiny model and dataset."""
    _use_model(training_args, model_args, tiny_model_folder(model_args))
    change_each(script_args, lambda one: _use_dataset(one, tiny_dataset_folder(one)))


def use_planned_size(script_args: ScriptArguments, training_args: TrainingArguments, model_args: ModelConfig) -> None:
    """Makes the arguments name a folder with the model's own config.json and a small tokenizer, and a small dataset.

    Neither the weights nor the texts change memory or time, so nothing else is asked of the Hub. The folders are below the
    run's output directory, which is a temporary one.
    """
    name, revision = model_args.model_name_or_path, model_args.model_revision
    check_model_exists(name, revision)
    folder = Path(tempfile.mkdtemp(prefix="made", dir=training_args.output_dir))
    tiny_model.make_tokenizer(tiny_model.family_of(name) or tiny_model.ANY_FAMILY).save_pretrained(folder / "model")
    shutil.copy(tiny_model.config_file(name, revision), folder / "model/config.json")
    datasets = [one.dataset_name for one in each_dataset(script_args) if one.dataset_name]
    planned = {"model": name, "datasets": datasets, "streaming": script_args.dataset_streaming}
    write_json(folder / "model" / PLANNED, planned)
    eval_rows, script_args.max_eval_samples = script_args.max_eval_samples, min(script_args.max_eval_samples, 16)
    _use_model(training_args, model_args, folder / "model")

    def use_small(one: ScriptArguments) -> None:
        one.eval_rows_of_run = eval_rows
        if not reading.is_local(one.dataset_name):
            tiny_data.make(one, folder / "data" / one.label)
        _use_dataset(one, folder / "data" / one.label)

    change_each(script_args, use_small)


def _use_model(training_args: TrainingArguments, model_args: ModelConfig, folder: Path) -> None:
    model_args.model_name_or_path, model_args.model_revision = str(folder), "main"
    if getattr(training_args, "model_init_kwargs", None):
        training_args.model_init_kwargs = {**training_args.model_init_kwargs, "revision": "main"}


def _use_dataset(script_args: ScriptArguments, folder: Path) -> None:
    """`folder`: of the tiny dataset, which replaces one of the Hub."""
    if reading.is_local(script_args.dataset_name):
        script_args.first_rows, script_args.cuts_texts = script_args.first_rows or REHEARSED_ROWS, True
    else:
        script_args.cuts_texts = script_args.dataset_name not in tiny_data.DATASETS
        script_args.eval_rows_of_run = 0
        script_args.dataset_name = str(folder)
        for flag in ("dataset_train_split", "dataset_test_split"):  # a slice in rows may be beyond the end
            setattr(script_args, flag, re.sub(r"\[[^\]%]*\]", "", getattr(script_args, flag)))
        if script_args.dataset_train_split == script_args.dataset_test_split:
            script_args.dataset_test_split = type(script_args).dataset_test_split


def tiny_model_folder(model_args: ModelConfig) -> Path:
    return _folder_for(model_args.model_name_or_path, model_args.model_revision)


def tiny_dataset_folder(script_args: ScriptArguments) -> Path:
    return _folder_for(script_args.dataset_name, script_args.dataset_config)


def _folder_for(name: str, variant: str | None) -> Path:
    """A folder for every name, variant, and version of the code that makes it."""
    code = [path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("tiny_*"))]
    digest = hashlib.sha256(f"{name} {variant} {code}".encode()).hexdigest()
    return FOLDER.absolute() / f"{name.strip('/').replace('/', '--')}-{digest[:8]}"
