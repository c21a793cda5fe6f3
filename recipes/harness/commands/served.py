"""Compares a model that a server offers (OpenAI's API: /v1/chat/completions) with the saved one.

`transformers serve` is tested. It gives no log-probabilities, so the first tokens of answers are compared instead of the loss.
"""

import contextlib
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from typing import Any

from harness.commands.expectations import Check, Expected, Prompt, exact_check
from harness.messages import UserError

SAME_ANSWERS = 0.9  # of the first tokens: other kernels round in another way, and two tokens can be about as likely
PROMPTS = 16
SECONDS = 600  # for an answer; the first one may load the model
MOST_BYTES = 10_000_000  # of an answer
PART = 65_536  # bytes that are read at once
# What is read of an answer.


def is_address(model: str) -> bool:
    return model.startswith(("http://", "https://"))


def check_served_model(
    address: str, name: str, loaded: Any, tokenizer: Any, prompts: list[Prompt], expected: Expected
) -> list[Check]:
    """Compares the served model with the saved one, which is `loaded`. `name`: of the model, if the server needs one."""
    address = address.rstrip("/").removesuffix("/v1")
    model = {"model": name} if name else {}
    return [
        check_answers(address, model, loaded, tokenizer, prompts[:PROMPTS]),
        check_prompt_lengths(address, model, prompts[:PROMPTS]),
        *check_end_tokens(address, model, prompts[0], expected),
    ]


def check_answers(address: str, model: dict, loaded: Any, tokenizer: Any, prompts: list[Prompt]) -> Check:
    """Compares the first token of the server's answers with that of the saved model."""
    import torch

    same = 0
    for prompt in prompts:
        if not prompt.tokens:
            continue
        with torch.no_grad():
            logits = loaded(input_ids=torch.tensor([prompt.tokens], device=loaded.device)).logits[0, -1]
        first = tokenizer.decode(int(logits.argmax()), skip_special_tokens=True).strip()
        answer = ask_chat(address, chat_request(model, prompt, max_tokens=1, temperature=0), "choices")
        same += (answer["choices"][0]["message"].get("content") or "").strip() == first
    of_all = len(prompts)
    what, result = "first tokens of answers as from the saved model", "ok" if same >= SAME_ANSWERS * of_all else "FAILED"
    return Check(address, what, f"{of_all} of {of_all}", f"{same} of {of_all}", f"{SAME_ANSWERS:.0%}", result)


def check_prompt_lengths(address: str, model: dict, prompts: list[Prompt]) -> Check:
    """Compares how many tokens the server makes of each prompt: a server does not say which."""
    right = 0
    for prompt in prompts:
        usage = ask_chat(address, chat_request(model, prompt, max_tokens=1, temperature=0), "usage")["usage"]
        right += prompt.is_trained and usage["prompt_tokens"] == len(prompt.tokens)
    of_all = len(prompts)
    return exact_check(address, "prompts with the trained number of tokens", f"{of_all} of {of_all}", f"{right} of {of_all}")


def check_end_tokens(address: str, model: dict, prompt: Prompt, expected: Expected) -> list[Check]:
    """Whether the server stops at each token that ends the trained answers; a bias makes the model write it."""
    checks = []
    for name, token in expected.end_tokens.items():
        # `transformers serve` fails with a bias that is an integer.
        request = chat_request(model, prompt, max_tokens=8, temperature=0, logit_bias={str(token): 100.0})
        status, answer = ask(address, "/v1/chat/completions", request, "choices")
        if status == 200:
            checks.append(exact_check(address, f"{name} ends an answer", "stop", answer["choices"][0]["finish_reason"]))
        else:
            result = f"not checked: the server refuses logit_bias ({status})"
            checks.append(Check(address, f"{name} ends an answer", "stop", "", "equal", result))
    return checks


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


def ask_chat(address: str, request: dict, expected: str) -> dict:
    status, answer = ask(address, "/v1/chat/completions", request, expected)
    if status != 200:
        hint = "" if "model" in request else ", or pass the name of the model as --served_model_name"
        raise UserError(f"{address}/v1/chat/completions answers with {status}: {answer}: see the server's messages{hint}")
    return answer


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes an error of a redirect: it could lead to another host, or to another protocol than HTTP."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


def ask(address: str, path: str, body: dict, expected: str) -> tuple[int, Any]:
    """POSTs `body` as JSON. Returns 200 and an answer with what is `expected`, or another status and the start of an error.

    Raises UserError if nothing answers in HTTP and JSON.
    """
    request = urllib.request.Request(address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    if key := os.environ.get("OPENAI_API_KEY"):
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.build_opener(NoRedirects).open(request, timeout=SECONDS) as answer:
            content = read_all(answer, address + path)
    except urllib.error.HTTPError as error:
        if error.code in (301, 302, 303, 307, 308):
            target = error.headers.get("Location", "another address")
            raise UserError(f"{address} redirects to {target}: pass the address of the server itself, without /v1") from error
        with contextlib.suppress(OSError, http.client.HTTPException):  # it has not sent what it announced
            return error.code, error.read(300).decode(errors="replace")
        return error.code, ""
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UserError(
            f"{address} does not answer ({error}): start the server first, and pass its address without /v1"
        ) from error
    try:
        parsed = json.loads(content)
        problem = "" if parsed.get(expected) else f"{expected} is missing"
    except (ValueError, RecursionError, AttributeError) as error:
        problem = f"its answer is no JSON: {error}"
    if problem:
        raise UserError(f"{address}{path} answers in another way than OpenAI's API ({problem})")
    return 200, parsed


def read_all(answer: http.client.HTTPResponse, address: str) -> bytes:
    """The body of an answer. Raises UserError if it is too long, and OSError if it takes too long."""
    content, deadline = b"", time.monotonic() + SECONDS
    while part := answer.read1(PART):
        content += part
        if len(content) > MOST_BYTES:
            raise UserError(f"{address} answers with more than {MOST_BYTES:,} bytes: is it a server of OpenAI's API?")
        if time.monotonic() > deadline:
            raise TimeoutError(f"it sends its answer for more than {SECONDS} s")
    return content
