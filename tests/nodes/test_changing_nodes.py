"""Nodes come and go: hybrid shard keeps its replicas whole."""

import os
import signal

from harness.configs import AccelerateConfig
from harness.contexts import Context
from harness.start.training import usable_numbers_of_nodes

import pytest
from conftest import ROOT, free_port, losses, read, wait_until
from transformers import TrainingArguments

FLAGS = ["--save_steps", "4", "--logging_steps", "1", "--eval_strategy", "no"]


@pytest.fixture
def start_node(fork_launch, tmp_path):
    """Starts a command as one of several nodes, all on this machine; returns the process and its log."""
    port, started = str(free_port()), []

    def call(rank, nodes, *arguments, **options):
        log = tmp_path / f"{len(started)}-node{rank}.log"
        variables = {"NNODES": nodes, "NODE_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables |= {"NODE_SILENCE": "6", "NPROC_PER_NODE": "1"}
        process = fork_launch.start("--tiny", *arguments, out=log, err=log, new_session=True, **variables, **options)
        started.append(process)
        return process, log

    yield call
    for process in started:
        process.kill()


def wait_for(process, log, text, times=1):
    def is_there():
        assert process.poll() is None, log.read_text()
        return log.read_text().count(text) >= times

    wait_until(is_there, 150, log.read_text)


def lose(node):
    os.killpg(node.pid, signal.SIGKILL)


def check_losses(run, uninterrupted):
    """They differ by rounding only: the rows of a step are the same."""
    found, expected = losses(run), losses(uninterrupted)
    assert found.keys() == expected.keys()
    for step, (loss, _) in found.items():
        assert loss == pytest.approx(expected[step][0], abs=0.02), step
    assert read(run)["tokens"] == read(uninterrupted)["tokens"]


@pytest.mark.parametrize(
    ("least", "shards", "accumulation", "expected"),
    [
        (1, 1, 1, [1, 2, 4]),
        (1, 1, 3, [1, 2, 3, 4]),
        (2, 4, 3, [2, 4]),
        (3, 1, 1, "a step has 8 rows, and on 3 nodes it needs a multiple of 6"),
    ],
    ids=["rows cannot be divided by three", "every number", "replicas on two nodes", "not the smallest number"],
)
def test_numbers_of_nodes_that_can_train(error_of, least, shards, accumulation, expected):
    """Of up to four nodes with two processes each."""
    config = AccelerateConfig(distributed_type="FSDP", replicas=8 // shards if shards > 1 else 1, shards=shards)
    context = Context("recipe.py", config, processes=8, nodes=4, min_nodes=least)
    arguments = TrainingArguments(per_device_train_batch_size=1, gradient_accumulation_steps=accumulation, use_cpu=True)
    if isinstance(expected, str):
        assert expected in error_of(usable_numbers_of_nodes, context, arguments)
    else:
        assert usable_numbers_of_nodes(context, arguments) == expected


def test_hybrid_shard_keeps_whole_replicas(start_node, rehearse, workdir, tmp_path, hybrid_2x2):
    """A replica is sharded over two nodes. Without its other node, one is not used until that returns."""
    run = workdir / "runs/hybrid-on-changing-nodes"
    flags = [*FLAGS, "--max_steps", "60", "--dtype", "float32", "--bf16", "false"]
    command = ["qwen2_fineweb_edu", hybrid_2x2, "--output_dir", run, *flags]
    nodes = [start_node(rank, "2:4", *command) for rank in range(4)]
    head, log = nodes[0]
    wait_for(head, log, "  loss ", 5)
    lose(nodes[3][0])
    wait_for(head, log, "The run continues with 2 nodes of 4.")
    wait_for(nodes[2][0], nodes[2][1], "Node 2 waits: the run can use 2 nodes at the moment.")
    wait_for(head, log, "Resuming from")
    nodes[3] = start_node(3, "2:4", *command)
    for process, of_node in nodes:
        assert process.wait(180) == 0, log.read_text() + of_node.read_text()
    assert "A node joins after step" in log.read_text() and "The run continues with 4 nodes of 4." in log.read_text()
    assert "error: " not in log.read_text() and "Traceback" not in log.read_text(), log.read_text()
    assert [start["processes"] for start in read(run, "starts.json")["starts"]] == [4, 2, 4]
    assert (read(run)["replicas"], read(run)["num_nodes"]) == (2, 4)
    check_losses(run, rehearse("qwen2_fineweb_edu", hybrid_2x2, *flags))


HANGS_ONCE = """
    import os, pathlib, signal, time
    flag = pathlib.Path(__file__).with_name(os.environ["RANK"])
    if not flag.exists():
        flag.touch()
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        time.sleep(2 if os.environ["RANK"] == "1" else 600)
        os._exit(9)
    train("""


def test_processes_that_wait_for_a_crashed_one_are_killed(start_node, workdir, tmp_path):
    """As they do with NCCL: they neither fail nor stop. The number of nodes is fixed."""
    recipe, run = tmp_path / "hangs.py", workdir / "runs/hangs"
    recipe.write_text((ROOT / "recipes/qwen2_fineweb_edu.py").read_text().replace("\n    train(", HANGS_ONCE))
    command = [recipe, "4gpu_full_shard", "--output_dir", run, "--max_steps", "2", "--eval_strategy", "no"]
    (head, log), (node, of_node) = [start_node(rank, "2", *command) for rank in range(2)]
    for process in (head, node):
        assert process.wait(150) == 0, log.read_text() + of_node.read_text()
    assert "Process 1 failed first (exit code 9); see its output above.\nStarting again" in of_node.read_text()
    assert "error: " not in log.read_text() + of_node.read_text() and len(losses(run)) == 2


def test_nodes_without_a_shared_folder_are_refused(start_node, tmp_path):
    """Each has an output directory of its own: their parts of a checkpoint could not be put together."""
    disks = [tmp_path / "disk0", tmp_path / "disk1"]
    for disk in disks:
        disk.mkdir()
    command = ["qwen2_fineweb_edu", "4gpu_full_shard", "--output_dir", "run", "--max_steps", "1", "--eval_strategy", "no"]
    for process, log in [start_node(rank, "2", *command, cwd=disks[rank]) for rank in range(2)]:
        assert process.wait(150) == 2 and "--output_dir: " in log.read_text(), log.read_text()
    assert not list(tmp_path.rglob("checkpoint-*"))
