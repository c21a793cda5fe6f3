"""Talks to the model of a finished run. launch.sh calls it:

`python -m harness.commands.chat RUN [--image FILE …] [--max_new_tokens N] [--system TEXT]`.
"""

import sys
from collections.abc import Iterator
from typing import Any

from harness.commands import parsers
from harness.commands.saved import check_has_model, load_model, load_saved_processor, load_saved_tokenizer, read_prompt
from harness.data.images import IMAGE, ImageCollator, encode_turns
from harness.folder import CONVERSATIONS
from harness.messages import UserError, exit_on_user_error, one_message, print_once, printable


@one_message()
def main(*words: str) -> None:
    """Answers every line of standard input, or continues it if the model was not trained on conversations."""
    parsed = parsers.chat().read(words)
    from transformers import BatchFeature

    check_has_model(parsed.run)  # before the tokenizer, whose error would name a package
    images = [{"bytes": None, "path": str(path.absolute())} for path in parsed.image or []]
    processor = load_saved_processor(parsed.run) if images else None
    tokenizer = load_saved_tokenizer(parsed.run)
    prompt = read_prompt(parsed.run)
    rows = prompt.get("rows", CONVERSATIONS)
    is_chat = bool(tokenizer.chat_template) and rows in (None, CONVERSATIONS)
    if not is_chat and (parsed.system or images):
        raise UserError(f"--system, --image: {parsed.run} was not trained on conversations: leave out the flag")
    options = prompt.get("chat_template_kwargs") or {}
    system = prompt.get("system") if parsed.system is None else parsed.system
    start = [{"role": "system", "content": system}] if system else []
    model = load_model(parsed.run)
    turns = list(start)
    print_once(f"{parsed.run} is loaded on {model.device}. `exit` ends.")
    if is_chat:
        print_once(f"Write a line and wait for the answer. An empty line starts a new conversation. System message: {system}")
    else:
        print_once(f"It was trained on {rows or 'texts'}, so it continues what you write. Write \\n for a line break.")
    for line in lines():
        if not line.strip():
            turns = list(start)
        elif is_chat:
            if images:
                line = line.replace(IMAGE, "image")
            turns.append({"role": "user", "content": line if len(turns) > len(start) else IMAGE * len(images) + line})
            if images:
                ids = encode_turns(processor, turns, images, add_generation_prompt=True, **options)["input_ids"]
                inputs = BatchFeature(ImageCollator(processor).for_prompts([ids], [images]))
            else:
                inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", **options)
            turns.append({"role": "assistant", "content": generate(model, tokenizer, inputs, parsed.max_new_tokens)})
        else:
            inputs = tokenizer(line.replace("\\n", "\n"), return_tensors="pt")
            generate(model, tokenizer, inputs, parsed.max_new_tokens)


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


def generate(model: Any, tokenizer: Any, inputs: Any, new_tokens: int) -> str:
    """Prints the answer token by token, and returns it. Sampling is as the model's generation config says."""
    from harness.run.generation import end_tokens

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
