"""`--report` compares finished runs: as a table, or as JSON."""

import itertools
import json

import pytest
from runs import assert_one_error, read

RECIPE = "qwen2_fineweb_edu"


@pytest.fixture(scope="module")
def runs(rehearse):
    """Runs of two processes and of one."""
    return [rehearse(RECIPE, "4gpu_ddp"), rehearse(RECIPE, "1x3090")]


def test_table(runs, launch, tmp_path):
    process = launch("--report", *runs, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    lines = itertools.takewhile(lambda line: line[:1] == "|", process.stdout.splitlines())
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = [dict(zip(table[0], row, strict=True)) for row in table[2:]]
    assert [row["processes"] for row in rows] == ["1", "2"]
    one, rates = read(runs[1]), {str(read(run)["world_size"]): read(run)["tokens_per_second"] for run in runs}
    for row in rows:
        speed_up = rates[row["processes"]] / one["tokens_per_second"]
        assert row["nodes"] == "1" and row["speed-up"] == f"{speed_up:.4g}"
        assert float(row["efficiency"]) == pytest.approx(speed_up / int(row["processes"]), rel=1e-3)
        assert float(row["tokens/s"].replace(",", "")) == pytest.approx(rates[row["processes"]], rel=1e-3)
    assert rows[0]["loss"] == f"{one['final_loss']:.4g}"
    assert [row["eval loss"] for row in rows] == [f"{read(run)['eval_loss']:.4g}" for run in reversed(runs)]
    assert not process.stderr


def test_json(runs, launch, tmp_path):
    """The results of every run, with its name, its speed-up and its efficiency."""
    process = launch("--report", *runs, "--json", cwd=tmp_path)
    assert process.returncode == 0 and not process.stderr and not list(tmp_path.iterdir()), process.stderr
    found = json.loads(process.stdout)
    assert [run["world_size"] for run in found] == [1, 2]
    for run, folder in zip(found, reversed(runs), strict=True):
        results = read(folder)
        assert run.keys() == results.keys() | {"name", "speed_up", "efficiency"}
        assert {name: run[name] for name in results} == results and run["name"] == str(folder)
        assert run["speed_up"] == pytest.approx(run["tokens_per_second"] / found[0]["tokens_per_second"])
        assert run["efficiency"] == pytest.approx(run["speed_up"] / run["world_size"])


@pytest.mark.unit
@pytest.mark.parametrize(("arguments", "word"), [(["nowhere"], "nowhere"), (["--json"], "RUN")])
def test_errors(launch, tmp_path, arguments, word):
    assert_one_error(launch("--report", *arguments, cwd=tmp_path), word)
