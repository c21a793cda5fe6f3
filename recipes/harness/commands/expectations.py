"""What a run has recorded for --verify (`save_expectations` in run/expectations.py), and the table of checks against it."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.commands.report import print_table
from harness.folder import read_json
from harness.hub import hub_errors
from harness.messages import UserError

Document = tuple[list[int], list[int]]  # tokens and labels
IGNORED = -100  # the label of a token that does not count in the loss


@dataclass
class Expected:
    """expected.json."""

    step: int  # of the last evaluation
    eval_losses: dict[str, float]  # as logged, by dataset; {} if the run has logged another loss than the mean over tokens
    tie_word_embeddings: bool
    generation: dict[str, Any]  # how the original model's generation config differs from transformers' defaults
    tokenizer: dict[str, Any]  # of `describe_tokenizer`
    end_tokens: dict[str, int]  # the tokens that end the trained answers
    conversations: list[dict[str, Any]]  # the first ones, with their tokens


@dataclass
class Row:
    """An evaluation row."""

    dataset: str
    documents: list[Document]


@dataclass
class Prompt:
    """A conversation up to an answer. `is_trained`: the run was trained on these tokens, and the answer after them."""

    turns: list[dict]
    tools: list[dict] | None
    options: dict[str, Any]  # of the chat template
    tokens: list[int]
    is_trained: bool


@dataclass
class Check:
    """A row of the table."""

    model: str
    what: str
    expected: str
    found: str
    tolerance: str
    result: str  # "ok", "FAILED" or "not checked: …"


def read_expectations(folder: Path) -> tuple[Expected, list[Row]]:
    """What the run has written for --verify."""
    from harness.run.expectations import EXPECTED, HELD_OUT

    import pyarrow.parquet

    recorded = read_json(folder / EXPECTED)
    if not recorded or not (folder / HELD_OUT).is_file():
        raise UserError(
            f"{folder} has no {EXPECTED} and {HELD_OUT} to compare with: a run writes them at its end, if it has evaluation rows "
            "with tokens"
        )
    try:
        expected = Expected(**recorded)
    except TypeError as error:
        raise UserError(f"{folder / EXPECTED} was written by another version of this project: {error}") from error
    rows = []
    with hub_errors("file", str(folder / HELD_OUT)):
        table = pyarrow.parquet.read_table(folder / HELD_OUT)
    for row in table.to_pylist():
        rows.append(Row(row["dataset"], documents_of(row)))
    return expected, rows


def documents_of(row: dict) -> list[Document]:
    """The documents of a tokenized row, packed or not."""
    ids, labels = row["input_ids"], row.get("labels", row["input_ids"])
    documents, start = [], 0
    for length in row.get("seq_lengths") or [len(ids)]:
        documents.append((ids[start : start + length], labels[start : start + length]))
        start += length
    return documents


def parse_tools(text: str) -> Any:
    """Tools that are JSON in a text. None if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


Render = Callable[[list[dict], list[dict] | None, dict], list[int]]  # from turns, tools and template options to tokens


def make_prompts(to_tokens: Render, expected: Expected) -> list[Prompt]:
    """The prompts of the run's conversations, one for each trained answer, with the tokens that `to_tokens` returns.

    Other answers can be in a row in another form: templates drop the reasoning of earlier answers.
    """
    prompts = []
    for row in expected.conversations:
        turns = without_none(row.get("messages") or row["prompt"] + row["completion"])
        tools = row.get("tools")
        tools = parse_tools(tools) if isinstance(tools, str) else tools
        options = row.get("chat_template_kwargs") or {}
        first = len(row["prompt"]) if "prompt" in row else 1
        for number in range(first, len(turns)):
            if turns[number]["role"] == "assistant" and turns[number].get("train", True):
                tokens = to_tokens(turns[:number], tools, options)
                is_trained = bool(tokens) and row["input_ids"][: len(tokens)] == tokens
                prompts.append(Prompt(turns[:number], tools, options, tokens, is_trained))
    return prompts


def without_none(value: Any) -> Any:
    """Messages without the keys that a table has filled with None."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def numeric_check(model: str, what: str, expected: float, found: float, tolerance: float, source: str = "") -> Check:
    is_near = abs(found - expected) <= tolerance  # False for NaN
    return Check(model, what, f"{expected:.4f}{source}", f"{found:.4f}", f"±{tolerance}", "ok" if is_near else "FAILED")


def exact_check(model: str, what: str, expected: Any, found: Any) -> Check:
    return Check(model, what, str(expected), str(found), "equal", "ok" if found == expected else "FAILED")


def has_failed(checks: list[Check]) -> bool:
    return any(check.result == "FAILED" for check in checks)


def print_checks(checks: list[Check]) -> None:
    print_table([("model", "what", "expected", "found", "tolerance", "result"), *map(dataclasses.astuple, checks)])
    compared = [check for check in checks if not check.result.startswith("not checked")]
    passed = sum(check.result == "ok" for check in compared)
    missing = f", {len(checks) - len(compared)} could not be made" if len(compared) < len(checks) else ""
    print(f"\n{passed} of {len(compared)} checks passed{missing}.")
