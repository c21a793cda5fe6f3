"""The tiny stand-in of a data set: real text in the columns, configs and splits of the original."""

import random
from pathlib import Path

from harness import hub

import yaml

SHARDS = 8  # parquet files a split, so that up to eight processes each read their own
ROWS, LETTERS = 500, 150  # of a data set that a person brings: so many of its first rows, so much of each text
DATA_SETS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
NOT_PROSE = {"id", "prompt_id", "dump", "url", "file_path", "language", "source", "category", "name"}


def documents() -> list[str]:
    """Some 500 documents of 100 to 6,000 characters, always the same ones in the same order."""
    from pydoc_data.topics import topics

    chance = random.Random(0)
    texts, text, length = [], "", 0
    for paragraph in "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n"):
        if not text:
            length = min(max(chance.lognormvariate(6.2, 0.8), 100), 6000)
        text += paragraph + "\n\n"
        if len(text) >= length:
            texts.append(text.strip())
            text = ""
    texts = list(dict.fromkeys(texts))  # some topics share paragraphs
    chance.shuffle(texts)
    return texts


def what(name: str) -> str:
    """What stands in for a data set, in words."""
    if name in DATA_SETS:
        return f"not {name} but Python's documentation in its columns"
    return f"the first {ROWS} rows of each split of {name}, long texts cut short"


def make(data, folder: Path):
    from datasets import Dataset

    described = DATA_SETS.get(data.dataset_name)
    splits = _imitated(**described) if described else _first_rows(data)
    for split, rows in splits.items():
        shards = min(SHARDS, len(rows))
        for shard in range(shards):
            path = folder / split / f"{shard:05}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            with hub.errors("data set", data.dataset_name):  # its rows may not be alike
                Dataset.from_list(rows[shard::shards]).to_parquet(str(path))
    files = "".join(f"  - split: {split}\n    path: {split}/*.parquet\n" for split in splits)
    card = f"---\nconfigs:\n- config_name: {data.dataset_config or 'default'}\n  data_files:\n{files}---\n"
    (folder / "README.md").write_text(card, "utf-8")


def _imitated(splits: list[str], columns: dict[str, str]) -> dict[str, list[dict]]:
    """Python's documentation in the columns of a known data set: nine tenths in the first split, the rest in the others."""
    texts = documents()
    cuts = [0, *(int(len(texts) * (0.9 + 0.1 * i / max(1, len(splits) - 1))) for i in range(len(splits)))]
    cuts[-1] = len(texts)
    return {
        split: [{name: _value(name, kind, texts[i], i, columns) for name, kind in columns.items()} for i in range(start, end)]
        for split, start, end in zip(splits, cuts, cuts[1:], strict=False)
    }


def _first_rows(data) -> dict[str, list[dict]]:
    """The first rows of any other data set, its texts cut short, so that a rehearsal's short sequences hold an answer too."""
    with hub.errors("data set", data.dataset_name):
        splits = {name: [_short(row) for row in rows.take(ROWS)] for name, rows in data.splits(streaming=True).items()}
    return {name: rows for name, rows in splits.items() if rows}


def _short(value):
    if isinstance(value, dict):
        return {name: _short(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_short(part) for part in value]
    return value[:LETTERS] if isinstance(value, str) else value


def _value(name: str, kind: str, text: str, index: int, columns: dict[str, str]):
    if kind == "messages":
        words = text.split(" ")
        size = min(40, len(words))
        asked = size * 4 // 5  # an answer is short, so that even a rehearsal's samples come to an end
        parts = [words[start : start + size] for start in range(0, len(words) - size + 1, size)]
        turns = [" ".join(turn) for part in parts for turn in (part[:asked], part[asked:])]
        return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    if kind == "int64":
        return index
    if kind == "float64":
        return index / 1000
    if name in NOT_PROSE:
        return f"{name}-{index}"
    prose = [column for column in columns if columns[column] == "string" and column not in NOT_PROSE]
    words, place = text.split(" "), prose.index(name)
    if len(prose) > 1:
        words = text[:200].split(" ")  # prompt and completion together stay below a rehearsal's max_length
    return " ".join(words[len(words) * place // len(prose) : len(words) * (place + 1) // len(prose)])
