"""The driver's process: everything joined for one job.

Signals to a driver.

What the job file says, as executors and the driver's watching are told it.

Faults of the driver itself, told to people: the log has the tracebacks, but who reads it before all is wrong?

All that the program, asyncio and the HTTP server write down as errors comes here, in whatever thread.

What of a job is refused, before anything of it is made or anything of the job before is moved.

The driver's process: everything joined for one job.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import psutil

from phalanx.core.asyncio_tasks import told
from phalanx.core.errors import UserError
from phalanx.core.rate_limit import LogThrottle
from phalanx.core.units import size
from phalanx.run import messages
from phalanx.run.api.job import known
from phalanx.run.api.server import open_house
from phalanx.run.backends.base import Backend, Movable, Ordered, check_backend, make_backend, settle
from phalanx.run.clock import read_clocks, unix_s
from phalanx.run.config import RunConfig, workers_on
from phalanx.run.decide.events import StopAsked
from phalanx.run.driver.driver import Driver, Settings
from phalanx.run.driver.event_loop import BackendOrders, aside_of, keep_going, let_leave
from phalanx.run.driver.host_comparison import PeersConfig
from phalanx.run.driver.job_status import overview
from phalanx.run.driver.judgements import class_of, suspects_named
from phalanx.run.driver.write_ahead import Aside, Book
from phalanx.run.executor.accelerator_probe import Accelerators
from phalanx.run.executor.main import Settings as ExecutorSettings
from phalanx.run.journal import Journal, JournalError, open_journal
from phalanx.run.judge.log_rules import Matcher, load_rules
from phalanx.run.reports.recent_events import SHOWN_HOSTS, Hub, Item, Overview, Source
from phalanx.run.reports.webhook import Audience, check_url, secrets_among
from phalanx.run.secrets import Token, ensure_token, server_context, without_tokens
from phalanx.run.wire.driver_address import publish
from phalanx.run.wire.server import ExecutorServer

_log = logging.getLogger(__name__)


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
        except Exception:  # whoever is to be ended must not live on because of that; a job that is wanted goes on
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
            asked.append(told(loop.create_task(ask_first(backend)), "what follows from SIGTERM"))

        loop.add_signal_handler(signal.SIGTERM, ask)
    else:
        loop.add_signal_handler(signal.SIGTERM, stop, signal.SIGTERM)


def executor_command(config: RunConfig, host: str) -> list[str]:
    """The command that runs the executor of a host."""
    folder = config.run_folder.absolute()
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
        **_tls(config),
    )
    text = msgspec.json.encode(settings).decode()
    return [sys.executable, "-m", "phalanx.run.executor", text]


def _tls(config: RunConfig) -> dict[str, Any]:
    """With what executors reach the driver: where both sides show a certificate, with the driver's own."""
    tls = config.tls
    found: dict[str, Any] = {"uses_tls": bool(tls.certificate)}
    if tls.authority:
        files = {"authority": tls.authority, "certificate": tls.certificate, "key": tls.key}
        found |= {name: str(Path(file).absolute()) for name, file in files.items()}
    return found


def watching(config: RunConfig) -> Settings:
    """How the driver watches, and what it has executors prepare."""
    folder = str(Path(config.working_folder or ".").absolute())
    prepare = messages.Prepare(
        [config.script, *config.script_arguments], config.module, folder, dict(config.environment), list(config.preload)
    )
    peers = PeersConfig(config.slow, config.traffic, config.heartbeat_s)
    return Settings(config.heartbeat_s, config.limits, peers, _versions(config, prepare))


def _versions(config: RunConfig, present: messages.Prepare) -> dict[str, messages.Prepare]:
    """What executors are told to run, by the version of the code as the decision names it."""
    previous, name = config.previous, config.previous_version
    if not name:
        return {"": present}
    script = [
        previous.script or config.script,
        *(config.script_arguments if previous.arguments is None else previous.arguments),
    ]
    folder = str(Path(previous.working_folder).absolute()) if previous.working_folder else present.folder
    return {"": present, name: msgspec.structs.replace(present, script=script, folder=folder)}


_CHARACTERS = 500


class Troubles(logging.Handler):
    """Says errors that are logged to people, the same not more often than every ten seconds.

    Args:
        hub: of the people, in the event loop that runs now.
    """

    def __init__(self, hub: Hub) -> None:
        super().__init__(logging.ERROR)
        self._hub, self._loop, self._throttle = hub, asyncio.get_running_loop(), LogThrottle()

    def emit(self, record: logging.LogRecord) -> None:
        """Say it; whatever is wrong with that is not worth another error."""
        with suppress(Exception):
            text = _words(record)
            others = self._throttle.due(text)
            if others is not None:
                again = f" ({others} times more before)" if others else ""
                self._loop.call_soon_threadsafe(self._hub.say, "error", f"{text}{again}", unix_s())


@asynccontextmanager
async def told_to(hub: Hub) -> AsyncIterator[None]:
    """Within it, errors that are logged are told to people; they are written to stderr as ever."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    troubles, root = Troubles(hub), logging.getLogger()
    root.addHandler(troubles)
    try:
        yield
    finally:
        root.removeHandler(troubles)


def _words(record: logging.LogRecord) -> str:
    """One line."""
    what = record.getMessage().strip().partition("\n")[0]
    error = record.exc_info[1] if record.exc_info else None
    why = "" if error is None else f": {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return f"a fault in the driver, whose log says more: {what[:_CHARACTERS]}{why[:_CHARACTERS]}"


_RANK_BYTES = 8 << 20
"""What a process of Python takes at least."""


def refuse(config: RunConfig) -> None:
    """See that the driver, which finds all of this too, would find nothing wrong.

    Raises:
        UserError: something is.
    """
    _see_script(config)
    check_backend(config)
    load_rules([Path(rule) for rule in config.rules])
    if config.tls.files is not None:
        server_context(config.tls.files)
    if config.webhook:
        check_url(config.webhook)
    if config.backend == "local":
        _see_ranks(config)
    if "://" in config.journal:
        from phalanx.run.journal.journal_tables import place_for  # SQLAlchemy is slow to import

        place_for(config.journal, config.job_name, os.environ)


def _see_script(config: RunConfig) -> None:
    """Where the hosts are this machine, it is there."""
    if config.backend != "local":
        return
    folder = Path(config.working_folder or ".")
    if not folder.is_dir():
        cure = "give a folder that is there"
        raise UserError("is no folder", cure=cure, field="run.working_folder", value=config.working_folder)
    path = folder / config.script
    if config.module:
        _see_module(config, folder)
        return
    if path.is_file():
        return
    cure = "give the path of a Python script, or a module with -m"
    problem = "is a folder" if path.is_dir() else "there is no such file"
    raise UserError(problem, cure=cure, field="script", value=config.script)


def _see_module(config: RunConfig, folder: Path) -> None:
    """It can be found, as far as its first part goes: to look for the rest imports that."""
    name = config.script.partition(".")[0]
    paths = config.environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")).split(os.pathsep)
    # absolute, since what Python has found in "." it remembers for every working folder
    folders = [str(Path(path).absolute()) for path in (str(folder), *filter(None, paths))]
    if PathFinder.find_spec(name, folders) is None and find_spec(name) is None:
        cure = "give a module that this Python finds from the working folder, or the path of a script without -m"
        raise UserError("there is no such module", cure=cure, field="script", value=config.script)


def _see_ranks(config: RunConfig) -> None:
    """The machine has room for all ranks, and the GPUs that are asked for."""
    setting = config.workers_per_host
    if not isinstance(setting, int):
        workers_on(setting, 1, len(Accelerators().read()) if setting == "gpu" else 0)
        return
    least_bytes = config.hosts * setting * _RANK_BYTES
    if least_bytes > (total_bytes := psutil.virtual_memory().total):
        ranks, least, total = f"{config.hosts * setting:,} ranks", size(least_bytes), size(total_bytes)
        cure = "give fewer, or cpu for one on each core"
        problem = f"{ranks} take {least} and more, and this machine has {total}"
        raise UserError(problem, cure=cure, field="run.workers_per_host", value=setting)


TO_BE_STARTED_AGAIN = 75
"""Exit status of a driver that had to end although the job goes on (EX_TEMPFAIL of sysexits.h)."""

_LEAST_FILES = 65_536

_LAST_LOOK_S = 60.0
"""For whoever watches to show how the job has ended; a view gives up earlier where its terminal takes nothing."""

Show = Callable[[Source], Coroutine[Any, Any, None]]
"""Shows a job to somebody until `Source.follow` ends."""


def drive(config: RunConfig, show: Show) -> int:
    """Keep a job running until it ends; its exit status.

    Args:
        config: the job.
        show: to whoever has started it.

    Raises:
        UserError: something is wrong with the job, or another driver has it.
    """
    _allow_many_files()
    config = settle(config)
    folder = config.run_folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    matcher = Matcher(load_rules([Path(rule) for rule in config.rules]))
    ensure_token(config.token_path.absolute())
    with _journal(config) as journal:
        return _run(_Joined(config, folder, matcher, show, journal).serve())


def _journal(config: RunConfig) -> Journal:
    """The job's, whose writer this driver is now.

    Raises:
        UserError: it cannot be opened; of a job that has begun the next driver tries again.
    """
    try:
        return open_journal(config.journal_url, job=config.job_name)
    except JournalError as error:
        cure = "see that it can be written there, or give run.journal another place"
        raise UserError(f"the journal cannot be opened: {error}", cure=cure, field="run.journal") from error


def _run(work: Coroutine[Any, Any, int]) -> int:
    try:
        import uvloop
    except ImportError:  # there is none for this system
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


@dataclass
class _Joined:
    """The parts of a driver."""

    config: RunConfig
    folder: Path
    matcher: Matcher
    show: Show
    journal: Journal

    async def serve(self) -> int:
        """Serve until the job has ended, or this driver has to."""
        with aside_of(asyncio.get_running_loop()) as aside:
            return await self._serve(aside)

    async def _serve(self, aside: Aside) -> int:
        config = self.config
        setting = config.workers_per_host
        gpus = 0 if isinstance(setting, int) else len(Accelerators().read())  # of this host, which stands for all
        workers = workers_on(setting, len(os.sched_getaffinity(0)), gpus)
        book = Book(self.journal, config.to_job(workers), config.policy.to_policy(), read_clocks().unix_s)
        hub = Hub()
        people = self._people(hub)
        people.recall(self.journal.read(), self.journal.epoch)
        environment = without_tokens(os.environ)
        backend = make_backend(Ordered(config, self.folder, partial(executor_command, config), environment))
        orders = BackendOrders(backend, lambda problem: hub.say("error", problem, read_clocks().unix_s))
        server = self._server(book, lambda: driver)
        driver = Driver(
            book,
            server,
            orders,
            people,
            lambda ended: class_of(self.matcher, ended),
            suspects_named,
            watching(config),
            aside=aside,
        )
        changed = asyncio.Event()
        driver.on_change = changed.set
        heed_signals(driver, backend)
        # Whoever supervises a driver starts it with these blocked: one that comes too early waits for us.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
        async with told_to(hub), server, open_house(config, self.folder, driver, book, hub):
            publish(self.folder / "driver", server.address)
            await _begin(driver, backend)
            ordering = asyncio.create_task(orders.run())
            ordering.add_done_callback(lambda task: _step_down(driver, task))
            showing = told(asyncio.create_task(self.show(_Here(driver, book, hub))), "the view")
            try:
                await keep_going(driver, changed)
            finally:
                ordering.cancel()
            try:
                return await self._leave(driver, server, backend)
            finally:
                await people.close()
                hub.close()
                await asyncio.wait([showing], timeout=_LAST_LOOK_S)

    async def _leave(self, driver: Driver, server: ExecutorServer, backend: Backend) -> int:
        """End the job's hosts with the job; where only the driver has to end, leave them alone."""
        if driver.finished is None:
            await backend.leave()
            sys.stderr.write(f"the driver has to end, the job goes on: {driver.problem}\n")
            return TO_BE_STARTED_AGAIN
        await let_leave(server, driver.finished.reason)
        await backend.end()
        return driver.finished.status

    def _people(self, hub: Hub) -> Audience:
        """Everybody who is told; no report holds a secret that the job was given."""
        config = self.config
        token = ensure_token(config.token_path.absolute())
        known: list[Token | str] = [token, *secrets_among({**os.environ, **config.environment})]
        return Audience(hub, self.folder, config.job_name, known, config.webhook)

    def _server(self, book: Book, driver: Callable[[], Driver]) -> ExecutorServer:
        config = self.config
        host, _, port = config.listen.rpartition(":")  # checked by the config; port 0 is any
        token = ensure_token(config.token_path.absolute()).reveal().encode()
        return ExecutorServer(
            token,
            config.job_name,
            host.strip("[]"),
            int(port),
            on_hello=lambda host, hello: driver().on_hello(host, hello),
            on_heartbeats=lambda beats: driver().on_heartbeats(beats),
            on_message=lambda host, message: driver().on_message(host, message),
            on_gone=lambda host, why: driver().on_disconnected(host, why),
            marks=book.marks,
            ssl=server_context(config.tls.files) if config.tls.files else None,
            field="run.listen",
        )


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
    """Without anybody who orders hosts, a job would wait for ever."""
    if not ordering.cancelled() and (error := ordering.exception()) is not None:
        _log.error("nobody orders the back end any more", exc_info=error)
        driver.step_down(RuntimeError(f"what orders the back end has failed: {type(error).__name__}: {error}"))


@dataclass(frozen=True)
class _Here:
    """The job of the driver in this process; implements `phalanx.run.reports.recent_events.Source`."""

    driver: Driver
    book: Book
    hub: Hub

    async def overview(self) -> Overview:
        return overview(known(self.driver, self.book.addresses), read_clocks(), SHOWN_HOSTS)

    def follow(self, number: int) -> AsyncIterator[Item]:
        return self.hub.follow(number)


def _allow_many_files() -> None:
    """A descriptor for each executor, and for as many strangers, as far as this process may have them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _LEAST_FILES if hard == resource.RLIM_INFINITY else min(hard, max(soft, _LEAST_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
