"""`--profile`: a trace of one step by each process, and the pictures that benchmarks/profile_pictures.py draws of it."""

import gzip
import json
import runpy

from conftest import ROOT

RECIPE = "qwen2_fineweb_edu"
FLAGS = ["--profile", "--max_steps", "5", "--eval_strategy", "no", "--save_strategy", "no"]


def events_of(trace):
    with gzip.open(trace) as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def test_profile_of_sharded_run(rehearse, tmp_path):
    folder = rehearse(RECIPE, "4gpu_full_shard", *FLAGS, NPROC_PER_NODE="2") / "profile"
    for rank in (0, 1):
        names = [event["name"] for event in events_of(folder / f"rank{rank}.json.gz")]
        assert sum(name.startswith("ProfilerStep#") for name in names) == 1
        assert sum(name.startswith("FSDP::all_gather") for name in names) > 2  # each layer, and the embeddings
    assert "aten::mm" in (folder / "table.txt").read_text()
    pictures = runpy.run_path(str(ROOT / "benchmarks/profile_pictures.py"))
    found, duration = pictures["read_step"](folder / "rank0.json.gz")
    assert set(found) == {"compute", "all-gather", "reduce-scatter", "all-reduce"}
    assert all(0 <= start < duration for start, _ in found["all-gather"])
    pictures["draw"](folder / "rank0.json.gz", "title", tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 5000


KERNELS = {
    "ncclDevKernel_AllReduce_Sum_bf16_TREE_LL(ncclDevKernelArgsStorage<4096ul>)": "all-reduce",
    "ncclSymkDevKernel_ReduceScatter_LD_sum_bf16(ncclSymkDevWorkArgs)": "reduce-scatter",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)": "other collectives",
    "Memcpy HtoD (Pinned -> Device)": "host to GPU",
    "gemm": "compute",
}


def test_kernels_of_a_gpu(tmp_path):
    """On a GPU its kernels and copies count, and not what the host does meanwhile."""
    events = [{"ph": "X", "name": "ProfilerStep#2", "cat": "user_annotation", "ts": 1000, "dur": 8000}]
    events.append({"ph": "X", "name": "aten::mm", "cat": "cpu_op", "ts": 1000, "dur": 8000})
    for number, name in enumerate(KERNELS, start=2):
        kind = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        events.append({"ph": "X", "name": name, "cat": kind, "ts": 1000 * number, "dur": 500})
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    found, duration = runpy.run_path(str(ROOT / "benchmarks/profile_pictures.py"))["read_step"](tmp_path / "trace.json.gz")
    assert duration == 8 and {kind: times for kind, times in found.items() if times} == {
        kind: [(number, 0.5)] for number, kind in enumerate(KERNELS.values(), start=1)
    }
