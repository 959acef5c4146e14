"""When the keeper ends. Torch-free."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

_EMPTY_TTL_S = 120.0  # ranks may take a while to import what they need
_PERSIST_GRACE_S = 3600.0


@dataclass
class Life:
    """Ends when every rank that began has finished, or some time after the last one hung up.

    Attributes:
        ttl_s: how long, counted from when there was last a rank connected.
    """

    ttl_s: float
    _attempt: int = 0
    _began: set[int] = field(default_factory=set)
    _finished: set[int] = field(default_factory=set)
    _was_connected: bool = False
    _alone_since_s: float = field(default_factory=time.monotonic)

    def begin(self, rank: int, attempt: int) -> None:
        """A rank belongs to an attempt; those of lower ones do not count any more."""
        if attempt > self._attempt:
            self._attempt = attempt
            self._began.clear()
            self._finished.clear()
        self._began.add(rank)
        self._finished.discard(rank)

    def finish(self, rank: int) -> None:
        """The job has ended well for a rank."""
        self._finished.add(rank)

    def stay(self) -> None:
        """Somebody is about to connect: not to end because the ranks before have finished."""
        self._finished.clear()
        self._alone_since_s = time.monotonic()

    def is_over(self, connected: int, *, is_idle: bool, is_persisting: bool, is_empty: bool = False) -> bool:
        """Whether the keeper ends now.

        Args:
            connected: how many ranks are.
            is_idle: whether nothing is on its way through the stages.
            is_persisting, is_empty: see `left_s`.
        """
        if connected or self._was_connected:
            self._alone_since_s = time.monotonic()
        self._was_connected = connected > 0
        if self._began and self._began <= self._finished and is_idle:
            return True
        return not connected and self.left_s(is_persisting=is_persisting, is_empty=is_empty) <= 0

    def left_s(self, *, is_persisting: bool, is_empty: bool = False) -> float:
        """How long it lives if nothing happens, seconds.

        Args:
            is_persisting: what is on its way to durable storage is waited for, an hour more than the time to live.
            is_empty: it holds nothing that anybody could come back for, as after a start that was refused.
        """
        ttl_s = min(self.ttl_s, _EMPTY_TTL_S) if is_empty else self.ttl_s
        grace_s = _PERSIST_GRACE_S if is_persisting else 0.0
        return self._alone_since_s + ttl_s + grace_s - time.monotonic()
