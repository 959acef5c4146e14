"""Errors and lost links of the interfaces that training uses, since the executor began. Torch-free.

The kernel counts since a card's driver was loaded, for months or so: only what has come since is news.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from phalanx.run.executor.carried import grown, is_gone
from phalanx.run.messages import Interface


class LinkTroubles:
    """Counters of the kernel, of which the first that are read count as nothing."""

    def __init__(self) -> None:
        self._kernel: dict[str, Interface] = {}
        self._since: dict[str, tuple[int, int]] = {}

    def since_begun(self, interfaces: Sequence[Interface]) -> list[Interface]:
        """The same interfaces with the errors and flaps that have come since they were first given."""
        return [self._renewed(interface) for interface in interfaces]

    def _renewed(self, now: Interface) -> Interface:
        before, (errors, flaps) = self._kernel.get(now.name, now), self._since.get(now.name, (0, 0))
        if not is_gone(now):
            errors += grown(before.errors, now.errors)
            flaps += grown(before.flaps, now.flaps)
            self._kernel[now.name], self._since[now.name] = now, (errors, flaps)
        return msgspec.structs.replace(now, errors=errors, flaps=flaps)
