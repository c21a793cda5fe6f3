"""Machines started with NNODES, NODE_RANK and MASTER_ADDR; one loses power."""

import pytest
import yaml
from conftest import ROOT, slow
from runs import losses, read, wait_until


@pytest.fixture
def on_nodes(machines, environment, workdir, tmp_path):
    """Starts a command on several nodes; returns the process and the log of each."""

    def call(count, *arguments):
        started = []
        for rank, name in enumerate(machines.names[:count]):
            log = tmp_path / f"{len(list(tmp_path.glob('*.log')))}-{name}.log"
            node = {"NNODES": str(count), "NODE_RANK": str(rank), "MASTER_ADDR": machines.names[0]}
            with log.open("w") as file:
                command = [ROOT / "launch.sh", *map(str, arguments)]
                process = machines.start(name, *command, cwd=workdir, env=environment | node, stdout=file, stderr=file)
            started.append((process, log))
        return started

    return call


def test_three_nodes(on_nodes, workdir):
    """Three machines with one GPU each. Each ends without a traceback when another has ended before."""
    run = workdir / "runs/three-nodes"
    started = on_nodes(
        3, "--tiny", "gpt2_xl_wikitext", "3xt4_shard_grad_op", "--output_dir", run, "--max_steps", "3", "--fp16", "false"
    )
    for process, log in started:
        assert process.wait(timeout=240) == 0 and "Traceback" not in log.read_text(), log.read_text()
    results = read(run)
    assert (results["num_nodes"], results["world_size"], results["fsdp_enabled"]) == (3, 3, True)


@slow
def test_lost_node(on_nodes, machines, workdir, tmp_path):
    """The other node exits with one error message, and the same command resumes from a complete checkpoint."""
    run, two = workdir / "runs/broken", tmp_path / "2 nodes.yaml"
    settings = yaml.safe_load((ROOT / "accelerate_configs/3xt4_shard_grad_op.yaml").read_text())
    two.write_text(yaml.safe_dump(settings | {"num_machines": 2, "num_processes": 2}))
    command = ["--tiny", "gpt2_xl_wikitext", two, "--output_dir", run, "--eval_strategy", "no", "--max_steps", "400"]
    command += ["--save_steps", "3", "--logging_steps", "1", "--fp16", "false"]
    started = on_nodes(2, *command)
    wait_until(lambda: list(run.glob("checkpoint-*/complete.json")), 120, lambda: started[0][1].read_text())
    machines.kill("node1")
    process, log = started[0]
    assert process.wait(timeout=60) == 3, log.read_text()
    errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "same command resumes" in errors[0], log.read_text()
    assert "Traceback" not in log.read_text()

    reached = max(int(path.parent.name.split("-")[1]) for path in run.glob("checkpoint-*/complete.json"))
    command[command.index("400")] = str(reached + 2)
    for more, code in (([], 0), (["--learning_rate", "1"], 2)):  # which the first process refuses, because the run is finished
        for process, log in on_nodes(2, *command, *more):
            assert process.wait(timeout=120) == code and "Traceback" not in log.read_text(), log.read_text()
    assert read(run)["resumed_from_step"] == reached and len(losses(run)) == reached + 2
