"""The ``auto`` interval as a run goes on: what was measured goes in, the interval in force comes out. Torch-free.

Only rank 0's figures count, and only it asks; the others are told what is due.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.policy.interval import Costs, Failures, Interval, choose
from phalanx.core import units

FIRST_S = 60.0
"""The first checkpoint is taken after about this long, so that its costs are known."""

_WINDOW = 15  # measurements of a kind that count: the last ones, by their median
_DEAD_BAND = 1.25  # a wish for a change by less than this factor is no reason to change
_AT_MOST = 2.0  # factor by which the interval changes at a time


def adapted(now_steps: int, wanted_steps: int) -> int:
    """The interval after `now_steps` where `wanted_steps` would be best: not at every whim, and not at once."""
    low, high = now_steps / _AT_MOST, now_steps * _AT_MOST
    if max(wanted_steps / now_steps, now_steps / wanted_steps) < _DEAD_BAND:
        return now_steps
    return max(math.floor(min(max(wanted_steps, low), high)), 1)


class AutoInterval:
    """The interval in force. Its steps change only when a checkpoint has become durable.

    Args:
        config: `auto`, its bounds, `mtbf_hours` and `restart_s`.
        hosts: of the job.
        state: from `to_json` of an earlier attempt; None: there was none.
        failed: whether that attempt ended by a failure; False after a clean stop.
    """

    def __init__(
        self, config: CheckpointConfig, hosts: int = 1, state: dict[str, Any] | None = None, *, failed: bool = False
    ) -> None:
        state = state or {}
        self._config, self._hosts = config, hosts
        self._seen = int(state.get("failures", 0)) + failed
        self._observed_s = float(state.get("observed_s", 0.0))
        self._times: dict[str, deque[float]] = {
            name: deque(state.get(name, []), _WINDOW) for name in ("step_s", "stall_s", "persist_s")
        }
        self._chosen: Interval | None = None
        self._steps = 0
        self._update()

    @property
    def steps(self) -> int:
        """The interval in force, steps; 0 until a step was measured, and without ``auto``."""
        if not self._config.auto or not self._times["step_s"]:
            return 0
        return self._steps or max(math.ceil(FIRST_S / self._costs().step_s), 1)

    @property
    def explanation(self) -> str:
        """One line about it for people; empty without ``auto``."""
        if self.steps == 0:
            return ""
        if self._chosen is None:
            first = f"{self.steps:,} step{'s' if self.steps > 1 else ''}"
            return f"the first after {first} (about {units.duration(FIRST_S)}), to measure what one costs"
        if self._chosen.steps == self._steps:
            return self._chosen.explanation
        near = adapted(self._steps, self._chosen.steps) == self._steps
        return f"every {self._steps:,} steps, {'near' if near else 'on the way to'} {self._chosen.explanation}"

    @property
    def expected_durable_s(self) -> float:
        """How long a checkpoint is expected to take until it is durable: the longest of the last; 0: unknown."""
        return max(self._times["stall_s"], default=0.0) + max(self._times["persist_s"], default=0.0)

    def note_step(self, seconds: float) -> None:
        """A step without a checkpoint took so long."""
        self._times["step_s"].append(seconds)
        self._observed_s += seconds

    def note_stall(self, seconds: float) -> None:
        """A snapshot made its step and the next one so much longer."""
        self._times["stall_s"].append(max(seconds, 0.0))

    def note_durable(self, persist_s: float) -> None:
        """A checkpoint has become durable so long after its snapshot."""
        self._times["persist_s"].append(persist_s)
        self._update()

    def to_json(self) -> dict[str, Any]:
        """What the next attempt should know."""
        return {"failures": self._seen, "observed_s": self._observed_s} | {n: list(v) for n, v in self._times.items()}

    def _costs(self) -> Costs:
        found = {name: median(times) for name, times in self._times.items() if times}
        return Costs(**{"stall_s": 0.0, "persist_s": 0.0, "restart_s": self._config.restart_s} | found)

    def _update(self) -> None:
        if not all(self._times[name] for name in ("step_s", "stall_s", "persist_s")):
            return
        failures = Failures(self._hosts, self._seen, self._observed_s, self._config.mtbf_hours * 3600)
        self._chosen = choose(self._config, self._costs(), failures)
        self._steps = adapted(self._steps, self._chosen.steps) if self._steps else self._chosen.steps
