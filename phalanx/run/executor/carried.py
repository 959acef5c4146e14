"""What the interfaces that training uses have carried in all, out of counters that do not simply grow. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.run.messages import Interface

_WRAP = 1 << 32


class Carried:
    """Bytes sent and received, since the first time that counters were read."""

    def __init__(self) -> None:
        self._bytes = 0
        self._last: dict[str, Interface] = {}

    def add(self, interfaces: Sequence[Interface]) -> int:
        """Take in counters; an interface that is new counts from now on.

        Returns:
            Bytes until now; -1: there is no interface.
        """
        for now in interfaces:
            if is_gone(now):  # what it has carried until then must not count again when it is back
                continue
            if (before := self._last.get(now.name)) is not None:
                self._bytes += grown(before.sent_bytes, now.sent_bytes)
                self._bytes += grown(before.received_bytes, now.received_bytes)
            self._last[now.name] = now
        return self._bytes if interfaces else -1


def is_gone(interface: Interface) -> bool:
    """It is not there just now, and so has no counters; they go on, or begin anew, when it is back."""
    return not (interface.is_up or interface.sent_bytes or interface.received_bytes)


def grown(before: int, now: int) -> int:
    """By how much a counter has grown that may have begun anew, or wrapped at 32 bits as old drivers' do."""
    if now >= before:
        return now - before
    wrapped = now + _WRAP - before
    return wrapped if 0 <= now < before < _WRAP and wrapped < _WRAP // 2 else max(now, 0)
