"""Machines started with NNODES, NODE_RANK and MASTER_ADDR; the network of one fails, another one loses power."""

import itertools

import pytest
import yaml
from campaign_nodes import MOMENTS, SILENCE, Trial, TwoNodes, check, make_reference, take_away
from conftest import ROOT, losses, read, wait_until


@pytest.fixture
def on_nodes(machines, environment, workdir, tmp_path):
    """Starts a command on several nodes, each in its folder of `folders`; returns the process and the log of each."""

    def call(count, *arguments, folders=None, ranks=None, **variables):
        started = []
        for rank, name in enumerate(machines.names[:count]):
            if ranks and rank not in ranks:
                continue
            log = tmp_path / f"{len(list(tmp_path.glob('*.log')))}-{name}.log"
            node = {"NNODES": str(count), "NODE_RANK": str(rank), "MASTER_ADDR": machines.names[0]}
            with log.open("w") as file:
                command = [ROOT / "launch.sh", *map(str, arguments)]
                env = environment | node | variables
                cwd = folders[rank] if folders else workdir
                process = machines.start(name, *command, cwd=cwd, env=env, stdout=file, stderr=file)
            started.append((process, log))
        return started

    return call


def test_three_nodes(on_nodes, workdir):
    """Three machines with one GPU each. Each prints a report, and ends without a traceback when another has ended before."""
    run = workdir / "runs/three-nodes"
    started = on_nodes(
        3, "--tiny", "gpt2_xl_wikitext", "3xt4_shard_grad_op", "--output_dir", run, "--max_steps", "3", "--fp16", "false"
    )
    for process, log in started:
        assert process.wait(timeout=240) == 0 and "Traceback" not in log.read_text(), log.read_text()
    results = read(run)
    assert (results["num_nodes"], results["world_size"], results["fsdp_enabled"]) == (3, 3, True)
    assert [report["node"] for report in results["nodes"]] == [0, 1, 2]
    assert started[0][1].read_text().count('{"node"') == 3 and not started[1][1].read_text().count("{")


def test_lost_network_and_lost_node(on_nodes, machines, workdir, tmp_path):
    """Every node exits with one error message within a bounded time, and the same command resumes from a complete checkpoint."""
    run, two = workdir / "runs/broken", tmp_path / "2 nodes.yaml"
    settings = yaml.safe_load((ROOT / "accelerate_configs/3xt4_shard_grad_op.yaml").read_text())
    two.write_text(yaml.safe_dump(settings | {"num_machines": 2, "num_processes": 2}))
    command = ["--tiny", "gpt2_xl_wikitext", two, "--output_dir", run, "--eval_strategy", "no", "--max_steps", "400"]
    command += ["--save_steps", "3", "--logging_steps", "1", "--fp16", "false"]

    def train_until(step):
        started = on_nodes(2, *command, NODE_SILENCE="8")

        def reached():
            assert all(process.poll() is None for process, _ in started), "".join(log.read_text() for _, log in started)
            return any(int(path.parent.name.split("-")[1]) >= step for path in run.glob("checkpoint-*/complete.json"))

        wait_until(reached, 120, lambda: started[0][1].read_text())
        return started

    def check_errors(started, *phrases):
        for (process, log), phrase in zip(started, phrases, strict=False):
            assert process.wait(timeout=60) not in (0, 2)
            errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
            assert len(errors) == 1 and phrase in errors[0] and "same command resumes" in errors[0], log.read_text()
            assert "Traceback" not in log.read_text()

    started = train_until(3)
    machines.set_cable("node1", "down")
    check_errors(started, "nothing was heard from node 1 (node1) for 8 s", "nothing was heard from node 0 (node0) for 8 s")
    machines.set_cable("node1", "up")

    reached = max(int(path.parent.name.split("-")[1]) for path in run.glob("checkpoint-*/complete.json"))
    started = train_until(reached + 3)
    assert "Resuming from" in started[0][1].read_text()
    machines.kill("node1")
    check_errors(started[:1], "nothing was heard from node 1 (node1) for 8 s")

    reached = max(int(path.parent.name.split("-")[1]) for path in run.glob("checkpoint-*/complete.json"))
    command[command.index("400")] = str(reached + 2)
    for process, log in on_nodes(2, *command):
        assert process.wait(timeout=120) == 0, log.read_text()
    assert read(run)["resumed_from_step"] == reached and len(losses(run)) == reached + 2


def test_run_continues_after_interruptions(machines, fork_launch, tmp_path):
    """A run with four interruptions trains the same rows as an uninterrupted run, each once, with the same losses.

    Node 1 starts later. A process of node 0 is killed during an evaluation. Node 1 loses power during a save, and its network
    during training. It joins again each time.
    """
    reference = make_reference(TwoNodes(machines, fork_launch, tmp_path / "uninterrupted", "streamed"))
    nodes = TwoNodes(machines, fork_launch, tmp_path / "lost", "streamed")
    nodes.start(0, wait=8)
    nodes.wait_for(nodes.last_step, 90, "a step of one node")
    for what, moment in (
        ("node 1 comes later", "training"),
        ("process of node 0", "evaluating"),
        ("node 1", "saving"),
        ("network of node 1", "training"),
    ):
        before = len(nodes.records(MOMENTS[moment]))
        nodes.wait_for(lambda: len(nodes.records(MOMENTS[moment])) > before, 60, moment)  # noqa: B023
        starts = {each["start"] for each in nodes.records()}
        take_away(nodes, what, seconds=SILENCE + 4)
        if what in ("node 1", "network of node 1"):
            nodes.wait_for(lambda: nodes.records()[-1]["processes"] == 1, 60, f"a step without {what}")
        nodes.go_on(what, starts)
    (nodes.folder / "fast").touch()
    nodes.wait_for_end()
    check(nodes, Trial("", "", "streamed"), reference)
    log, of_node = nodes.logs[0].read_text(), nodes.logs[2].read_text()
    assert log.count("The run continues with 2 nodes of 2.") == 3 and log.count("The run continues with 1 node of 2.") == 2, log
    assert "Process 0 failed first (exit code 137)" in log and "Starting again from the newest checkpoint, 1 of 3 " in log, log
    assert of_node.count("\n") <= 4, of_node
    processes = [start["processes"] for start in read(nodes.run, "starts.json")["starts"]]
    assert [number for number, _ in itertools.groupby(processes)] == [
        2,
        1,
        2,
        1,
        2,
        1,
        2,
    ]  # first as checked
