"""A template process that ends by itself, or does not: what is said of it. Its process is a test's."""

from __future__ import annotations

import asyncio
import socket
import subprocess

import pytest

from phalanx.launch import warm_template
from phalanx.launch.launch_messages import MessageSocket, Of, Prepare
from phalanx.launch.rank_failures import Failure
from phalanx.launch.warm_template import TemplateGoneError, TemplateProcess

GUARD_S = 120.0


class Process:
    """Plays a `subprocess.Popen` that leaves with status 3 if it is let, or takes no notice of that."""

    pid = 1

    def __init__(self, *, leaves: bool) -> None:
        self._leaves, self.is_killed = leaves, False

    def kill(self) -> None:
        self.is_killed = True

    def wait(self, timeout: float | None = None) -> int:
        if self.is_killed:
            return -9
        if self._leaves:
            return 3
        assert timeout is not None
        raise subprocess.TimeoutExpired("python", timeout)


@pytest.mark.parametrize(("leaves", "how"), [(True, "left with exit status 3"), (False, "was killed by SIGKILL")])
def test_a_template_that_hangs_up_is_killed_only_if_it_does_not_end_by_itself(
    leaves: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails closes its socket as Python ends, which takes a while with all that it has imported."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    process = Process(leaves=leaves)
    monkeypatch.setattr(warm_template, "_start", lambda *_: (MessageSocket(ours), process))

    async def story() -> None:
        gone = asyncio.Event()
        template = TemplateProcess(Prepare([], [], "", []), {}, ".", lambda _: None, lambda *_: gone.set())
        theirs.close()
        await gone.wait()
        assert template.how == how and process.is_killed is not leaves
        with pytest.raises(TemplateGoneError, match=how):
            await template.ready

    asyncio.run(asyncio.wait_for(story(), GUARD_S))


@pytest.mark.parametrize("sends", [False, True])
def test_what_a_template_said_before_it_ended_is_heard(sends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it left without reading all, or where that is found out by sending."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    monkeypatch.setattr(warm_template, "_start", lambda *_: (MessageSocket(ours), Process(leaves=True)))

    async def story() -> None:
        gone, heard = asyncio.Event(), list[object]()
        template = TemplateProcess(Prepare([], [], "", []), {}, ".", heard.append, lambda *_: gone.set())
        last_words = Of(1, Failure(3, 1, "raised", 1, "KeyError"))
        MessageSocket(theirs).send(last_words)
        theirs.close()  # what it was to prepare is unread
        if sends:
            with pytest.raises(TemplateGoneError):
                template.signal(1, [3], 15)
        await gone.wait()
        assert heard == [last_words]

    asyncio.run(asyncio.wait_for(story(), GUARD_S))
