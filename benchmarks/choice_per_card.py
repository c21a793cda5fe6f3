"""What `./launch.sh RECIPE` would choose for five kinds of GPU, for every recipe: forecasts of `--plan RECIPE --for MACHINES`.

    .venv/bin/python benchmarks/choice_per_card.py                 # all recipes: an hour on two busy cores
    .venv/bin/python benchmarks/choice_per_card.py qwen3_dpo       # this one only

Writes benchmarks/results/forecasts/choice_per_card.json. Needs neither GPU nor network: the models' config.json come from
tests/published. The number of steps of an epoch is not known without the datasets, so STEPS has one that is near it.
"""

import json
import os
import subprocess
import sys

import inputs

NODE = "{n}x3090,{h}GB; {n}x4090,{h}GB; {n}xL40S,{h}GB; {n}xA100 80GB,{h}GB; {n}xH100,{h}GB"
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
KEYS = ("machine", "gpu", "config", "peak_gpu_gb", "reserved_gb", "on_machine", "flags", "choices", "compiling", "proposals")


def main(recipes: list[str]) -> None:
    from local_hub import serve

    record = json.loads(FILE.read_text("utf-8")) if FILE.is_file() else {}
    record |= inputs.provenance() | {"what": "forecasts of ./launch.sh --plan RECIPE --for MACHINES, without a GPU"}
    with serve(inputs.ROOT / "tests/published") as hub:
        environment = os.environ | {"HF_ENDPOINT": hub.url, "PYTHON": sys.executable}
        for recipe in recipes:
            gpus = GPUS.get(recipe, 1)
            words = ["--plan", recipe, "--for", NODE.format(n=gpus, h=64 * gpus if gpus > 1 else 128), "--json"]
            words += ["--max_steps", str(STEPS[recipe])] if recipe in STEPS else []
            process = subprocess.run([inputs.ROOT / "launch.sh", *words], env=environment, capture_output=True, text=True)
            found = {"command": " ".join(["./launch.sh", *words]), "exit_code": process.returncode}
            if process.returncode:
                found["error"] = process.stderr[-500:]
            else:
                found["plans"] = [{key: plan.get(key) for key in KEYS} for plan in json.loads(process.stdout)]
            record.setdefault("choices", {})[recipe] = found
            FILE.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:] or sorted(path.stem for path in (inputs.ROOT / "recipes").glob("*.py")))
