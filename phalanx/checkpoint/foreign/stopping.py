"""Whether a foreign loop has to end soon: a signal has come, or the scheduler's time is nearly over."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.policy.deadline import deadline_due, find_deadline
from phalanx.core.peers import Peers
from phalanx.ipc.processes import STOP_SIGNALS

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
