"""Checks what `./launch.sh --plan RECIPE --for MACHINE` chooses, against every other combination of its grid.

    .venv/bin/python benchmarks/choices.py            # asks the Hub, or HF_ENDPOINT, for config.json of the recipes' models
    .venv/bin/python benchmarks/choices.py 2          # the third pair only

For ten pairs of machine and recipe it simulates all configs × micro-batches × activation checkpointing, and prints a table: the
choice, and the fastest other combination that fits. Needs no GPU.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "recipes"))
PAIRS = (
    ("qwen2_fineweb_edu", "1x3090,64GB"),
    ("qwen2_fineweb_edu", "2x4090,128GB"),
    ("qwen2_fineweb_edu", "1xT4,16GB"),
    ("qwen2_fineweb_edu", "4xT4,64GB"),
    ("qwen2_chat", "1x4090,64GB"),
    ("qwen2_chat", "4xA100,nvlink,500GB"),
    ("llama31_8b_lora", "1xL40S,128GB"),
    ("llama31_8b_lora", "4xA100,nvlink,500GB"),
    ("gpt2_xl_wikitext", "4xT4,128GB"),
    ("llama31_70b_qlora", "2x3090,160GB"),
)


def main(numbers: list[int]) -> None:
    from planner import command

    method = command.start_server()
    from planner import choose, machines
    from planner.grid import Grid, make_grid
    from planner.values import values_of_recipe

    paths = [str(path) for path in sorted((ROOT / "accelerate_configs").glob("*.yaml"))]
    print("| recipe | machine | chosen | s per step | tried | fit | the fastest other | |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name, text in (PAIRS[number] for number in numbers):
        recipe, machine = str(ROOT / f"recipes/{name}.py"), machines.read_machine(text)
        grid = make_grid(values_of_recipe(recipe, []), machine, paths, [])

        tried = []

        def simulate(options: list, recipe: str = recipe, grid: Grid = grid, tried: list = tried) -> list:
            tried.extend(options)
            return command.simulate_options(method, recipe, grid, grid.common_flags, options)

        best = choose.choose(machine, grid, simulate)[0]
        count = len(tried)
        every = [option for options in grid.settings.values() for option in options]
        fitting = {one.option: one.seconds for one in choose.possible(machine, every, simulate(every))}
        number = f"{count} of {len(every)} | {len(fitting)}"
        del fitting[best.option]
        other = min(fitting, key=fitting.get)
        share = percent(fitting[other] / best.seconds - 1)
        print(f"| `{name}` | {text} | {words_of(best.option)} | {best.seconds:.2f} | {number} | {words_of(other)} | {share} |")


def words_of(option: "Option") -> str:  # noqa: F821
    checkpointing = "" if option.checkpointing is None else f", checkpointing {'on' if option.checkpointing else 'off'}"
    return f"`{Path(option.config).stem}`, micro-batch {option.micro_batch}{checkpointing}"


def percent(share: float) -> str:
    words = "slower" if share >= 0 else "faster"
    return f"{abs(share):.1%} {words}".replace("%", " %")


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main([int(word) for word in sys.argv[1:]] or list(range(len(PAIRS))))
    sys.stdout.flush()
    os._exit(0)  # Python would need a second to take down all that was imported
