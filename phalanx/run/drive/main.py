"""The driver's process: everything joined for one job."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from phalanx.core.asyncio_tasks import report_failure
from phalanx.core.errors import UserError
from phalanx.core.rate_limit import LogThrottle
from phalanx.detect.logs.log_rules import Matcher, load_rules
from phalanx.run import messages
from phalanx.run.api.app import serve_job
from phalanx.run.api.job import known
from phalanx.run.backends.backend import Backend, BackendSetup, Movable, make_backend, settle
from phalanx.run.clock import unix_s
from phalanx.run.config import RunConfig, workers_on
from phalanx.run.decide.actions import Finish
from phalanx.run.decide.events import StopAsked
from phalanx.run.driver.backend_orders import BackendOrders
from phalanx.run.driver.driver import Driver, WatchSettings
from phalanx.run.driver.job_status import overview
from phalanx.run.driver.judgements import PeersConfig, class_of, suspects_named
from phalanx.run.driver.run_judges import RunJudges
from phalanx.run.driver.write_ahead import Book, aside_of, clock_of
from phalanx.run.executor.accelerator_probe import Accelerators
from phalanx.run.executor.executor_settings import ExecutorSettings
from phalanx.run.file_limit import allow_files
from phalanx.run.journal import Journal, JournalError, JournalFullError, open_journal
from phalanx.run.left_behind import clear_left
from phalanx.run.reports.job_watch import JobWatch
from phalanx.run.reports.recent_events import SHOWN_HOSTS, Hub, Item, Overview, Source
from phalanx.run.reports.training_settings import training_folder
from phalanx.run.reports.webhook import Audience, secrets_among
from phalanx.run.secrets import Token, ensure_token, server_context, without_tokens
from phalanx.run.supervise import TO_BE_STARTED_AGAIN
from phalanx.run.wire.driver_address import publish
from phalanx.run.wire.executor_server import ExecutorServer
from phalanx.telemetry.alerts.alert_receivers import addresses_of

_log = logging.getLogger(__name__)


LEAVE_S = 5.0
"""For executors to end by themselves what they have, before the back end ends them."""


class _MovedError(Exception):
    """This driver is ended, and its job is not."""


def heed_signals(driver: Driver, backend: Backend) -> None:
    """SIGINT and SIGTERM stop the job; but where a SIGTERM may mean this driver alone, the back end is asked first."""
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        driver.ask(lambda at_s: StopAsked(at_s, f"{number.name} at {socket.gethostname()}"))

    async def ask_first(movable: Movable) -> None:
        try:
            goes_on = await movable.goes_on()
        except Exception:  # a driver that is to be ended must not live on because of that; a job that is wanted goes on
            _log.exception("the back end does not say whether the job shall go on: it does")
            goes_on = True
        if goes_on:
            driver.step_down(_MovedError("its process is ended, and the next one takes over"))
        else:
            stop(signal.SIGTERM)

    loop.add_signal_handler(signal.SIGINT, stop, signal.SIGINT)
    if isinstance(backend, Movable):
        asked: list[asyncio.Task[None]] = []  # a task that nobody holds may be dropped

        def ask() -> None:
            asked.append(report_failure(loop.create_task(ask_first(backend)), "what follows from SIGTERM"))

        loop.add_signal_handler(signal.SIGTERM, ask)
    else:
        loop.add_signal_handler(signal.SIGTERM, stop, signal.SIGTERM)


def executor_command(config: RunConfig, host: str) -> list[str]:
    """The command that runs the executor of a host."""
    folder, tls = config.run_folder.absolute(), config.tls
    files: dict[str, str] = {}
    if tls.authority:  # both sides show a certificate: executors the driver's own
        files = {"authority": tls.authority, "certificate": tls.certificate, "key": tls.key}
    settings = ExecutorSettings(
        job=config.job_name,
        host=host,
        folder=str(folder),
        driver=str(folder / "driver"),
        token=str(config.token_path.absolute()),
        logs=str(config.log_folder.absolute()),
        segment_bytes=config.logs.segment_bytes,
        kept_bytes=config.logs.kept_bytes,
        rules=tuple(str(Path(rule).absolute()) for rule in config.rules),
        skip=config.checks.skip,
        checkpoints=config.checkpoint_place,
        address="127.0.0.1" if config.backend == "local" else "auto",
        hosts=config.hosts,
        is_only_host=config.backend == "local" or config.hosts == 1,
        driver_lost_s=config.driver_lost_s,
        uses_tls=bool(tls.certificate),
        **{name: str(Path(file).absolute()) for name, file in files.items()},
    )
    return [sys.executable, "-m", "phalanx.run.executor", msgspec.json.encode(settings).decode()]


def watching(config: RunConfig) -> WatchSettings:
    """How the driver watches, and what it has executors prepare, by the version of the code."""
    previous = config.previous
    folder = str(Path(config.working_folder or ".").absolute())
    present = messages.Prepare(
        [_file_of(config.script, folder, config.module), *config.script_arguments],
        config.module,
        folder,
        dict(config.environment),
        list(config.preload),
        config.starts_warm,
    )
    versions = {"": present}
    if config.previous_version:
        arguments = config.script_arguments if previous.arguments is None else previous.arguments
        folder = str(Path(previous.working_folder).absolute()) if previous.working_folder else folder
        script = [_file_of(previous.script or config.script, folder, config.module), *arguments]
        versions[config.previous_version] = msgspec.structs.replace(present, script=script, folder=folder)
    peers = PeersConfig(config.slow, config.traffic, config.heartbeat_s)
    return WatchSettings(config.heartbeat_s, config.limits, peers, versions)


def _file_of(script: str, folder: str, is_module: bool) -> str:
    """Of a folder with a ``__main__.py`` that file, as Python does."""
    inner = Path(script) / "__main__.py"
    return str(inner) if not is_module and (Path(folder) / inner).is_file() else script


_CHARACTERS = 500


class Troubles(logging.Handler):
    """Shows errors that are logged to people, the same not more often than every ten seconds.

    The log has the tracebacks, but nobody reads it before all is wrong. Errors of the program, asyncio and the HTTP
    server come here, in whatever thread.

    Args:
        hub: of the people, in the event loop that runs now.
    """

    def __init__(self, hub: Hub) -> None:
        super().__init__(logging.ERROR)
        self._hub, self._loop, self._throttle = hub, asyncio.get_running_loop(), LogThrottle()

    def emit(self, record: logging.LogRecord) -> None:
        """Show it; a fault in doing so is not worth another error."""
        with suppress(Exception):
            what = record.getMessage().strip().partition("\n")[0]
            error = record.exc_info[1] if record.exc_info else None
            why = "" if error is None else f": {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            text = f"a fault in the driver, whose log says more: {what[:_CHARACTERS]}{why[:_CHARACTERS]}"
            others = self._throttle.due(text)
            if others is not None:
                again = f" ({others} times more before)" if others else ""
                self._loop.call_soon_threadsafe(self._hub.say, "error", f"{text}{again}", unix_s())


@asynccontextmanager
async def told_to(hub: Hub) -> AsyncIterator[None]:
    """Within it, errors that are logged are shown to people; they are written to stderr as ever."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    troubles, root = Troubles(hub), logging.getLogger()
    root.addHandler(troubles)
    try:
        yield
    finally:
        root.removeHandler(troubles)


_LAST_LOOK_S = 60.0
"""For a view to show how the job has ended; it gives up earlier where its terminal takes nothing."""

Show = Callable[[Source], Coroutine[Any, Any, None]]
"""Shows a job until `Source.follow` ends."""


def drive(config: RunConfig, show: Show) -> int:
    """Keep a job running until it ends; its exit status.

    Args:
        show: to the person who has started it.

    Raises:
        UserError: something is wrong with the job, or another driver has it.
    """
    allow_files(config.hosts + config.spares)
    with suppress(Exception):  # it is no reason to run no job
        clear_left()
    config = settle(config)
    folder = config.run_folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    matcher = Matcher(load_rules([Path(rule) for rule in config.rules]))
    ensure_token(config.token_path.absolute())
    try:
        journal = open_journal(config.journal_url, job=config.job_name)
    except JournalError as error:  # of a job that has begun the next driver tries again
        cure = "see that it can be written there, or give run.journal another place"
        raise UserError(f"the journal cannot be opened: {error}", cure=cure, field="run.journal") from error
    with journal:
        try:
            return _run(_serve(config, folder, matcher, show, journal))
        except OSError as error:
            if not isinstance(error, JournalFullError) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # Before it could begin: as it runs, a driver waits for room by itself.
            sys.stderr.write(f"the driver has to end, since there is no room under {folder}: {error}\n")
            return TO_BE_STARTED_AGAIN


def _run(work: Coroutine[Any, Any, int]) -> int:
    try:
        import uvloop
    except ImportError:  # there is none for this system
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def _serve(config: RunConfig, folder: Path, matcher: Matcher, show: Show, journal: Journal) -> int:
    """Join the parts, and serve until the job has ended, or this driver has to."""
    setting = config.workers_per_host
    gpus = 0 if isinstance(setting, int) else len(Accelerators().read())  # of this host, which stands for all
    workers = workers_on(setting, len(os.sched_getaffinity(0)), gpus)
    token = ensure_token(config.token_path.absolute())
    clock = clock_of(journal.read())
    book = Book(journal, config.to_job(workers), config.policy.to_policy(), clock.read().unix_s, clock)
    hub = Hub()
    # No report holds a secret that the job was given.
    secrets: list[Token | str] = [token, *secrets_among({**os.environ, **config.environment})]
    secrets += addresses_of(config.alerts, os.environ)
    people = Audience(hub, folder, config.job_name, secrets, config.webhook)
    people.recall(journal.read(), journal.epoch)
    environment = without_tokens(os.environ)
    backend = make_backend(BackendSetup(config, folder, partial(executor_command, config), environment))
    orders = BackendOrders(backend, lambda problem: hub.say("error", problem, clock.read().unix_s))
    host, _, port = config.listen.rpartition(":")  # checked by the config; port 0 is any
    server = ExecutorServer(
        token.reveal().encode(),
        config.job_name,
        host.strip("[]"),
        int(port),
        on_hello=lambda host, hello: driver.on_hello(host, hello),
        on_heartbeats=lambda beats: driver.on_heartbeats(beats),
        on_message=lambda host, message: driver.on_message(host, message),
        on_gone=lambda host, why: driver.on_disconnected(host, why),
        marks=book.marks,
        ssl=server_context(config.tls.files) if config.tls.files else None,
        field="run.listen",
    )
    with aside_of(asyncio.get_running_loop()) as aside:
        driver = Driver(
            book,
            server,
            orders,
            people,
            lambda ended: class_of(matcher, ended),
            lambda state, evidence, at_s: judges.weighed(suspects_named(state, evidence, at_s)),
            watching(config),
            clocks=clock.read,
            aside=aside,
        )
        changed = asyncio.Event()
        driver.on_change = changed.set
        heed_signals(driver, backend)
        # The supervisor starts a driver with these blocked: one that comes too early waits for us.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
        job_watch = JobWatch(config, folder, unix_s=lambda: clock.read().unix_s)
        judges = RunJudges(config, driver, training_folder(config, folder) or folder, config.log_folder.absolute())
        people.listeners.append(judges.heard)

        def seen() -> tuple[Overview, Finish | None]:
            return overview(known(driver, book.addresses), driver.now(), 0), driver.finished

        async with told_to(hub), server, serve_job(config, folder, driver, book, hub, lambda: job_watch.figures):
            publish(folder / "driver", server.address)
            await _begin(driver, backend)
            ordering = asyncio.create_task(orders.run())
            ordering.add_done_callback(lambda task: _step_down(driver, task))
            showing = report_failure(asyncio.create_task(show(_Here(driver, book, hub))), "the view")
            watching_job = asyncio.create_task(job_watch.watch(seen))
            judging = report_failure(asyncio.create_task(judges.watch()), "the judges beside the job")
            try:
                await driver.keep_going(changed)
            finally:
                ordering.cancel()
                watching_job.cancel()
            try:
                if driver.finished is None:  # only the driver has to end: leave the hosts alone
                    await backend.leave()
                    sys.stderr.write(f"the driver has to end, the job goes on: {driver.problem}\n")
                    return TO_BE_STARTED_AGAIN
                await let_leave(server, driver.finished.reason)
                await backend.end()
                await judges.last_word(driver.finished)
                return driver.finished.status
            finally:
                judging.cancel()
                await asyncio.wait([judging])
                await job_watch.close(seen)
                await people.close()
                hub.close()
                await asyncio.wait([showing], timeout=_LAST_LOOK_S)


async def let_leave(server: ExecutorServer, reason: str, within_s: float = LEAVE_S) -> list[str]:
    """Let all executors know that the job is over, and wait until they have gone; those that have not in time."""
    server.send_all(messages.End(reason))
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while server.hosts():
                await asyncio.sleep(0.02)
    return server.hosts()


async def _begin(driver: Driver, backend: Backend) -> None:
    """Begin; where the back end of a job that runs already cannot be used just now, the next driver tries again.

    Raises:
        UserError: it cannot be used, and nothing runs yet.
    """
    try:
        await backend.begin(driver.listener())
    except UserError as error:
        if not driver.state.attempt:
            raise
        driver.step_down(error)
    else:
        driver.begin()


def _step_down(driver: Driver, ordering: asyncio.Task[None]) -> None:
    """Without a task that orders hosts, a job would wait for ever."""
    if not ordering.cancelled() and (error := ordering.exception()) is not None:
        _log.error("nobody orders the back end any more", exc_info=error)
        driver.step_down(RuntimeError(f"what orders the back end has failed: {type(error).__name__}: {error}"))


@dataclass(frozen=True)
class _Here:
    """The job of the driver in this process: a `phalanx.run.reports.recent_events.Source`."""

    driver: Driver
    book: Book
    hub: Hub

    async def overview(self) -> Overview:
        return overview(known(self.driver, self.book.addresses), self.driver.now(), SHOWN_HOSTS)

    def follow(self, number: int) -> AsyncIterator[Item]:
        return self.hub.follow(number)
