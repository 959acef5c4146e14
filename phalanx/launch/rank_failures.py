"""How ranks fail: which failure came first, which only followed from it, when the others are ended, what is shown."""

from __future__ import annotations

import math
import os
import re
import runpy
import signal
import socket
import sys
import textwrap
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from phalanx.core.errors import UserError
from phalanx.core.layout import Layout
from phalanx.launch.environment import Worker

# A `UserError`, source that cannot be compiled, another exception, KeyboardInterrupt, killed by a signal, or left
# without a report.
Kind = Literal["user", "syntax", "raised", "interrupted", "signal", "status"]

# What gloo, NCCL and TCPStore say when a peer is gone, as opposed to an error of this rank.
_OF_A_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by peer|reset by peer|broken pipe|socket closed"
    r"|socket timeout|timed out (waiting|after)|watchdog caught collective|application timeout|remote process exited"
    r"|nccl\w*remote\s?error|failed to recv|failed to send|recvvalue failed|sendbytes failed|wait timeout|writeerror"
    r"|store is not available|software caused connection",
    re.IGNORECASE,
)
_OF_A_PEER_BY_TYPE = {
    "BrokenPipeError",
    "CollectiveError",  # phalanx.parallel's
    "ConnectionRefusedError",
    "ConnectionResetError",
    "DistNetworkError",
    "DistStoreError",
    "PeerError",  # phalanx.core's
}

_RUNNERS = {runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>"}


@dataclass(frozen=True)
class Failure:
    """One rank's end that was not wanted.

    Attributes:
        time_ns: on the host's monotonic clock.
        status: exit status that the job has because of it.
        text: the traceback, or the last lines that the rank wrote; may be empty.
        follows: whether it says that a peer is gone, so that it explains nothing.
    """

    rank: int
    time_ns: int
    kind: Kind
    status: int
    summary: str
    text: str = ""
    follows: bool = False


def failure_of_exception(rank: int, time_ns: int, error: BaseException) -> Failure:
    """What an uncaught exception says of its rank."""
    if isinstance(error, UserError):
        return Failure(rank, time_ns, "user", 2, str(error), follows=speaks_of_a_peer(error))
    if isinstance(error, KeyboardInterrupt):
        return Failure(rank, time_ns, "interrupted", 128 + signal.SIGINT, "interrupted")
    lines = traceback.format_exception(type(error), error, frames_of_user(error))
    summary = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}".removesuffix(": ")
    # Whether a file of source cannot be compiled; text that a program compiles by itself has no name of a file.
    is_source = isinstance(error, SyntaxError) and bool(error.filename) and not str(error.filename).startswith("<")
    kind: Kind = "syntax" if is_source else "raised"
    return Failure(rank, time_ns, kind, 1, summary, "".join(lines), follows=speaks_of_a_peer(error))


def frames_of_user(error: BaseException) -> TracebackType | None:
    """The traceback from where the launcher has called other code; all of it where the error never left it."""
    frames = error.__traceback__
    here = os.path.dirname(__file__)  # noqa: PTH120 - text is compared
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        if file not in _RUNNERS and os.path.dirname(file) != here:  # noqa: PTH120
            break
        frames = frames.tb_next
    return frames if frames is not None or isinstance(error, SyntaxError) else error.__traceback__


def failure_of_exit(rank: int, time_ns: int, code: int, last_lines: Sequence[str] = ()) -> Failure:
    """What the end of a process without a report says; `code` as subprocess has it, negative for a signal."""
    text = "".join(f"{line}\n" for line in last_lines)
    if code < 0:
        return Failure(rank, time_ns, "signal", 128 - code, f"killed by {signal_name(-code)}", text)
    return Failure(rank, time_ns, "status", code, f"left with exit status {code} and no word", text)


def speaks_of_a_peer(error: BaseException) -> bool:
    """Whether an exception, or what it was raised from, is what one sees when a peer is gone."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if type(current).__name__ in _OF_A_PEER_BY_TYPE or _OF_A_PEER.search(str(current)):
            return True
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return False


def signal_name(number: int) -> str:
    """Such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def find_culprit(failures: Iterable[Failure]) -> Failure:
    """The first failure that does not follow from another's; the first of all if every one seems to."""
    return min(failures, key=lambda failure: (failure.follows, failure.time_ns))


def describe(failures: Sequence[Failure], world_size: int, host: str, layout: Layout | None) -> str:
    """What happened, the culprit last: its traceback under a line that names rank, host and layout.

    A `UserError` is one line and has no traceback. Other ranks' failures are one line each above.
    """
    culprit = find_culprit(failures)
    others = [failure for failure in failures if failure is not culprit and failure.summary != culprit.summary]
    same = sum(failure.summary == culprit.summary for failure in failures) - 1
    # While axes are open the layout has fewer ranks than the job: it is not known yet where this one will sit.
    spans_all = layout is not None and layout.world_size == world_size
    where = f"rank {culprit.rank} of {world_size} on {host}" + place(layout if spans_all else None, culprit.rank)
    also = f", and so did {same} more" if same else ""
    others.sort(key=lambda failure: failure.time_ns)
    lines = [f"  rank {failure.rank} then: {_short(failure.summary)}" for failure in others]
    if culprit.kind == "user":
        return "\n".join([*lines, f"error: {culprit.summary} [{where}{also}]"]) + "\n"
    if culprit.kind == "interrupted":
        return f"interrupted, and so were all {world_size} ranks\n"
    summary = textwrap.shorten(culprit.summary, 200, placeholder=" …")  # all of it stands at the traceback's end
    mark = f"{where}: {summary}{also}"
    rule = "=" * min(max(len(mark), 20), 100)
    return "\n".join([*lines, rule, mark, rule, *culprit.text.splitlines()]) + "\n"


def place(layout: Layout | None, rank: int) -> str:
    """Where a rank sits, such as `` (layout pp2·tp2: pipeline 1, tensor 0)``; empty without a layout."""
    if layout is None:
        return ""
    coordinates = layout.coordinates(rank)._asdict()
    used = [f"{axis} {index}" for axis, index in coordinates.items() if getattr(layout, axis) > 1]
    return f" (layout {layout}{': ' if used else ''}{', '.join(used)})"


def _short(summary: str) -> str:
    """A summary without the source lines that C++ puts before its messages, cut to what fits on a line."""
    return textwrap.shorten(re.sub(r"\[/\S+:\d+\] ", "", summary), 120, placeholder=" …")


# Every process is to be gone within 2 s of a failure: these two, and the time that the system takes.
SETTLE_S = 0.4
GRACE_S = 0.9

_SIGNALS = (signal.SIGTERM, signal.SIGKILL)

NO_CONSEQUENCE = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""By these no rank dies just because its peers are being ended, unless it is sent them."""


@dataclass
class Ending:
    """Which ranks of a job have failed, and which signal the others are due: a pure state machine.

    A failure that explains itself ends the others at once. One that only says that a peer is gone waits a moment
    (`settle_s`) for that peer's own report, which SIGTERM might cut off. SIGTERM comes first, so that a rank may leave
    its files in order; SIGKILL `grace_s` later. All times are of the host's monotonic clock.
    """

    settle_s: float = SETTLE_S
    grace_s: float = GRACE_S
    failures: dict[int, Failure] = field(default_factory=dict)
    due_s: float = math.inf
    _given: int = 0
    _began_s: float = math.inf

    def fail(self, failure: Failure, now_s: float) -> None:
        """A rank has failed. Its first report counts, and none that came only because the ranks were being ended."""
        reported_ns = math.inf if failure.kind in ("signal", "status") else failure.time_ns
        # Peers of one that crashes see its connections closed, and are ended for that, before the system has reaped it.
        number = failure.status - 128 if failure.kind == "signal" else 0
        crashed = number in NO_CONSEQUENCE and number not in _SIGNALS[: self._given]
        late = self._given > 0 and reported_ns * 1e-9 > self._began_s and not crashed
        if late or failure.rank in self.failures:
            return
        self.failures[failure.rank] = failure
        self.end(now_s + (self.settle_s if failure.follows else 0.0))

    def end(self, at_s: float) -> None:
        """The ranks are to be ended at `at_s`, or earlier if that is planned already."""
        if not self._given:
            self.due_s = min(self.due_s, at_s)

    def signal_due(self, now_s: float) -> signal.Signals | None:
        """The signal that all ranks are to get now, or None; each is given out once."""
        if now_s < self.due_s:
            return None
        given = _SIGNALS[self._given]
        self._given += 1
        self._began_s = min(self._began_s, now_s)
        self.due_s = now_s + self.grace_s if self._given < len(_SIGNALS) else math.inf
        return given


class EndedWithPeer(SystemExit):
    """The exit of a rank that failed only because a peer is gone: who started it can tell this from a cause."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.status)
        self.failure = failure


@contextmanager
def errors_named(worker: Worker, layout: Layout | None) -> Iterator[None]:
    """Show an error that leaves the block as `launch_local` would, then leave with its exit status.

    An error that only says that a peer is gone is one line, so that the traceback that explains it is not buried. Where
    our own launcher started this process, which hears of errors by itself, nothing is done here.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if worker.launcher == "phalanx":
            raise
        failure = failure_of_exception(worker.rank, time.monotonic_ns(), error)
        text = describe([failure], worker.world_size, socket.gethostname(), layout)
        sys.stderr.write(text if not failure.follows else f"rank {worker.rank} ended with a peer: {failure.summary}\n")
        sys.stderr.flush()
        raise EndedWithPeer(failure) if failure.follows else SystemExit(failure.status) from None
