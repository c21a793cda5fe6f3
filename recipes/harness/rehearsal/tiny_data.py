"""The tiny dataset of a rehearsal: real text in the columns, configs and splits of the original.

The text is Python's own documentation (`pydoc_data.topics`), which every Python has. A dataset that is not in
tiny_data.yaml is replaced by its own first rows.
"""

import random
from pathlib import Path
from typing import Any

from harness.data.loading import ScriptArguments, open_splits, splits_of
from harness.hub import hub_errors
from harness.launched import UserError

import yaml

SHARDS = 8  # Parquet files per split, so that up to eight processes read different ones
MAX_ROWS, MAX_LETTERS = 500, 150  # of the first rows of a dataset, and of each of its texts
DATASETS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
NOT_PROSE = {"id", "prompt_id", "dump", "url", "file_path", "language", "source", "category", "name"}


def documents() -> list[str]:
    """About 500 documents of 100 to 6,000 characters, always the same in the same order."""
    from pydoc_data.topics import topics

    generator = random.Random(0)
    texts, text, length = [], "", 0
    for paragraph in "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n"):
        if not text:
            length = min(max(generator.lognormvariate(6.2, 0.8), 100), 6000)
        text += paragraph + "\n\n"
        if len(text) >= length:
            texts.append(text.strip())
            text = ""
    texts = list(dict.fromkeys(texts))  # some topics share paragraphs
    generator.shuffle(texts)
    return texts


def describe(name: str) -> str:
    """What replaces a dataset, in words."""
    if name in DATASETS:
        return f"not {name} but Python's documentation in the same columns"
    return f"the first {MAX_ROWS} rows of each split of {name}, with long texts cut"


def make(script_args: ScriptArguments, folder: Path, repeats: int = 1) -> None:
    """Writes the tiny dataset that replaces `script_args.dataset_name`; a benchmark repeats its documents."""
    from datasets import Dataset

    description = DATASETS.get(script_args.dataset_name)
    splits = _documents_in_columns(**description, repeats=repeats) if description else _first_rows(script_args)
    for split, rows in splits.items():
        shards = min(SHARDS, len(rows))
        for shard in range(shards):
            path = folder / split / f"{shard:05}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            with hub_errors("dataset", script_args.dataset_name):  # rows can have different types in one column
                Dataset.from_list(rows[shard::shards]).to_parquet(str(path))
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


def _first_rows(script_args: ScriptArguments) -> dict[str, list[dict]]:
    """The first rows of any other dataset, with texts cut so that the short sequences of a rehearsal hold an answer too."""
    splits = {}
    with hub_errors("dataset", script_args.dataset_name):
        for name, rows in open_splits(script_args, streaming=True).items():
            first = [_cut_texts(row) for row in rows.take(MAX_ROWS)]
            if first:
                splits[name] = first
            elif name in splits_of(script_args.dataset_test_split):
                raise UserError(f"--dataset_name: {script_args.dataset_name} has no rows in {name}")
    return splits


def _cut_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _cut_texts(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_cut_texts(part) for part in value]
    return value[:MAX_LETTERS] if isinstance(value, str) else value


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
        turns.append({"role": "user", "content": " ".join(part[:question])})
        turns.append({"role": "assistant", "content": " ".join(part[question:])})
    return turns
