"""What the first rank to give up tells all others, over the store: no collective can be trusted to end any more.

Ranks that wait for one that is gone are told so by gloo at once, and by NCCL never. So until the first step is done,
in which memory runs out if it does, each rank also looks now and then whether anybody has given up.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from torch._C._distributed_c10d import Store

from phalanx.core.errors import UserError

_WHY, _HEARD = "abort/why", "abort/heard"
# Of 12,288 ranks one or two thousand questions a second reach the store: far fewer than it can answer.
_LOOK_S = 5.0
_GRACE_S = 5.0
_STATUS = 2  # as of every UserError


class Abort:
    """One rank's view of it.

    Args:
        store: of the run's attempt; None: there is no other rank.
        serves: whether the store ends with this process.
        look_s: between two looks whether another has given up.
        grace_s: that a rank has to end by itself then, and that one which serves the store waits for the others.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int = 0,
        size: int = 1,
        *,
        serves: bool = False,
        look_s: float = _LOOK_S,
        grace_s: float = _GRACE_S,
    ) -> None:
        self._store, self._rank, self._size, self._serves = store, rank, size, serves
        self._look_s, self._grace_s = look_s, grace_s
        self._said_here = False
        self._why: UserError | None = None
        self._once = threading.Lock()

    def say(self, error: UserError) -> None:
        """Tell all ranks why this one ends; what was said first stays."""
        if self._store is None:
            return
        text = json.dumps([str(error).removesuffix(f"; {error.cure}"), error.cure])
        with suppress(RuntimeError):  # who has served the store may be gone
            self._said_here = self._store.compare_set(_WHY, "", text).decode() == text

    def said(self) -> UserError | None:
        """Why another rank has ended, if one has said so."""
        if self._store is None or self._said_here:
            return None
        with self._once, suppress(RuntimeError):  # who has served the store may be gone
            if self._why is None and self._store.check([_WHY]):
                problem, cure = json.loads(self._store.get(_WHY))
                self._why = UserError(problem, cure=cure)
                self._store.add(_HEARD, 1)
        return self._why

    def linger(self) -> None:
        """Serve the store until all others have read why this rank ends, for some seconds at most."""
        if self._store is None or not (self._said_here and self._serves):
            return
        until_s = time.monotonic() + self._grace_s
        while time.monotonic() < until_s and self._store.add(_HEARD, 0) < self._size - 1:
            time.sleep(0.05)

    @contextmanager
    def watched(self, is_over: Callable[[], bool]) -> Iterator[None]:
        """Within it this process ends soon after another has given up, even while it waits where nothing wakes it.

        Args:
            is_over: there is no more need to look.
        """
        if self._store is None:
            yield
            return
        left = threading.Event()
        thread = threading.Thread(target=self._look, args=(is_over, left), name="phalanx-abort", daemon=True)
        thread.start()
        try:
            yield
        finally:
            left.set()

    def _look(self, is_over: Callable[[], bool], left: threading.Event) -> None:
        while not left.wait(self._look_s) and not is_over():
            why = self.said()
            if why is not None and not left.wait(self._grace_s):
                sys.stderr.write(f"rank {self._rank} ends with another: error: {why}\n")
                sys.stderr.flush()
                os._exit(_STATUS)
