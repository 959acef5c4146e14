"""Where a view gets what it shows: from the driver in this process, or over its API. Torch-free."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from phalanx.run.people.hub import Item
from phalanx.run.people.overview import Overview

SHOWN_HOSTS = 256
"""So many hosts a source shows, those in trouble first: a view is looked at, and 12,500 rows are not."""


class Source(Protocol):
    """One job."""

    async def overview(self) -> Overview:
        """The job now.

        Raises:
            OSError: the driver cannot be reached; it may be again.
        """
        ...

    def follow(self, number: int) -> AsyncIterator[Item]:
        """What is said after this number; ends, or raises OSError, where the driver cannot be reached any more."""
        ...
