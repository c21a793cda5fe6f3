"""Tokens that train per second: our recipe, a bare PyTorch loop, `trl sft` and the source guide's own way, step by step in turn.

    .venv/bin/python benchmarks/side_by_side.py                  # on CPU a small model: some minutes; on a GPU the real one
    .venv/bin/python benchmarks/side_by_side.py --rounds 50

Five processes are alive at once and one of them trains at a time, an optimizer step each, in turns: whatever else the machine
does hits all alike. A turn goes from one optimizer step to the next, so it holds data, logging and callbacks as well as
arithmetic; on a CPU its seconds are those that the process had of one core. Tokens that train are those in the loss that are
no padding. All have the same model, documents, batch and learning rate: the numbers of recipes/qwen2_fineweb_edu.py, but for
CHANGES on a CPU.
"""

import argparse
import ast
import itertools
import statistics
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path

import material
import sides

NAMES = {
    "recipe": "the recipe, `recipes/qwen2_fineweb_edu.py`",
    "bare_loop": "a bare PyTorch loop over the same packed rows",
    "bare_loop_with_trl_loss": "the same loop with TRL's loss",
    "trl_sft": "TRL's `trl sft` with the same numbers",
    "guide": "the source guide's way: truncate, pad to the full length",
}
GOALS = {"bare_loop": 0.95, "guide": 1.5}  # times as many tokens as these
CHANGES = {"max_length": 256, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "use_cpu": True, "bf16": False}
# The head has as large a share of the parameters as in the real model.
SMALL = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6, "vocab_size": 12_288}
DOCUMENTS = 2000  # log-normal in length as FineWeb-Edu's, about: a median of 600 tokens, a mean of 1,000; of max_length 1,024


def measure(rounds: int, changes: dict, sizes: dict) -> dict:
    """Tokens per second of each side, and how many times as many our recipe trains (the median of all rounds)."""
    from harness.rehearsal import tiny_model
    from harness.start import flags, server

    calls = [node for node in ast.walk(ast.parse(sides.RECIPE.read_text("utf-8"))) if isinstance(node, ast.Call)]
    call = next(node for node in calls if getattr(node.func, "id", "") == "parse")
    fields = [word for word in call.keywords if word.arg in flags.known(sides.RECIPE)]
    own = {word.arg: ast.literal_eval(word.value) for word in fields}
    numbers = own | changes | {"eval_strategy": "no"}
    rows = numbers.pop("global_batch_size")  # TRL does not know it
    numbers.setdefault("gradient_accumulation_steps", rows // numbers["per_device_train_batch_size"])
    with tempfile.TemporaryDirectory() as scratch:
        model, data = Path(scratch, "model"), Path(scratch, "data")
        material.make_model(numbers["model_name_or_path"], model, **sizes)
        tokenizer, scale = tiny_model.make_tokenizer(tiny_model.family_of("Qwen/Qwen2-0.5B")), numbers["max_length"] / 1024
        material.make_documents(data, tokenizer, DOCUMENTS, 600 * scale, 1000 * scale)
        numbers |= {"model_name_or_path": str(model), "dataset_name": str(data), "output_dir": "run"}
        changed = {name: value for name, value in numbers.items() if own.get(name) != value}  # the recipe says the rest
        context, lines, processes = get_context(server.method), {}, []
        try:
            for name in NAMES:
                lines[name], end = context.Pipe()
                given = changed if name == "recipe" else numbers
                processes.append(context.Process(target=sides.begin, args=(name, end, given, Path(scratch, name))))
                processes[-1].start()
                end.close()
            for name in NAMES:
                lines[name].recv()  # its first step
            turns = [{} for _ in range(rounds)]
            for turn, name in itertools.product(turns, NAMES):
                lines[name].send(True)
                turn[name] = lines[name].recv()  # tokens and seconds
        except EOFError:
            sys.exit(f"error: {name} ended: {Path(scratch, name, 'output.txt').read_text()[-2000:]}")
        finally:
            for process in processes:
                process.kill()
                process.join()
    tokens, seconds = ({name: sum(turn[name][i] for turn in turns) for name in NAMES} for i in (0, 1))
    rates = [{name: turn[name][0] / turn[name][1] for name in NAMES} for turn in turns]
    whole = rounds * numbers["per_device_train_batch_size"] * numbers["gradient_accumulation_steps"] * numbers["max_length"]
    return {
        "tokens_per_second": {name: round(tokens[name] / seconds[name], 1) for name in NAMES},
        "share_that_trains": {name: round(tokens[name] / whole, 3) for name in NAMES},
        "recipe_over": {name: round(statistics.median(rate["recipe"] / rate[name] for rate in rates), 3) for name in NAMES},
        **{"rounds": rounds, "numbers": changes, "sizes": sizes},
    }


def table(record: dict) -> list[list[str]]:
    """The rows of docs/measurements.md."""
    rows = [["", "of a batch trains", "tokens/s that train", "the recipe trains", "goal"]]
    for name, title in NAMES.items():
        speed, share, ratio = (record[key][name] for key in ("tokens_per_second", "share_that_trains", "recipe_over"))
        goal = f"{GOALS[name]:.2f} ×" if name in GOALS else ""
        rows.append([title, f"{share:.0%}", f"{speed:,.0f}", f"{ratio:.2f} ×", goal])
    return rows


def main(rounds: int, results: Path):
    from harness.folder import write_json
    from harness.start import server

    server.prepare()  # before anything else: they are forked from a process that has imported the libraries only
    import torch
    from transformers.utils import is_flash_attn_2_available

    device = "gpu" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        record = measure(rounds, CHANGES, SMALL)
    else:
        flash = is_flash_attn_2_available(kernels_fallback_ok=True)
        record = measure(rounds, {"attn_implementation": "flash_attention_2"} if flash else {}, {})
    command = f"python benchmarks/side_by_side.py --rounds {rounds}"
    record = {"measurement": "side by side", "command": command, **material.provenance(), **record}
    results.mkdir(parents=True, exist_ok=True)
    write_json(results / f"side_by_side_{device}.json", record)
    print(*("| " + " | ".join(row) + " |" for row in table(record)), sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="optimizer steps of each side")
    parser.add_argument("--results", type=Path, default=material.RESULTS, help="where the JSON file goes")
    main(**vars(parser.parse_args()))
