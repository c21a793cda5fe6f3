"""Finished runs side by side."""

import json

from harness.commands import report

import pytest
from conftest import read

RECIPE = "qwen2_fineweb_edu"


def test_runs_of_one_two_and_four_processes(rehearse, launch, tmp_path):
    """The table's numbers are those of the runs; the picture is drawn."""
    runs = [
        rehearse(RECIPE, "4gpu_full_shard"),
        rehearse(RECIPE, "1x3090"),
        rehearse(RECIPE, "4gpu_full_shard", "--max_steps", "5", "--eval_strategy", "no", NPROC_PER_NODE="2"),
    ]
    process = launch("--report", *runs, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in process.stdout.splitlines() if line[:1] == "|"]
    rows = [dict(zip(table[0], row, strict=True)) for row in table[2:]]
    assert [row["processes"] for row in rows] == ["1", "2", "4"]
    one, rates = read(runs[1]), {str(read(run)["world_size"]): read(run)["tokens_per_second"] for run in runs}
    for row in rows:
        faster = rates[row["processes"]] / one["tokens_per_second"]
        assert row["nodes"] == "1" and row["speed-up"] == f"{faster:.2f}"
        assert row["efficiency"] == f"{faster / int(row['processes']):.0%}"
        assert row["tokens/s"] == f"{rates[row['processes']]:,.0f}"
    assert rows[0]["time (s)"] == f"{one['train_runtime']:.0f}" and rows[0]["loss"] == f"{one['final_loss']:.4f}"
    assert all(row["GPU %"] == "" for row in rows)  # a CPU
    assert (tmp_path / "report.png").stat().st_size > 10_000 and not process.stderr


def test_runs_that_do_not_compare(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    numbers = {"num_nodes": 1, "train_runtime": 9.0, "tokens_per_second": 5.0, "peak_gpu_gb": 1.0, "peak_host_gb": 1.0}
    for name, processes in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        results = numbers | {"world_size": processes, "final_loss": 1.0, "recipe": name, "gpu_utilization": [97.0] * processes}
        results["gpu_memory_gb"] = [14.21] * processes
        (tmp_path / name / "train_results.json").write_text(json.dumps(results))
    report.main("a", "b")
    said = capsys.readouterr()
    assert "differ in recipe" in said.err and "| 97 97 | 14.2 14.2" in said.out


@pytest.mark.parametrize(("arguments", "words"), [(["nowhere"], ["nowhere", "train_results.json"]), ([], ["RUN"])])
def test_what_is_no_run(launch, tmp_path, arguments, words):
    process = launch("--report", *arguments, cwd=tmp_path)
    assert process.returncode == 2 and process.stderr.count("\n") == 1 and not process.stdout
    for word in words:
        assert word in process.stderr
