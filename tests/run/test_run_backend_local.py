"""The local back end, with real processes in place of executors."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from phalanx.core.errors import UserError
from phalanx.ipc.processes import Identity, Watched, identity_of
from phalanx.run.backends import local as module
from phalanx.run.backends.backend import BackendSetup, Listener
from phalanx.run.backends.local import LocalBackend, Options
from phalanx.run.config import RunConfig
from phalanx.run.messages import VERSION

GUARD_S = 240.0

OBEDIENT = "import signal; print('ready', flush=True); signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); signal.pause()"
SHORT = "import sys; sys.exit('cannot open the door')"


class Told:
    """What the back end says, to be waited for."""

    def __init__(self) -> None:
        self.gone: dict[str, str] = {}
        self.changed = asyncio.Event()
        self.listener = Listener(self._gone, lambda left_s: None)

    def _gone(self, host: str, why: str) -> None:
        self.gone[host] = why
        self.changed.set()

    async def until(self, *hosts: str) -> None:
        while not set(hosts) <= self.gone.keys():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), GUARD_S)


def make(folder: Path, program: str = OBEDIENT, most: int = 4, grace_s: float = GUARD_S) -> LocalBackend:
    return LocalBackend(folder, lambda host: [sys.executable, "-c", program, host], most, grace_s=grace_s)


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 2 * GUARD_S))


async def until_ready(folder: Path, *hosts: str) -> None:
    """Wait until each process has said that its signals are arranged."""
    for host in hosts:
        while "ready" not in (folder / f"{host}.err").read_text():
            await asyncio.sleep(0.01)


def pids(backend: LocalBackend) -> list[int]:
    return [watched.identity.pid for watched in backend._hosts.values()]


def test_hosts_are_started_up_to_the_most_and_ended(tmp_path: Path) -> None:
    async def story() -> None:
        told, backend = Told(), make(tmp_path, most=3)
        await backend.begin(told.listener)
        await backend.ask(2)
        assert backend.hosts == ["host-1", "host-2"]
        await backend.ask(2)  # the same two, which have not come yet
        assert backend.hosts == ["host-1", "host-2"]
        backend.arrived("host-1")
        backend.arrived("never there")
        await backend.ask(5)
        assert backend.hosts == ["host-1", "host-2", "host-3"]
        started = pids(backend)
        assert all(os.getsid(pid) == pid for pid in started)
        await until_ready(tmp_path, *backend.hosts)
        await backend.end()
        assert backend.hosts == [] and not any(psutil.pid_exists(pid) for pid in started)
        assert told.gone == dict.fromkeys(["host-1", "host-2", "host-3"], "it was ended")
        assert list(tmp_path.glob("*.json")) == []

    run(story)


def test_a_host_that_dies_is_told_and_its_name_is_not_used_again(tmp_path: Path) -> None:
    async def story() -> None:
        told, backend = Told(), make(tmp_path)
        await backend.begin(told.listener)
        await backend.ask(2)
        os.kill(pids(backend)[0], signal.SIGKILL)
        await told.until("host-1")
        assert told.gone["host-1"] == "its executor was killed by SIGKILL"
        await backend.ask(2)  # one of them is on its way
        assert backend.hosts == ["host-2", "host-3"]
        await backend.end()

    run(story)


def test_an_executor_that_cannot_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    async def story() -> None:
        told, backend = Told(), make(tmp_path, SHORT)
        await backend.begin(told.listener)
        await backend.ask(1)
        await told.until("host-1")
        assert told.gone["host-1"].endswith("cannot open the door")

    run(story)


def test_evicted_even_if_it_is_stopped_or_will_not_go(tmp_path: Path) -> None:
    async def story() -> None:
        told, backend = Told(), make(tmp_path, STUBBORN, grace_s=0.1)
        await backend.begin(told.listener)
        await backend.ask(2)
        await until_ready(tmp_path, "host-1", "host-2")
        os.kill(pids(backend)[0], signal.SIGSTOP)
        await backend.evict("host-1", "it is bad")
        await backend.evict("host-1", "asked twice")
        await told.until("host-1")
        assert backend.hosts == ["host-2"]
        await backend.release("host-9", "there is none")
        await backend.end()

    run(story)


def test_a_driver_that_is_started_again_finds_its_hosts(tmp_path: Path) -> None:
    async def first() -> None:
        backend = make(tmp_path)
        await backend.begin(Told().listener)
        await backend.ask(3)
        await until_ready(tmp_path, *backend.hosts)
        os.kill(pids(backend)[1], signal.SIGKILL)
        os.waitpid(pids(backend)[1], 0)
        await backend.leave()
        assert backend.hosts == []

    async def second() -> None:
        told, backend = Told(), make(tmp_path)
        await backend.begin(told.listener)
        assert backend.hosts == ["host-1", "host-3"]
        assert "before the driver was started again" in told.gone["host-2"]
        backend.arrived("host-1")
        backend.arrived("host-3")
        await backend.ask(1)
        assert backend.hosts[-1] == "host-4"
        started = pids(backend)
        await backend.end()
        assert not any(psutil.pid_exists(pid) for pid in started)

    run(first)
    run(second)


@pytest.mark.parametrize("said", [3, None])
def test_executors_of_another_version_are_ended_and_started_again_at_once(tmp_path: Path, said: int | None) -> None:
    async def first() -> None:
        backend = make(tmp_path, most=2)
        await backend.begin(Told().listener)
        await backend.ask(2)
        await until_ready(tmp_path, *backend.hosts)
        path = tmp_path / "host-1.json"
        fields = json.loads(path.read_text())
        assert fields.pop("version") == VERSION
        path.write_text(json.dumps(fields | ({} if said is None else {"version": said})))
        await backend.leave()

    async def second() -> None:
        told, backend = Told(), make(tmp_path, most=3)
        await backend.begin(told.listener)
        await backend.ask(2)  # one of them is on its way
        assert backend.hosts == ["host-1", "host-2", "host-3"]
        await told.until("host-1")
        spoke = "version 3 of the wire" if said else "another version of the wire"
        assert told.gone == {"host-1": f"its executor spoke {spoke}, the driver {VERSION}: it was ended"}
        assert backend.hosts == ["host-2", "host-3"]
        await backend.end()

    run(first)
    run(second)


def test_a_number_that_another_process_has_now_is_not_touched(tmp_path: Path) -> None:
    mine = identity_of(os.getpid())
    assert mine is not None and mine == identity_of(os.getpid())
    other = Identity(mine.pid, mine.started_ticks - 1, mine.boot_id)

    async def story() -> None:
        with pytest.raises(ProcessLookupError, match="another one now"):
            Watched(other, lambda: None)
        told, backend = Told(), make(tmp_path)
        (tmp_path / "host-7.json").write_text(
            f'{{"pid": {other.pid}, "started_ticks": {other.started_ticks}, "boot_id": "{other.boot_id}"}}'
        )
        (tmp_path / "host-8.json").write_text("{")
        (tmp_path / "host-9.err").write_text("")  # the driver was killed before it could write down who that is
        await backend.begin(told.listener)
        assert backend.hosts == [] and set(told.gone) == {"host-7", "host-8"}
        await backend.ask(1)
        assert backend.hosts == ["host-10"]
        await backend.end()

    run(story)


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be used"):
        run(lambda: make(tmp_path / "file" / "x").begin(Told().listener))
    with pytest.raises(UserError, match="at least one host"):
        make(tmp_path, most=0)


def test_no_more_hosts_than_there_are_in_all(tmp_path: Path) -> None:
    async def story() -> None:
        told, backend = Told(), make(tmp_path)
        backend.options = Options(total_hosts=2)
        await backend.begin(told.listener)
        await backend.ask(3)
        assert backend.hosts == ["host-1", "host-2"]
        os.kill(pids(backend)[0], signal.SIGKILL)
        await told.until("host-1")
        await backend.ask(3)
        assert backend.hosts == ["host-2"]
        await backend.end()

    run(story)


SAYS = "import os, signal, sys; print(os.environ.get('WORD'), sys.argv[1], 'ready', flush=True); signal.pause()"


def test_single_hosts_have_variables_and_a_door_of_their_own(tmp_path: Path) -> None:
    async def story() -> None:
        options = {"environment": {"host-2": {"WORD": "hello"}}, "driver_files": str(tmp_path)}
        config = RunConfig(script="train.py", hosts=2, backend_options=options)
        settings = '{"host": "h", "driver": "everywhere"}'
        backend = module.make(BackendSetup(config, tmp_path, lambda host: [sys.executable, "-c", SAYS, settings], {}))
        told = Told()
        await backend.begin(told.listener)
        await backend.ask(2)
        await until_ready(tmp_path / "executors", *backend.hosts)
        said = [(tmp_path / "executors" / f"host-{number}.err").read_text().split(None, 1) for number in (1, 2)]
        assert [words[0] for words in said] == ["None", "hello"]
        assert f'{{"host": "h", "driver": "{tmp_path}/host-2"}}' in said[1][1]
        await backend.end()

    run(story)


def test_an_option_that_is_none_is_named(tmp_path: Path) -> None:
    config = RunConfig(script="train.py", backend_options={"total": 3})
    with pytest.raises(UserError, match="total_hosts"):
        module.make(BackendSetup(config, tmp_path, lambda host: [], {}))
