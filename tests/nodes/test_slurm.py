"""A real SLURM: submitted, requeued, refused and started by srun, on network namespaces of this machine."""

import json
import re
import subprocess

import pytest
from cluster import Slurm, missing
from conftest import ROOT, losses, read, wait_until


@pytest.fixture
def slurm_cluster(machinery):
    if not isinstance(machinery, Slurm):
        pytest.skip(missing("slurmctld", "slurmd", "munged", "sbatch"))
    return machinery


def submit(cluster, environment, workplace, *arguments, options=(), nodes=2) -> str:
    """Submits launch.sh as a person does; returns the job's number."""
    command = ["sbatch", "--parsable", "--nodes", nodes, *options, ROOT / "launch.sh", *arguments]
    return cluster.run(*command, cwd=workplace, env=environment).strip()


def state(cluster, job) -> str:
    return re.search(r"JobState=(\w+)", cluster.run("scontrol", "show", "job", job)).group(1)


HYBRID = ["--logging_steps", "1", "--max_steps", "16", "--eval_strategy", "no", "--bf16", "false", "--dtype", "float32"]


@pytest.fixture(scope="session")
def undisturbed(machinery, environment, workplace, two_by_two):
    """A hybrid run on two nodes of two processes, through sbatch."""
    if not isinstance(machinery, Slurm):
        pytest.skip(missing("slurmctld", "slurmd", "munged", "sbatch"))
    run = workplace / "runs/undisturbed"
    job = submit(machinery, environment, workplace, "--tiny", "llama31_8b_lora", two_by_two, "--output_dir", run, *HYBRID)
    log = workplace / f"slurm-{job}.out"
    wait_until(lambda: state(machinery, job) in ("COMPLETED", "FAILED"), 240, lambda: log.read_text())
    assert state(machinery, job) == "COMPLETED", log.read_text()
    return run, log.read_text()


def test_sbatch(undisturbed):
    run, log = undisturbed
    results = read(run)
    assert (results["num_nodes"], results["world_size"], results["fsdp_enabled"]) == (2, 4, True)
    reports = [json.loads(line) for line in log.splitlines() if line.startswith('{"node"')]
    assert [(report["node"], report["fsdp_enabled"]) for report in reports] == [(0, True), (1, True)]
    assert len(losses(run)) == 16 and log.count("  loss ") == 16  # one node speaks


def test_requeued_twice_logs_the_same_losses(slurm_cluster, undisturbed, environment, workplace, two_by_two):
    """Once by `scontrol requeue`, once by the signal that SLURM sends before the time limit."""
    run = workplace / "runs/requeued"
    job = submit(slurm_cluster, environment, workplace, "--tiny", "llama31_8b_lora", two_by_two, "--output_dir", run, *HYBRID)
    log = workplace / f"slurm-{job}.out"
    for steps, disturb in ((2, ["scontrol", "requeue"]), (8, ["scancel", "--signal=USR1"])):
        wait_until(lambda n=steps: log.exists() and log.read_text().count("  loss ") >= n, 120, log.read_text)
        slurm_cluster.run(*disturb, job)
        wait_until(lambda: state(slurm_cluster, job) == "PENDING", 60, log.read_text)
        # SLURM would wait two minutes; a node needs a few seconds to forget the job's former life.
        slurm_cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+5seconds")
    wait_until(lambda: state(slurm_cluster, job) in ("COMPLETED", "FAILED"), 120, log.read_text)
    text = log.read_text()
    assert state(slurm_cluster, job) == "COMPLETED", slurm_cluster.run("scontrol", "show", "job", job) + text
    assert "Stopped by SIGTERM at step" in text and "Stopped by SIGUSR1 at step" in text and "goes back to the queue" in text
    assert text.count("Continuing from") == 2
    assert losses(run) == losses(undisturbed[0])  # bit for bit
    assert read(run)["tokens"] == read(undisturbed[0])["tokens"]


@pytest.mark.parametrize(
    ("options", "count", "words"),
    [
        ([], 3, ["shards over 2 GPUs of each of 2 nodes", "3 nodes with 2 GPUs each"]),
        (["--ntasks-per-node=2"], 2, ["tasks a node", "--ntasks-per-node=1"]),
    ],
)
def test_an_allocation_that_does_not_fit(slurm_cluster, environment, workplace, two_by_two, options, count, words):
    arguments = ["--tiny", "llama31_8b_lora", two_by_two]
    job = submit(slurm_cluster, environment, workplace, *arguments, options=options, nodes=count)
    wait_until(lambda: state(slurm_cluster, job) == "FAILED", 60, lambda: state(slurm_cluster, job))
    log = (workplace / f"slurm-{job}.out").read_text()
    assert log.startswith("error: ") and log.count("\n") == 1, log
    for word in words:
        assert word in log


def test_srun_in_an_allocation(slurm_cluster, environment, tmp_path):
    """`srun ./launch.sh` inside `salloc`: SLURM has started it on each node; a misspelt flag is answered there."""
    command = ["salloc", "--nodes=2", "srun", "--ntasks-per-node=1", ROOT / "launch.sh", "--tiny", "qwen2_chat", "1x3090"]
    variables = environment | slurm_cluster.variables
    process = subprocess.run(list(map(str, command)), cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60)
    assert process.returncode == 2 and process.stderr.count("1x3090.yaml trains on one GPU of one machine") == 2, process.stderr
