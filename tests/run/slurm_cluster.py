"""A Slurm cluster on this machine: real munged, slurmctld and several slurmd, in a folder and on ports of their own.

The machine's own configuration is neither read nor changed: `SLURM_CONF` names another one. For a look by hand::

    python tests/run/slurm_cluster.py 4 bash    # sinfo, srun … in that shell; the cluster ends with it
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PROGRAMS = (
    "setpriv",
    "munged",
    "slurmctld",
    "slurmd",
    "sinfo",
    "salloc",
    "srun",
    "sbatch",
    "scontrol",
    "scancel",
    "squeue",
)
GUARD_S = 120.0

_CONFIG = """\
ClusterName=phalanx
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/linear
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
SlurmdTimeout={node_timeout_s}
SlurmctldTimeout=10
OverTimeLimit=0
KillWait=2
CompleteWait=0
ReturnToService=2
NodeName=n[1-{count}] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=1000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """What of Slurm is not installed here."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


class Cluster:
    """Started by `with`; all of it, and what it has started, is gone afterwards.

    Args:
        count: nodes, called n1, n2, …
        node_timeout_s: after which a silent slurmd makes its node DOWN.
    """

    def __init__(self, count: int, node_timeout_s: int = 6) -> None:
        self.nodes = [f"n{number + 1}" for number in range(count)]
        self.folder = Path(tempfile.mkdtemp(prefix="phalanx-slurm-"))
        self.folder.chmod(0o755)  # munge wants its socket reachable for all
        self.config = self.folder / "slurm.conf"
        self.environ = {**_without_slurm(os.environ), "SLURM_CONF": str(self.config)}
        self._node_timeout_s = node_timeout_s
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        try:
            self._write()
            self._start_munge()
            self._start("slurmctld", "slurmctld", "-D", "-c")
            for node in self.nodes:
                self.start_node(node)
            self.until(lambda: self.states() == dict.fromkeys(self.nodes, "idle"))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
        self._kill_what_was_started(lambda environ: True)
        for process in self._processes.values():
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    # Nodes

    def start_node(self, node: str) -> None:
        """Start its slurmd."""
        self._start(node, "slurmd", "-D", "-N", node)

    def kill_slurmd(self, node: str) -> None:
        """As when the daemon crashes: what runs on the node goes on."""
        process = self._processes.pop(node)
        process.kill()
        process.wait()

    def kill_node(self, node: str) -> None:
        """As when its power is cut."""
        self.kill_slurmd(node)
        self.clear_node(node)

    def clear_node(self, node: str) -> None:
        """All that still runs on a node whose daemon is dead."""
        self._kill_what_was_started(lambda environ: environ.get("SLURMD_NODENAME") == node)

    def states(self) -> dict[str, str]:
        """Of the nodes, as sinfo has them; empty while nobody answers."""
        found = self.run("sinfo", "-h", "-N", "-o", "%N %T", check=False).split()
        return dict(zip(found[::2], found[1::2], strict=True))

    # Commands

    def run(self, *command: str, check: bool = True, **environ: str) -> str:
        """What a command says, run as from a login node."""
        done = subprocess.run(
            command, env={**self.environ, **environ}, capture_output=True, text=True, timeout=GUARD_S, check=False
        )
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def until(self, condition: Callable[[], object], within_s: float = GUARD_S) -> None:
        """Wait for something that a command of Slurm's tells."""
        end_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end_s, f"{self.states()}\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        """The last lines of the daemons."""
        tails = []
        for path in sorted(self.folder.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-30:]
            tails.append("\n".join([f"== {path.name}", *lines]))
        return "\n".join(tails)

    # The rest

    def _write(self) -> None:
        for name in ("state", "spool", "munge", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir()
        (self.folder / "munge").chmod(0o755)
        controller, first = _free_ports(1), _free_ports(len(self.nodes))
        self.config.write_text(
            _CONFIG.format(
                folder=self.folder,
                user=pwd.getpwuid(os.getuid()).pw_name,
                controller=controller,
                first=first,
                last=first + len(self.nodes) - 1,
                count=len(self.nodes),
                node_timeout_s=self._node_timeout_s,
            )
        )

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        key = folder / "key"
        with os.fdopen(os.open(key, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(secrets.token_bytes(128))
        names = {"key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed", "socket": "socket"}
        options = [f"--{option}={folder / name}" for option, name in names.items()]
        self._start("munged", "munged", "--foreground", *options)
        self.until((folder / "socket").exists)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],  # also when this process is killed, none is left
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _kill_what_was_started(self, wanted: Callable[[dict[str, str]], bool]) -> None:
        """Daemons of steps and what runs in them: they have the name of our configuration in their environment."""
        found = True
        while found:
            found = False
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    environ = process.environ()
                    if environ.get("SLURM_CONF") == str(self.config) and wanted(environ) and _is_alive(process):
                        process.send_signal(signal.SIGKILL)
                        found = True


def _is_alive(process: psutil.Process) -> bool:
    return process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE


def _without_slurm(environ: os._Environ[str]) -> dict[str, str]:
    return {
        name: value for name, value in environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN", "SALLOC"))
    }


def _free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody has."""
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(_bound(0)).getsockname()[1]
            try:
                for port in range(first + 1, first + count):
                    stack.enter_context(_bound(port))
            except (OSError, OverflowError):
                continue
            return first


def _bound(port: int) -> socket.socket:
    listener = socket.socket()
    try:
        listener.bind(("127.0.0.1", port))
    except BaseException:
        listener.close()
        raise
    return listener


if __name__ == "__main__":
    with Cluster(int(sys.argv[1])) as cluster:
        sys.exit(subprocess.run(sys.argv[2:] or ["bash"], env=cluster.environ, check=False).returncode)
