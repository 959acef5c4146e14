"""Tests of the host that the driver asks for, by number. Torch-free."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from phalanx.run import messages

_log = logging.getLogger(__name__)

Check = Callable[[str, Sequence[str], Sequence[int]], list[messages.CheckOutcome]]
"""Tests the host: the kind, addresses of peers, and process ids that are the job's own. May block."""


class Checking:
    """Tests once for each number, and answers as often as it is asked.

    Args:
        check: see `Check`.
        tell: is given the answers.
    """

    def __init__(self, check: Check, tell: Callable[[messages.Checked], object]) -> None:
        self._check, self._tell = check, tell
        self._answers: dict[int, messages.Checked] = {}
        self._under_way: set[int] = set()

    async def answer(self, order: messages.Check, own: Sequence[int]) -> None:
        """Test and answer; what is under way already will be answered by that."""
        if order.number in self._under_way:
            return
        if order.number not in self._answers:
            self._under_way.add(order.number)
            try:
                self._answers[order.number] = await self._test(order, own)
            finally:
                self._under_way.discard(order.number)
        self._tell(self._answers[order.number])

    async def _test(self, order: messages.Check, own: Sequence[int]) -> messages.Checked:
        began_s = time.monotonic()
        try:
            outcomes = await asyncio.to_thread(self._check, order.kind, order.peers, own)
        except Exception as error:  # the driver has to hear it, and need not wait for its limit
            _log.exception("the tests of this host have failed")
            reason = f"the tests could not be run: {type(error).__name__}: {error}"[:1000]
            outcomes = [messages.CheckOutcome("executor", "fail", reason)]
        return messages.Checked(order.number, outcomes, time.monotonic() - began_s)
