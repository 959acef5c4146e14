"""Which snapshots in memory can be restored, of all that the hosts hold. Torch-free, and a pure function.

The newest state is the one of the highest attempt, and within that of the highest step. An attempt begins from the
newest state it may trust, so whatever it wrote itself comes after that; a snapshot of an earlier attempt with a higher
step lies on a branch that was given up (its host could not be reached, or a person went back), and is not taken up
again while there is anything of a later attempt. Of one attempt and step, memory goes before durable storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from phalanx.checkpoint.format.shard_plan import Record, SnapshotId, is_stale, sick_tensors
from phalanx.checkpoint.keeper_contract import Keeper


class Choice(NamedTuple):
    """A snapshot of which every shard has a copy.

    Attributes:
        snapshot: which.
        plans: SHA-256 of the plan of each shard, by rank.
        hosts: names of the hosts that have a copy of each shard, by rank; never none.
    """

    snapshot: SnapshotId
    plans: dict[int, str]
    hosts: dict[int, list[str]]

    def without(self, bad: set[tuple[str, int]]) -> Choice:
        """Less the copies (host, rank) in `bad`; a shard may then have none."""
        kept = {rank: [host for host in hosts if (host, rank) not in bad] for rank, hosts in self.hosts.items()}
        return self._replace(hosts=kept)

    @property
    def is_whole(self) -> bool:
        """Whether every shard still has a copy."""
        return all(self.hosts.values())


def newest_first(attempt: int, step: int) -> tuple[int, int]:
    """For sorting states in reverse."""
    return attempt, step


def summary(keeper: Keeper) -> list[str]:
    """The records of what a keeper holds, without their long parts, for `restorable` on every rank."""
    return [brief(copy.record) for copy in keeper.held()]


def brief(record: Record) -> str:
    """A record without the sums and the state, which are read with the copy itself."""
    short = Record(**vars(record) | {"sums": (), "state": "", "state_sum": 0, "metrics": {}, "sick": record.sick[:1]})
    return short.to_text()


def restorable(held: Mapping[str, Sequence[Record]]) -> list[Choice]:
    """The snapshots that are whole and good, newest first.

    One counts only if each of its `Record.shards` shards has a committed copy on some host, all records of it agree
    about what belongs together, and it is neither stale nor sick.

    Args:
        held: by name of the host, the records of all copies there.
    """
    found: dict[SnapshotId, list[tuple[str, Record]]] = {}
    for host in sorted(held):
        for record in held[host]:
            found.setdefault(record.snapshot, []).append((host, record))
    choices = [_choice(snapshot, copies) for snapshot, copies in found.items()]
    whole = [choice for choice in choices if choice is not None]
    return sorted(whole, key=lambda c: (newest_first(c.snapshot.attempt, c.snapshot.step), c.snapshot), reverse=True)


def _choice(snapshot: SnapshotId, copies: list[tuple[str, Record]]) -> Choice | None:
    shards: dict[int, Record] = {}
    hosts: dict[int, list[str]] = {}
    for host, record in copies:
        first = shards.setdefault(record.rank, record)
        if (first.plan_sha256, first.data_bytes) != (record.plan_sha256, record.data_bytes):
            return None
        if host not in hosts.setdefault(record.rank, []):
            hosts[record.rank].append(host)
    records = [record for _, record in copies]
    if {record.shards for record in records} != {len(shards)} or is_stale(records) or sick_tensors(records):
        return None
    return Choice(snapshot, {rank: shards[rank].plan_sha256 for rank in sorted(shards)}, hosts)
