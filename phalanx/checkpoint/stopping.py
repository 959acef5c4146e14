"""Whether training has to end soon: a stop signal has come, or the scheduler's deadline is near."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from types import FrameType
from typing import Any

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.core.errors import UserError
from phalanx.core.peers import Peers
from phalanx.ipc.processes import STOP_SIGNALS

_OURS, _SLURM = "PHALANX_DEADLINE", "SLURM_JOB_END_TIME"


@dataclass(frozen=True)
class Deadline:
    """When the job will be ended.

    Attributes:
        unix_s: seconds since 1970.
        source: the environment variable that says so.
    """

    unix_s: float
    source: str


def find_deadline(environment: Mapping[str, str], now_unix_s: float) -> Deadline | None:
    """When the job will be ended, if that is known: PHALANX_DEADLINE, else SLURM_JOB_END_TIME.

    Slurm's is passed over where it is no time to come, as in a shell that outlived its job.

    Raises:
        UserError: PHALANX_DEADLINE is no time, or over already.
    """
    given = environment.get(_OURS, "")
    if given:
        return Deadline(_read(given, now_unix_s), _OURS)
    try:
        unix_s = float(environment.get(_SLURM, ""))
    except ValueError:
        return None
    return Deadline(unix_s, _SLURM) if now_unix_s < unix_s < float("inf") else None


def deadline_due(
    deadline: Deadline | None, now_unix_s: float, *, margin_s: float, durable_s: float, step_s: float
) -> bool:
    """Whether, at the end of a step, the last checkpoint has to be taken: after another step it would come too late.

    Args:
        deadline: from `find_deadline`; None: never.
        now_unix_s: now, by the clock of the host (seconds since 1970).
        margin_s: `CheckpointConfig.wall_time_margin_s`.
        durable_s: how long a checkpoint is expected to take until it is durable.
        step_s: how long the next step is expected to take.
    """
    return deadline is not None and now_unix_s + step_s + durable_s + margin_s > deadline.unix_s


def _read(text: str, now_unix_s: float) -> float:
    unix_s = _unix_s(text)
    if unix_s <= now_unix_s:
        raise UserError("is over already", cure="set it to when the job will end, or unset it", field=_OURS, value=text)
    return unix_s


def _unix_s(text: str) -> float:
    cure = "give seconds since 1970 (date +%s), or such as 2026-03-01T18:00:00+01:00"
    if re.fullmatch(r"\d+(\.\d*)?", text):
        return float(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UserError("is no time", cure=cure, field=_OURS, value=text) from None
    if moment.tzinfo is None:
        raise UserError("does not say which time zone it is in", cure=cure, field=_OURS, value=text)
    return moment.timestamp()


_TIME_IS_OVER = 1 << 16  # above all numbers of signals


class Stopping:
    """Agreed among all ranks at the end of each step, where there is something to agree on.

    Args:
        config: `wall_time_margin_s` counts.
        peers: the ranks; rank 0's deadline and clock count.
        environment: where the deadline is found.
        now_unix_s: now.
        catch: whether to catch signals, on the main thread only.

    Raises:
        UserError: PHALANX_DEADLINE is no time to come.
    """

    def __init__(
        self, config: CheckpointConfig, peers: Peers, environment: Mapping[str, str], now_unix_s: float, *, catch: bool
    ) -> None:
        self._config, self._peers = config, peers
        self._deadline = find_deadline(environment, now_unix_s) if peers.rank == 0 else None
        self._asks = catch or bool(peers.broadcast(self._deadline is not None))
        self._signal = 0
        self._before: dict[int, Any] = {}
        self._last_s = time.monotonic()
        self._step_s = 0.0
        if catch and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}

    def agreed(self, durable_s: float) -> str:
        """Why the loop has to end now, the same on all ranks; empty: it goes on.

        Args:
            durable_s: how long a checkpoint is expected to take until it is durable.
        """
        now_s = time.monotonic()
        self._step_s, self._last_s = max(0.9 * self._step_s, now_s - self._last_s), now_s
        if not self._asks:
            return ""
        number = self._peers.ask_highest(max(self._signal, self._time_is_over(durable_s)))()
        if number >= _TIME_IS_OVER:
            return "the scheduler will end the job soon"
        return signal.Signals(number).name if number else ""

    def close(self) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _time_is_over(self, durable_s: float) -> int:
        margin_s = self._config.wall_time_margin_s
        due = deadline_due(self._deadline, time.time(), margin_s=margin_s, durable_s=durable_s, step_s=self._step_s)
        return _TIME_IS_OVER if due else 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal and number == signal.SIGINT:
            raise KeyboardInterrupt  # a person who will not wait
        self._signal = number
