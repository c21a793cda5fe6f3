"""Talks to the model of a finished run. launch.sh calls it:

`python -m harness.commands.chat RUN [--max_new_tokens N]`.

An adapter stays an adapter: the model is loaded as it was trained on, in 4 bits from the folder of `--prepare` if it was, so that
a 70B model needs no merge and fits the two 24 GB GPUs that it was trained on. One process uses all GPUs, one after the other.
"""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.commands import arguments
from harness.commands.saved import check_saved_model, read_adapter_settings, read_prompt
from harness.compat.bitsandbytes import keep_4bit_layout
from harness.folder import (
    CONVERSATIONS,
    RESULTS,
    read_json,
)
from harness.hub import TOKENIZER, hub_errors
from harness.messages import UserError, exit_on_user_error, print_once, printable

LONGEST_PROMPT = 4096  # tokens; the earliest turns of a longer conversation are left out


def main(*words: str) -> None:
    parsed = arguments.chat().read(words)
    check_saved_model(parsed.run)
    model, tokenizer = load_model(parsed.run), load_saved_tokenizer(parsed.run)
    prompt = read_prompt(parsed.run)
    is_chat = uses_template(tokenizer, prompt)
    print_once(loaded_message(parsed.run, model))
    print_once(how_to_write(tokenizer, prompt))
    if is_chat:
        chat(model, tokenizer, parsed.max_new_tokens, prompt.get("chat_template_kwargs") or {})
    else:
        continue_lines(model, tokenizer, parsed.max_new_tokens, prompt)


def load_model(run: Path) -> Any:
    """The model in a folder, with its adapter if it has one, on the GPUs of this machine or on its CPU.

    `run`: the folder of a finished run, or of a model that --merge or someone else has made from it.
    """
    from harness.compat.transformers import use_no_gpu_kernels
    from harness.model.weight_files import check_adapter_weights, check_found, class_of_model

    import torch
    import transformers
    from peft import PeftModel
    from transformers import AutoConfig, BitsAndBytesConfig

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    results, has_gpu = read_json(run / RESULTS), torch.cuda.is_available()
    options = {"device_map": "auto" if has_gpu else {"": "cpu"}, "dtype": "auto"}
    base = str(run)
    if (run / "adapter_config.json").is_file():
        settings = read_adapter_settings(run)
        quantized = find_quantized_weights(run, results)
        base = quantized or settings.base_model_name_or_path
        if not quantized:
            options |= {"revision": settings.revision or "main"}
            if results.get("quantization"):
                options["quantization_config"] = quantization = BitsAndBytesConfig.from_dict(results["quantization"])
                options["dtype"] = quantization.bnb_4bit_compute_dtype  # what the run has loaded the rest of the model in
    if not has_gpu:
        keep_4bit_layout()
        use_no_gpu_kernels()
    with hub_errors("model", base):
        config = AutoConfig.from_pretrained(base, revision=options.get("revision"))
        model, found = class_of_model(config).from_pretrained(base, output_loading_info=True, **options)
    check_found(found, base)
    if base != str(run):
        with hub_errors("adapter", str(run)):
            model = PeftModel.from_pretrained(model, run)
            check_adapter_weights(model, run)
    return model.eval()


def find_quantized_weights(run: Path, results: dict) -> str:
    """The folder of the 4-bit weights that a run was trained on, "" if it quantized while it loaded, or not at all."""
    from huggingface_hub.constants import HF_HOME

    recorded = results.get("quantized_weights")
    if not recorded:
        return ""
    # The name of the folder is the same on every machine.
    folders = [Path(recorded), Path(HF_HOME, "quantized", Path(recorded).name)]
    for folder in folders:
        if folder.is_dir():
            return str(folder)
    raise UserError(
        f"{run} was trained on 4-bit weights of {results.get('model')} that are not in {folders[0]} nor in {folders[1]}: "
        f"./launch.sh --prepare {results.get('recipe')} makes them, with the flags of the run"
    )


def load_saved_tokenizer(run: Path) -> Any:
    from transformers import AutoTokenizer

    with hub_errors(TOKENIZER, str(run)):
        return AutoTokenizer.from_pretrained(run)


def loaded_message(run: Path, model: Any) -> str:
    """What was loaded, and where it is."""
    devices = sorted({str(weight.device) for weight in model.parameters()})
    message = f"{run} is loaded on {', '.join(devices)}."
    return message + " Generating on a CPU is slow: --max_new_tokens makes answers shorter." if "cpu" in devices else message


def uses_template(tokenizer: Any, prompt: dict[str, Any]) -> bool:
    """Whether the model was trained on conversations; if that is not known, whether it has a chat template."""
    return bool(tokenizer.chat_template) and prompt.get("rows") in (None, CONVERSATIONS)


def how_to_write(tokenizer: Any, prompt: dict[str, Any]) -> str:
    """What to write, and what becomes of it."""
    if uses_template(tokenizer, prompt):
        return "Write a line and wait for the answer. An empty line starts a new conversation, `exit` ends."
    rows = prompt.get("rows")
    reason = f"The model was trained on {rows}" if rows else "The model has no chat template"
    begins, ends = prompt.get("begins", ""), prompt.get("ends", "")
    if begins or ends:
        form = (begins + "YOUR TEXT" + ends).replace("\n", "\\n")
        return f"{reason}. Your line becomes a prompt as in the training: {form}. Write \\n for a line break. `exit` ends."
    return f"{reason}, so it continues your text. Write \\n for a line break. `exit` ends."


def chat(model: Any, tokenizer: Any, new_tokens: int, template_arguments: dict[str, Any]) -> None:
    """Answers every line of standard input, until it ends. `template_arguments`: see --chat_template_kwargs."""
    turns = []
    for line in lines():
        if not line.strip():
            turns = []
            continue
        turns.append({"role": "user", "content": line})
        inputs = encode_prompt(tokenizer, turns, template_arguments)
        while inputs["input_ids"].shape[1] > LONGEST_PROMPT and len(turns) > 1:
            del turns[:2]  # a question and its answer
            inputs = encode_prompt(tokenizer, turns, template_arguments)
        turns.append({"role": "assistant", "content": generate(model, tokenizer, inputs, new_tokens)})


def continue_lines(model: Any, tokenizer: Any, new_tokens: int, prompt: dict[str, Any]) -> None:
    """Puts each line of standard input into the prompt format of the training, and generates its continuation."""
    for line in lines():
        if line.strip():
            text = prompt.get("begins", "") + line.replace("\\n", "\n") + prompt.get("ends", "")
            generate(model, tokenizer, encode_text(tokenizer, text), new_tokens)


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


def encode_prompt(tokenizer: Any, turns: list[dict[str, str]], template_arguments: dict[str, Any] | None = None) -> Any:
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    return tokenizer.apply_chat_template(turns, **options, **(template_arguments or {}))


def encode_text(tokenizer: Any, text: str) -> Any:
    """The tokens of a text that the model is to continue: without the EOS token, which some tokenizers add."""
    from transformers import BatchEncoding

    inputs = tokenizer(text, return_tensors="pt")
    if int(inputs["input_ids"][0, -1]) == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        inputs = BatchEncoding({name: tensor[:, :-1] for name, tensor in inputs.items()})
    return inputs


def generate(model: Any, tokenizer: Any, inputs: Any, new_tokens: int) -> str:
    """Prints the answer token by token, and returns it. Sampling is as the model's generation config says."""
    import torch
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        """Prints an answer without control characters, which a model can write too."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            super().on_finalized_text(printable(text), stream_end)

    ends = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
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
