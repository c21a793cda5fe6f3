"""What `./launch.sh RECIPE` would choose for five kinds of GPU, for every recipe: forecasts of `--plan RECIPE --for MACHINE`.

    .venv/bin/python benchmarks/choice_per_card.py                 # all recipes: an hour on two busy cores
    .venv/bin/python benchmarks/choice_per_card.py qwen3_dpo       # this one only

Writes benchmarks/results/forecasts/choice_per_card.json. Needs neither GPU nor network: the models' config.json come from
tests/published. The number of steps of an epoch is not known without the datasets, so STEPS has one that is near it.
"""

import json
import os
import subprocess
import sys
from typing import Any

import inputs

CARDS = ("3090", "4090", "L40S", "A100 80GB", "H100")
GPUS = {"llama31_70b_qlora": 2, "qwen3_30b_a3b_lora": 4}  # of one machine; other recipes: 1
STEPS = {
    "qwen2_chat": 1_000,
    "llama31_8b_lora": 110,
    "qwen3_30b_a3b_lora": 500,
    "qwen3_8b_qlora": 150,
    "qwen35_4b_lora": 125,
    "qwen3_dpo": 625,
    "gpt2_xl_wikitext": 40,
}
FILE = inputs.RESULTS / "forecasts/choice_per_card.json"
KEYS = ("machine", "gpu", "config", "peak_gpu_gb", "on_machine", "flags", "choices", "compiling", "proposals")


def plan(recipe: str, machine: str, environment: dict[str, str]) -> dict[str, Any]:
    """What is chosen for a machine, with its command."""
    words = ["--plan", recipe, "--for", machine, "--json"]
    words += ["--max_steps", str(STEPS[recipe])] if recipe in STEPS else []
    process = subprocess.run([inputs.ROOT / "launch.sh", *words], env=environment, capture_output=True, text=True)
    found = {"command": " ".join(["./launch.sh", *words]), "exit_code": process.returncode}
    if process.returncode:
        return found | {"error": process.stderr[-500:]}
    chosen = json.loads(process.stdout)
    return found | {key: chosen.get(key) for key in KEYS}


def main(recipes: list[str]) -> None:
    from local_hub import serve

    record = json.loads(FILE.read_text("utf-8")) if FILE.is_file() else {}
    record |= inputs.provenance() | {"what": "forecasts of ./launch.sh --plan RECIPE --for MACHINE, without a GPU"}
    with serve(inputs.ROOT / "tests/published") as hub:
        environment = os.environ | {"HF_ENDPOINT": hub.url, "PYTHON": sys.executable}
        for recipe in recipes:
            gpus = GPUS.get(recipe, 1)
            machines = [f"{gpus}x{card},{64 * gpus if gpus > 1 else 128}GB" for card in CARDS]
            found = [plan(recipe, machine, environment) for machine in machines]
            record.setdefault("choices", {})[recipe] = found
            FILE.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:] or sorted(path.stem for path in (inputs.ROOT / "recipes").glob("*.py")))
