"""A driver whose process stood still, as on a machine that was paused: it hears what has come before it judges silence.

On both loops, which look at their sockets at other moments.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from driver_helpers import Town, running
from wire_helpers import Clock, calling, client_frame, driving, guarded, heartbeat, proved

from phalanx.run.clock import Now
from phalanx.run.decide.events import Event
from phalanx.run.decide.policy import Job

Run = Callable[[Coroutine[Any, Any, None]], Any]

LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


@LOOPS
def test_hosts_whose_heartbeats_have_come_meanwhile_are_not_silent(tmp_path: Path, run: Run) -> None:
    town = Town(tmp_path, ["a", "b"], Job("j", hosts=2, workers_per_host=1))
    town.begin()
    town.until(running(1))
    silent: list[Event] = []
    look, ours_and_theirs = town.driver.hosts.tick, socket.socketpair()

    def noted(now: Now) -> list[Event]:
        found = look(now)
        silent.extend(found)
        return found

    town.driver.hosts.tick = noted  # type: ignore[method-assign]

    async def story() -> None:
        loop, changed, heard = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        ours, theirs = ours_and_theirs

        def hand_on() -> None:
            town._beat()
            heard.set()

        def read() -> None:
            ours.recv(1)
            loop.call_soon(hand_on)  # as `ExecutorServer` does, for all that come in one round

        loop.add_reader(ours, read)
        task = asyncio.create_task(town.driver.keep_going(changed))
        for _ in range(10):
            await asyncio.sleep(0)
        # In one piece, so that the loop looks at nothing in between.
        theirs.send(b".")
        town.now_s += 40.0
        changed.set()
        await heard.wait()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        loop.remove_reader(ours)

    run(guarded(story))
    for end in ours_and_theirs:
        end.close()
    town.journal.close()
    assert silent == []


@LOOPS
def test_connections_on_which_something_has_come_meanwhile_are_not_closed(run: Run) -> None:
    clock = Clock()

    async def story() -> None:
        async with driving(clock=clock) as driver, calling(driver.address) as raw:
            await proved(raw)
            await driver.heard.kind("hello")
            sweeper, raw_socket = driver.server._sweeper, raw.channel._transport.get_extra_info("socket")
            assert sweeper is not None
            sweeper.cancel()
            # In one piece, so that the loop looks at nothing in between.
            os.write(raw_socket.fileno(), client_frame(heartbeat(1)))
            clock.now_s += 40.0
            driver.server._sweep_again()
            await driver.heard.until(lambda: driver.messages() or driver.server.hosts() == [])
            for _ in range(10):
                await asyncio.sleep(0)
            assert len(driver.messages()) == 1 and driver.server.hosts() == ["node-1"]

    run(guarded(story))
