"""The losses of one rehearsal of every recipe, which a change should not change without a reason.

    python tests/golden.py            makes golden.json again, with which tests/recipes/test_smoke.py compares its rehearsals
    python tests/golden.py COMMIT     rehearses with a commit and with the working tree, whose losses must be equal bit for bit

Both take some minutes: each recipe is started by launch.sh, as a user does it.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from runs import SHORT, fewer_processes, history, read, write_hybrid_2x2

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests/golden.json"
HYBRID = "2x4gpu_hybrid_shard"  # eight processes; rehearsed as two replicas of two shards
# A pair for each recipe, and for each kind of training; the tests rehearse these by day, and all others at night.
PAIRS = (
    ("qwen2_fineweb_edu", "1x3090_offload"),
    ("qwen2_chat", "4gpu_shard_grad_op"),
    ("smollm2_chat", "cpu"),
    ("qwen3_8b_qlora", "1x3090"),
    ("qwen3_dpo", "4gpu_full_shard"),
    ("qwen3_distill", "1x3090"),
    ("qwen3_grpo", "4gpu_ddp"),
    ("qwen35_4b_lora", "1x3090"),
    ("qwen35_4b_images", "4gpu_ddp"),
    ("llama31_8b_lora", HYBRID),
    ("qwen3_30b_a3b_lora", "4gpu_full_shard"),
    ("llama31_70b_qlora", "2x3090_qlora"),
    ("gpt2_xl_wikitext", "3xt4_full_shard"),
)
# Of recipes that train on answers which the model samples: after a token that differs, an answer is another one.
SAMPLED = {"qwen3_distill": 0.05, "qwen3_grpo": 0.05}


def numbers_of(run: Path) -> dict:
    """The loss of a run's last evaluation; of its first four steps the loss, the norm of the gradient and the entropy.

    GRPO has the entropy also where no answer gets a reward. transformers' own Trainer does not log it.
    """
    steps = [[entry[key] for key in ("loss", "grad_norm", "entropy") if key in entry] for entry in history(run)[:4]]
    return {"steps": steps, "eval_loss": read(run)["eval_loss"]}


def check(run: Path, name: str) -> None:
    """The numbers of a rehearsal are those of the file, as far as processors round alike."""
    import pytest

    tolerance = SAMPLED.get(name.split("-")[0], 1e-3)
    expected, found = json.loads(FILE.read_text())[name], numbers_of(run)
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=tolerance, abs=1e-6), name
    for step, numbers in enumerate(expected["steps"]):
        assert found["steps"][step] == pytest.approx(numbers, rel=tolerance, abs=1e-6), f"{name}, step {step + 1}"


def rehearse(tree: Path, folder: Path) -> dict:
    """Rehearses all of PAIRS with the launch.sh of a working tree. Returns the numbers of each, by its name."""
    found = {}
    for recipe, config in PAIRS:
        run = folder / recipe
        written = write_hybrid_2x2(folder) if config == HYBRID else config
        variables = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **fewer_processes(written)}
        command = [tree / "launch.sh", "--tiny", recipe, written, "--output_dir", run, *SHORT]
        process = subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True, text=True)
        if process.returncode:
            sys.exit(f"{recipe}-{config}: {process.stdout}{process.stderr}")
        found[f"{recipe}-{config}"] = numbers_of(run)
        print(f"{recipe}-{config}", found[f"{recipe}-{config}"], file=sys.stderr)
    return found


def main(commit: str = "") -> int:
    """Returns 1 if the losses of the commit are others."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ours").mkdir()
        ours = rehearse(ROOT, Path(folder) / "ours")
        if not commit:
            lines = [f" {json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in ours.items()]
            FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
            return 0
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            (Path(folder) / "theirs").mkdir()
            theirs = rehearse(tree, Path(folder) / "theirs")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    different = [name for name in ours if ours[name] != theirs[name]]
    for name in different:
        print(f"{name}: {theirs[name]} at {commit}, {ours[name]} here")
    print(f"{len(ours) - len(different)} of {len(ours)} recipes have the losses of {commit}")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
