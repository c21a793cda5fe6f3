"""How fast the host of this machine starts kernels on its GPU. `python -m planner.launches` measures it and prints seconds."""

import subprocess
import sys
import time

import torch

LAYERS = 50
ROUNDS = 20
KERNELS = 6  # of a linear layer, forward and backward under autocast (counted with torch.profiler on an H100)


def measured_launch(environment: dict[str, str]) -> float | None:
    """Seconds in which this machine starts a kernel; None if its GPU cannot be asked.

    `environment`: in which the GPUs are visible. They are hidden from this process.
    """
    words = [sys.executable, "-m", "planner.launches"]
    process = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    try:
        return float(process.stdout)
    except ValueError:
        return None


def seconds_per_launch(device: str) -> float:
    """Seconds per kernel of layers so small that the GPU waits for the host."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(LAYERS))).to(device)
    rows = torch.ones(64, 64, device=device)
    wait = torch.cuda.synchronize if device == "cuda" else torch.cpu.synchronize
    seconds = []
    for _ in range(4):  # the first warms up
        wait()
        began = time.perf_counter()
        for _ in range(ROUNDS):
            with torch.autocast(device, torch.float16):
                loss = layers(rows).sum()
            loss.backward()
        wait()
        seconds.append(time.perf_counter() - began)
    return min(seconds) / ROUNDS / LAYERS / KERNELS


if __name__ == "__main__" and torch.cuda.is_available():
    print(seconds_per_launch("cuda"))
