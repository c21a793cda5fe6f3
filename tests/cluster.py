"""Several machines on one: network namespaces joined by a bridge, and a real SLURM in them.

Needs root on Linux; SLURM needs Debian's `slurm-wlm` and `munge`. The system is not changed: the key, the socket and the state of
SLURM are in a temporary folder, and each node has a copy of /etc/hosts in its mount namespace.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from forked_launcher import ForkedLauncher, Started


def missing(*programs: str) -> str:
    """Why no cluster can be made on this machine, "" if one can."""
    if os.name != "posix" or os.uname().sysname != "Linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    absent = [program for program in ("ip", "nsenter", "unshare", *programs) if not shutil.which(program)]
    if absent:
        return f"not installed: {', '.join(absent)}"
    probe = f"recipes-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "this machine allows no network namespaces"
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return ""


class Nodes:
    """`count` machines named node0, node1, … that can reach each other and nothing else. A context manager.

    `prefix`: of the names of namespaces and interfaces, which all users of this machine share, as they share `network`.
    """

    def __init__(self, count: int, folder: Path, prefix: str = "recipes", network: str = "10.177.0"):
        self.names, self.folder, self.processes = [f"node{i}" for i in range(count)], folder, []
        self.prefix, self.network, self.controller = prefix, network, f"{network}.254"
        self.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self):
        self._remove()
        _ip("link", "add", f"{self.prefix}0", "type", "bridge")
        _ip("addr", "add", f"{self.controller}/24", "dev", f"{self.prefix}0")
        _ip("link", "set", f"{self.prefix}0", "up")
        hosts = ["127.0.0.1 localhost", f"{self.controller} {socket.gethostname()}"]
        for number, name in enumerate(self.names):
            address = f"{self.network}.{number + 1}"
            hosts.append(f"{address} {name}")
            _ip("netns", "add", self.space(name))
            _ip("link", "add", self.space(name), "type", "veth", "peer", "name", "eth0", "netns", self.space(name))
            _ip("link", "set", self.space(name), "master", f"{self.prefix}0", "up")
            _ip("-n", self.space(name), "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", self.space(name), "link", "set", "eth0", "up")
            _ip("-n", self.space(name), "link", "set", "lo", "up")
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")
        return self

    def __exit__(self, *error):
        for name in self.names:
            self.kill(name)
        for process in self.processes:
            process.wait(timeout=30)
        self._remove()

    def _remove(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", self.space(name)], capture_output=True)
            subprocess.run(["ip", "link", "delete", self.space(name)], capture_output=True)
        subprocess.run(["ip", "link", "delete", f"{self.prefix}0"], capture_output=True)

    def start(self, name: str, *command, **options) -> subprocess.Popen:
        """Starts a program on a node. `ip netns exec` would hide /sys/fs/cgroup, which slurmd needs."""
        script = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'
        wrapped = ["nsenter", f"--net=/run/netns/{self.space(name)}", "unshare", "--uts", "--mount", "sh", "-c", script, "sh"]
        process = subprocess.Popen([*wrapped, name, self.folder / "hosts", *command], start_new_session=True, **options)
        self.processes.append(process)
        return process

    def fork(self, launcher: ForkedLauncher, name: str, *arguments, **options) -> Started:
        """Starts launch.sh on a node without its imports; the options are those of `ForkedLauncher.start`."""
        hosts = ["--bind", str(self.folder / "hosts"), "/etc/hosts"]
        return launcher.start(*arguments, node=(self.space(name), name), mounts=[hosts], new_session=True, **options)

    def pids(self, name: str) -> list[int]:
        """The processes of a node, without SLURM's daemon."""
        listed = subprocess.run(["ip", "netns", "pids", self.space(name)], capture_output=True, text=True).stdout.split()
        return [int(pid) for pid in listed if _name_of(pid) != "slurmd"]

    def kill(self, name: str):
        """Kills every process of a node, as a loss of power does."""
        for _ in range(20):
            if not (pids := self.pids(name)):
                return
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def space(self, name: str) -> str:
        """The network namespace of a node, which is also the name of its interface at the bridge."""
        return f"{self.prefix}-{name}"


class Slurm(Nodes):
    """The same machines under SLURM; `run` calls sbatch, scontrol and other commands as a user does on the head node."""

    def __enter__(self):
        self.daemons, self.variables = [], {}
        super().__enter__()
        try:
            return self._begin()
        except BaseException:
            self.__exit__()
            raise

    def _begin(self):
        folder = self.folder
        for name in ("state", *self.names):
            (folder / name).mkdir(exist_ok=True)
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}
        (folder / "slurm.conf").write_text(self._conf())
        log = (folder / "daemons.log").open("w")
        munged = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"]
        munged += [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("pid-file", "log-file", "seed-file")]
        environment = os.environ | self.variables
        for command in (munged, ["slurmctld", "-D", "-i"]):
            self.daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            time.sleep(1)
        for name in self.names:
            self.daemons.append(self.start(name, "slurmd", "-D", "-N", name, env=environment, stdout=log, stderr=log))
        deadline = time.monotonic() + 60
        while self.run("sinfo", "--noheader", "--states=idle", "--format=%D").strip() != str(len(self.names)):
            assert time.monotonic() < deadline, (folder / "daemons.log").read_text()
            time.sleep(0.5)
        return self

    def _conf(self) -> str:
        folder, cores, names = self.folder, max(8, os.cpu_count()), self.names
        lines = f"""ClusterName=tests
SlurmctldHost={socket.gethostname()}({self.controller})
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n/spool
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmctldPidFile={folder}/slurmctld.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
MpiDefault=none
JobRequeue=0
MinJobAge=3600
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,sched_interval=1,requeue_delay=1
"""
        for number, name in enumerate(names):
            lines += f"NodeName={name} NodeAddr={self.network}.{number + 1} CPUs={cores} RealMemory=4000 State=UNKNOWN\n"
        return lines + f"PartitionName=all Nodes={','.join(names)} Default=YES MaxTime=60 State=UP OverSubscribe=FORCE:2\n"

    def __exit__(self, *error):
        subprocess.run(["scancel", "--user=root"], env=os.environ | self.variables, capture_output=True)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            daemon.wait(timeout=30)
        super().__exit__(*error)

    def run(self, *command, **options) -> str:
        """Returns what a SLURM command prints; fails if the command fails."""
        environment = options.pop("env", os.environ) | self.variables
        process = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, **options)
        assert process.returncode == 0, f"{command}: {process.stdout}{process.stderr}"
        return process.stdout


def _name_of(pid: str) -> str:
    """The name of a process's program, "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True)
