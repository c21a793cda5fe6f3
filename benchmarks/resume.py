"""How long a run takes from the command to its first step, going on in a stream at step 20 and at step 2,000.

    .venv/bin/python benchmarks/resume.py            # about six minutes on two cores

One rehearsal of 2,000 steps keeps both checkpoints. Then the same command goes on from a copy of one and of the other in
turn; the clock stops when the first loss after the checkpoint is printed. For comparison, each goes on once more with
--dataloader_num_workers 1, where transformers reads the stream again from its beginning.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS, LATER, REPEATS = (20, 2000), 2001, 3


def command(run: Path, steps: int, *flags) -> list:
    recipe = ["--tiny", "qwen2_fineweb_edu", "1x3090", "--output_dir", run, "--max_steps", steps, "--save_steps", STEPS[0]]
    small = ["--max_length", 64, "--gradient_accumulation_steps", 1, "--eval_strategy", "no", "--save_total_limit", STEPS[1]]
    return [str(word) for word in [ROOT / "launch.sh", *recipe, *small, *flags]]


def until_first_step(checkpoint: Path, *flags) -> float:
    """Seconds from the command, which goes on from a copy of `checkpoint`, to its first logged loss."""
    run = checkpoint.parent.with_name("again")
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(checkpoint, run / checkpoint.name)
    shutil.copy(checkpoint.parent / "run.json", run)
    began = time.monotonic()
    words = command(run, LATER, "--logging_steps", 1, *flags)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        said = []
        for line in process.stdout:
            said.append(line)
            if "loss" in line and "Continuing from" in "".join(said):
                seconds = time.monotonic() - began
                process.terminate()  # which leaves nothing behind that still writes
                process.communicate()
                return seconds
    raise RuntimeError("".join(said))


def main():
    os.environ.setdefault("PYTHON", sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        began = time.monotonic()
        subprocess.run(command(run, STEPS[1], "--logging_steps", 100), check=True, stdout=subprocess.DEVNULL)
        print(f"{STEPS[1]} steps: {time.monotonic() - began:.0f} s", flush=True)
        seconds = {step: [] for step in STEPS}
        for step in STEPS * REPEATS:
            seconds[step].append(until_first_step(run / f"checkpoint-{step}"))
        for step, measured in seconds.items():
            again = until_first_step(run / f"checkpoint-{step}", "--dataloader_num_workers", 1)
            each = ", ".join(f"{one:.1f}" for one in measured)
            print(f"step {step}: {statistics.median(measured):.1f} s ({each}); the stream read again: {again:.1f} s", flush=True)
        print(f"ratio {statistics.median(seconds[STEPS[1]]) / statistics.median(seconds[STEPS[0]]):.2f}")


if __name__ == "__main__":
    main()
