"""Measures how long a run takes from the command to its first step, when it resumes a stream at step 20 and at step 2,000.

    .venv/bin/python benchmarks/resume.py            # about six minutes on two cores

One rehearsal of 2,000 steps keeps both checkpoints. Then the same command resumes from a copy of each of them in turn, and the
clock stops at the first loss that it prints.
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
STEPS, MAX_STEPS, REPEATS = (20, 2000), 2001, 3


def command(output_dir: Path, steps: int, *flags: str | int) -> list[str]:
    recipe = ["--tiny", "qwen2_fineweb_edu", "1x3090", "--output_dir", output_dir, "--max_steps", steps, "--save_steps", STEPS[0]]
    small = ["--max_length", 64, "--gradient_accumulation_steps", 1, "--eval_strategy", "no", "--save_total_limit", STEPS[1]]
    return [str(word) for word in [ROOT / "launch.sh", *recipe, *small, *flags]]


def seconds_to_first_step(checkpoint: Path, *flags: str | int) -> float:
    """Seconds from the command, which resumes from a copy of `checkpoint`, to its first logged loss."""
    output_dir = checkpoint.parent.with_name("resumed")
    shutil.rmtree(output_dir, ignore_errors=True)
    shutil.copytree(checkpoint, output_dir / checkpoint.name)
    shutil.copy(checkpoint.parent / "run.json", output_dir)
    began, output = time.monotonic(), ""
    words = command(output_dir, MAX_STEPS, "--logging_steps", 1, *flags)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            output += line
            if "loss" in line and "Resuming from" in output:
                seconds = time.monotonic() - began
                process.terminate()
                process.communicate()  # until it has exited and writes no more
                return seconds
    raise RuntimeError(output)


def main() -> None:
    os.environ.setdefault("PYTHON", sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        began = time.monotonic()
        subprocess.run(command(run, STEPS[1], "--logging_steps", 100), check=True, stdout=subprocess.DEVNULL)
        print(f"{STEPS[1]} steps: {time.monotonic() - began:.0f} s", flush=True)
        measured = {step: [] for step in STEPS}
        for step in STEPS * REPEATS:
            measured[step].append(seconds_to_first_step(run / f"checkpoint-{step}"))
        medians = {step: statistics.median(seconds) for step, seconds in measured.items()}
        for step, seconds in measured.items():
            each = ", ".join(f"{number:.1f}" for number in seconds)
            print(f"step {step}: {medians[step]:.1f} s ({each})", flush=True)
        print(f"ratio {medians[STEPS[1]] / medians[STEPS[0]]:.2f}")


if __name__ == "__main__":
    main()
