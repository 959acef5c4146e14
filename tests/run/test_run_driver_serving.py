"""The driver on a real event loop: real connections of emulated executors, and a back end that fails at first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
from driver_helpers import FakeHost, blame_the_silent, running

from phalanx.run import messages
from phalanx.run.backends.backend import Listener
from phalanx.run.clock import Now, read_clocks
from phalanx.run.decide import actions
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.drive.main import let_leave
from phalanx.run.driver.backend_orders import BackendOrders
from phalanx.run.driver.driver import Driver, WatchSettings
from phalanx.run.driver.write_ahead import Aside, Book
from phalanx.run.journal import open_journal
from phalanx.run.wire.driver_link import DriverLink
from phalanx.run.wire.executor_server import ExecutorServer

GUARD_S = 60.0
TOKEN = b"t" * 32
HEARTBEAT_S = 0.1


class Boxes:
    """A back end that notes what it is told, and fails so many times."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.asked: list[int] = []
        self.ended: list[tuple[str, str]] = []
        self.here: list[str] = []
        self.changed = asyncio.Event()

    async def begin(self, listener: Listener) -> None: ...

    async def ask(self, count: int) -> None:
        self.changed.set()
        if self.failures:
            self.failures -= 1
            raise OSError("the scheduler does not answer")
        self.asked.append(count)

    def arrived(self, host: str) -> None:
        self.here.append(host)

    async def evict(self, host: str, why: str) -> None:
        self.ended.append((host, why))
        self.changed.set()

    async def release(self, host: str, why: str) -> None:
        await self.evict(host, f"released: {why}")

    async def leave(self) -> None: ...

    async def end(self) -> None: ...


class Silent:
    def tell(self, action: actions.Action, at: Now) -> None: ...

    def heard(self, host: str, message: messages.Evidence | messages.WorkerEnded, at: Now) -> None: ...

    def wrote(self, lines: Sequence[messages.LogLine], at: Now) -> None: ...


class NoLine:
    """To executors that do not answer."""

    def send(self, host: str, message: messages.FromDriver) -> bool:
        return True

    def mark(self, host: str) -> None:
        return None

    def acknowledge(self, host: str) -> None: ...

    def other_versions(self) -> dict[str, int]:
        return {}


class Executor:
    """A fake host at the end of a real connection; one that `stays` does not end when it is told to."""

    stays = False

    def __init__(self, name: str, address: str) -> None:
        self.host = FakeHost(name)
        self.link = DriverLink(address, TOKEN, "j", self.host.hello, self._hear)

    def _hear(self, message: messages.FromDriver) -> None:
        if isinstance(message, messages.End) and not self.stays:
            self.link.close()
        for answer in self.host.answer(message, time.monotonic()):
            self.link.send(answer)  # type: ignore[arg-type]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.link.run())
            while True:
                await asyncio.sleep(HEARTBEAT_S)
                self.link.send(self.host.beat(time.monotonic()))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(GUARD_S):
        while not condition():
            await asyncio.sleep(0.005)


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 2 * GUARD_S))


def test_from_the_first_connection_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driver_helpers.STEP_S", 0.1)

    async def story() -> None:
        boxes = Boxes()
        orders = BackendOrders(boxes, lambda problem: None)
        with open_journal(str(tmp_path / "journal.db")) as journal:
            book = Book(journal, Job("j", hosts=2, spares=1), Policy(), read_clocks().unix_s)
            server = ExecutorServer(
                TOKEN,
                "j",
                "127.0.0.1",
                0,
                on_hello=lambda host, hello: driver.on_hello(host, hello),
                on_heartbeats=lambda beats: driver.on_heartbeats(beats),
                on_message=lambda host, message: driver.on_message(host, message),
                on_gone=lambda host, why: driver.on_disconnected(host, why),
            )
            settings = WatchSettings(heartbeat_s=HEARTBEAT_S)
            driver = Driver(book, server, orders, Silent(), lambda ended: "process", blame_the_silent, settings)
            changed = asyncio.Event()
            driver.on_change = changed.set
            async with server, asyncio.TaskGroup() as tasks:
                driver.begin()
                working = [tasks.create_task(orders.run())]
                executors = [Executor(name, str(server.address)) for name in "abc"]
                working += [tasks.create_task(executor.run()) for executor in executors]
                going = tasks.create_task(driver.keep_going(changed))
                await until(lambda: running(1)(driver.state))
                assert sorted(boxes.here) == ["a", "b", "c"] and boxes.asked[0] == 3
                executors[1].link.send(messages.WorkerEnded(1, 1, -9, "signal", "killed by SIGKILL"))
                await until(lambda: running(2)(driver.state))
                for rank, executor in enumerate(executors[:2]):
                    executor.link.send(messages.WorkerEnded(2, rank, 0, "returned"))
                await going
                assert driver.finished is not None and driver.finished.status == 0
                executors[2].stays = True
                server.send_all(messages.End("done"))
                await until(lambda: server.hosts() == ["c"])
                assert await let_leave(server, "done", within_s=0.1) == ["c"]
                executors[2].stays = False
                assert await let_leave(server, "done", within_s=GUARD_S) == []
                assert executors[0].host.heard[-1] == messages.End("done")
                for task in working:
                    task.cancel()

    run(story)


class Starter(Boxes):
    """A back end that begins hosts as the one of this machine does: so many as are asked for and not on their way.

    What asks for them may take a while, as an API does, and it sees who is on the way at the end of that.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.coming: set[str] = set()
        self.begun: list[str] = []

    async def ask(self, count: int) -> None:
        await asyncio.sleep(self.seconds)
        for _ in range(count - len(self.coming)):
            name = f"host-{len(self.begun) + 1}"
            self.begun.append(name)
            self.coming.add(name)
        await super().ask(count)

    def arrived(self, host: str) -> None:
        super().arrived(host)
        self.coming.discard(host)


@pytest.mark.parametrize("seconds", [0.0, 0.05])
@pytest.mark.parametrize("apart", ["one commit", "two commits", "while it is asked"])
def test_hosts_that_join_shortly_after_each_other_are_not_joined_by_one_more(
    tmp_path: Path, apart: str, seconds: float
) -> None:
    async def story() -> None:
        boxes = Starter(seconds)
        orders = BackendOrders(boxes, lambda problem: None)
        writing: list[tuple[Future[None], Callable[[], None]]] = []

        def submit(work: Callable[[], None]) -> Future[None]:
            writing.append((Future(), work))
            return writing[-1][0]

        async def write() -> None:
            await until(lambda: bool(writing))
            future, work = writing.pop(0)
            work()
            future.set_result(None)
            await asyncio.sleep(0)

        loop = asyncio.get_running_loop()
        with open_journal(str(tmp_path / "journal.db")) as journal:
            book = Book(journal, Job("j", hosts=2), Policy(), read_clocks().unix_s)
            aside = Aside(loop.call_soon, loop.call_soon_threadsafe, submit)
            driver = Driver(
                book,
                NoLine(),
                orders,
                Silent(),
                lambda ended: "process",
                blame_the_silent,
                WatchSettings(),
                aside=aside,
            )
            driver.begin()
            working = asyncio.create_task(orders.run())
            await until(lambda: boxes.begun == ["host-1", "host-2"])
            driver.on_hello("host-1", FakeHost("host-1").hello())
            if apart != "one commit":
                await until(lambda: bool(writing))
            if apart == "while it is asked":
                await write()
            driver.on_hello("host-2", FakeHost("host-2").hello())
            while len(boxes.here) < 2 or boxes.asked[-1] or writing:
                if writing:
                    await write()
                await asyncio.sleep(0.001)
            assert boxes.begun == ["host-1", "host-2"]
            working.cancel()

    run(story)


def test_a_back_end_that_fails_is_asked_again(tmp_path: Path) -> None:
    async def story() -> None:
        boxes, problems = Boxes(failures=3), list[str]()
        orders = BackendOrders(boxes, problems.append, retry_s=0.01)
        task = asyncio.create_task(orders.run())
        orders.put(actions.AskForHosts(2))
        orders.put(actions.Evict("a", "bad"))
        await until(lambda: bool(boxes.asked and boxes.ended))
        assert boxes.asked == [2] and boxes.ended == [("a", "bad")]
        assert problems == ["OSError: the scheduler does not answer"]
        orders.put(actions.Release("b", "slow"))
        await until(lambda: len(boxes.ended) == 2)
        assert boxes.ended[1] == ("b", "released: slow")
        task.cancel()

    run(story)


def test_the_last_word_counts(tmp_path: Path) -> None:
    async def story() -> None:
        boxes = Boxes(failures=1)
        orders = BackendOrders(boxes, lambda problem: None, retry_s=0.05)
        orders.put(actions.AskForHosts(5))
        task = asyncio.create_task(orders.run())
        await until(boxes.changed.is_set)
        orders.put(actions.AskForHosts(1))
        await until(lambda: bool(boxes.asked))
        assert boxes.asked == [1]
        task.cancel()

    run(story)
