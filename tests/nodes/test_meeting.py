"""The processes of a run test their network; the launchers of several nodes meet, check in turn and end together."""

import multiprocessing
import os
import re
import socket
import socketserver
import sys
import threading
from pathlib import Path

from harness.nodes import network

import pytest
from conftest import free_port

RECIPE, CONFIG = "qwen2_fineweb_edu", "4gpu_full_shard"
PLAIN = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1"}


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch"])


class Script:
    """Python code in a process that has imported torch already."""

    def __init__(self, code: str, arguments: list[str], variables: dict[str, str], folder: Path, name: str):
        self.printed = [folder / f"{name}.{stream}" for stream in ("out", "err")]
        self.process = FORKS.Process(target=run_script, args=(code, arguments, variables, self.printed))
        self.process.start()

    def wait(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        self.process.join(60)
        assert self.process.exitcode is not None, [path.read_text() for path in self.printed]
        return self.process.exitcode, *(path.read_text() for path in self.printed)


def run_script(code: str, arguments: list[str], variables: dict[str, str], printed: list[Path]):
    for number, path in enumerate(printed, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(variables)
    sys.argv[1:] = arguments
    exec(code, {"__name__": "__main__"})


@pytest.fixture
def start_two(tmp_path):
    """Starts a script once per rank, by default as rank 0 and rank 1; `sys.argv`: rank, port, number."""
    started = []

    def call(script: str, ranks="01") -> list[Script]:
        port = str(free_port())
        for number, rank in enumerate(ranks):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            started.append(Script(script, [rank, port, str(number)], variables, tmp_path, f"script-{number}"))
        return started

    yield call
    for script in started:
        script.process.kill()
        script.process.join()


CHECK_ALL_REDUCE = """
import os, sys, time
import torch.distributed as dist
from harness.nodes import network
dist.init_process_group("gloo")
{before}
network.check_all_reduce("cpu", 3)
print("checked")
"""


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("", None),
        ("if dist.get_rank(): time.sleep(60)", "no answer within 3 s"),
        ("if dist.get_rank(): os._exit(0)", "peer"),
        ("real = dist.all_reduce; dist.all_reduce = lambda t: (real(t), t[7:9].add_(1))", "2 of 65536 sums were wrong"),
    ],
    ids=["no failure", "a process hangs", "a process dies", "wrong bytes"],
)
def test_all_reduce_works_or_causes_are_named(start_two, before, reason):
    first, second = start_two(CHECK_ALL_REDUCE.format(before=before))
    code, out, err = first.wait()
    if reason is None:
        assert (code, out) == (0, "checked\n") and second.wait()[0] == 0
        return
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == network.UNREACHABLE and not out and "Traceback" not in err
    for word in (reason, "NCCL_P2P_DISABLE=1", "NCCL_SOCKET_IFNAME", "firewall"):
        assert word in line


WAIT_FOR_FIRST = """
import time
import torch.distributed as dist
from harness.nodes import network
dist.init_process_group("gloo")
time.sleep(4 if dist.get_rank() == 0 else 0)
network.wait_for_first_process()
network.check_all_reduce("cpu", 2)
print("checked")
"""


def test_processes_wait_for_the_first_one(start_two):
    """As long as it checks the run, which is longer than an all-reduce may take."""
    assert [script.wait() for script in start_two(WAIT_FOR_FIRST)] == [(0, "checked\n", "")] * 2


LOST_BEFORE_TRAINING = """
import os, signal
import torch.distributed as dist
from harness.run.failures import exit_for_known_failure
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.barrier()
except RuntimeError as error:
    exit_for_known_failure(error)
"""


def test_lost_process_before_the_training_is_no_error_of_the_user(start_two):
    """After one of a user (exit code 2) the processes are not started again."""
    code, out, err = start_two(LOST_BEFORE_TRAINING)[0].wait()
    assert (code, out) == (network.LOST, "") and err.count("\n") == 2
    assert err.startswith("\nerror: the connection to another process was lost (")


CHECK_IN_TURN = """
import os, sys
from pathlib import Path
from harness.messages import UserError, exit_on_user_error
from harness.nodes.cluster import Nodes
from harness.nodes.meeting import Meeting
def fail():
    raise UserError("no GPU")
rank, port, folder, command = int(sys.argv[1]), int(sys.argv[2]), {folders}[int(sys.argv[1])], {commands}[int(sys.argv[1])]
if os.environ.pop("RANK") == "1":  # a launcher has no RANK
    os.environ["HARNESS_NODE"] = "1"
with exit_on_user_error(), Meeting(Nodes(2, rank, "127.0.0.1", port), {{"command": command}}) as meeting:
    checked = meeting.check_in_turn(lambda: {check})
    print(checked, meeting.all_see(Path(folder), 1))
"""


@pytest.mark.parametrize(
    ("commands", "other", "check", "expected"),
    [
        (["r c", "r c"], "one", "rank", [(0, "0 True", ""), (0, "1 True", "")]),
        (["r c", "r c"], "another", "rank", [(0, "0 False", ""), (0, "1 False", "")]),
        (["r c", "r d"], "one", "rank", [(1, "", ""), (1, "", "")]),
        # A node that fails its checks ends the others.
        (["r c", "r c"], "one", "sys.exit(2) if rank else 0", [(2, "", "did not pass its checks"), (2, "", "")]),
        (["r c", "r c"], "one", "print('checks') or 1 if rank else sys.exit(2)", [(2, "", ""), (2, "", "did not pass")]),
        (["r c", "r c"], "one", "fail() if rank else 0", [(2, "", "did not pass its checks"), (2, "", "error: node 1: no GPU")]),
        # The first node finds that the run is finished.
        (["r c", "r c"], "one", "rank or sys.exit(0)", [(0, "", ""), (0, "", "")]),
    ],
    ids=["all pass", "two folders", "two commands", "the second fails", "the first fails", "a user error", "finished"],
)
def test_launchers_check_in_turn_and_end_together(start_two, tmp_path, commands, other, check, expected):
    folders = [str(tmp_path / name) for name in ("one", other)]
    for folder in folders:
        Path(folder).mkdir(exist_ok=True)
    errors = []
    started = start_two(CHECK_IN_TURN.format(folders=folders, commands=commands, check=check))
    for script, (expected_code, printed, error) in zip(started, expected, strict=True):
        code, out, err = script.wait()
        errors.append(err)
        out = out.replace(f"Node 1 has joined; node 0 ({socket.gethostname()}) prints the messages of all 2 nodes.", "")
        out = re.sub("Waiting for (node|NODE_RANK).* so far.\n", "", out)  # on a busy machine
        assert (code, out.strip()) == (expected_code, printed), err
        assert error in err and err.count("\n") <= 2 and "Traceback" not in err
    if commands[0] != commands[1]:  # one of them may exit before it has seen the other's command
        assert re.search("was started with another command than this node: r [cd], here r [cd]", "".join(errors))


def test_node_that_is_stopped_while_it_checks_ends_no_other(start_two, tmp_path):
    """With NNODES=1:2."""
    script = CHECK_IN_TURN.replace("port)", "port, min_count=1)")
    check = "sys.exit(143) if rank else 'checks'"
    head, node = start_two(script.format(folders=[str(tmp_path)] * 2, commands=["r c", "r c"], check=check))
    code, out, err = head.wait()
    assert (code, err, node.wait()[0]) == (0, "", 143) and out.endswith("checks True\n") and "Lost node 1" in out


DIES_IN_RENDEZVOUS = """
import os, sys
from harness.nodes.cluster import Nodes
from harness.nodes.meeting import Meeting
from harness.nodes.rendezvous import ChangingNodes, make_rendezvous
rank, port = int(sys.argv[1]), int(sys.argv[2])
os.environ["NODE_SILENCE"] = "3"
rendezvous = make_rendezvous(Meeting(Nodes(2, rank, "127.0.0.1", port, min_count=1), {}), [1, 2])
if rank:
    print(super(ChangingNodes, rendezvous).next_rendezvous().world_size, flush=True)
    os._exit(1)
print(rendezvous.next_rendezvous().world_size, flush=True)
os._exit(0)
"""


def test_node_that_is_lost_in_the_rendezvous_is_not_waited_for(start_two):
    """It has joined a round, and has not said so to the others."""
    head, node = start_two(DIES_IN_RENDEZVOUS)
    assert node.wait()[1].endswith("2\n")
    code, out, err = head.wait()
    assert (code, err) == (0, "") and out.endswith("1\n"), out


LATE = """
import sys, time
from harness.nodes import cluster, meeting
rank, port = int(sys.argv[1]), int(sys.argv[2])
meeting.MESSAGE_INTERVAL = 1
time.sleep(9 * rank)
with meeting.Meeting(cluster.Nodes(2, rank, "127.0.0.1", port), {}):
    print("all here")
"""


def test_late_node_is_waited_for(start_two):
    first, second = start_two(LATE)
    code, out, err = first.wait()
    *waiting, last = out.splitlines()
    assert code == second.wait()[0] == 0 and last == "all here" and not err
    started = "Waiting for NODE_RANK 1 (of 2 nodes"
    assert 1 <= len(waiting) <= 20 and all(line.startswith(started) and "of 600 s" in line for line in waiting)


END_LATER = """
import sys, time
from harness.nodes import cluster, meeting
rank, port = int(sys.argv[1]), int(sys.argv[2])
meeting.LEAVE_TIMEOUT = -4
with meeting.Meeting(cluster.Nodes(3, rank, "127.0.0.1", port), {}) as meeting:
    print(meeting.run(lambda: time.sleep(3 * rank) or 0))
"""


def test_store_of_head_outlives_the_other_nodes(start_two):
    """Also if their processes need longer to exit than a node is given after a failure."""
    started = start_two(END_LATER, "012")
    for script in started:
        code, out, err = script.wait()
        assert (code, out[-2:], err) == (0, "0\n", "")


JOINS_AND_FAILS = """
import os, sys, time
from harness.nodes import cluster, meeting
rank, port = int(sys.argv[1]), int(sys.argv[2])
os.environ["NODE_WAIT"], meeting.LEAVE_TIMEOUT = "1", -4
time.sleep(5 * rank)
with meeting.Meeting(cluster.Nodes(2, rank, "127.0.0.1", port, min_count=1), {}) as meeting:
    if rank:
        sys.exit(2)
    print(meeting.run(lambda: time.sleep(9) or 0))
"""


def test_node_that_fails_its_checks_when_it_joins_does_not_end_the_run(start_two):
    head, node = start_two(JOINS_AND_FAILS)
    assert node.wait()[0] == 2
    code, out, err = head.wait()
    assert (code, out[-2:], err) == (0, "0\n", "") and "Starting without NODE_RANK 1" in out, out


SAME_RANK = """
import sys, time
from harness.nodes.cluster import Nodes
from harness.nodes.meeting import Meeting
rank, port, number = map(int, sys.argv[1:])
time.sleep(4 * (number == {last}))
Meeting(Nodes(3, rank, "127.0.0.1", port), {{}})
"""


@pytest.mark.parametrize(("ranks", "words"), [("011", "is node 1 already"), ("00", "by another NODE_RANK 0:")])
def test_same_node_rank_twice_is_an_error(start_two, ranks, words):
    *others, last = start_two(SAME_RANK.format(last=len(ranks) - 1), ranks)
    code, _, err = last.wait()
    assert code == 1 and words in err
    assert all(script.process.is_alive() for script in others)


def test_missing_node_is_an_error(fork_launch, tmp_path):
    """Each node names the one that is missing, and exits after NODE_WAIT seconds."""
    port = str(free_port())
    alone = [{"NODE_RANK": "0", "MASTER_PORT": str(free_port())}, {"NODE_RANK": "1", "MASTER_PORT": port}]
    processes = [fork_launch("--tiny", RECIPE, CONFIG, cwd=tmp_path, **PLAIN, NODE_WAIT="3", **own) for own in alone]
    expected = (r"NODE_RANK 1 \(of 2 nodes", f"node 0: nothing answers at 127.0.0.1:{port}")
    for process, missing in zip(processes, expected, strict=True):
        assert process.returncode == 1 and not process.stdout
        assert re.fullmatch(rf"\nerror: waited [3-9] of 3 s \(NODE_WAIT\) for {missing}.*\n", process.stderr), process.stderr


def test_port_of_head_in_use_is_an_error(fork_launch, tmp_path):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        process = fork_launch("--tiny", RECIPE, CONFIG, cwd=tmp_path, **PLAIN | {"NODE_RANK": "0", "MASTER_PORT": port})
    assert process.returncode == 1
    assert process.stderr.startswith(f"\nerror: port {port} of this machine is in use") and process.stderr.count("\n") == 2


class SSHServer(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n")


def test_another_server_in_place_of_the_head_is_an_error(fork_launch, tmp_path):
    """One line, without what torch prints for each attempt."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), SSHServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = str(server.server_address[1])
        variables = {"NODE_RANK": "1", "MASTER_PORT": port, "NODE_SILENCE": "3"}
        process = fork_launch("--tiny", RECIPE, CONFIG, cwd=tmp_path, **PLAIN, **variables)
        server.shutdown()
    assert process.returncode == 1
    problem = f"the process that answers at 127.0.0.1:{port} is not node 0 of this run"
    assert process.stderr.startswith(f"\nerror: {problem}") and process.stderr.count("\n") == 2, process.stderr
