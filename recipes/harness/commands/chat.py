"""Talks to the model of a finished run. launch.sh calls it:

`python -m harness.commands.chat RUN [--max_new_tokens N]`.
"""

import sys
from collections.abc import Iterator
from typing import Any

from harness.commands import arguments
from harness.commands.saved import load_model, load_saved_tokenizer, read_prompt
from harness.folder import CONVERSATIONS
from harness.messages import exit_on_user_error, print_once, printable


def main(*words: str) -> None:
    """Answers every line of standard input, or continues it if the model was not trained on conversations."""
    parsed = arguments.chat().read(words)
    model, tokenizer, prompt = load_model(parsed.run), load_saved_tokenizer(parsed.run), read_prompt(parsed.run)
    options, turns = prompt.get("chat_template_kwargs") or {}, []
    is_chat = bool(tokenizer.chat_template) and prompt.get("rows", CONVERSATIONS) in (None, CONVERSATIONS)
    print_once(f"{parsed.run} is loaded on {model.device}. {how_to_write(is_chat, prompt)} `exit` ends.")
    for line in lines():
        if not line.strip():
            turns = []
        elif is_chat:
            turns.append({"role": "user", "content": line})
            inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", **options)
            turns.append({"role": "assistant", "content": generate(model, tokenizer, inputs, parsed.max_new_tokens)})
        else:
            text = prompt.get("begins", "") + line.replace("\\n", "\n") + prompt.get("ends", "")
            generate(model, tokenizer, encode_text(tokenizer, text), parsed.max_new_tokens)


def how_to_write(is_chat: bool, prompt: dict[str, Any]) -> str:
    """What to write, and what becomes of it."""
    if is_chat:
        return "Write a line and wait for the answer. An empty line starts a new conversation,"
    form = (prompt.get("begins", "") + "YOUR TEXT" + prompt.get("ends", "")).replace("\n", "\\n")
    return f"It was trained on {prompt.get('rows') or 'texts'}, so it continues: {form}. Write \\n for a line break,"


def lines() -> Iterator[str]:
    """The lines of standard input, until it ends, or somebody writes `exit`."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip() in ("exit", "quit"):
            return
        yield line


def encode_text(tokenizer: Any, text: str) -> Any:
    """The tokens of a text that the model is to continue: without the EOS token, which some tokenizers add."""
    inputs = tokenizer(text, return_tensors="pt")
    if int(inputs["input_ids"][0, -1]) == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        for name in inputs:
            inputs[name] = inputs[name][:, :-1]
    return inputs


def generate(model: Any, tokenizer: Any, inputs: Any, new_tokens: int) -> str:
    """Prints the answer token by token, and returns it. Sampling is as the model's generation config says."""
    from harness.run.samples import end_tokens

    import torch
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        """Prints an answer without control characters, which a model can write too."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            super().on_finalized_text(printable(text), stream_end)

    ends = end_tokens(model, tokenizer)
    with torch.no_grad():
        tokens = model.generate(
            **inputs.to(model.device),
            max_new_tokens=new_tokens,
            eos_token_id=sorted(ends),
            pad_token_id=min(ends) if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            streamer=Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


if __name__ == "__main__":
    with exit_on_user_error():
        main(*sys.argv[1:])
