"""The Slurm back end against a real slurmctld and three slurmd, with plain processes in place of executors."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest
from slurm_cluster import Cluster, missing_programs

from phalanx.core.errors import UserError
from phalanx.run.backends.backend import BackendSetup, Listener
from phalanx.run.backends.slurm.commands import read_options
from phalanx.run.backends.slurm.slurm_backend import SlurmBackend, make
from phalanx.run.config import RunConfig

GUARD_S = 120.0
OBEDIENT = 'trap "exit 0" TERM; echo $$ >"$0.pid.tmp"; mv "$0.pid.tmp" "$0.pid"; while :; do sleep 0.1; done'
STUBBORN = OBEDIENT.replace('"exit 0"', '""')

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing_programs()), reason=f"Slurm is not installed here: {', '.join(missing_programs())} missing"
    ),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3) as started:
        yield started


@pytest.fixture
def allocation(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The id of a job with all nodes, as for somebody who has called salloc."""
    for node in cluster.nodes:
        if cluster.states().get(node, "").startswith("down"):
            cluster.start_node(node)
    cluster.until(lambda: cluster.states() == dict.fromkeys(cluster.nodes, "idle"))
    cluster.run("salloc", "--no-shell", "--no-kill", "-N3", "--time=10", "--job-name=test")
    job = cluster.run("squeue", "-h", "-t", "R", "-o", "%i").strip()
    for name, value in {"SLURM_CONF": str(cluster.config), "SLURM_JOB_ID": job}.items():
        monkeypatch.setenv(name, value)
    yield job
    cluster.run("scancel", job)
    cluster.until(lambda: not cluster.run("squeue", "-h"))


class Told:
    """What the back end says, to be waited for."""

    def __init__(self) -> None:
        self.gone: dict[str, str] = {}
        self.left_s: list[float] = []
        self.listener = Listener(self.gone.__setitem__, self.left_s.append)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(GUARD_S):
            while not condition():
                await asyncio.sleep(0.05)

    async def until_gone(self, *hosts: str) -> None:
        await self.until(lambda: set(hosts) <= self.gone.keys())


def backend_of(folder: Path, job: str, program: str = OBEDIENT, hosts: int = 2, **options: object) -> SlurmBackend:
    config = RunConfig(
        script="t.py", hosts=hosts, spares=0, backend="slurm", backend_options={"poll_s": 0.5, **options}
    )
    setup = BackendSetup(config, folder, lambda host: ["sh", "-c", program, str(folder / host)], dict(os.environ))
    return SlurmBackend(setup, read_options(config), job)


def play(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 2 * GUARD_S))


async def pids(told: Told, folder: Path, *hosts: str) -> list[int]:
    """Of what runs in place of executors, when it runs."""
    await told.until(lambda: all((folder / f"{host}.pid").exists() for host in hosts))
    return [int((folder / f"{host}.pid").read_text()) for host in hosts]


async def begun(folder: Path, job: str, *hosts: str, program: str = OBEDIENT) -> tuple[Told, SlurmBackend, list[int]]:
    """A back end that has been asked for as many hosts, and waited until these run: what it tells, itself, and pids."""
    told, backend = Told(), backend_of(folder, job, program)
    await backend.begin(told.listener)
    await backend.ask(len(hosts))
    return told, backend, await pids(told, folder, *hosts)


def test_hosts_are_steps_on_nodes_that_are_ended_replaced_and_not_used_again_when_evicted(
    cluster: Cluster, allocation: str, tmp_path: Path
) -> None:
    async def story() -> None:
        told, backend, started = await begun(tmp_path, allocation, "n1", "n2")
        await backend.ask(2)  # the same two
        assert backend.hosts == ["n1", "n2"]
        nodes = [psutil.Process(pid).environ()["SLURMD_NODENAME"] for pid in started]
        assert nodes == ["n1", "n2"]
        backend.arrived("n1"), backend.arrived("n2")

        await backend.evict("n2", "it is bad")
        await told.until_gone("n2")
        assert not psutil.pid_exists(started[1])
        await backend.ask(1)
        assert backend.hosts == ["n1", "n3"]
        await pids(told, tmp_path, "n3")
        backend.arrived("n3")

        os.kill(started[0], signal.SIGKILL)  # the executor
        await told.until_gone("n1")
        assert "its executor has ended" in told.gone["n1"]
        await backend.ask(1)  # n2 is free, but evicted
        assert backend.hosts == ["n3", "n1.2"]
        await pids(told, tmp_path, "n1.2")
        await backend.end()
        assert backend.hosts == [] and told.gone["n1.2"] == "it was ended"
        assert "phalanx" not in cluster.run("squeue", "-h", "-s", "-o", "%j")

    play(story)


@pytest.mark.campaign
def test_who_does_not_obey_is_killed(allocation: str, tmp_path: Path) -> None:
    async def story() -> None:
        told, backend, (pid,) = await begun(tmp_path, allocation, "n1", program=STUBBORN)
        await backend.release("n1", "it was not needed")
        await told.until_gone("n1")
        assert not psutil.pid_exists(pid)
        await backend.end()

    play(story)


@pytest.mark.campaign
def test_the_next_driver_takes_over_and_hosts_outlive_their_sruns_only_until_that_is_seen(
    allocation: str, tmp_path: Path
) -> None:
    async def story() -> None:
        told, first, started = await begun(tmp_path, allocation, "n1", "n2")
        srun = first._notes.hosts["n2"].srun
        assert srun is not None
        await first.leave()
        assert all(map(psutil.pid_exists, started)) and not told.gone

        told, second = Told(), backend_of(tmp_path, allocation)
        await second.begin(told.listener)
        assert second.hosts == ["n1", "n2"]
        second.arrived("n1"), second.arrived("n2")
        os.kill(srun.pid, signal.SIGKILL)  # nobody keeps this step any more
        await told.until_gone("n2")
        assert not psutil.pid_exists(started[1]) and psutil.pid_exists(started[0])
        await second.leave()
        srun = second._notes.hosts["n1"].srun
        assert srun is not None
        os.kill(srun.pid, signal.SIGKILL)  # while there is no driver

        told, third = Told(), backend_of(tmp_path, allocation)
        await third.begin(told.listener)
        await told.until_gone("n1")
        await told.until(lambda: not psutil.pid_exists(started[0]))
        await third.end()

    play(story)


@pytest.mark.campaign
def test_a_node_that_slurm_takes_out_of_the_job_is_gone_and_another_is_used(
    cluster: Cluster, allocation: str, tmp_path: Path
) -> None:
    async def story() -> None:
        told, backend, _ = await begun(tmp_path, allocation, "n1", "n2")
        backend.arrived("n1"), backend.arrived("n2")
        await asyncio.to_thread(cluster.kill_slurmd, "n2")  # what runs there goes on, but Slurm gives the node up
        await told.until_gone("n2")
        await backend.ask(1)
        assert backend.hosts == ["n1", "n3"]
        await pids(told, tmp_path, "n3")
        await backend.end()

    play(story)
    cluster.clear_node("n2")


def test_what_cannot_start_is_told_and_its_node_rests(allocation: str, tmp_path: Path) -> None:
    async def story() -> None:
        told, backend = Told(), backend_of(tmp_path, allocation, "echo no such library; exit 3", hosts=1)
        await backend.begin(told.listener)
        await backend.ask(1)
        await told.until(lambda: len(told.gone) >= 3)  # each node once, by itself
        assert set(told.gone) >= {"n1", "n2", "n3"}
        assert all(why.endswith("no such library") or "Exited" in why for why in told.gone.values()), told.gone
        await backend.end()

    play(story)


def test_time_that_is_short_is_told_once_by_the_clock_or_by_a_signal(
    cluster: Cluster, allocation: str, tmp_path: Path
) -> None:
    async def story() -> None:
        told, backend = Told(), backend_of(tmp_path, allocation, stop_before_s=100)
        await backend.begin(told.listener)
        await asyncio.to_thread(cluster.run, "scontrol", "update", f"JobId={allocation}", "TimeLimit=1")
        await told.until(lambda: told.left_s)
        backend.warn()
        await asyncio.sleep(0)
        assert len(told.left_s) == 1 and 0 <= told.left_s[0] <= 60
        await backend.end()
        with pytest.raises(UserError, match="of the allocation are left; give the allocation more time"):
            await backend_of(tmp_path, allocation, stop_before_s=100).begin(told.listener)

    play(story)


def test_a_signal_says_it_before_the_clock_does(allocation: str, tmp_path: Path) -> None:
    async def story() -> None:
        told = Told()
        config = RunConfig(script="t.py", backend="slurm", backend_options={"poll_s": 300})
        backend = make(BackendSetup(config, tmp_path, lambda host: ["true"], dict(os.environ)))
        os.kill(os.getpid(), signal.SIGUSR1)  # before it has begun
        await backend.begin(told.listener)
        await told.until(lambda: told.left_s)
        assert told.left_s == [120.0]
        assert not await backend.goes_on()
        await backend.end()

    play(story)


def test_an_allocation_that_is_too_small_or_none_is_refused(
    allocation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        with pytest.raises(UserError, match=r"run.hosts = 4: the allocation has 3 nodes; ask Slurm for 4 nodes"):
            await backend_of(tmp_path, allocation, hosts=4).begin(Told().listener)
        with pytest.raises(UserError, match="is no Slurm job that has nodes"):
            await backend_of(tmp_path, "9999").begin(Told().listener)
        monkeypatch.delenv("SLURM_JOB_ID")
        with pytest.raises(UserError, match="there is no allocation here"):
            make(BackendSetup(RunConfig(script="t.py", backend="slurm"), tmp_path, lambda host: [], {}))

    play(story)


def test_a_cluster_leaves_nothing_behind() -> None:
    with Cluster(1) as cluster:
        cluster.run("srun", "-N1", "hostname")
        folder = cluster.folder
    assert not folder.exists()
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if str(folder) in line]
