"""Several hosts on one machine: each has a keeper of its own, and ranks that know only that one.

Ranks are forked from a server that has imported all they need, and are told who they are as torchrun would tell them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from phalanx.checkpoint.format.shard_plan import Record, SnapshotId
from phalanx.checkpoint.keeper.keeper_client import KeeperClient
from phalanx.checkpoint.keeper_contract import KeeperLostError
from phalanx.cli.main import main
from phalanx.ipc.handshake import hand_out
from phalanx.telemetry.loggers import read_json_lines
from support.kills.run import TinyRun

GUARD_S = 120.0
"""Whatever takes longer hangs."""
_TURN_S = 0.02  # a step or two
_FIRST_REST_S = 0.03
_LONGEST_REST_S = 1.0

SETTINGS: dict[str, Any] = {
    "checkpoint.every_steps": 0,  # nothing is durable but the state at the end
    "checkpoint.memory_every_steps": 1,
    "parallel.host_loader": False,  # which takes longer to start than these runs take
    "evaluate.final_tokens": 64,
}

_IMPORTED = [
    "phalanx.train.session",
    "phalanx.cli.train_command",
    "torch.utils.checkpoint",
    "torch._inductor.standalone_compile",  # by torch.use_deterministic_algorithms
]

_TAKEN_UP = re.compile(r"going on from (.*?) \(step (\d+) of", re.DOTALL)


class TakenUp(NamedTuple):
    """What a run went on from; as it told people."""

    source: str
    step: int


class Left(NamedTuple):
    """What the hosts that are left have in memory.

    Attributes:
        whole: steps of the snapshots of which they have every shard, newest first.
        parts: steps of those of which they have any shard, newest first.
    """

    whole: list[int]
    parts: list[int]


def left(records: Sequence[Record]) -> Left:
    """What these copies make up; newest is the highest attempt, and within that the highest step."""
    ranks: dict[SnapshotId, set[int]] = {}
    shards: dict[SnapshotId, int] = {}
    for record in records:
        ranks.setdefault(record.snapshot, set()).add(record.rank)
        shards[record.snapshot] = record.shards
    newest_first = sorted(ranks, key=lambda one: (one.attempt, one.step), reverse=True)
    whole = [one.step for one in newest_first if len(ranks[one]) == shards[one]]
    return Left(whole, [one.step for one in newest_first])


@dataclass
class Host:
    """What plays a host.

    Attributes:
        name: in names of files.
        ranks: how many of the job's it has.
        rack: of it; empty: unknown.
        lives: how often it was replaced by a new one.
    """

    name: str
    ranks: int
    rack: str = ""
    lives: int = 0
    processes: list[BaseProcess] = field(default_factory=list)


class Cluster:
    """The hosts of one run.

    Args:
        run: its settings, without those of the layout.
        ranks: of each host.
        racks: of each host.
    """

    def __init__(self, run: TinyRun, ranks: Sequence[int], racks: Sequence[str] = ()) -> None:
        self.run = run
        racks = racks or [""] * len(ranks)
        self.hosts = [Host(f"h{number}", *one) for number, one in enumerate(zip(ranks, racks, strict=True))]
        self.starts = 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_IMPORTED)

    def keeper(self, host: int) -> Path:
        """The socket of the keeper of a host."""
        one = self.hosts[host]
        return self.run.folder / f"{self.run.name}.{one.name}.{one.lives}"

    def start(self, changes: Mapping[str, Any] | None = None) -> None:
        """Start all ranks, as one job; `changes` are settings."""
        self.starts += 1
        run = TinyRun(self.run.folder, self.run.name, SETTINGS | dict(self.run.changes) | dict(changes or {}))
        arguments, size, port = run.arguments(), sum(host.ranks for host in self.hosts), _free_port()
        (run.folder / "none.toml").touch()
        first, secret = 0, hand_out(run.folder, run.folder.name.encode().rjust(32))
        for number, host in enumerate(self.hosts):
            host.processes = []
            for local in range(host.ranks):
                environ = {
                    "RANK": str(first + local),
                    "LOCAL_RANK": str(local),
                    "WORLD_SIZE": str(size),
                    "LOCAL_WORLD_SIZE": str(host.ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "PHALANX_KEEPER": str(self.keeper(number)),
                    "PHALANX_INTERFACE": "lo",
                    "PHALANX_RACK": host.rack,
                    **secret,
                }
                target = (str(run.folder), str(self._log(first + local)), arguments, environ)
                process = self._context.Process(target=_become, args=target)
                process.start()
                host.processes.append(process)
            first += host.ranks

    def wait(self) -> list[int]:
        """Exit statuses of all ranks, once they have ended.

        Raises:
            TimeoutError: they do not.
        """
        end_s = time.monotonic() + GUARD_S
        for process in self._processes():
            process.join(max(end_s - time.monotonic(), 0.01))
        statuses = [process.exitcode for process in self._processes()]
        if None in statuses:
            raise TimeoutError(f"ranks do not end: {statuses}\n{self.logs()}")
        return [status for status in statuses if status is not None]

    def until_step(self, step: int) -> int:
        """Wait until the run has written `step` down; the last one that it has.

        Raises:
            RuntimeError: a rank has ended before. TimeoutError: it does not come.
        """
        self.until(f"step {step}", lambda: self.run.last_step() >= step)
        return self.run.last_step()

    def until(self, what: str, condition: Callable[[], bool], *, slowly: bool = False) -> None:
        """Wait for something that no event tells of, while the run goes on.

        Args:
            slowly: the ranks are stopped most of the time, so that keepers, which give way to training, are done before
                a short run has come to its end.

        Raises:
            RuntimeError: a rank has ended before. TimeoutError: it does not come.
        """
        end_s, rests_s = time.monotonic() + GUARD_S, _rests_s()
        try:
            while not condition():
                if any(process.exitcode is not None for process in self._processes()):
                    raise RuntimeError(f"a rank ended before {what}:\n{self.logs()}")
                if time.monotonic() > end_s:
                    raise TimeoutError(f"{what} does not come:\n{self.logs()}")
                if slowly:
                    self._run_and_rest(next(rests_s))
                else:
                    time.sleep(0.002)
        finally:
            if slowly:
                self._signal(signal.SIGCONT)

    def until_replicated(self, after: int = 0) -> None:
        """Wait until every host could be lost: a snapshot that was begun after step `after` is whole on all others.

        The second is begun only when the first is.

        Raises:
            RuntimeError, TimeoutError: as `until`.
        """

        def replicated() -> bool:
            events = [one for one in self.events("snapshot") if one["step"] > after]
            return len([one for one in events if one["checkpoint/replicate_bytes"]]) > 1

        self.until_step(after + 1)  # starting is not slowed down
        self.until(f"a replicated snapshot after step {after}", replicated, slowly=True)

    def lose(self, *hosts: int) -> Left:
        """SIGKILL all that runs on some hosts, at once, and then the job; others take their places, with empty memory.

        Returns:
            What the hosts that are left have.
        """
        pids = [keeper.pid for host in hosts for keeper in self.keepers(host)]
        _kill([*pids, *(process.pid for host in hosts for process in self.hosts[host].processes)])
        for host in hosts:
            self.hosts[host].lives += 1
        self.end()
        others = [host for host in range(len(self.hosts)) if host not in hosts]
        self._settle(others)
        return left([record for host in others for record, _ in self.held(host)])

    def _settle(self, hosts: Sequence[int]) -> None:
        """Wait until the keepers of these hosts have taken in what others had sent before they were killed."""
        keepers = [one for host in hosts for one in self.keepers(host) if one.name().startswith("phalanx keeper")]
        end_s = time.monotonic() + GUARD_S
        while time.monotonic() < end_s:
            connections = [one for keeper in keepers for one in keeper.net_connections("tcp")]
            heard_at = {one.laddr for one in connections if one.status == psutil.CONN_LISTEN}
            living = {one.laddr for one in connections}
            if all(one.raddr in living for one in connections if one.raddr and one.laddr in heard_at):
                return
            time.sleep(0.005)
        raise TimeoutError("keepers do not notice that others are gone")

    def kill_keeper(self, host: int) -> None:
        """SIGKILL the keeper of a host and what it started, nothing else."""
        _kill([keeper.pid for keeper in self.keepers(host)])

    def end(self) -> None:
        """SIGKILL all ranks."""
        _kill([process.pid for process in self._processes()])
        for process in self._processes():
            process.join()

    def keepers(self, host: int) -> list[psutil.Process]:
        """The keeper of a host, and its persister, if there are any."""
        return list(_of_keeper(self.keeper(host)))

    def last_keepers(self) -> list[psutil.Process]:
        """Those that do not end although the job has, nor their persisters."""
        processes = [process for host in range(len(self.hosts)) for process in self.keepers(host)]
        _, alive = psutil.wait_procs(processes, GUARD_S)
        return list(alive)

    def held(self, host: int) -> list[tuple[Record, bool]]:
        """Records of the copies that the keeper of a host has, and whether each is a replica."""
        if not self.keepers(host):  # a rank that was stopped while it starts one listens there, and does not answer
            return []
        try:
            keeper = KeeperClient(self.keeper(host), 0, 1)
        except KeeperLostError:
            return []
        try:
            return [(one.record, one.is_replica) for one in keeper.held()]
        finally:
            keeper.close()

    def taken_up(self) -> TakenUp | None:
        """What the run went on from at its last start; None where it began."""
        found = _TAKEN_UP.search(self.log())
        return TakenUp(" ".join(found[1].split()), int(found[2])) if found else None

    def log(self, rank: int = 0) -> str:
        """What a rank has printed since the last start."""
        try:
            return self._log(rank).read_text()
        except FileNotFoundError:
            return ""

    def logs(self) -> str:
        """What all ranks have printed since the last start."""
        return "\n".join(self.log(rank) for rank in range(sum(host.ranks for host in self.hosts)))

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Entries of the metrics, such as ``snapshot``."""
        metrics = self.run.path / "metrics.jsonl"
        return [one for one in read_json_lines(metrics) if one["kind"] == kind] if metrics.exists() else []

    def close(self) -> None:
        """End all there is."""
        self.end()
        _kill([process.pid for process in _of_keeper(self.run.folder / f"{self.run.name}.")])

    def _run_and_rest(self, rest_s: float) -> None:
        self._signal(signal.SIGCONT)
        time.sleep(_TURN_S)
        self._signal(signal.SIGSTOP)
        time.sleep(rest_s)

    def _signal(self, number: int) -> None:
        for process in self._processes():
            if process.exitcode is None and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _processes(self) -> list[BaseProcess]:
        return [process for host in self.hosts for process in host.processes]

    def _log(self, rank: int) -> Path:
        return self.run.folder / f"{self.run.name}.{self.starts}.{rank}.log"


@contextlib.contextmanager
def a_cluster(run: TinyRun, ranks: Sequence[int], racks: Sequence[str] = ()) -> Iterator[Cluster]:
    """The hosts of a run; nothing of them is left after the context."""
    cluster = Cluster(run, ranks, racks)
    try:
        yield cluster
    finally:
        cluster.close()


def share_text(source: TinyRun, folder: Path) -> None:
    """Give another folder the same text, prepared."""
    shutil.copy(source.folder / "corpus.jsonl", folder)
    shutil.copytree(source.folder / "prepared", folder / "prepared")


def _rests_s() -> Iterator[float]:
    """Longer and longer ones: on a machine that is busy, keepers may need many seconds."""
    rest_s = _FIRST_REST_S
    while True:
        yield rest_s
        rest_s = min(1.3 * rest_s, _LONGEST_REST_S)


def _become(folder: str, log: str, arguments: list[str], environ: dict[str, str]) -> None:
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # the fork server ignores some
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(folder)
    os.environ.update(environ | {"COLUMNS": "1000"})
    main(arguments)


def _of_keeper(address: Path) -> Iterator[psutil.Process]:
    """Keepers and persisters, and whatever they have started, whose address begins so."""
    for process in psutil.process_iter(["name"]):
        if (process.info["name"] or "").startswith(("phalanx keeper", "phalanx persist")):
            with contextlib.suppress(psutil.Error):
                if process.environ().get("PHALANX_KEEPER", "").startswith(str(address)):
                    yield process


def _kill(pids: Sequence[int | None]) -> None:
    """SIGKILL, and wait until they are gone."""
    gone = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            assert pid is not None
            gone.append(psutil.Process(pid))
            os.kill(pid, signal.SIGKILL)
    for process in gone:
        end_s = time.monotonic() + GUARD_S
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end_s:
                time.sleep(0.001)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
