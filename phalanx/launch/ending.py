"""When the ranks of a job are to be ended because one of them failed. A pure state machine, torch-free."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass, field

from phalanx.launch.failures import Failure

# Every process is to be gone within 2 s of a failure: these two, and the time that the system takes.
SETTLE_S = 0.4
GRACE_S = 0.9

_SIGNALS = (signal.SIGTERM, signal.SIGKILL)


@dataclass
class Ending:
    """Knows what has failed and which signal is due.

    A failure that explains itself ends the others at once. One that only says that a peer is gone waits a moment for
    that peer's own word, which SIGTERM might cut off. SIGTERM comes first, so that a rank may leave its files in order;
    SIGKILL a grace later. All times are of the host's monotonic clock.

    Args:
        settle_s, grace_s: the two waits.
    """

    settle_s: float = SETTLE_S
    grace_s: float = GRACE_S
    failures: dict[int, Failure] = field(default_factory=dict)
    due_s: float = math.inf
    _given: int = 0
    _began_s: float = math.inf

    def fail(self, failure: Failure, now_s: float) -> None:
        """A rank has failed. Its first word counts, and nothing that came only because the ranks were being ended."""
        said_ns = math.inf if failure.kind in ("signal", "status") else failure.time_ns
        late = self._given > 0 and said_ns * 1e-9 > self._began_s
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
