"""The real driver behind the real server: journal on a disk, decisions, judges. Its back end gives no hosts.

Run as `python -m crowd.driver HOSTS WORKERS FOLDER`; the first line on stdout is the port, and each line on stdin is
answered with one line of what this process has used so far and where the job stands.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from crowd.servers import JOB, TOKEN, Ready
from phalanx.run import messages as m
from phalanx.run.clock import Now, read_clocks
from phalanx.run.decide import actions
from phalanx.run.decide.events import SuspectsNamed
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.driver.driver import Driver, WatchSettings
from phalanx.run.driver.write_ahead import Book, aside_of
from phalanx.run.journal import open_journal
from phalanx.run.wire.executor_server import ExecutorServer


class Nobody:
    """People who are not there, and a back end that has nothing."""

    def tell(self, action: actions.Action, at: Now) -> None: ...

    def heard(self, host: str, message: m.Evidence | m.WorkerEnded, at: Now) -> None: ...

    def wrote(self, lines: Sequence[m.LogLine], at: Now) -> None: ...

    def arrived(self, host: str) -> None: ...

    def put(self, action: actions.AskForHosts | actions.Evict | actions.Release) -> None: ...


class Standing(Ready):
    """Says how far the job is, too."""

    driver: Driver

    def _counts(self) -> dict[str, int]:
        state = self.driver.state
        return {
            "beats": self.driver.hosts.heartbeats,
            "hosts": len(self.driver.hosts.hosts),
            "attempt": state.attempt,
            "running": int(state.phase == "running"),
            "incidents": state.incident_count,
            "evicted": sum(host.state == "evicted" for host in state.hosts.values()),
        }


async def serve(hosts: int, workers: int, folder: Path) -> None:
    nobody, ready = Nobody(), Standing()
    # Hosts that are started by the thousand need a while until all have been heard.
    policy = Policy(joining_check="passive", passive_check_s=120.0, store_s=60.0, start_s=300.0, stop_s=120.0)
    loop = asyncio.get_running_loop()
    with open_journal(str(folder / "journal.db"), job=JOB) as journal, aside_of(loop) as aside:
        book = Book(journal, Job(JOB, hosts, workers), policy, read_clocks().unix_s)
        server = ExecutorServer(
            TOKEN,
            JOB,
            "127.0.0.1",
            0,
            silence_s=600.0,
            on_hello=lambda host, hello: driver.on_hello(host, hello),
            on_heartbeats=lambda beats: driver.on_heartbeats(beats),
            on_message=lambda host, message: driver.on_message(host, message),
            on_gone=lambda host, why: driver.on_disconnected(host, why),
        )
        driver = ready.driver = Driver(
            book,
            server,
            nobody,
            nobody,
            lambda ended: None,
            nobody_stands_out,
            WatchSettings(),
            aside=aside,
        )
        changed = asyncio.Event()
        driver.on_change = changed.set
        async with server:
            driver.begin()
            ready.listen(server.address.port)
            await driver.keep_going(changed)


def nobody_stands_out(state: object, evidence: object, at_s: float) -> SuspectsNamed:
    return SuspectsNamed(at_s, getattr(state, "attempt"), ())  # noqa: B009 - only its number is of interest


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
