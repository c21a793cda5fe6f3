"""What a rehearsal (--tiny) and a plan (--plan) train instead of the recipe's model and dataset.

A rehearsal replaces the model by one of two layers and a dataset of the Hub by a small one, once per working directory and before
any process starts, below `outputs/tiny/.made`. A dataset of the Hub that is not in tiny_data.yaml is replaced by its own first
rows. Files on this machine are not replaced: `load` reads their first rows as in a run, and shortens them. A plan needs the
model's config.json only, next to a small tokenizer.
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
from typing import Any

from harness.data import reading
from harness.data.loading import REHEARSED_ROWS, open_splits
from harness.data.script_arguments import ScriptArguments, change_each, each_dataset
from harness.data.splits import splits_of
from harness.folder import write_json
from harness.hub import check_model_exists, hub_errors
from harness.launched import UserError, print_once
from harness.rehearsal import tiny_model
from harness.rehearsal.tiny_model import documents

import yaml
from transformers import TrainingArguments
from trl import ModelConfig

FOLDER = Path("outputs/tiny/.made")
SHARDS = 8  # Parquet files per split, so that up to eight processes read different ones
DATASETS = yaml.safe_load(Path(__file__).with_name("tiny_data.yaml").read_text("utf-8"))
NOT_PROSE = {"id", "prompt_id", "dump", "url", "file_path", "language", "source", "category", "name"}
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
            _make_once(tiny_dataset_folder(one), functools.partial(make_dataset, one))


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
    datasets = describe_datasets([one.dataset_name for one in each_dataset(script_args)])
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
            make_dataset(one, folder / "data" / one.label)
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
        script_args.cuts_texts = script_args.dataset_name not in DATASETS
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


def describe_datasets(names: list[str]) -> str:
    """What replaces datasets, in words."""
    known, others = [name for name in names if name in DATASETS], [name for name in names if name not in DATASETS]
    parts = [f"not {' and '.join(known)} but Python's documentation in the same columns"] if known else []
    if others:
        parts.append(f"the first {REHEARSED_ROWS} rows of each split of {' and '.join(others)}, with long texts cut")
    return ", and ".join(parts)


def make_dataset(script_args: ScriptArguments, folder: Path, repeats: int = 1) -> None:
    """Writes the tiny dataset that replaces `script_args.dataset_name`; a benchmark repeats its documents."""
    from datasets import Dataset

    description = DATASETS.get(script_args.dataset_name)
    if description:
        rows = _documents_in_columns(**description, repeats=repeats)
        splits = {split: Dataset.from_list(documents) for split, documents in rows.items()}
    else:
        splits = _first_rows(script_args)
    for split, rows in splits.items():
        shards = min(SHARDS, len(rows))
        for shard in range(shards):
            path = folder / split / f"{shard:05}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows.shard(shards, shard, contiguous=False).to_parquet(str(path))
    files = "".join(f"  - split: {split}\n    path: {split}/*.parquet\n" for split in splits)
    card = f"---\nconfigs:\n- config_name: {script_args.dataset_config or 'default'}\n  data_files:\n{files}---\n"
    (folder / "README.md").write_text(card, "utf-8")


def _documents_in_columns(splits: list[str], columns: dict[str, str], repeats: int) -> dict[str, list[dict]]:
    """The documents in the columns of a known dataset: nine tenths in the first split, the rest in the others."""
    texts = documents() * repeats
    ends = [int(len(texts) * (0.9 + 0.1 * index / max(1, len(splits) - 1))) for index in range(len(splits))]
    ends[-1] = len(texts)
    starts = [0, *ends[:-1]]
    return {
        split: [
            {name: _value(name, kind, texts[index], index, columns) for name, kind in columns.items()}
            for index in range(start, end)
        ]
        for split, start, end in zip(splits, starts, ends, strict=True)
    }


def _first_rows(script_args: ScriptArguments) -> dict[str, Any]:
    """The first rows of every split of a dataset of the Hub, as they are."""
    from datasets import Dataset

    splits = {}
    with hub_errors("dataset", script_args.dataset_name):
        for name, rows in open_splits(script_args, streaming=True).items():
            if first := list(rows.take(REHEARSED_ROWS)):
                splits[name] = Dataset.from_list(first, features=rows.features)
            elif name in splits_of(script_args.dataset_test_split):
                raise UserError(f"--dataset_name: {script_args.dataset_name} has no rows in {name}")
    return splits


def _value(name: str, kind: str, text: str, index: int, columns: dict[str, str]) -> Any:
    """A value for one column of a row that holds `text`."""
    if kind == "messages":
        return _conversation(text)
    if kind == "int64":
        return index
    if kind == "float64":
        return index / 1000
    if name in NOT_PROSE:
        return f"{name}-{index}"
    prose = [column for column in columns if columns[column] == "string" and column not in NOT_PROSE]
    if len(prose) == 1:
        return text
    words = text[:200].split(" ")  # prompt and completion together stay below a rehearsal's max_length
    position = prose.index(name)
    return " ".join(words[len(words) * position // len(prose) : len(words) * (position + 1) // len(prose)])


def _conversation(text: str) -> list[dict[str, str]]:
    """Turns of a user and an assistant. Answers are short, so that even the samples of a rehearsal come to an end."""
    words = text.split(" ")
    size = min(40, len(words))
    question = size * 4 // 5
    turns = []
    for start in range(0, len(words) - size + 1, size):
        part = words[start : start + size]
        texts = " ".join(part[:question]), " ".join(part[question:])
        if all(text.strip() for text in texts):
            turns += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
    return turns
