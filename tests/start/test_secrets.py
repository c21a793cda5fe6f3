"""Tokens and keys of the environment are written nowhere; other machines cannot connect to the processes of one machine."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from harness.configs import AccelerateConfig
from harness.nodes.cluster import Nodes
from harness.start import launch as launch_module

import psutil
import pytest

SECRETS = {
    "HF_TOKEN": "hf_secretOfTheHub",
    "WANDB_API_KEY": "secretOfWandb0123456789",
    "AWS_SECRET_ACCESS_KEY": "secretOfTheBucket",
    "OPENAI_API_KEY": "sk-secretOfTheServer",
}


def files_with_secrets(*folders: Path) -> list[str]:
    """Paths and names of variables."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [f"{path}: {name}" for path in files for name, value in SECRETS.items() if value.encode() in path.read_bytes()]


def test_files_and_output_of_a_run(fork_launch, tmp_path):
    run = tmp_path / "run"
    arguments = ["qwen2_chat", "1x3090", "--max_steps", "2", "--save_steps", "1", "--eval_strategy", "no"]
    process = fork_launch("--tiny", *arguments, "--output_dir", run, HARNESS_DEBUG="1", **SECRETS)
    assert process.returncode == 0, process.stderr
    assert (run / "train_results.json").is_file() and not files_with_secrets(run)
    assert not any(value in process.stdout + process.stderr for value in SECRETS.values())
    modes = {path.stat().st_mode & 0o777 for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    assert modes == {(run / "run.json").stat().st_mode & 0o777}  # the user's umask decides who can read the files


@contextlib.contextmanager
def watched(look: Callable[[psutil.Process], object]) -> Iterator[list]:
    """What `look` returns of every process that is started in the block, again and again."""
    found, has_ended = [], threading.Event()
    before = {process.pid for process in psutil.Process().children(recursive=True)}

    def watch() -> None:
        while not has_ended.wait(0.05):
            for process in psutil.Process().children(recursive=True):
                if process.pid in before:
                    continue
                with contextlib.suppress(psutil.Error, OSError):
                    found.append(look(process))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        has_ended.set()
        thread.join()


def test_arguments_of_processes(launch, tmp_path):
    """Other users of the machine can read them. Stops after the check, with a traceback."""
    flags = ["--max_steps", "0", "--output_dir", tmp_path / "run"]
    with watched(lambda process: " ".join(process.cmdline())) as seen:
        process = launch("--tiny", "qwen2_chat", "1x3090", *flags, HARNESS_DEBUG="1", **SECRETS)
    assert process.returncode == 2 and any("harness.start.launch" in words for words in seen), process.stderr
    assert "Traceback" in process.stderr
    assert not any(value in words for words in [*seen, process.stdout, process.stderr] for value in SECRETS.values())


def test_listens_on_this_machine_only(fork_launch, tmp_path, monkeypatch):
    """Also gloo, which otherwise takes the address of the machine's name."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    look = lambda process: [one.laddr.ip for one in process.net_connections("tcp") if one.status == "LISTEN"]  # noqa: E731
    arguments = ["qwen2_fineweb_edu", "4gpu_ddp", "--max_steps", "1", "--eval_strategy", "no", "--save_strategy", "no"]
    with watched(look) as seen:
        process = fork_launch("--tiny", *arguments, "--output_dir", tmp_path / "run", NPROC_PER_NODE="2")
    assert process.returncode == 0, process.stderr
    addresses = {address for of_process in seen for address in of_process}
    assert "127.0.0.1" in addresses and all(address.startswith("127.") for address in addresses), addresses


@pytest.mark.unit
@pytest.mark.parametrize(
    ("nodes", "before", "expected"), [(1, {}, "=lo"), (1, {"NCCL_SOCKET_IFNAME": "eth0"}, "eth0"), (2, {}, None)]
)
def test_nccl_listens_on_this_machine_only(monkeypatch, nodes, before, expected):
    """Unless the user says otherwise, or there are other nodes."""
    monkeypatch.setattr(launch_module, "interface_to", lambda address: {"127.0.0.1": "lo"}[address])
    monkeypatch.setattr(os, "environ", dict(before))
    config = AccelerateConfig("c.yaml", distributed_type="FSDP")
    launch_module.set_environment_of_processes("recipe.py", config, Nodes(count=nodes), 2, tiny=False)
    assert os.environ.get("NCCL_SOCKET_IFNAME") == expected
