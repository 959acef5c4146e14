"""The driver's process: everything joined for one job. Torch-free."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.core.tasks import told
from phalanx.run.api.house import open_house
from phalanx.run.backends.base import Backend, Ordered
from phalanx.run.backends.choose import make_backend, settle
from phalanx.run.config import RunConfig, workers_on
from phalanx.run.drive.signals import heed_signals
from phalanx.run.drive.told import executor_command, watching
from phalanx.run.drive.troubles import told_to
from phalanx.run.driver.book import Book
from phalanx.run.driver.classify import class_of, suspects_named
from phalanx.run.driver.commits import Aside
from phalanx.run.driver.driver import Driver
from phalanx.run.driver.overview import known, overview
from phalanx.run.driver.serving import BackendOrders, aside_of, keep_going, let_leave
from phalanx.run.executor.accelerators import Accelerators
from phalanx.run.journal import Journal, JournalError, open_journal
from phalanx.run.judge.rules import Matcher, load_rules
from phalanx.run.now import read_clocks
from phalanx.run.people.audience import Audience, secrets_among
from phalanx.run.people.hub import Hub, Item
from phalanx.run.people.overview import Overview
from phalanx.run.people.source import SHOWN_HOSTS, Source
from phalanx.run.secrets import Token, ensure_token, server_context, without_tokens
from phalanx.run.wire.addresses import publish
from phalanx.run.wire.server import ExecutorServer

_log = logging.getLogger(__name__)

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
    """The job of the driver in this process; implements `phalanx.run.people.source.Source`."""

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
