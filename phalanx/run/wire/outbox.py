"""What an executor has said that the driver may not have yet, in order. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from phalanx.run import messages
from phalanx.run.wire.codec import Kept, KeptMessage, encode

LIMIT_BYTES = 64 << 20


class Outbox:
    """Messages with their numbers, from the first that was not confirmed.

    All are kept but `Found`, of which there may be many while the driver is away: beyond `limit_bytes` the oldest of
    these are left out.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._kept: deque[tuple[int, bool, bytes]] = deque()
        self._last = 0
        self._bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, message: KeptMessage) -> None:
        """Keep it.

        Raises:
            TooLargeError: it does not fit into a frame.
        """
        content = encode(Kept(self._last + 1, message))
        self._last += 1
        self._kept.append((self._last, isinstance(message, messages.Found), content))
        self._bytes += len(content)
        if self._bytes > self._limit_bytes:
            self._leave_out()

    def confirm(self, sequence: int) -> None:
        """The driver has all up to this number."""
        while self._kept and self._kept[0][0] <= sequence:
            self._bytes -= len(self._kept.popleft()[2])

    def after(self, sequence: int) -> Iterator[tuple[int, bytes]]:
        """Those that come after this number, as frames, with their own numbers; nothing may be put meanwhile."""
        if self._last > sequence:
            yield from ((number, content) for number, _, content in self._kept if number > sequence)

    def _leave_out(self) -> None:
        left: deque[tuple[int, bool, bytes]] = deque()
        for number, may_go, content in self._kept:
            if may_go and self._bytes > self._limit_bytes // 2:  # by half, so that this is seldom done
                self._bytes -= len(content)
                self.dropped += 1
            else:
                left.append((number, may_go, content))
        self._kept = left
