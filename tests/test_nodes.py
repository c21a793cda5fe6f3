"""Several machines: a real SLURM and plain variables, in network namespaces of this machine; what breaks there."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

from harness.nodes import machines

import pytest
import yaml
from cluster import Nodes, Slurm, missing
from conftest import ROOT, free_port, losses, read

RECIPE = "qwen2_fineweb_edu"


def is_one_line(process, *words):
    assert process.returncode == 2, process.stdout + process.stderr
    assert process.stderr.count("\n") == 1 and process.stderr.startswith("error: "), process.stderr
    for word in words:
        assert word in process.stderr


PLAIN = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "MASTER_ADDR": "127.0.0.1"}
SKY = {"SKYPILOT_NODE_RANK": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n10.0.0.2\n10.0.0.3", "SKYPILOT_NUM_GPUS_PER_NODE": "1"}


@pytest.fixture
def nodes_from(monkeypatch):
    """`machines.from_environment` in an environment of the given variables."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SKYPILOT_", "N", "MASTER_"))]:
        monkeypatch.delenv(name)

    def call(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return machines.from_environment()

    return call


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, machines.Nodes(head="")),
        ({"NPROC_PER_NODE": "2"}, machines.Nodes(head="", processes=2)),
        (PLAIN, machines.Nodes(2, 1, "127.0.0.1")),
        (PLAIN | {"MASTER_PORT": "1234"}, machines.Nodes(2, 1, "127.0.0.1", 1234)),
        (SKY, machines.Nodes(3, 2, "127.0.0.1", processes=1)),
        (STEP | {"SLURM_GPUS_ON_NODE": "4"}, machines.Nodes(2, 1, "127.0.0.1", 10_007, 4)),
        (STEP | {"SLURM_GPUS_ON_NODE": "4", "NPROC_PER_NODE": "2"}, machines.Nodes(2, 1, "127.0.0.1", 10_007, 2)),
    ],
)
def test_nodes_from_variables(nodes_from, variables, expected):
    assert nodes_from(variables) == expected


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"NNODES": "2"}, ["NODE_RANK", "MASTER_ADDR"]),
        ({"NNODES": "two"}, ["NNODES", "'two'", "whole number"]),
        ({"NODE_RANK": "0"}, ["NNODES and MASTER_ADDR missing"]),
        ({"NNODES": "0"}, ["NNODES", "'0'", "from 1"]),
        (PLAIN | {"NODE_RANK": "2"}, ["2 of 2", "0 to 1"]),
        (PLAIN | {"MASTER_PORT": "99999"}, ["MASTER_PORT is 99999", "65535"]),
        (PLAIN | {"MASTER_ADDR": "127.0.0.1:29400"}, ["without a port"]),
        (PLAIN | {"MASTER_ADDR": "no.such.host.invalid"}, ["no.such.host.invalid", "does not resolve", "MASTER_ADDR"]),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, ["2(x2) tasks a node", "--ntasks-per-node=1"]),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "PATH": "/nowhere"}, ["srun", "PATH"]),
        ({"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_NTASKS": "8"}, ["--ntasks-per-node=1", "tasks a node"]),
    ],
)
def test_variables_that_cannot_be(nodes_from, monkeypatch, capsys, variables, words):
    if "PATH" not in variables:
        monkeypatch.setattr(machines.shutil, "which", lambda name: name)
    with pytest.raises(SystemExit) as stopped:
        nodes_from(variables)
    message = capsys.readouterr().err
    assert stopped.value.code == 2 and message.count("\n") == 1
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("config", "variables", "words"),
    [
        ("3xt4_full_shard", {}, ["3 machines with 1 GPU each", "NNODES=3", "sbatch --nodes 3", "--tiny"]),
        ("2x4gpu_hybrid_shard", PLAIN | {"NNODES": "3"}, ["4 GPUs of each of 2 nodes", "3 nodes with 4 GPUs each"]),
        ("2x4gpu_hybrid_shard", PLAIN | {"NPROC_PER_NODE": "2"}, ["4 GPUs of each of 2 nodes", "2 nodes with 2 GPUs each"]),
        ("1x3090", PLAIN, ["one GPU of one machine", "2 nodes"]),
    ],
)
def test_machines_that_do_not_fit_the_config(launch, tmp_path, config, variables, words):
    is_one_line(launch(RECIPE, config, cwd=tmp_path, **variables), *words)
    assert not list(tmp_path.iterdir())


def test_a_node_that_never_comes(launch, tmp_path):
    """Either end says who is missing, every half minute, and ends with that line."""
    port = str(free_port())
    wait = {"NODE_WAIT": "3", "MASTER_PORT": port}
    for rank, whom in (("0", "node 1 of 2"), ("1", f"node 0: nobody answers at 127.0.0.1:{port}")):
        process = launch("--tiny", RECIPE, "4gpu_full_shard", cwd=tmp_path, **PLAIN | wait | {"NODE_RANK": rank})
        assert process.returncode == 1 and not process.stdout
        assert re.fullmatch(rf"\nerror: waited 3 of 3 s \(NODE_WAIT\) in vain for {whom}.*\n", process.stderr), process.stderr


def test_the_heads_port_is_taken(launch, tmp_path):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        process = launch("--tiny", RECIPE, "4gpu_full_shard", cwd=tmp_path, **PLAIN | {"NODE_RANK": "0", "MASTER_PORT": port})
    assert process.returncode == 1
    assert process.stderr.startswith(f"\nerror: port {port} of this machine is taken") and process.stderr.count("\n") == 2


@pytest.fixture(scope="session")
def machinery(tmp_path_factory):
    """Three machines, under SLURM where it is installed."""
    if reason := missing():
        pytest.skip(reason)
    kind = Nodes if missing("slurmctld", "slurmd", "munged", "sbatch") else Slurm
    with kind(3, tmp_path_factory.mktemp("cluster")) as made:
        yield made


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


def wait_until(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)


HYBRID = ["--logging_steps", "1", "--max_steps", "16", "--eval_strategy", "no"]


@pytest.fixture(scope="session")
def undisturbed(machinery, environment, workplace, two_by_two, rehearse):
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
    assert len(losses(run)) == 16 and log.count("{'loss'") == 16  # one node speaks


def test_requeued_twice_logs_the_same_losses(slurm_cluster, undisturbed, environment, workplace, two_by_two):
    """Once by `scontrol requeue`, once by the signal that SLURM sends before the time limit."""
    run = workplace / "runs/requeued"
    job = submit(slurm_cluster, environment, workplace, "--tiny", "llama31_8b_lora", two_by_two, "--output_dir", run, *HYBRID)
    log = workplace / f"slurm-{job}.out"
    for steps, disturb in ((2, ["scontrol", "requeue"]), (8, ["scancel", "--signal=USR1"])):
        wait_until(lambda n=steps: log.exists() and log.read_text().count("{'loss'") >= n, 120, log.read_text)
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
    command = ["salloc", "--nodes=2", "srun", "--ntasks-per-node=1", ROOT / "launch.sh", "--tiny", RECIPE, "1x3090"]
    variables = environment | slurm_cluster.variables
    process = subprocess.run(list(map(str, command)), cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60)
    assert process.returncode == 2 and process.stderr.count("1x3090.yaml trains on one GPU of one machine") == 2, process.stderr


@pytest.fixture
def on_nodes(machinery, environment, workplace, tmp_path):
    """Starts the same command on several nodes with NNODES, NODE_RANK and MASTER_ADDR; returns processes and their logs."""

    def call(count, *arguments, **variables):
        started = []
        for rank, name in enumerate(machinery.names[:count]):
            log = tmp_path / f"{len(list(tmp_path.glob('*.log')))}-{name}.log"
            plain = {"NNODES": str(count), "NODE_RANK": str(rank), "MASTER_ADDR": machinery.names[0]}
            with log.open("w") as file:
                command = [ROOT / "launch.sh", *map(str, arguments)]
                env = environment | plain | variables
                process = machinery.start(name, *command, cwd=workplace, env=env, stdout=file, stderr=file)
            started.append((process, log))
        return started

    return call


def test_three_nodes(on_nodes, workplace):
    """The third system: GPT-2 on three machines of one GPU, which report one each."""
    run = workplace / "runs/three-nodes"
    started = on_nodes(3, "--tiny", "gpt2_xl_wikitext", "3xt4_full_shard", "--output_dir", run)
    for process, log in started:
        assert process.wait(timeout=240) == 0, log.read_text()
    results = read(run)
    assert (results["num_nodes"], results["world_size"], results["fsdp_enabled"]) == (3, 3, True)
    assert [report["node"] for report in results["nodes"]] == [0, 1, 2]
    assert started[0][1].read_text().count('{"node"') == 3 and not started[1][1].read_text().count("{")


def test_a_cable_pulled_and_a_node_killed(on_nodes, machinery, workplace, tmp_path):
    """Each ends on every node within a bounded time with a line; the last checkpoint is whole; the same command goes on."""
    run, two = workplace / "runs/broken", tmp_path / "2 nodes.yaml"
    settings = yaml.safe_load((ROOT / "accelerate_configs/3xt4_full_shard.yaml").read_text())
    two.write_text(yaml.safe_dump(settings | {"num_machines": 2, "num_processes": 2}))
    command = ["--tiny", "gpt2_xl_wikitext", two, "--output_dir", run, "--eval_strategy", "no", "--max_steps", "400"]
    command += ["--save_steps", "3", "--logging_steps", "1"]

    def train_until(step):
        started = on_nodes(2, *command, NODE_SILENCE="8")

        def reached():
            assert all(process.poll() is None for process, _ in started), "".join(log.read_text() for _, log in started)
            return any(int(path.parent.name.split("-")[1]) >= step for path in run.glob("checkpoint-*/complete.json"))

        wait_until(reached, 120, lambda: started[0][1].read_text())
        return started

    def ended(started, *phrases):
        for (process, log), phrase in zip(started, phrases, strict=False):
            assert process.wait(timeout=60) not in (0, 2)
            errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
            assert len(errors) == 1 and phrase in errors[0] and "same command goes on" in errors[0], log.read_text()
            assert "Traceback" not in log.read_text()

    started = train_until(3)
    machinery.cable("node1", "down")
    ended(started, "nothing heard of node 1 (node1) for 8 s", "nothing heard of node 0 (node0) for 8 s")
    machinery.cable("node1", "up")

    reached = max(int(path.parent.name.split("-")[1]) for path in run.glob("checkpoint-*/complete.json"))
    started = train_until(reached + 3)
    assert "Continuing from" in started[0][1].read_text()
    machinery.kill("node1") if not isinstance(machinery, Slurm) else kill_launched(machinery, "node1")
    ended(started[:1], "was lost")

    reached = max(int(path.parent.name.split("-")[1]) for path in run.glob("checkpoint-*/complete.json"))
    command[command.index("400")] = str(reached + 2)
    for process, log in on_nodes(2, *command):
        assert process.wait(timeout=120) == 0, log.read_text()
    assert read(run)["resumed_from_step"] == reached and len(losses(run)) == reached + 2


def kill_launched(machinery, name):
    """The node's processes die at once, without its slurmd."""
    listed = subprocess.run(["ip", "netns", "pids", f"recipes-{name}"], capture_output=True, text=True).stdout.split()
    for pid in listed:
        if "slurmd" not in Path(f"/proc/{pid}/comm").read_text():
            os.kill(int(pid), signal.SIGKILL)
