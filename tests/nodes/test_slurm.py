"""Jobs of a real SLURM in network namespaces of this machine: submitted, requeued, refused, started by srun."""

import re

import pytest
from cluster import Slurm, missing
from conftest import ROOT, slow
from runs import losses, read, wait_until

pytestmark = slow


@pytest.fixture
def slurm_cluster(machines):
    if not isinstance(machines, Slurm):
        pytest.skip(missing("slurmctld", "slurmd", "munged", "sbatch"))
    return machines


def submit(cluster, environment, workdir, *arguments, options=(), nodes=2) -> str:
    """Submits launch.sh; returns the number of the job."""
    command = ["sbatch", "--parsable", "--nodes", nodes, *options, ROOT / "launch.sh", *arguments]
    return cluster.run(*command, cwd=workdir, env=environment).strip()


def state(cluster, job) -> str:
    return re.search(r"JobState=(\w+)", cluster.run("scontrol", "show", "job", job)).group(1)


HYBRID = ["--logging_steps", "1", "--max_steps", "16", "--eval_strategy", "no", "--bf16", "false", "--dtype", "float32"]


@pytest.fixture(scope="session")
def uninterrupted(machines, environment, workdir, hybrid_2x2):
    """A hybrid run on two nodes with two processes each, started by sbatch: its folder and its log."""
    if not isinstance(machines, Slurm):
        pytest.skip(missing("slurmctld", "slurmd", "munged", "sbatch"))
    run = workdir / "runs/uninterrupted"
    job = submit(machines, environment, workdir, "--tiny", "llama31_8b_lora", hybrid_2x2, "--output_dir", run, *HYBRID)
    log = workdir / f"slurm-{job}.out"
    wait_until(lambda: state(machines, job) in ("COMPLETED", "FAILED"), 240, lambda: log.read_text())
    assert state(machines, job) == "COMPLETED", log.read_text()
    return run, log.read_text()


def test_sbatch(uninterrupted):
    run, log = uninterrupted
    results = read(run)
    assert (results["num_nodes"], results["world_size"], results["fsdp_enabled"]) == (2, 4, True)
    assert len(losses(run)) == 16 and log.count("  loss ") == 16  # one node prints them


def test_requeued_twice_logs_the_same_losses(slurm_cluster, uninterrupted, environment, workdir, hybrid_2x2):
    """Requeued by `scontrol requeue`, and by the signal that SLURM sends before the time limit."""
    run = workdir / "runs/requeued"
    job = submit(slurm_cluster, environment, workdir, "--tiny", "llama31_8b_lora", hybrid_2x2, "--output_dir", run, *HYBRID)
    log = workdir / f"slurm-{job}.out"
    for steps, interrupt in ((2, ["scontrol", "requeue"]), (8, ["scancel", "--signal=USR1"])):
        wait_until(lambda n=steps: log.exists() and log.read_text().count("  loss ") >= n, 120, log.read_text)
        slurm_cluster.run(*interrupt, job)
        wait_until(lambda: state(slurm_cluster, job) == "PENDING", 60, log.read_text)
        # SLURM would wait two minutes; a node needs a few seconds to clean up the job's first start.
        slurm_cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+5seconds")
    wait_until(lambda: state(slurm_cluster, job) in ("COMPLETED", "FAILED"), 120, log.read_text)
    text = log.read_text()
    assert state(slurm_cluster, job) == "COMPLETED", slurm_cluster.run("scontrol", "show", "job", job) + text
    assert "Stopped by SIGTERM at step" in text and "Stopped by SIGUSR1 at step" in text and "goes back to the queue" in text
    assert text.count("Resuming from") == 2
    assert losses(run) == losses(uninterrupted[0])  # bit for bit
    assert read(run)["tokens"] == read(uninterrupted[0])["tokens"]


def test_allocation_must_fit_the_config(slurm_cluster, environment, workdir, hybrid_2x2):
    arguments = ["--tiny", "llama31_8b_lora", hybrid_2x2]
    job = submit(slurm_cluster, environment, workdir, *arguments, options=["--ntasks-per-node=2"])
    wait_until(lambda: state(slurm_cluster, job) == "FAILED", 60, lambda: state(slurm_cluster, job))
    log = (workdir / f"slurm-{job}.out").read_text()
    assert log.startswith("error: ") and log.count("\n") == 1 and "--ntasks-per-node=1" in log, log
