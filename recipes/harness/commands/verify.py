"""Compares the model that was trained with the one that is saved, merged, quantized or served. launch.sh calls it:

`python -m harness.commands.verify RUN [MODEL] [--served_model_name NAME] [--json]`.

MODEL is a folder, or the address of a server; without it, the run's folder `merged`, if it exists. The run itself is always
compared. Exit code 1 if a check fails.
"""

import contextlib
import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

from harness.commands import arguments, chat
from harness.commands.expectations import (
    IGNORED,
    Check,
    Expected,
    Prompt,
    Row,
    exact_check,
    has_failed,
    make_prompts,
    numeric_check,
    print_checks,
    read_expectations,
)
from harness.commands.saved import check_saved_model
from harness.commands.served import check_served_model, is_address
from harness.folder import RUN, date_of, read_json
from harness.messages import UserError, exit_on_user_error, print_once

# How far a loss may be from the one it is compared with, in nats per token.
TOLERANCE = 0.02  # rounding: the run has float32 weights and other kernels, a merged weight is rounded once more
TOLERANCE_QUANTIZED = 0.1  # weights that were quantized after the training
MERGE_TOKENS = 8192  # with which --merge compares on a CPU
# Not about which tokens are generated, or compared by another check.
OTHER_GENERATION_KEYS = ("_from_model_config", "transformers_version", "use_cache", "output_attentions", "output_hidden_states")
CHECKSUMS = {"vocabulary": "vocabulary", "chat_template": "chat template"}

Losses = list[tuple[float, int]]  # of each row: the sum over its tokens in the loss, and their number


def main(*words: str) -> int:
    """Checks whether the saved model of RUN, and MODEL if there is one, give the results that the run has recorded.

    Compares the losses on the evaluation rows, the tokens of prompts, tokenizer and configs. Returns 1 if a check failed.
    """
    parsed = arguments.verify().read(words)
    folder, model = parsed.run, parsed.model
    if parsed.served_model_name and not is_address(model):
        raise UserError(
            "--served_model_name is for a server: pass its address too, ./launch.sh --verify RUN http://localhost:8000"
        )
    check_saved_model(folder)
    expected, rows = read_expectations(folder)
    use_date_of_run(folder)
    if not model and (folder / "merged").is_dir():
        model = str(folder / "merged")
    if is_address(model) and not expected.conversations:
        raise UserError(f"{folder} was not trained on conversations, which a server is asked for: pass the folder of its model")
    if model and not is_address(model):
        check_model_folder(Path(model))
    # Only the JSON goes to standard output.
    with contextlib.redirect_stdout(sys.stderr) if parsed.json else contextlib.nullcontext():
        checks = compare(folder, model, parsed.served_model_name, expected, rows)
    if parsed.json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    else:
        print_checks(checks)
        print_meaning(checks, folder)
    return int(has_failed(checks))


def check_model_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder} is no model: pass a folder with a config.json, or the address of a server such as http://localhost:8000"
        )


def compare(folder: Path, model: str, served_name: str, expected: Expected, rows: list[Row]) -> list[Check]:
    """All checks of a run, and of `model` if it is not ""."""
    loaded, tokenizer = chat.load_model(folder), chat.load_saved_tokenizer(folder)
    saved = measure(loaded, rows, str(folder))
    checks = check_loss(str(folder), saved, expected, rows, TOLERANCE)
    checks += check_tokenizer_and_configs(str(folder), loaded, tokenizer, expected, (folder / "adapter_config.json").is_file())
    if is_address(model):
        prompts = render_as_a_server(tokenizer, make_prompts(functools.partial(render, tokenizer), expected))
        return checks + check_served_model(model, served_name, loaded, tokenizer, prompts, expected)
    if not model or Path(model).resolve() == folder.resolve():
        return checks
    del loaded
    loaded, tokenizer = chat.load_model(Path(model)), chat.load_saved_tokenizer(Path(model))
    tolerance = tolerance_of(loaded)
    checks += check_loss(model, measure(loaded, rows, model), expected, rows, tolerance, saved)
    return checks + check_tokenizer_and_configs(model, loaded, tokenizer, expected, Path(model, "adapter_config.json").is_file())


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


def check_loss(
    model: str, losses: Losses, expected: Expected, rows: list[Row], tolerance: float, saved: Losses | None = None
) -> list[Check]:
    """Compares the loss of all evaluation rows with what the run has logged, for every dataset.

    If the run has logged another loss or none, the comparison is with `saved`, the losses of the saved model.
    """
    what, found = f"loss of {len(rows)} evaluation sequences", per_token(losses)
    if not expected.eval_losses and saved is not None:
        return [numeric_check(model, what, per_token(saved), found, tolerance, " (saved model)")]
    if not expected.eval_losses:
        return [Check(model, what, "", f"{found:.4f}", "", "not checked: the run logged another loss, or none")]
    checks = []
    for dataset, logged in expected.eval_losses.items():
        of_dataset = [loss for loss, row in zip(losses, rows, strict=True) if row.dataset == dataset]
        found = per_token(of_dataset)
        what = f"loss of {len(of_dataset)} evaluation sequences{f' of {dataset}' if dataset else ''}"
        source = f" (logged at step {expected.step})"
        checks.append(numeric_check(model, what, logged, found, tolerance, source))
    return checks


def check_tokenizer_and_configs(label: str, model: Any, tokenizer: Any, expected: Expected, is_adapter: bool) -> list[Check]:
    """Compares what is saved next to the weights with what the run recorded (`expected`). `label`: the model in the table."""
    from harness.run.expectations import describe_tokenizer

    generation_config = model.generation_config
    eos_tokens = as_set(generation_config.eos_token_id)
    if is_adapter:  # it has no generation config of its own; --chat and vLLM also stop at the tokenizer's EOS token
        eos_tokens |= as_set(tokenizer.eos_token_id)
    checks = [
        *check_prompts(label, make_prompts(functools.partial(render, tokenizer), expected)),
        *check_ends(label, eos_tokens, expected),
    ]
    wanted, found = expected.tokenizer, describe_tokenizer(tokenizer)
    checks.append(exact_check(label, "special tokens", in_words(wanted["special_tokens"]), in_words(found["special_tokens"])))
    checks += [exact_check(label, f"{name} (checksum)", wanted[key], found[key]) for key, name in CHECKSUMS.items()]
    if is_adapter:
        return checks
    if expected.generation:
        wanted, found = sampling(expected.generation), sampling(generation_config.to_diff_dict())
        checks.append(exact_check(label, "generation config", wanted, found))
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head is not None and head.weight.data_ptr() == embeddings.weight.data_ptr()
    wanted, found = ("tied to the embeddings" if tied else "not tied" for tied in (expected.tie_word_embeddings, is_tied))
    return [*checks, exact_check(label, "output layer", wanted, found)]


def in_words(special_tokens: dict[str, list]) -> str:
    """For example: bos <s> (1), eos </s> (2)."""
    return ", ".join(f"{name} {token} ({index})" for name, (token, index) in special_tokens.items() if token is not None)


def as_set(tokens: int | list[int] | None) -> set[int]:
    return set(tokens) if isinstance(tokens, list) else {tokens} - {None}


def sampling(config: dict) -> dict:
    """The keys of a generation config that change how tokens are chosen."""
    return {key: config[key] for key in sorted(config) if key not in OTHER_GENERATION_KEYS and not key.endswith("_token_id")}


def use_date_of_run(run: Path) -> None:
    """Makes chat templates that print the date print that of the run."""
    from harness.compat.transformers import set_date_of_chat_templates

    set_date_of_chat_templates(date_of(read_json(run / RUN)))


def render_as_a_server(tokenizer: Any, prompts: list[Prompt]) -> list[Prompt]:
    """The prompts with the tokens that a server makes of them today."""
    from harness.compat.transformers import set_date_of_chat_templates

    set_date_of_chat_templates(None)
    return [
        dataclasses.replace(prompt, tokens=render(tokenizer, prompt.turns, prompt.tools, prompt.options)) for prompt in prompts
    ]


def render(tokenizer: Any, turns: list[dict], tools: list[dict] | None, options: dict) -> list[int]:
    """The tokens of a prompt, [] if the tokenizer has no chat template that can render it."""
    from harness.data.chat_templates import fit_calls

    try:
        ((_, row),) = fit_calls(tokenizer, [("", {"messages": turns})])
        return tokenizer.apply_chat_template(row["messages"], tools=tools, add_generation_prompt=True, **options)["input_ids"]
    except Exception:  # a template is a program: it can fail in any way
        return []


def check_prompts(model: str, prompts: list[Prompt]) -> list[Check]:
    if not prompts:
        return []
    found = sum(prompt.is_trained for prompt in prompts)
    return [
        exact_check(model, "prompts with the trained tokens", f"{len(prompts)} of {len(prompts)}", f"{found} of {len(prompts)}")
    ]


def check_ends(model: str, stops: set[int], expected: Expected) -> list[Check]:
    """Whether the tokens that end the trained answers stop the generation."""
    if not expected.end_tokens:
        return []
    wanted = ", ".join(f"{name} ({index})" for name, index in expected.end_tokens.items())
    result = "ok" if set(expected.end_tokens.values()) <= stops else "FAILED"
    return [Check(model, "tokens that end an answer", wanted, ", ".join(map(str, sorted(stops))), "contained", result)]


def compare_merged(run: Path, merged: Path) -> int:
    """For --merge: compares the merged model with the adapter and with what the run has logged; returns the exit code.

    On a CPU with the first rows only, and not at all if the memory is too small. Raises UserError if a model cannot be loaded.
    """
    from harness.run.expectations import EXPECTED

    import psutil
    import torch

    if not (run / EXPECTED).is_file():
        return 0
    size = sum(file.stat().st_size for file in merged.glob("*.safetensors"))
    gpus = range(torch.cuda.device_count())
    free = psutil.virtual_memory().available + sum(torch.cuda.mem_get_info(index)[0] for index in gpus)
    if 1.2 * size > free:
        print_once(
            f"Not compared with the adapter: {merged} needs {1.2 * size / 1e9:.0f} GB of memory, {free / 1e9:.0f} GB are free. "
            f"On another machine: ./launch.sh --verify {run} {merged}"
        )
        return 0
    expected, rows = read_expectations(run)
    use_date_of_run(run)
    few = rows if gpus else rows_within(rows, MERGE_TOKENS)
    adapter = measure(chat.load_model(run), few, str(run))
    model = chat.load_model(merged)
    tolerance, found = tolerance_of(model), measure(model, few, str(merged))
    if len(few) == len(rows):
        checks = check_loss(str(run), adapter, expected, rows, TOLERANCE)
        checks += check_loss(str(merged), found, expected, rows, tolerance, adapter)
    else:
        what = f"loss of {len(few)} of {len(rows)} evaluation sequences"
        checks = [numeric_check(str(merged), what, per_token(adapter), per_token(found), tolerance, " (adapter)")]
    checks += check_tokenizer_and_configs(str(merged), model, chat.load_saved_tokenizer(merged), expected, is_adapter=False)
    print_checks(checks)
    print_meaning(checks, run)
    return int(has_failed(checks))


def print_meaning(checks: list[Check], run: Path) -> None:
    """What a failed check means, and what to do next."""
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
