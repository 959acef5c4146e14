"""Keeps a driver alive: starts it again when it dies, and passes signals on, each once.

The driver has a process group of its own. So a Ctrl-C, or a signal for a whole group, reaches this process only, and
the driver hears it once: the first asks for a stop with grace, the second for one without. SIGHUP, of a terminal that
is closed, is passed on as SIGTERM. The driver starts with both blocked and takes them when it is ready, so that none
kills it on its way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from phalanx.ipc.stop_request import ReceivedSignals

TO_BE_STARTED_AGAIN = 75
"""Exit status of a driver that had to end although the job goes on (EX_TEMPFAIL of sysexits.h)."""

_PASSED_ON = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,  # Slurm's warning that the time is short; without such a back end it stays blocked
}
_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_BAD_INPUT = 2
_MOST_FALSE_STARTS = 5
_MOST_FALSE_STARTS_LATER = 20
"""Of a job that has begun: what keeps its next driver from beginning may pass, and its ranks run on meanwhile."""

_UNHEARD_S = 2.0
"""A signal that came so shortly before a driver died was hardly heard; sent again, a stop has only less grace."""


@dataclass
class Supervisor:
    """Of one driver.

    Args:
        has_begun: whether the driver with this process number has begun.
        say: writes a line for people.
        pause_s: before the first restart; doubles with each until `most_pause_s`, and begins anew after a driver that
            lived for `settled_s`.
    """

    command: Sequence[str]
    has_begun: Callable[[int], bool]
    say: Callable[[str], None]
    pause_s: float = 0.2
    most_pause_s: float = 30.0
    settled_s: float = 60.0
    _pending: list[signal.Signals] = field(default_factory=list)
    _sent: list[signal.Signals] = field(default_factory=list)
    _sent_s: float = 0.0
    _ever_begun: bool = False
    _gives_up: bool = False

    def run(self) -> int:
        """Supervise until the driver has ended by itself; its exit status, as a shell gives it."""
        passed_on = [number for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
        with ReceivedSignals([*passed_on, signal.SIGCHLD]) as received:
            return self._run(received)

    def _run(self, received: ReceivedSignals) -> int:
        pause_s, false_starts = self.pause_s, 0
        while True:
            began_s = time.monotonic()
            try:
                pid = self._start()
            except OSError as error:  # no room for a process, which may pass
                self.say(f"the driver cannot be started: {error}; it is tried again in {self.most_pause_s:g} s")
                self._rest(self.most_pause_s, received)
                continue
            status, has_begun = self._watch(pid, received)
            self._ever_begun |= has_begun
            false_starts = 0 if has_begun else false_starts + 1
            if not self._is_to_start_again(status, has_begun):
                return _for_a_shell(status)
            if false_starts >= (_MOST_FALSE_STARTS_LATER if self._ever_begun else _MOST_FALSE_STARTS):
                self.say(f"the driver {_how(status)} {false_starts} times before it had begun: it is given up")
                return _for_a_shell(status)
            if time.monotonic() - began_s > self.settled_s:
                pause_s = self.pause_s
            self.say(
                f"the driver (process {pid}) {_how(status)}; it is started again in {pause_s:g} s, the job goes on"
            )
            self._rest(pause_s, received)
            pause_s = min(2 * pause_s, self.most_pause_s)

    def _start(self) -> int:
        pid = os.posix_spawn(
            self.command[0], list(self.command), os.environ, setpgroup=0, setsigmask=_BLOCKED, setsigdef=[signal.SIGHUP]
        )
        self._sent = []
        for number in self._pending:
            self._send(pid, number)
        self._pending = []
        return pid

    def _watch(self, pid: int, received: ReceivedSignals) -> tuple[int, bool]:
        """Until it has ended: its status, negative for a signal, and whether it had begun."""
        while True:
            numbers = [number for number in received.take(timeout_s=None) if number != signal.SIGCHLD]
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                has_begun = self.has_begun(pid)
                if not has_begun:  # it has not heard what was sent
                    self._pending = self._sent
                elif self._sent and time.monotonic() - self._sent_s < _UNHEARD_S:  # as it died
                    self._pending = self._sent[-1:]
                self._pending += [_PASSED_ON[number] for number in numbers]
                return os.waitstatus_to_exitcode(status), has_begun
            for number in numbers:
                if self._sent and not self._ever_begun and not self.has_begun(pid):
                    # Asked a second time, and nothing runs yet that would have to be ended in order.
                    self._gives_up = True
                    self._send(pid, signal.SIGKILL)
                else:
                    self._send(pid, _PASSED_ON[number])

    def _send(self, pid: int, number: signal.Signals) -> None:
        self._sent.append(number)
        self._sent_s = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def _is_to_start_again(self, status: int, has_begun: bool) -> bool:
        if self._gives_up:
            return False
        # Bad input does not end a job that had begun with the same input. A driver that has to be started again is not,
        # where we were to end too, as by a back end that moves us.
        is_no_end = status == _BAD_INPUT and self._ever_begun and not has_begun
        if is_no_end or status == TO_BE_STARTED_AGAIN:
            return not self._sent
        return status < 0

    def _rest(self, seconds: float, received: ReceivedSignals) -> None:
        """Wait; a signal ends that, for the next driver has to hear of it."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            numbers = [number for number in received.take(left_s) if number != signal.SIGCHLD]
            self._pending += [_PASSED_ON[number] for number in numbers]
            if numbers:
                return


def end_with(status: int) -> NoReturn:
    """End this process with a status, whatever its streams can still take: a terminal may be gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _for_a_shell(status: int) -> int:
    return status if status >= 0 else 128 - status


def _how(status: int) -> str:
    if status >= 0:
        return "had to end"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-status}"
