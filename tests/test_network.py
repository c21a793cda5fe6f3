"""What crosses the network, and what happens when processes cannot reach each other."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, free_port, losses, read

RECIPE = "qwen2_fineweb_edu"


@pytest.fixture
def count(rehearse, environment, workplace, two_by_two, tmp_path):
    """Trains two steps of four micro-batches on two replicas of two shards; returns the collectives and the run."""
    rehearse(RECIPE, "1x3090")  # makes the stand-ins

    def call(name: str, **fsdp):
        settings = yaml.safe_load(two_by_two.read_text())
        settings["fsdp_config"] |= fsdp
        config, out, run = tmp_path / f"{name}.yaml", tmp_path / f"{name}.json", tmp_path / name
        config.write_text(yaml.safe_dump(settings))
        run.mkdir()
        (run / "run.json").write_text(json.dumps({"recipe": RECIPE, "config": name, "model": "", "dataset": "", "tiny": True}))
        launched = {"recipe": RECIPE, "config": str(config), "processes": 4, "tiny": True, "on_cpu": True}
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--num_machines", "1"]
        command += ["--main_process_port", "0", ROOT / "tests/count_collectives.py", ROOT / f"recipes/{RECIPE}.py", out]
        command += ["--output_dir", run, "--max_steps", "2", "--gradient_accumulation_steps", "4", "--logging_steps", "1"]
        command += ["--save_strategy", "no", "--eval_strategy", "no"]
        variables = {"RECIPE_LAUNCH": json.dumps(launched), "PYTHONPATH": str(ROOT / "recipes")}
        process = subprocess.run(command, cwd=workplace, env=environment | variables, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        return json.loads(out.read_text()), run

    return call


def test_one_gather_and_one_reduction_a_step(count):
    """However many micro-batches; the gradients are the same. In a hybrid config only gradients leave the node."""
    usual, usual_run = count("usual")
    once, once_run = count("once", fsdp_reshard_after_forward=False, fsdp_reshard_after_backward=False)
    assert losses(once_run) == losses(usual_run)
    model = once["parameters"]

    def total(step, kind):
        return sum(size for name, _, size in step if name == kind)

    units = 3  # two layers, and what is around them
    for step in once["steps"]:
        gathers = [size for name, _, size in step if name == "all_gather_single"]
        assert len(gathers) == units and sum(gathers) == pytest.approx(model, rel=0.01)
    for step in usual["steps"]:
        # Each of four micro-batches gathers every layer for the forward and again for the backward pass.
        assert total(step, "all_gather_single") > 4 * model
    for step in once["steps"] + usual["steps"]:
        assert total(step, "reduce_scatter_single") == pytest.approx(model, rel=0.01)
        for name, ranks, _ in step:
            if name != "all_reduce":
                assert ranks == [0, 1], "weights of rank 0 are gathered inside its node"
        crossing = [size for name, ranks, size in step if name == "all_reduce" and ranks == [0, 2]]
        assert sum(crossing) == pytest.approx(model / 2, rel=0.01)  # the half of the gradients that rank 0 keeps


def test_processes_whose_files_end_at_different_times_go_on(rehearse, environment, workplace, tmp_path):
    """Three files for two processes, five passes over the shorter share: without help they wait for each other for ever."""
    rehearse(RECIPE, "1x3090")  # makes the stand-ins
    model = next((workplace / "outputs/tiny/.stand-ins").glob("Qwen--Qwen2-0.5B-*"))
    (tmp_path / "data").mkdir()
    for file, rows in enumerate((40, 30, 20)):
        texts = [json.dumps({"text": f"file {file} row {row} " + "of many words " * 20}) for row in range(rows)]
        (tmp_path / f"data/{file}.jsonl").write_text("\n".join(texts))
    settings = yaml.safe_load((ROOT / "accelerate_configs/4gpu_full_shard.yaml").read_text()) | {"num_processes": 2}
    config = tmp_path / "2gpu.yaml"
    config.write_text(yaml.safe_dump(settings))
    launched = {"recipe": RECIPE, "config": str(config), "processes": 2, "on_cpu": True}
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"recipe": RECIPE, "config": "", "model": "", "dataset": "", "tiny": True}))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--num_machines", "1"]
    command += ["--main_process_port", "0", ROOT / f"recipes/{RECIPE}.py", "--output_dir", run, "--max_steps", "40"]
    command += ["--model_name_or_path", model, "--dataset_name", tmp_path / "data", "--dataset_config", "default"]
    command += ["--max_length", "256", "--gradient_accumulation_steps", "1", "--max_eval_samples", "4"]
    command += ["--eval_strategy", "epoch", "--save_strategy", "epoch", "--logging_steps", "10"]
    variables = {"RECIPE_LAUNCH": json.dumps(launched), "PYTHONPATH": str(ROOT / "recipes")}
    process = subprocess.run(
        list(map(str, command)), cwd=tmp_path, env=environment | variables, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    assert read(run)["global_step"] == 40


@pytest.fixture
def start_two(environment, tmp_path):
    """Starts a script as rank 0 and rank 1 of two processes, or as other ranks."""
    started = []

    def call(script: str, ranks="01"):
        port = str(free_port())
        for rank in ranks:
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            variables["PYTHONPATH"] = str(ROOT / "recipes")
            command, env = [sys.executable, "-c", script, rank, port, str(len(started))], environment | variables
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(command, cwd=tmp_path, env=env, **pipes))
        return started

    yield call
    for process in started:
        process.kill()
        process.wait()


MEET = """
import os, sys, time
import torch.distributed as dist
from harness.nodes import network
dist.init_process_group("gloo")
{before}
network.meet("cpu", 3)
print("met")
"""


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("", None),
        ("if dist.get_rank(): time.sleep(60)", "no answer within 3 s"),
        ("if dist.get_rank(): os._exit(0)", "peer"),
        ("real = dist.all_reduce; dist.all_reduce = lambda t: (real(t), t[7:9].add_(1))", "2 of 65536 sums were wrong"),
    ],
    ids=["all well", "a process hangs", "a process dies", "wrong bytes"],
)
def test_processes_meet_or_name_the_causes(start_two, before, reason):
    first, second = start_two(MEET.format(before=before))
    out, err = first.communicate(timeout=60)
    if reason is None:
        assert (first.returncode, out) == (0, "met\n") and second.wait(timeout=60) == 0
        return
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert first.returncode == 3 and not out and "Traceback" not in err
    for word in (reason, "NCCL_P2P_DISABLE=1", "NCCL_SOCKET_IFNAME", "firewall"):
        assert word in line


GATHER = """
import sys
from pathlib import Path
from harness.nodes.meeting import Meeting
from harness.nodes.machines import Nodes
rank, port, folder, command = int(sys.argv[1]), int(sys.argv[2]), {folders}[int(sys.argv[1])], {commands}[int(sys.argv[1])]
with Meeting(Nodes(2, rank, "127.0.0.1", port), {{"command": command}}) as meeting:
    checked = meeting.in_turn(lambda: {check})
    print(checked, meeting.share(Path(folder), 1))
"""


@pytest.mark.parametrize(
    ("commands", "other", "check", "expected"),
    [
        (["r c", "r c"], "one", "rank", [(0, "0 True", ""), (0, "1 True", "")]),
        (["r c", "r c"], "another", "rank", [(0, "0 False", ""), (0, "1 False", "")]),
        (["r c", "r d"], "one", "rank", [(1, "", ""), (1, "", "")]),
        # A node that fails its checks ends the others; the first one goes first.
        (["r c", "r c"], "one", "sys.exit(2) if rank else 0", [(2, "", "did not pass its checks"), (2, "", "")]),
        (["r c", "r c"], "one", "print('checks') or 1 if rank else sys.exit(2)", [(2, "", ""), (2, "", "did not pass")]),
        # A run that is finished, as the first one says.
        (["r c", "r c"], "one", "rank or sys.exit(0)", [(0, "", ""), (0, "", "")]),
    ],
    ids=["together", "two folders", "two commands", "the second fails", "the first fails", "finished"],
)
def test_launchers_check_in_turn_and_end_together(start_two, tmp_path, commands, other, check, expected):
    folders = [str(tmp_path / name) for name in ("one", other)]
    for folder in folders:
        Path(folder).mkdir(exist_ok=True)
    said = []
    started = start_two(GATHER.format(folders=folders, commands=commands, check=check))
    for process, (code, printed, error) in zip(started, expected, strict=True):
        out, err = process.communicate(timeout=60)
        said.append(err)
        out = out.replace(f"Node 1 of 2 is here; node 0 ({socket.gethostname()}) speaks for all.", "")
        assert (process.returncode, out.strip()) == (code, printed), err
        assert error in err and err.count("\n") <= 2 and "Traceback" not in err
    if commands[0] != commands[1]:  # whoever looks first
        assert re.search("was started with command r [cd], this node with command r [cd]", "".join(said))


LATE = """
import sys, time
from harness.nodes import gather, meeting
from harness.nodes.machines import Nodes
rank, port = int(sys.argv[1]), int(sys.argv[2])
gather.NOTICE = 1
time.sleep(7 * rank)
with meeting.Meeting(Nodes(2, rank, "127.0.0.1", port), {}):
    print("all here")
"""


def test_a_node_that_comes_late_is_waited_for(start_two):
    first, second = start_two(LATE)
    out, err = first.communicate(timeout=60)
    *waiting, last = out.splitlines()
    assert first.returncode == second.wait(timeout=60) == 0 and last == "all here" and not err
    assert 1 <= len(waiting) <= 20 and all(line.startswith("Waiting for node 1 of 2") and "of 600 s" in line for line in waiting)


TWINS = """
import sys, time
from harness.nodes.meeting import Meeting
from harness.nodes.machines import Nodes
rank, port, number = map(int, sys.argv[1:])
time.sleep(4 * (number == {last}))
Meeting(Nodes(3, rank, "127.0.0.1", port), {{}})
"""


@pytest.mark.parametrize(("ranks", "words"), [("011", "is node 1 already"), ("00", "by another NODE_RANK 0?")])
def test_the_same_node_rank_twice(start_two, ranks, words):
    *others, last = start_two(TWINS.format(last=len(ranks) - 1), ranks)
    assert words in last.communicate(timeout=60)[1] and last.returncode == 1
    assert all(process.poll() is None for process in others)
