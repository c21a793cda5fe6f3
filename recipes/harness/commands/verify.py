"""Compares the model that was trained with the one that is saved, merged or quantized. launch.sh calls it:

`python -m harness.commands.verify RUN [MODEL] [--json]`.

MODEL is a folder or a GGUF file; without it, the run's folder `merged`, if it exists. The run itself is always compared: the loss
on the rows that it was evaluated on, and the tokens of prompts. Exit code 1 if a check fails.
"""

import contextlib
import dataclasses
import json
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.commands import parsers
from harness.commands.gguf import FLOATS, Check, check_vocabulary, compare, load_gguf, read_gguf, value_of
from harness.commands.report import print_table
from harness.commands.saved import load_model, load_saved_processor, load_saved_tokenizer
from harness.data.images import ImageCollator, count_marks, encode_turns
from harness.data.turns import IGNORED
from harness.folder import HELD_OUT, RESULTS, read_json
from harness.hub import hub_errors
from harness.messages import UserError, exit_on_user_error, one_message, print_once

# How far a loss may be from the one it is compared with, in nats per token.
TOLERANCE = 0.02  # rounding: the run has float32 weights and other kernels, a merged weight is rounded once more
POSITIONS = 256  # whose logits are in float32 at a time
TOLERANCE_QUANTIZED = 0.1  # weights that were quantized after the training


@dataclass
class HeldOut:
    """What a run has kept for the comparison."""

    documents: dict[str, list[tuple]]  # tokens, labels and images or None, by the label of their dataset, "" for a single one
    conversations: list[dict[str, Any]]  # the first ones, with their tokens
    results: dict[str, Any]  # of the run, with the logged losses


@one_message()
def main(*words: str) -> int:
    """Checks whether the saved model of RUN, and MODEL if there is one, compute what was trained; returns 1 if one does not."""
    parsed = parsers.verify().read(words)
    run = parsed.run
    merged = parsed.run / "merged"
    held_out = read_held_out(run)
    other = parsed.model or (merged if merged.is_dir() else None)
    # First: to load and measure the run's model takes minutes.
    file = read_gguf(other) if other and other.is_file() else None
    if file and any(row["images"] for row in held_out.conversations):
        raise UserError(f"{other}: a GGUF file of a model that was trained on images cannot be compared: pass a folder")
    # Of --json, only the JSON goes to standard output.
    with contextlib.redirect_stdout(sys.stderr if parsed.json else sys.stdout):
        model = load_model(run)
        config = model.config
        saved = measure(model, held_out, run)
        del model  # before the other one is loaded
        checks = check_loss(run, saved, held_out, TOLERANCE, {}) + check_prompts(run, held_out)
        tokenizer = None
        if file:
            tokenizer = load_saved_tokenizer(run)
            tokenizer.chat_template = value_of(file, "chat_template")
            checks += check_vocabulary(other, file, tokenizer)
            model = load_gguf(other, config)
            is_rounded = any(tensor.tensor_type.name not in FLOATS for tensor in file.tensors)
        elif other:
            model = load_model(other)
            is_rounded = getattr(model.config, "quantization_config", None) is not None
        if other:
            tolerance = TOLERANCE_QUANTIZED if is_rounded else TOLERANCE
            checks += check_loss(other, measure(model, held_out, other), held_out, tolerance, saved)
            checks += check_prompts(other, held_out, tokenizer)
    failed = sorted({check.model for check in checks if check.result == "FAILED"})
    if parsed.json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    else:
        print_table([("model", "what", "expected", "found", "tolerance", "result"), *map(dataclasses.astuple, checks)])
        for name in failed:
            print_once(f"\nFAILED: {name} is not the model that was trained: copy, merge or convert it again.")
    return int(bool(failed))


def read_held_out(folder: Path) -> HeldOut:
    """What the run has written for the comparison."""
    from harness.run.generation import documents_of

    import pyarrow.parquet

    held_out = HeldOut({}, [], read_json(folder / RESULTS))
    if not (folder / HELD_OUT).is_file():
        raise UserError(
            f"{folder} has no {HELD_OUT}: a run writes it at its end, if it evaluates rows with answers. A run that learns from "
            "rewards, a teacher or pairs has none"
        )
    with hub_errors("file", str(folder / HELD_OUT)):
        table = pyarrow.parquet.read_table(folder / HELD_OUT)

    def drop_none(message: dict) -> dict:  # a table has filled keys with it
        return {key: item for key, item in message.items() if item is not None}

    for row in table.to_pylist():
        if row["conversation"] is None:
            found = [(*document, row.get("images")) for document in documents_of(row)]
            held_out.documents.setdefault(row["dataset"], []).extend(found)
        else:
            tokens = {"input_ids": row["input_ids"], "images": row.get("images")}
            held_out.conversations.append(json.loads(row["conversation"], object_hook=drop_none) | tokens)
    return held_out


def measure(model: Any, held_out: HeldOut, name: Path) -> dict[str, float]:
    """The loss per token of each evaluation dataset. The model gets every document alone."""
    from tqdm import tqdm

    collate = None
    losses = {}
    for label, documents in held_out.documents.items():
        total = 0.0
        count = 0
        for ids, labels, images in tqdm(documents, f"Evaluating {name}", unit="document", disable=None):
            if images is not None:
                collate = collate or ImageCollator(load_saved_processor(name))
            loss, tokens = document_loss(model, ids, labels, collate and collate.for_prompts([ids], [images]))
            total += loss
            count += tokens
        losses[label] = total / max(1, count)
    return losses


def document_loss(model: Any, ids: list[int], labels: list[int], inputs: Any) -> tuple[float, int]:
    """The sum of the loss over a document, and the number of its tokens in the loss. `inputs`: of one with images, else None."""
    import torch
    from torch.nn.functional import cross_entropy

    targets = torch.tensor(labels[1:])
    count = int((targets != IGNORED).sum())
    if not count:
        return 0.0, 0
    inputs = inputs or {"input_ids": torch.tensor([ids])}
    with torch.no_grad():
        logits = model(**{name: value.to(model.device) for name, value in inputs.items()}).logits[0, :-1]
        total = 0.0
        for some, wanted in zip(logits.split(POSITIONS), targets.split(POSITIONS), strict=True):
            total += cross_entropy(some.float(), wanted.to(some.device), ignore_index=IGNORED, reduction="sum").item()
    return total, count


def check_loss(
    model: Path, losses: dict[str, float], held_out: HeldOut, tolerance: float, saved: dict[str, float]
) -> list[Check]:
    """Compares the loss of each evaluation dataset with what the run has logged.

    If the run has logged another loss or none, the comparison is with `saved`, the losses of the saved model.
    """
    checks = []
    for label, found in losses.items():
        what = f"loss of {label or 'the evaluation rows'}"
        expected = held_out.results.get(f"eval_{label}_loss" if label else "eval_loss")
        if expected is None or not held_out.results.get("loss_is_cross_entropy"):
            expected = saved.get(label)
        result = "not checked"
        if expected is not None:
            expected = round(expected, 4)
            result = "ok" if abs(found - expected) <= tolerance else "FAILED"  # also for NaN
        checks.append(Check(str(model), what, str(expected), f"{found:.4f}", f"±{tolerance}", result))
    return checks


def check_prompts(model: Path, held_out: HeldOut, tokenizer: Any = None) -> list[Check]:
    """Whether the tokenizer of `model` makes the tokens of the run from each conversation up to a trained answer."""
    from harness.compat.transformers import set_date_of_chat_templates

    if not held_out.conversations:
        return []
    date = held_out.results.get("date")  # of the run's first start
    set_date_of_chat_templates(datetime.fromisoformat(date) if date else None)
    tokenizer = tokenizer or load_saved_tokenizer(model)
    processor = None if held_out.conversations[0]["images"] is None else load_saved_processor(model)
    equal = []
    for row in held_out.conversations:
        turns = row.get("messages") or row["prompt"] + row["completion"]
        # Not earlier answers of --split_conversations: templates drop their reasoning.
        for number in range(len(row.get("prompt", [0])), len(turns)):
            if turns[number]["role"] == "assistant" and turns[number].get("train") is not False:
                tokens = tokens_of_prompt(tokenizer, processor, row, turns[:number])
                equal.append(bool(tokens) and row["input_ids"][: len(tokens)] == tokens)
    counts = f"{len(equal)} of {len(equal)}", f"{sum(equal)} of {len(equal)}"
    if equal:
        return [compare(model, "prompts with the trained tokens", *counts)]
    return []


def tokens_of_prompt(tokenizer: Any, processor: Any, row: dict, turns: list[dict]) -> list[int]:
    """The tokens of the first turns of a row, as a prompt; [] if the chat template cannot render them.

    `processor`: of rows with images.
    """
    from harness.data.chat_templates import fit_calls

    tools = row.get("tools")
    options = {"tools": json.loads(tools) if isinstance(tools, str) else tools, **(row.get("chat_template_kwargs") or {})}
    options["add_generation_prompt"] = True
    try:
        ((_, fitted),) = fit_calls(tokenizer, [("", {"messages": turns})])
        if processor:
            images = row["images"][: count_marks(turns)]  # those of later turns are not in this prompt
            return encode_turns(processor, fitted["messages"], images, **options)["input_ids"]
        return tokenizer.apply_chat_template(fitted["messages"], return_dict=True, **options)["input_ids"]
    except UserError:
        raise
    except Exception:  # a template is a program: it can fail in any way
        return []


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main(*sys.argv[1:]))
