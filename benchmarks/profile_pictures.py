"""Draws one step of DDP and one of FSDP side by side, from the traces of `--profile`: the pictures of docs/profiling.md.

.venv/bin/python benchmarks/profile_pictures.py             # rehearses both on two CPU processes, and draws
.venv/bin/python benchmarks/profile_pictures.py RUN/profile/rank0.json.gz picture.png      # one trace, also of a GPU
"""

import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "qwen2_fineweb_edu"
PICTURES = {"4gpu_ddp": "profile_ddp.png", "4gpu_full_shard": "profile_fsdp.png"}
FLAGS = ["--profile", "--max_steps", "20", "--gradient_accumulation_steps", "1", "--eval_strategy", "no", "--save_strategy", "no"]
# A name comes before those that are a part of it.
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast", "reduce", "gather")
COPIES = {"HtoD": "host to GPU", "DtoH": "GPU to host"}
CATEGORIES = ("compute", *COLLECTIVES, "other collectives", *COPIES.values())
# CPU operators that compute nothing: calls of collectives, and autograd's wrappers around what a hook does.
NOT_COMPUTE = re.compile(r"_?c10d|autograd::|torch::autograd")

Interval = tuple[float, float]  # start and duration in ms


def read_step(trace: Path) -> tuple[dict[str, list[Interval]], float]:
    """Category to intervals of the recorded step, which begins at 0, and its duration.

    If kernels ran on a GPU, they and the copies; otherwise gloo's transfers and the CPU operators that call no collective.
    """
    with gzip.open(trace) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    step = next(event for event in events if event["name"].startswith("ProfilerStep#"))
    has_kernels = any(event.get("cat") == "kernel" for event in events)
    calls = [event for event in events if event.get("cat") == "cpu_op" and event["name"].startswith(("c10d", "_c10d"))]
    found, called = defaultdict(list), []
    for event in sorted(events, key=lambda event: event["ts"]):
        name, kind, end = event["name"], event.get("cat"), event["ts"] + event["dur"]
        category = None
        if has_kernels and kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            copy = next((COPIES[word] for word in COPIES if word in name), None)
            category = collective(name) if "nccl" in name.lower() else copy or "compute"
        elif has_kernels or kind not in ("cpu_op", "user_annotation"):
            continue
        elif name.startswith("gloo:"):
            # gloo runs collectives in the order of their calls, and implements reduce-scatter by all-reduce.
            own = collective(name)
            category = next((c for c in called if c == own or (c, own) == ("reduce-scatter", "all-reduce")), None)
            if category:
                called.remove(category)
            category = category or own
        elif name.startswith("c10d::"):
            called.append(collective(name))
        elif "::" in name and kind == "cpu_op" and not NOT_COMPUTE.match(name):
            waits = any(event["ts"] < call["ts"] < end for call in calls)
            category = None if waits else "compute"
        if category:
            found[category].append(((event["ts"] - step["ts"]) / 1e3, event["dur"] / 1e3))
    return found, step["dur"] / 1e3


def collective(name: str) -> str:
    """`ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(…)` and `c10d::_reduce_scatter_base_` are both a reduce-scatter."""
    letters = re.sub("[^a-z]", "", name.lower().split("(")[0])
    return next((kind for kind in COLLECTIVES if kind.replace("-", "") in letters), "other collectives")


def draw(trace: Path, title: str, picture: Path) -> None:
    from matplotlib.figure import Figure

    found, duration = read_step(trace)
    rows = [category for category in CATEGORIES if category in found]
    figure = Figure(figsize=(10, 0.9 + 0.35 * len(rows)), layout="tight")
    axes = figure.subplots()
    for row, category in enumerate(rows):
        axes.broken_barh(found[category], (row - 0.4, 0.8), color=f"C{CATEGORIES.index(category)}")
    axes.set(xlabel="ms", xlim=(0, duration), title=title)
    axes.set(yticks=range(len(rows)), yticklabels=rows, ylim=(len(rows) - 0.5, -0.5))
    figure.savefig(picture, dpi=120)


def rehearse_and_draw(folder: Path) -> None:
    """Writes both pictures to a folder."""
    with tempfile.TemporaryDirectory() as scratch:
        for config, picture in PICTURES.items():
            command = [ROOT / "launch.sh", "--tiny", RECIPE, config, *FLAGS, "--output_dir", f"{scratch}/{config}"]
            subprocess.run(command, check=True, cwd=scratch, env=os.environ | {"NPROC_PER_NODE": "2"})
            title = f"{RECIPE} × {config}, one step of process 0, on the CPU"
            draw(Path(scratch, config, "profile/rank0.json.gz"), title, folder / picture)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        draw(Path(sys.argv[1]), sys.argv[1], Path(sys.argv[2]))
    else:
        rehearse_and_draw(ROOT / "docs")
