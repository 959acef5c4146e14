"""What the memory of this host holds of a run, for `phalanx checkpoint ls`. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import NamedTuple

from phalanx.checkpoint.format.record import Record
from phalanx.checkpoint.keeper.client import connect
from phalanx.checkpoint.keeper.contract import KeeperLostError
from phalanx.checkpoint.keeper.start import address_for
from phalanx.checkpoint.restoring.choices import restorable
from phalanx.core.errors import UserError


class Kept(NamedTuple):
    """A snapshot of which this host has shards.

    Attributes:
        taken: when.
        size_bytes: of the shards here.
        shards, of: how many there are here, and how many there are.
        is_whole: training can go on from what is here alone.
    """

    step: int
    attempt: int
    taken: datetime
    size_bytes: int
    shards: int
    of: int
    is_whole: bool


def records_here(urls: Sequence[str]) -> list[Record]:
    """The records of what the keeper of the first of these destinations holds that has one; none where none has."""
    for url in urls:
        try:
            with closing(connect(address_for(url, os.environ), 0, 1)) as keeper:
                return [held.record for held in keeper.held()]
        except (KeeperLostError, UserError):  # there is none, or nobody could have started one
            continue
    return []


def kept(records: Sequence[Record]) -> list[Kept]:
    """The snapshots that these shards are of, newest first."""
    whole = {choice.snapshot for choice in restorable({"here": records})}
    shards: dict[tuple[int, int, str], dict[int, Record]] = {}
    for record in records:
        shards.setdefault((record.attempt, record.step, record.set_id), {})[record.rank] = record
    found = []
    for (attempt, step, _), of_rank in sorted(shards.items(), reverse=True):
        some = next(iter(of_rank.values()))
        taken = datetime.fromtimestamp(some.unix_ns * 1e-9, UTC)
        size_bytes = sum(record.data_bytes for record in of_rank.values())
        found.append(Kept(step, attempt, taken, size_bytes, len(of_rank), some.shards, some.snapshot in whole))
    return found
