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
