"""The tiny dataset of a rehearsal: real text in the columns, configs and splits of the original.

The text is Python's own documentation (`pydoc_data.topics`), which every Python has. A dataset of the Hub that is not in
tiny_data.yaml is replaced by its own first rows. Files on this machine are not replaced: `load` reads them as in a run, and
shortens what it has read.
"""

import random
from pathlib import Path
from typing import Any

from harness.data.loading import REHEARSED_ROWS, open_splits
from harness.data.script_arguments import ScriptArguments
from harness.data.splits import splits_of
from harness.hub import hub_errors
from harness.launched import UserError

import yaml

SHARDS = 8  # Parquet files per split, so that up to eight processes read different ones
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


def describe(names: list[str]) -> str:
    """What replaces datasets, in words."""
    known, others = [name for name in names if name in DATASETS], [name for name in names if name not in DATASETS]
    parts = [f"not {' and '.join(known)} but Python's documentation in the same columns"] if known else []
    if others:
        parts.append(f"the first {REHEARSED_ROWS} rows of each split of {' and '.join(others)}, with long texts cut")
    return ", and ".join(parts)


def make(script_args: ScriptArguments, folder: Path, repeats: int = 1) -> None:
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
