"""Faults of our own: whatever raises where nobody expects it is told, and the rest goes on."""

from __future__ import annotations

import asyncio
import gc
import io
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driver_helpers import Town, running
from rich.console import Console
from rich.text import Text

from phalanx.core.asyncio_tasks import report_failure
from phalanx.core.errors import UserError
from phalanx.run import messages
from phalanx.run.api.guard import Guard, Sessions
from phalanx.run.api.http_server import HttpServer
from phalanx.run.backends.backend import Listener
from phalanx.run.backends.local import LocalBackend
from phalanx.run.clock import Now
from phalanx.run.decide.actions import OpenIncident
from phalanx.run.decide.policy import Job
from phalanx.run.drive.main import _begin, _step_down, heed_signals, told_to
from phalanx.run.executor.host_monitor import CheckRunner
from phalanx.run.executor.main import _read_kernel
from phalanx.run.executor.workers import TEXT_CHARS, sendable
from phalanx.run.incidents import evidence_files
from phalanx.run.incidents.evidence_files import ReportKeeper
from phalanx.run.incidents.incident_pages import load
from phalanx.run.incidents.report import Incident
from phalanx.run.logs.log_files import RankLog
from phalanx.run.logs.log_lines import Tails
from phalanx.run.logs.log_pump import Pump
from phalanx.run.reports.live_view import _Painter, show
from phalanx.run.reports.recent_events import Hub, Told
from phalanx.run.reports.webhook import Webhook
from phalanx.run.secrets import Token
from phalanx.run.wire.driver_address import Address
from phalanx.telemetry.alerts.alert_receivers import Message, PostedTo

GUARD_S = 60.0


class FaultError(Exception):
    """That nobody expects."""


def run(story: Callable[[list[dict[str, Any]]], Awaitable[None]]) -> list[dict[str, Any]]:
    """What the loop was told meanwhile."""
    found: list[dict[str, Any]] = []

    async def guarded() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: found.append(context))
        await asyncio.wait_for(story(found), GUARD_S)

    asyncio.run(guarded())
    gc.collect()
    return found


def test_a_task_that_nobody_awaits_is_told_while_it_is_held() -> None:
    async def fail() -> None:
        raise FaultError("x")

    async def story(found: list[dict[str, Any]]) -> None:
        held = [
            report_failure(asyncio.create_task(fail()), "the work"),
            report_failure(asyncio.create_task(asyncio.sleep(9)), "more"),
        ]
        held[1].cancel()
        await asyncio.wait(held)
        await asyncio.sleep(0)
        assert [context["message"] for context in found] == ["the work has failed"]

    assert isinstance(run(story)[0]["exception"], FaultError)


def test_of_reports_one_that_cannot_be_made_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good = evidence_files.store

    def store(folder: Path, incident: Incident) -> Path:
        if incident.number == 1:
            raise FaultError("a page that cannot be made")
        return good(folder, incident)

    def deliver(incident: Incident, page: Path) -> None:
        raise FaultError("nobody is told")

    monkeypatch.setattr(evidence_files, "store", store)
    kept = ReportKeeper(tmp_path, "j", (), deliver)
    for number in (1, 2, 3):
        kept.tell(OpenIncident(number, 1, "x", "y"), Now(0, 1.0))
    kept.close(GUARD_S)
    assert [load(tmp_path, number).number for number in (2, 3)] == [2, 3]
    assert "a page that cannot be made" in caplog.text and "nobody is told" in caplog.text


def test_a_webhook_outlives_what_it_did_not_expect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def attempt(self: PostedTo, message: Message) -> str:
        raise FaultError("https://x/s3cr3t")

    monkeypatch.setattr(PostedTo, "send", attempt)
    webhook = Webhook("https://example.org/s3cr3t", pauses_s=())
    for _ in range(2):
        webhook.post(Incident(number=1, job="j", attempt=1, facts=[]), Path("p"))
    webhook.close(GUARD_S)
    assert (webhook.delivered, webhook.given_up) == (0, 2)
    assert "FaultError" in caplog.text and "s3cr3t" not in caplog.text


def test_a_view_goes_on_after_what_cannot_be_drawn(caplog: pytest.LogCaptureFixture) -> None:
    drawn, lines = list[int](), list[str]()
    painter = _Painter(lambda found: lines.extend(str(line) for line in found))

    def fail() -> None:
        raise FaultError("no such glyph")

    painter.put(fail)
    painter.put(Text("one"))
    painter.put(Text("two"))
    painter.put(lambda: drawn.append(1))
    painter.put(Text("three"))
    painter.close(GUARD_S, GUARD_S)
    assert drawn == [1] and lines == ["one", "two", "three"] and "no such glyph" in caplog.text


def test_a_view_that_cannot_read_on_says_so() -> None:
    class Broken:
        async def overview(self) -> Any:
            raise ConnectionError("not now")

        async def follow(self, number: int) -> Any:
            raise FaultError("no such item")
            yield

    with pytest.raises(FaultError):
        asyncio.run(show(Broken(), Console(file=io.StringIO())))


def test_a_rank_whose_log_fails_is_read_on(tmp_path: Path) -> None:
    class Broken(RankLog):
        def write(self, lines: Sequence[str], unix_s: float) -> None:
            raise FaultError("a log of ours")

    async def story(found: list[dict[str, Any]]) -> None:
        tails = Tails()
        pump = Pump(tails, lambda rank, lines: None, lambda: 1.0)
        ours, theirs = os.pipe()
        pump.add(3, ours, Broken(tmp_path, 3, 1))
        for text in (b"one\n", b"two\n"):
            os.write(theirs, text)
            while text.decode().strip() not in tails.last(3):
                await asyncio.sleep(0.01)
        os.close(theirs)
        await pump.close()

    found = run(story)
    assert [context["message"] for context in found] == ["writing the log of rank 3 has failed"] * 2


def test_tests_of_a_host_that_cannot_be_run_are_answered() -> None:
    answers: list[messages.Checked] = []

    def check(kind: str, peers: Sequence[str], own: Sequence[int]) -> list[messages.CheckOutcome]:
        raise FaultError("x" * 10_000)

    asyncio.run(CheckRunner(check, answers.append).answer(messages.Check(7, "quick", []), []))
    ((outcome,),) = [answer.outcomes for answer in answers]
    assert (answers[0].number, outcome.outcome) == (7, "fail")
    assert "could not be run: FaultError: xxx" in outcome.reason and len(outcome.reason) <= 1000


def test_a_kernel_log_that_cannot_be_read_is_let_go() -> None:
    class Log:
        def __init__(self) -> None:
            self.ours, self.theirs = os.pipe()
            self.reads = 0
            os.write(self.theirs, b"x")

        def fileno(self) -> int:
            return self.ours

        def read(self) -> None:
            self.reads += 1
            raise FaultError("no such record")

        def close(self) -> None:
            self.ours = -1

    async def story(found: list[dict[str, Any]]) -> None:
        log: Any = Log()
        executor: Any = SimpleNamespace(monitor=SimpleNamespace(kernel_findings=log.read))
        asyncio.get_running_loop().add_reader(log.fileno(), _read_kernel, log, executor)
        for _ in range(20):
            await asyncio.sleep(0)
        assert log.reads == 1

    assert run(story) == []


def test_text_is_cut_to_what_a_message_holds() -> None:
    cut = sendable("begin" + "\udc80ä" * 1_000_000 + "end")
    assert cut.startswith("begin?ä") and cut.endswith("end") and "characters are left out" in cut
    assert len(cut) < TEXT_CHARS + 100 and cut.encode()
    assert sendable("short") == "short"


def test_a_host_is_gone_also_where_nothing_can_be_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(found: list[dict[str, Any]]) -> None:
        gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        backend = LocalBackend(tmp_path / "executors", lambda host: [sys.executable, "-c", ""], 1)
        await backend.begin(Listener(lambda host, why: gone.set_result(host), lambda left_s: None))

        def fail(self: Path, missing_ok: bool = False) -> None:
            raise PermissionError(30, "Read-only file system")

        monkeypatch.setattr(Path, "unlink", fail)
        await backend.ask(1)
        assert await gone == "host-1"
        monkeypatch.undo()

    assert run(story) == []
    assert "Read-only file system" in caplog.text


def test_faults_of_the_driver_are_told_to_people() -> None:
    hub = Hub()

    async def story() -> None:
        async with told_to(hub):
            asyncio.get_running_loop().call_soon(lambda: 1 / 0)  # asyncio writes it down
            await asyncio.sleep(0)
            for _ in range(3):
                await asyncio.to_thread(logging.getLogger("phalanx.x").error, "the store\nis %s", "shut")
            logging.getLogger("phalanx.x").warning("it is late")
            await asyncio.sleep(0.01)
        logging.getLogger("phalanx.x").error("nobody is there")

    asyncio.run(story())
    said = [item.text for item in hub.since(0) if isinstance(item, Told)]
    assert len(said) == 2 and "ZeroDivisionError: division by zero" in said[0]
    assert said[1] == "a fault in the driver, whose log says more: the store"


class Begins:
    """A back end that cannot begin."""

    async def begin(self, listener: Listener) -> None:
        raise UserError("Slurm does not answer", cure="look at slurmctld")


def test_a_back_end_that_cannot_be_used_just_now_is_no_end_of_a_job_that_runs(tmp_path: Path) -> None:
    town = Town(tmp_path, "a", Job("j", hosts=1))
    backend: Any = Begins()
    with pytest.raises(UserError, match="Slurm"):
        asyncio.run(_begin(town.driver, backend))
    town.begin()
    town.until(running(1))
    asyncio.run(_begin(town.driver, backend))
    assert "Slurm does not answer" in str(town.driver.problem) and town.driver.finished is None
    town.journal.close()


def test_a_driver_without_anybody_who_orders_hosts_steps_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise FaultError("no orders")

    async def story() -> None:
        town = Town(tmp_path, "a", Job("j", hosts=1))
        ordering = asyncio.create_task(fail())
        ordering.add_done_callback(lambda task: _step_down(town.driver, task))
        await asyncio.wait([ordering])
        await asyncio.sleep(0)
        assert "no orders" in str(town.driver.problem)
        town.journal.close()

    asyncio.run(story())
    assert "nobody orders the back end any more" in caplog.text and "Traceback" in caplog.text


def test_a_sigterm_that_nobody_can_explain_ends_the_driver_alone(tmp_path: Path) -> None:
    class Silent:
        async def goes_on(self) -> bool:
            raise FaultError("no answer")

        async def begin(self, listener: Listener) -> None: ...

    async def story() -> None:
        town = Town(tmp_path, "a", Job("j", hosts=1))
        changed = asyncio.Event()
        town.driver.on_change = changed.set
        heed_signals(town.driver, Silent())  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(changed.wait(), GUARD_S)
        assert town.driver.problem is not None and town.driver.state.ending is None
        town.journal.close()

    asyncio.run(story())


def guarded_nothing() -> Guard:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    token = Token("0" * 64)
    return Guard(app, token, Sessions(token, "demo", time.time))


def test_an_interface_that_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(found: list[dict[str, Any]]) -> None:
        async with HttpServer(guarded_nothing(), Address("127.0.0.1", 0), None, None) as server:

            def fail() -> None:
                raise FaultError("a timer of the server")

            monkeypatch.setattr(server._server, "on_tick", lambda counter: fail())
            while not found:
                await asyncio.sleep(0.01)

    assert run(story)[0]["message"] == "the interface for people has failed"


def test_an_interface_that_does_not_begin_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(found: list[dict[str, Any]]) -> None:
        server = HttpServer(guarded_nothing(), Address("127.0.0.1", 0), None, None)

        async def fail(sockets: Any) -> None:
            raise FaultError("no server")

        monkeypatch.setattr(server._server, "serve", fail)
        with pytest.raises(FaultError):
            async with server:
                pass
        server._socket.close()

    run(story)


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
