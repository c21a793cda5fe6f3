"""Compares the model that was trained with the one that is saved, merged, quantized or served. launch.sh calls it:

`python -m harness.commands.verify RUN [MODEL] [--served_model_name NAME] [--json]`.

MODEL is a folder, a .gguf file, or the address of a server of OpenAI's API; without it, the run's folder `merged`, if it exists.
The run itself is always compared. It has written what it was evaluated on, and the loss (`save_expectations` in run/outputs.py).
Exit code 1 if a check fails.
"""

import contextlib
import dataclasses
import functools
import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.commands import chat
from harness.commands.report import print_table
from harness.folder import RESULTS, check_saved_model, read_json
from harness.hub import hub_errors
from harness.launched import UserError, exit_on_user_error, print_once

# How far a loss may be from the one it is compared with, in nats per token.
TOLERANCE = 0.02  # rounding: the run has float32 weights and other kernels, a merged weight is rounded once more
TOLERANCE_4BIT = 0.05  # an adapter that was trained on 4-bit weights, merged into the original ones
TOLERANCE_QUANTIZED = 0.1  # weights that were quantized after the training
SAME_ANSWERS = 0.9  # of the first tokens that a server without log-probabilities writes
DOCUMENTS = 16  # that a server or a .gguf file is measured with
LONGEST = 2048  # tokens of such a document; a .gguf file needs the logits of all of them in float32
MERGE_TOKENS = 8192  # with which --merge compares on a CPU
IGNORED = -100
SERVER_SECONDS = 600  # for an answer; the first one may load the model
# Not about which tokens are generated, or compared by another check.
OTHER_GENERATION_KEYS = ("_from_model_config", "transformers_version", "use_cache", "output_attentions", "output_hidden_states")

CHECKSUMS = {"vocabulary": "vocabulary", "chat_template": "chat template"}


@dataclass
class Check:
    """A row of the table."""

    model: str
    what: str
    expected: str
    found: str
    tolerance: str
    result: str  # "ok", "FAILED" or "not checked"


@dataclass
class Row:
    """An evaluation row: its documents, each as tokens and labels."""

    dataset: str
    documents: list[tuple[list[int], list[int]]]


@dataclass
class Prompt:
    """A conversation up to an answer. `is_trained`: the run was trained on these tokens, and the answer after them."""

    turns: list[dict]
    tools: list[dict] | None
    options: dict[str, Any]  # of the chat template
    tokens: list[int]
    is_trained: bool


Losses = list[tuple[float, int]]  # of each row: the sum over its tokens in the loss, and their number


def main(run: str, *words: str) -> int:
    """Checks whether the saved model of a run, and MODEL if there is one, give the results that the run has recorded.

    `run`: its output directory; `words`: [MODEL] [--served_model_name NAME] [--json], MODEL is by default `run`/merged, if it
    exists. Compares the losses on the evaluation rows, the tokens of prompts, tokenizer and configs. Returns 1 if a check failed.
    """
    model, served_name, as_json = read_words(words)
    if served_name and not is_address(model):
        raise UserError(
            "--served_model_name is for a server: pass its address too, ./launch.sh --verify RUN http://localhost:8000"
        )
    folder = Path(run)
    check_saved_model(folder)
    expected, held_out_rows = read_expectations(folder)
    if not model and (folder / "merged").is_dir():
        model = str(folder / "merged")
    if model and not is_address(model):
        check_model_path(Path(model))
    # Only the JSON goes to standard output.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        checks = compare(folder, model, served_name, expected, held_out_rows)
    if as_json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    else:
        print_checks(checks)
    return int(has_failed(checks))


def read_words(words: tuple[str, ...]) -> tuple[str, str, bool]:
    """MODEL, the name of the served model and whether to print JSON."""
    model, served_name, as_json = "", "", False
    rest = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while rest:
        word = rest.pop(0)
        if word == "--json":
            as_json = True
        elif word.replace("-", "_") == "__served_model_name":
            if not rest:
                raise UserError("--served_model_name is missing its value: the name of the model on the server")
            served_name = rest.pop(0)
        elif word.startswith("-"):
            raise UserError(f"unknown flag {word}: --verify has only --served_model_name and --json")
        elif model:
            raise UserError(f"--verify compares one model, not {model} and {word}: ./launch.sh --verify RUN [MODEL]")
        else:
            model = word
    return model, served_name, as_json


def is_address(model: str) -> bool:
    return model.startswith(("http://", "https://"))


def check_model_path(path: Path) -> None:
    if path.suffix == ".gguf" and path.is_file():
        try:
            import llama_cpp  # noqa: F401
        except ImportError as error:
            raise UserError(f"{path} needs llama-cpp-python: .venv/bin/pip install llama-cpp-python") from error
    elif not (path / "config.json").is_file() and not (path / "adapter_config.json").is_file():
        raise UserError(
            f"{path} is no model: pass a folder with a config.json, a .gguf file, or a server such as http://localhost:8000"
        )


def read_expectations(folder: Path) -> tuple[dict, list[Row]]:
    """What the run has written for --verify."""
    from harness.run.outputs import EXPECTED, HELD_OUT

    import pyarrow.parquet

    expected = read_json(folder / EXPECTED)
    if not expected or not (folder / HELD_OUT).is_file():
        raise UserError(
            f"{folder} has no {EXPECTED} and {HELD_OUT} to compare with: a run writes them at its end, if it has evaluation rows "
            "with tokens"
        )
    rows = []
    with hub_errors("file", str(folder / HELD_OUT)):
        table = pyarrow.parquet.read_table(folder / HELD_OUT)
    for row in table.to_pylist():
        documents, start = [], 0
        for length in row["seq_lengths"]:
            part = slice(start, start + length)
            documents.append((row["input_ids"][part], row["labels"][part]))
            start += length
        rows.append(Row(row["dataset"], documents))
    return expected, rows


def compare(folder: Path, model: str, served_name: str, expected: dict, rows: list[Row]) -> list[Check]:
    """All checks of a run, and of `model` if it is not ""."""
    loaded, tokenizer = chat.load_model(folder), chat.load_saved_tokenizer(folder)
    saved = measure(loaded, rows, str(folder))
    checks = check_loss(str(folder), saved, expected, rows, TOLERANCE)
    checks += check_tokenizer_and_configs(str(folder), loaded, tokenizer, expected, (folder / "adapter_config.json").is_file())
    prompts = make_prompts(functools.partial(render, tokenizer), expected)
    if is_address(model):
        return checks + check_server(model.rstrip("/"), served_name, loaded, tokenizer, prompts, expected, rows)
    if model.endswith(".gguf"):
        return checks + check_gguf(Path(model), loaded, expected, rows)
    if not model or Path(model).resolve() == folder.resolve():
        return checks
    del loaded
    loaded, tokenizer = chat.load_model(Path(model)), chat.load_saved_tokenizer(Path(model))
    tolerance = tolerance_of(folder, loaded)
    checks += check_loss(model, measure(loaded, rows, model), expected, rows, tolerance, saved)
    return checks + check_tokenizer_and_configs(model, loaded, tokenizer, expected, Path(model, "adapter_config.json").is_file())


def tolerance_of(folder: Path, model: Any) -> float:
    """The tolerance for another model than the saved one."""
    was_4bit = bool(read_json(folder / RESULTS).get("quantization"))
    if getattr(model.config, "quantization_config", None) is not None:
        return TOLERANCE_QUANTIZED
    return TOLERANCE_4BIT if was_4bit else TOLERANCE


# The loss


def measure(model: Any, rows: list[Row], name: str) -> Losses:
    """The losses of a loaded model, which gets every document alone."""
    from tqdm import tqdm

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


def mean_as_logged(losses: Losses, batch_size: int, processes: int) -> float:
    """The mean over rows of the loss of their batch, as transformers logs it.

    Several processes complete the last batch with the first rows.
    """
    total, rows = 0.0, 0
    for start in range(0, len(losses), batch_size):
        batch = losses[start : start + batch_size]
        completed = batch + losses[: batch_size - len(batch)] if processes > 1 else batch
        if count := sum(count for _, count in completed):
            total, rows = total + len(batch) * sum(loss for loss, _ in completed) / count, rows + len(batch)
    return total / rows if rows else float("nan")


def per_token(losses: Losses) -> float:
    return sum(loss for loss, _ in losses) / max(1, sum(count for _, count in losses))


def check_loss(
    model: str, losses: Losses, expected: dict, rows: list[Row], tolerance: float, saved: Losses | None = None
) -> list[Check]:
    """Compares the loss of all evaluation rows with what the run has logged, for every dataset.

    If the run has logged another loss or none, the comparison is with `saved`, the losses of the saved model.
    """
    what, found = f"loss of {len(rows)} evaluation rows", per_token(losses)
    if not expected["eval_losses"] and saved is not None:
        return [numeric_check(model, what, per_token(saved), found, tolerance, " (saved model)")]
    if not expected["eval_losses"]:
        return [Check(model, what, "", f"{found:.4f}", "", "not checked: the run logged another loss, or none")]
    checks = []
    for dataset, logged in expected["eval_losses"].items():
        of_dataset = [loss for loss, row in zip(losses, rows, strict=True) if row.dataset == dataset]
        found = mean_as_logged(of_dataset, expected["batch_size"], expected["processes"])
        what = f"loss of {len(of_dataset)} evaluation rows{f' of {dataset}' if dataset else ''}"
        source = f" (logged at step {expected['step']})"
        checks.append(numeric_check(model, what, logged, found, tolerance, source))
    return checks


def numeric_check(model: str, what: str, expected: float, found: float, tolerance: float, source: str = "") -> Check:
    is_near = abs(found - expected) <= tolerance  # False for NaN
    return Check(model, what, f"{expected:.4f}{source}", f"{found:.4f}", f"±{tolerance}", "ok" if is_near else "FAILED")


def exact_check(model: str, what: str, expected: Any, found: Any) -> Check:
    return Check(model, what, str(expected), str(found), "equal", "ok" if found == expected else "FAILED")


def documents_for_server(rows: list[Row]) -> list[tuple[list[int], list[int]]]:
    """Documents with tokens in the loss, to measure a server with. Raises UserError if there is none."""
    documents = [(ids[:LONGEST], labels[:LONGEST]) for row in rows for ids, labels in row.documents]
    documents = [document for document in documents if any(label != IGNORED for label in document[1][1:])][:DOCUMENTS]
    if not documents:
        raise UserError(
            f"no evaluation row has a token in the loss among its first {LONGEST:,} tokens, so nothing can be compared"
        )
    return documents


# Tokenizer, chat template and configs


def check_tokenizer_and_configs(label: str, model: Any, tokenizer: Any, expected: dict, is_adapter: bool) -> list[Check]:
    """Compares what is saved next to the weights with what the run recorded (`expected`). `label`: the model in the table."""
    from harness.run.outputs import describe_tokenizer

    generation_config = model.generation_config
    eos_tokens = as_set(generation_config.eos_token_id)
    if is_adapter:  # it has no generation config of its own; --chat and vLLM also stop at the tokenizer's EOS token
        eos_tokens |= as_set(tokenizer.eos_token_id)
    checks = [
        *check_prompts(label, make_prompts(functools.partial(render, tokenizer), expected)),
        *check_ends(label, eos_tokens, expected),
    ]
    wanted, found = expected["tokenizer"], describe_tokenizer(tokenizer)
    checks.append(exact_check(label, "special tokens", in_words(wanted["special_tokens"]), in_words(found["special_tokens"])))
    checks += [exact_check(label, f"{name} (checksum)", wanted[key], found[key]) for key, name in CHECKSUMS.items()]
    if is_adapter:
        return checks
    if expected["generation"]:
        wanted, found = sampling(expected["generation"]), sampling(generation_config.to_diff_dict())
        checks.append(exact_check(label, "generation config", wanted, found))
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head is not None and head.weight.data_ptr() == embeddings.weight.data_ptr()
    wanted, found = ("tied to the embeddings" if tied else "not tied" for tied in (expected["tie_word_embeddings"], is_tied))
    return [*checks, exact_check(label, "output layer", wanted, found)]


def in_words(special_tokens: dict[str, list]) -> str:
    """For example: bos <s> (1), eos </s> (2)."""
    return ", ".join(f"{name} {token} ({index})" for name, (token, index) in special_tokens.items() if token is not None)


def as_set(tokens: int | list[int] | None) -> set[int]:
    return set(tokens) if isinstance(tokens, list) else {tokens} - {None}


def sampling(config: dict) -> dict:
    """The keys of a generation config that change how tokens are chosen."""
    return {key: config[key] for key in sorted(config) if key not in OTHER_GENERATION_KEYS and not key.endswith("_token_id")}


Render = Callable[[list[dict], list[dict] | None, dict], list[int]]  # from turns, tools and template options to tokens


def make_prompts(to_tokens: Render, expected: dict) -> list[Prompt]:
    """The prompts of the run's conversations, one for each answer, with the tokens that `to_tokens` returns."""
    prompts = []
    for row in expected["conversations"]:
        turns = without_none(row.get("messages") or row["prompt"] + row["completion"])
        tools = row.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        options = row.get("chat_template_kwargs") or {}
        first = len(row["prompt"]) if "prompt" in row else 1
        for number in range(first, len(turns)):
            if turns[number]["role"] == "assistant":
                tokens = to_tokens(turns[:number], tools, options)
                is_trained = bool(tokens) and row["input_ids"][: len(tokens)] == tokens
                prompts.append(Prompt(turns[:number], tools, options, tokens, is_trained))
    return prompts


def without_none(value: Any) -> Any:
    """Messages without the keys that a table has filled with None."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def render(tokenizer: Any, turns: list[dict], tools: list[dict] | None, options: dict) -> list[int]:
    """The tokens of a prompt, [] if the tokenizer has no chat template that can render it."""
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(turns, tools=tools, add_generation_prompt=True, **options)["input_ids"]
    except (ValueError, TemplateError):
        return []


def check_prompts(model: str, prompts: list[Prompt]) -> list[Check]:
    if not prompts:
        return []
    found = sum(prompt.is_trained for prompt in prompts)
    return [
        exact_check(model, "prompts with the trained tokens", f"{len(prompts)} of {len(prompts)}", f"{found} of {len(prompts)}")
    ]


def check_ends(model: str, stops: set[int], expected: dict) -> list[Check]:
    """Whether the tokens that end the trained answers stop the generation."""
    if not expected["end_tokens"]:
        return []
    wanted = ", ".join(f"{name} ({index})" for name, index in expected["end_tokens"].items())
    result = "ok" if set(expected["end_tokens"].values()) <= stops else "FAILED"
    return [Check(model, "tokens that end an answer", wanted, ", ".join(map(str, sorted(stops))), "among", result)]


# A server of OpenAI's API


def ask(address: str, path: str, body: dict | None = None) -> tuple[int, Any]:
    """GETs a path of a server, or POSTs `body` as JSON. Returns the status, and the parsed JSON or the first letters of an error.

    Raises UserError if nothing answers in HTTP and JSON.
    """
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(address + path, data, headers), timeout=SERVER_SECONDS) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")[:300]
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UserError(
            f"{address} does not answer ({error}): start the server first, and pass its address without /v1"
        ) from error


def find_served_model(address: str, name: str) -> dict:
    """The part of a request that names the model: {} for a server with one model that does not list it."""
    if name:
        return {"model": name}
    status, answer = ask(address, "/v1/models")
    entries = answer.get("data", []) if status == 200 else []
    names = [entry["id"] for entry in entries]
    if any(entry.get("owned_by") == "vllm" for entry in entries):
        if len(names) > 1:
            raise UserError(f"{address} serves {', '.join(names)}: pass one of them as --served_model_name")
        return {"model": names[0]}
    return {}  # `transformers serve` lists the models of the Hub's cache, and serves the one that it was started with


def check_server(
    address: str, name: str, loaded: Any, tokenizer: Any, prompts: list[Prompt], expected: dict, rows: list[Row]
) -> list[Check]:
    """Compares a served model with the saved one, which is `loaded`."""
    address = address.removesuffix("/v1")
    model = find_served_model(address, name)
    checks = []
    documents = documents_for_server(rows)
    what = f"loss of {len(documents)} evaluation documents"
    found, reason = served_loss(address, model, documents)
    if found is None:
        checks.append(Check(address, what, "", "", "", f"not checked: {reason}"))
        if prompts:
            checks.append(check_answers(address, model, loaded, tokenizer, prompts[:DOCUMENTS]))
    else:
        saved = per_token([document_loss(loaded, *document) for document in documents])
        checks.append(numeric_check(address, what, saved, found, TOLERANCE, " (saved model)"))
    if not prompts:
        return checks
    checks.append(check_served_prompts(address, model, prompts[:DOCUMENTS]))
    return [*checks, *check_served_ends(address, model, prompts[0], expected)]


def served_loss(address: str, model: dict, documents: list[tuple[list[int], list[int]]]) -> tuple[float | None, str]:
    """The loss per token by the log-probabilities of a server, or None and the reason why it gives none."""
    losses = []
    for ids, labels in documents:
        request = {**model, "prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
        status, answer = ask(address, "/v1/completions", request)
        if status != 200:
            return None, f"the server gives no log-probabilities of a prompt ({status}: {answer})"
        values = ((answer.get("choices") or [{}])[0].get("logprobs") or {}).get("token_logprobs") or []
        wanted = [value for value, label in zip(values[1:], labels[1:], strict=False) if label != IGNORED]
        if len(values) < len(ids) or None in wanted:
            return None, "the server gives no log-probabilities of a prompt"
        losses.append((-sum(wanted), len(wanted)))
    return per_token(losses), ""


def chat_request(model: dict, prompt: Prompt, **options: Any) -> dict:
    """A request for /v1/chat/completions, with tool calls as OpenAI's API has them."""
    turns = []
    for turn in prompt.turns:
        calls = [
            {"id": f"call_{number}", "type": "function", **call, "function": call["function"] | {"arguments": as_text(call)}}
            for number, call in enumerate(turn.get("tool_calls") or [])
        ]
        turns.append(turn | ({"tool_calls": calls} if calls else {}))
    tools = {"tools": prompt.tools} if prompt.tools else {}
    template = {"chat_template_kwargs": prompt.options} if prompt.options else {}
    return {**model, "messages": turns, **tools, **template, **options}


def as_text(call: dict) -> str:
    arguments = call["function"].get("arguments", {})
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def ask_chat(address: str, request: dict) -> dict:
    status, answer = ask(address, "/v1/chat/completions", request)
    if status != 200:
        hint = "" if "model" in request else ", or pass the name of the model as --served_model_name"
        raise UserError(f"{address}/v1/chat/completions answers with {status}: {answer}: see the server's messages{hint}")
    return answer


def check_served_prompts(address: str, model: dict, prompts: list[Prompt]) -> Check:
    """By the tokens that vLLM's /tokenize returns; other servers only count the tokens of a prompt."""
    right, what = 0, "prompts with the trained tokens"
    for prompt in prompts:
        request = chat_request(model, prompt)
        status, answer = ask(address, "/tokenize", request | {"add_generation_prompt": True})
        if status == 200 and isinstance(answer, dict) and answer.get("tokens"):  # llama.cpp's own /tokenize returns []
            right += prompt.is_trained and answer["tokens"] == prompt.tokens
            continue
        what = "prompts with the trained number of tokens"
        usage = ask_chat(address, request | {"max_tokens": 1, "temperature": 0})["usage"]
        right += prompt.is_trained and usage["prompt_tokens"] == len(prompt.tokens)
    return exact_check(address, what, f"{len(prompts)} of {len(prompts)}", f"{right} of {len(prompts)}")


def check_answers(address: str, model: dict, loaded: Any, tokenizer: Any, prompts: list[Prompt]) -> Check:
    """For a server without log-probabilities: compares the first token of its answers with that of the saved model."""
    import torch

    same = 0
    for prompt in prompts:
        if not prompt.tokens:
            continue
        with torch.no_grad():
            logits = loaded(input_ids=torch.tensor([prompt.tokens], device=loaded.device)).logits[0, -1]
        expected = tokenizer.decode(int(logits.argmax()), skip_special_tokens=True).strip()
        answer = ask_chat(address, chat_request(model, prompt, max_tokens=1, temperature=0))
        same += (answer["choices"][0]["message"].get("content") or "").strip() == expected
    wanted = f"{len(prompts)} of {len(prompts)}"
    result = "ok" if same >= SAME_ANSWERS * len(prompts) else "FAILED"
    return Check(
        address,
        "first tokens of answers as from the saved model",
        wanted,
        f"{same} of {len(prompts)}",
        f"{SAME_ANSWERS:.0%}",
        result,
    )


def check_served_ends(address: str, model: dict, prompt: Prompt, expected: dict) -> list[Check]:
    """Whether the server stops at each token that ends the trained answers; a bias makes the model write it."""
    checks = []
    for name, token in expected["end_tokens"].items():
        # `transformers serve` fails with a bias that is an integer.
        request = chat_request(model, prompt, max_tokens=8, temperature=0, logit_bias={str(token): 100.0})
        status, answer = ask(address, "/v1/chat/completions", request)
        if status == 200:
            checks.append(exact_check(address, f"{name} ends an answer", "stop", answer["choices"][0]["finish_reason"]))
        else:
            result = f"not checked: the server refuses logit_bias ({status})"
            checks.append(Check(address, f"{name} ends an answer", "stop", "", "equal", result))
    return checks


# A .gguf file


def check_gguf(path: Path, loaded: Any, expected: dict, rows: list[Row]) -> list[Check]:
    """Compares a file for llama.cpp with the saved model, which is `loaded`."""
    import numpy as np
    from llama_cpp import Llama

    documents = documents_for_server(rows)
    conversations = expected["conversations"]
    longest = max(len(ids) for ids, _ in documents)
    model = Llama(str(path), n_ctx=longest, logits_all=True, verbose=False)
    losses = []
    for ids, labels in documents:
        model.reset()
        model.eval(ids)
        logits = np.asarray(model.scores[: len(ids) - 1], dtype=np.float64)
        logits -= logits.max(-1, keepdims=True)
        log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        wanted = [-log_probabilities[index, token] for index, token in enumerate(labels[1:]) if token != IGNORED]
        losses.append((float(sum(wanted)), len(wanted)))
    saved = per_token([document_loss(loaded, *document) for document in documents])
    what = f"loss of {len(documents)} evaluation documents"
    checks = [numeric_check(str(path), what, saved, per_token(losses), TOLERANCE_QUANTIZED, " (saved model)")]
    if not conversations:
        return checks
    return [*checks, *check_gguf_prompts(path, model, expected)]


def check_gguf_prompts(path: Path, model: Any, expected: dict) -> list[Check]:
    """Checks the tokens of the prompts, by the chat template and tokenizer in the file, and the tokens at which it stops."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = model.metadata.get("tokenizer.chat_template", "")
    special = {f"{name}_token": token for name, (token, _) in expected["tokenizer"]["special_tokens"].items() if token}

    def render(turns: list[dict], tools: list[dict] | None, options: dict) -> list[int]:
        options = {"add_generation_prompt": True, **special, **options}
        texts, _ = render_jinja_template([turns], tools=tools, chat_template=template, **options)
        return list(model.tokenize(texts[0].encode(), add_bos=False, special=True))

    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    stops = {int(model.metadata[key]) for key in keys if key in model.metadata}
    return [*check_prompts(str(path), make_prompts(render, expected)), *check_ends(str(path), stops, expected)]


# What --merge and --verify print


def compare_merged(run: Path, merged: Path) -> int:
    """For --merge: compares the merged model with the adapter and with what the run has logged; returns the exit code.

    On a CPU with the first rows only, and not at all if the memory is too small.
    """
    from harness.run.outputs import EXPECTED

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
    few = rows if gpus else rows_within(rows, MERGE_TOKENS)
    adapter = measure(chat.load_model(run), few, str(run))
    model = chat.load_model(merged)
    tolerance, found = tolerance_of(run, model), measure(model, few, str(merged))
    if len(few) == len(rows):
        checks = check_loss(str(run), adapter, expected, rows, TOLERANCE)
        checks += check_loss(str(merged), found, expected, rows, tolerance, adapter)
    else:
        what = f"loss of {len(few)} of {len(rows)} evaluation rows"
        checks = [numeric_check(str(merged), what, per_token(adapter), per_token(found), tolerance, " (adapter)")]
    checks += check_tokenizer_and_configs(str(merged), model, chat.load_saved_tokenizer(merged), expected, is_adapter=False)
    print_checks(checks)
    return int(has_failed(checks))


def rows_within(rows: list[Row], tokens: int) -> list[Row]:
    """The first rows that have at most so many tokens together; at least one."""
    few = []
    for row in rows:
        tokens -= sum(len(ids) for ids, _ in row.documents)
        if few and tokens < 0:
            break
        few.append(row)
    return few


def has_failed(checks: list[Check]) -> bool:
    return any(check.result == "FAILED" for check in checks)


def print_checks(checks: list[Check]) -> None:
    print_table([("model", "what", "expected", "found", "tolerance", "result"), *map(dataclasses.astuple, checks)])
    compared = [check for check in checks if not check.result.startswith("not checked")]
    passed = sum(check.result == "ok" for check in compared)
    missing = f", {len(checks) - len(compared)} could not be made" if len(compared) < len(checks) else ""
    print(f"\n{passed} of {len(compared)} checks passed{missing}.")


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main(*sys.argv[1:]))
