"""Compares the model that was trained with the one that is saved, merged or quantized. launch.sh calls it:

`python -m harness.commands.verify RUN [MODEL] [--json]`.

MODEL is a folder; without it, the run's folder `merged`, if it exists. The run itself is always compared: the loss on the rows
that it was evaluated on, and the tokens of prompts. Exit code 1 if a check fails.
"""

import contextlib
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.commands import arguments, chat
from harness.commands.documents import IGNORED, Document, documents_of
from harness.commands.report import print_table
from harness.commands.saved import check_saved_model
from harness.folder import HELD_OUT, RESULTS, date_of, read_json
from harness.hub import hub_errors
from harness.messages import UserError, exit_on_user_error, print_once

# How far a loss may be from the one it is compared with, in nats per token.
TOLERANCE = 0.02  # rounding: the run has float32 weights and other kernels, a merged weight is rounded once more
TOLERANCE_QUANTIZED = 0.1  # weights that were quantized after the training
MERGE_TOKENS = 8192  # with which --merge compares on a CPU

Losses = list[tuple[float, int]]  # of each row: the sum over its tokens in the loss, and their number


@dataclass
class Row:
    """An evaluation row."""

    dataset: str
    documents: list[Document]


@dataclass
class HeldOut:
    """What a run has kept for the comparison."""

    rows: list[Row]
    conversations: list[dict[str, Any]]  # the first ones, with their tokens
    results: dict[str, Any]  # of the run, with the logged losses


@dataclass
class Check:
    """A row of the table."""

    model: str
    what: str
    expected: str
    found: str
    tolerance: str
    result: str  # "ok", "FAILED" or "not checked: …"


def main(*words: str) -> int:
    """Checks whether the saved model of RUN, and MODEL if there is one, compute what was trained; returns 1 if one does not."""
    parsed = arguments.verify().read(words)
    folder, model = parsed.run, parsed.model
    check_saved_model(folder)
    held_out = read_held_out(folder)
    if not model and (folder / "merged").is_dir():
        model = str(folder / "merged")
    if model and not any(Path(model, name).is_file() for name in ("config.json", "adapter_config.json")):
        raise UserError(f"{model} is no model: pass a folder with a config.json; of a server, the folder that it has loaded")
    # Only the JSON goes to standard output.
    with contextlib.redirect_stdout(sys.stderr) if parsed.json else contextlib.nullcontext():
        saved = measure(chat.load_model(folder), held_out.rows, str(folder))
        checks = check_loss(str(folder), saved, held_out, TOLERANCE) + check_prompts(folder, held_out)
        if model and Path(model).resolve() != folder.resolve():
            loaded = chat.load_model(Path(model))
            losses = measure(loaded, held_out.rows, model)
            checks += check_loss(model, losses, held_out, tolerance_of(loaded), saved) + check_prompts(Path(model), held_out)
    if parsed.json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
        return int(has_failed(checks))
    return print_checks(checks, folder)


def read_held_out(folder: Path) -> HeldOut:
    """What the run has written for the comparison."""
    import pyarrow.parquet

    if not (folder / HELD_OUT).is_file():
        raise UserError(
            f"{folder} has no {HELD_OUT} to compare with: a run writes it at its end, if it evaluates rows with tokens"
        )
    held_out = HeldOut([], [], read_json(folder / RESULTS))
    with hub_errors("file", str(folder / HELD_OUT)):
        table = pyarrow.parquet.read_table(folder / HELD_OUT)
    for row in table.to_pylist():
        if row["conversation"] is None:
            held_out.rows.append(Row(row["dataset"], documents_of(row)))
        else:
            held_out.conversations.append(json.loads(row["conversation"]) | {"input_ids": row["input_ids"]})
    return held_out


def tolerance_of(model: Any) -> float:
    """The tolerance for another model than the saved one."""
    return TOLERANCE_QUANTIZED if getattr(model.config, "quantization_config", None) is not None else TOLERANCE


def measure(model: Any, rows: list[Row], name: str) -> Losses:
    """The losses of a loaded model, which gets every document alone."""
    from tqdm import tqdm

    count = model.get_input_embeddings().weight.shape[0]
    tokens = {token for row in rows for part in row.documents for tokens in part for token in tokens} - {IGNORED}
    if unknown := [token for token in tokens if not 0 <= token < count]:
        raise UserError(f"{name} has {count} tokens, and not {unknown[0]}, which is in a row: is it the model of this run?")
    losses = []
    for row in tqdm(rows, desc=f"Evaluating {name}", unit="row", disable=None):
        parts = [document_loss(model, *document) for document in row.documents]
        losses.append((sum(loss for loss, _ in parts), sum(count for _, count in parts)))
    return losses


def document_loss(model: Any, ids: list[int], labels: list[int], positions: int = 256) -> tuple[float, int]:
    """The sum of the loss over a document, and the number of its tokens in the loss. Logits of `positions` tokens in float32."""
    import torch
    from torch.nn.functional import cross_entropy

    targets = torch.tensor(labels[1:])
    count = int((targets != IGNORED).sum())
    if not count:
        return 0.0, 0
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids], device=model.device)).logits[0, :-1]
        total = 0.0
        for start in range(0, len(targets), positions):
            part = slice(start, start + positions)
            wanted = targets[part].to(logits.device)
            total += cross_entropy(logits[part].float(), wanted, ignore_index=IGNORED, reduction="sum").item()
    return total, count


def per_token(losses: Losses) -> float:
    return sum(loss for loss, _ in losses) / max(1, sum(count for _, count in losses))


def check_loss(model: str, losses: Losses, held_out: HeldOut, tolerance: float, saved: Losses | None = None) -> list[Check]:
    """Compares the loss of all evaluation rows with what the run has logged, for every dataset.

    If the run has logged another loss or none, the comparison is with `saved`, the losses of the saved model.
    """
    checks = []
    for dataset in dict.fromkeys(row.dataset for row in held_out.rows):
        of_dataset = [row.dataset == dataset for row in held_out.rows]
        found = per_token([loss for loss, is_in in zip(losses, of_dataset, strict=True) if is_in])
        what = f"loss of {sum(of_dataset)} evaluation sequences{f' of {dataset}' if dataset else ''}"
        logged = held_out.results.get(f"eval_{dataset}_loss" if dataset else "eval_loss")
        if logged is not None and held_out.results.get("loss_is_cross_entropy"):
            checks.append(check_number(model, what, logged, found, tolerance, "logged"))
        elif saved is not None:
            expected = per_token([loss for loss, is_in in zip(saved, of_dataset, strict=True) if is_in])
            checks.append(check_number(model, what, expected, found, tolerance, "saved model"))
        else:
            checks.append(Check(model, what, "", f"{found:.4f}", "", "not checked: the run logged another loss, or none"))
    return checks


def check_number(model: str, what: str, expected: float, found: float, tolerance: float, source: str) -> Check:
    is_near = abs(found - expected) <= tolerance  # False for NaN
    return Check(model, what, f"{expected:.4f} ({source})", f"{found:.4f}", f"±{tolerance}", "ok" if is_near else "FAILED")


def check_prompts(folder: Path, held_out: HeldOut) -> list[Check]:
    """Whether the tokenizer in `folder` makes the tokens of the run from each conversation up to a trained answer."""
    from harness.compat.transformers import set_date_of_chat_templates

    if not held_out.conversations:
        return []
    set_date_of_chat_templates(date_of(held_out.results))
    tokenizer, equal = chat.load_saved_tokenizer(folder), []
    for row in held_out.conversations:
        turns = row.get("messages") or row["prompt"] + row["completion"]
        # Not earlier answers of --split_conversations: templates drop their reasoning.
        for number in range(len(row.get("prompt", [0])), len(turns)):
            if turns[number]["role"] == "assistant" and turns[number].get("train") is not False:
                tokens = render(tokenizer, turns[:number], row.get("tools"), row.get("chat_template_kwargs") or {})
                equal.append(bool(tokens) and row["input_ids"][: len(tokens)] == tokens)
    result = "ok" if all(equal) else "FAILED"
    counts = f"{len(equal)} of {len(equal)}", f"{sum(equal)} of {len(equal)}"
    return [Check(str(folder), "prompts with the trained tokens", *counts, "equal", result)] if equal else []


def render(tokenizer: Any, turns: list[dict], tools: Any, options: dict) -> list[int]:
    """The tokens of a prompt, [] if the tokenizer has no chat template that can render it."""
    from harness.data.chat_templates import fit_calls

    try:
        ((_, row),) = fit_calls(tokenizer, [("", {"messages": without_none(turns)})])
        tools = json.loads(tools) if isinstance(tools, str) else tools
        return tokenizer.apply_chat_template(row["messages"], tools=tools, add_generation_prompt=True, **options)["input_ids"]
    except Exception:  # a template is a program: it can fail in any way
        return []


def without_none(value: Any) -> Any:
    """Messages without the keys that a table has filled with None."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def has_failed(checks: list[Check]) -> bool:
    return any(check.result == "FAILED" for check in checks)


def print_checks(checks: list[Check], run: Path) -> int:
    """Prints the table, what a failed check means and what to do next; returns the exit code."""
    print_table([("model", "what", "expected", "found", "tolerance", "result"), *map(dataclasses.astuple, checks)])
    compared = [check for check in checks if not check.result.startswith("not checked")]
    passed = sum(check.result == "ok" for check in compared)
    print(f"\n{passed} of {len(compared)} checks passed.")
    failed = {check.model for check in checks if check.result == "FAILED"}
    if str(run) in failed:
        print_once(
            f"FAILED: {run} is not the model that was trained. A file was changed or damaged, or other versions of the libraries "
            "compute something else: copy the folder again, and compare `versions` in train_results.json."
        )
    for model in sorted(failed - {str(run)}):
        print_once(
            f"FAILED: {model} is not the model that was trained. Weights that were quantized afterwards, or the original weights "
            f"with an adapter of QLoRA, differ a little: the loss says how much. Otherwise use {run}, which is not affected, and "
            f"merge it again: ./launch.sh --merge {run} OUT"
        )
    return int(bool(failed))


def compare_merged(run: Path, merged: Path) -> int:
    """For --merge: compares the merged model with the adapter and with what the run has logged; returns the exit code.

    On a CPU with the first rows only, and not at all if the memory is too small. Raises UserError if a model cannot be loaded.
    """
    import psutil
    import torch

    if not (run / HELD_OUT).is_file():
        return 0
    size = sum(file.stat().st_size for file in merged.glob("*.safetensors"))
    gpus = range(torch.cuda.device_count())
    free = psutil.virtual_memory().available + sum(torch.cuda.mem_get_info(index)[0] for index in gpus)
    if 1.2 * size > free:
        raise UserError(f"{merged} needs {1.2 * size / 1e9:.0f} GB of memory, {free / 1e9:.0f} GB are free")
    held_out = read_held_out(run)
    few = held_out.rows if gpus else rows_within(held_out.rows, MERGE_TOKENS)
    adapter = measure(chat.load_model(run), few, str(run))
    model = chat.load_model(merged)
    tolerance, found = tolerance_of(model), measure(model, few, str(merged))
    if len(few) == len(held_out.rows):
        checks = check_loss(str(run), adapter, held_out, TOLERANCE) + check_loss(str(merged), found, held_out, tolerance, adapter)
    else:
        what = f"loss of {len(few)} of {len(held_out.rows)} evaluation sequences"
        checks = [check_number(str(merged), what, per_token(adapter), per_token(found), tolerance, "adapter")]
    return print_checks([*checks, *check_prompts(merged, held_out)], run)


def rows_within(rows: list[Row], tokens: int) -> list[Row]:
    """The first rows that have at most so many tokens together; at least one."""
    few = []
    for row in rows:
        tokens -= sum(len(ids) for ids, _ in row.documents)
        if few and tokens < 0:
            break
        few.append(row)
    return few


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main(*sys.argv[1:]))
