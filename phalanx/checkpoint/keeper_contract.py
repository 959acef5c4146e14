"""What ranks, the keeper of their host, its persister and its peers on other hosts tell each other.

A rank leases memory for its shard: some slots, each large enough for one snapshot of it. It copies a snapshot into a
free slot (`KeeperClient.slot`, `taken`). The keeper then, in the background: sums and examines it and writes the record
that commits it; sends it to the peer host; hands it to the persister. A slot is free unless it holds the newest
committed copy of the shard, is not committed yet, or is being replicated or persisted.

Of all snapshots that keepers hold, `restorable` says which can be restored, newest first. The newest state is the one
of the highest attempt, and within that of the highest step. An attempt begins from the newest state it may trust, so
whatever it wrote itself comes after that; a snapshot of an earlier attempt with a higher step lies on a branch that was
given up (its host could not be reached, or a person went back), and is not taken up again while there is anything of a
later attempt. Of one attempt and step, memory goes before durable storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from phalanx.checkpoint.format.shard_plan import JobPlan, Record, ShardPlan, SnapshotId, is_stale, sick_tensors


class RefusedError(RuntimeError):
    """A later attempt has been seen: this process is a leftover of an earlier one, and must not write."""


class NotBegunError(RuntimeError):
    """No rank of this host has begun this attempt: it may come yet, or somebody has made it up."""


@dataclass(frozen=True)
class Endpoint:
    """Where the keeper of a host can be reached by those of other hosts.

    Attributes:
        host: name of the host (or of what plays one).
        addresses: of its network interfaces, the one to be used first.
        port: TCP; 0 where it does not listen.
        interface: name of the interface that was chosen.
        interface_bits_per_s: its speed; None: unknown.
    """

    host: str
    addresses: tuple[str, ...]
    port: int
    interface: str = ""
    interface_bits_per_s: int | None = None


class Slot(NamedTuple):
    """Memory for one snapshot of a shard; ``memory[: plan.data_bytes]`` is to be written."""

    number: int
    memory: memoryview


class Held(NamedTuple):
    """A committed copy that a keeper has."""

    record: Record
    is_replica: bool


@dataclass(frozen=True)
class Replicated:
    """What became of sending one snapshot of a rank to the keeper of another host.

    Attributes:
        to: name of the other host.
        problem: empty, or why it is not there, naming host and cause.
        refused: the other host has seen a later attempt: this process is a leftover of an earlier one.
        seconds, bytes: what it took; 0 where it failed.
        share: of the rate that the interface could reach; None where its speed is unknown.
    """

    rank: int
    step: int
    to: str
    problem: str = ""
    refused: bool = False
    seconds: float = 0.0
    bytes: int = 0
    share: float | None = None


@dataclass(frozen=True)
class Destination:
    """Durable storage of a job, and how its persister is to go about it.

    Attributes:
        url: a folder, or a URL that fsspec knows (``s3://bucket/run/checkpoints``).
        options: for fsspec (``endpoint_url`` …).
        nonce: of this job, in names of what is being written; the same on all ranks.
        keep_last, keep_every, keep_best, best_metric, budget_bytes: see `CheckpointConfig`; for the publisher.
        timeout_s: how long the publisher waits for the shards of other hosts.
        umask: of the process that trains: who else may read and write what is durable. Keeper and persister keep all
            else to themselves, and may have been started by a process with another one.
    """

    url: str
    options: dict[str, object] = field(default_factory=dict)
    nonce: str = ""
    keep_last: int = 2
    keep_every: int = 0
    keep_best: int = 0
    best_metric: str = "validation_loss"
    budget_bytes: int = 0
    timeout_s: float = 1800.0
    umask: int = 0o077


@dataclass(frozen=True)
class PersistTask:
    """One shard to be written; with `job`, also the whole checkpoint to be published.

    Attributes:
        record: its sums are checked while it is read; what does not match is not written.
        descriptor: the slot's memory, which stays as it is until the outcome has come.
        job: of rank 0's shard: gather the parts of all shards, and publish.
        hurry: see `Taken`.
    """

    plan: ShardPlan
    record: Record
    descriptor: int
    destination: Destination
    job: JobPlan | None = None
    hurry: bool = False


@dataclass(frozen=True)
class PersistOutcome:
    """What became of a task.

    Attributes:
        published: False: the shard is written (or not, see `problem`), and its slot is free; True: the whole checkpoint
            is published, or will not be. Every task has one of the first kind and then one of the second: where another
            host publishes, the second comes when that is seen in the storage.
        problem: empty, or what went wrong, naming file and cause.
        name: of the published checkpoint.
        seconds, bytes: writing took.
    """

    rank: int
    step: int
    published: bool
    problem: str = ""
    name: str = ""
    seconds: float = 0.0
    bytes: int = 0


Stage = Literal["committed", "replicated", "durable"]


class KeeperLostError(RuntimeError):
    """The keeper is gone or cannot be reached; what it kept is lost, training need not be."""


@dataclass(frozen=True)
class Taken:
    """A snapshot that has been copied into a slot.

    Attributes:
        step: optimizer steps done.
        state: JSON text, of rank 0; empty on others.
        stepped, metrics: as in `Record`.
        persist: whether it shall become a durable checkpoint; the same on all ranks.
        hurry: examine and persist it as fast as possible instead of sparing the cores: training waits for it.
    """

    step: int
    state: str = ""
    stepped: bool = True
    persist: bool = False
    hurry: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    unix_ns: int = 0


@dataclass(frozen=True)
class SnapshotProgress:
    """A snapshot of this rank has come to a stage, or will not.

    Attributes:
        stage: which; ``durable`` is reported to every rank when the whole checkpoint is published.
        problem: empty, or why it failed, naming file and cause. A checkpoint that is stale or sick and therefore
            quarantined is a problem at the stage ``durable``.
        name: of the durable checkpoint.
        seconds, bytes: what it took this host: examining, sending, writing.
        to: the peer host that has the replica.
    """

    step: int
    stage: Stage
    problem: str = ""
    name: str = ""
    seconds: float = 0.0
    bytes: int = 0
    to: str = ""


class RestorableSnapshot(NamedTuple):
    """A snapshot of which every shard has a copy.

    Attributes:
        snapshot: which.
        plans: SHA-256 of the plan of each shard, by rank.
        hosts: names of the hosts that have a copy of each shard, by rank; never none.
    """

    snapshot: SnapshotId
    plans: dict[int, str]
    hosts: dict[int, list[str]]

    def without(self, bad: set[tuple[str, int]]) -> RestorableSnapshot:
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


def brief(record: Record) -> str:
    """A record without the sums and the state, which are read with the copy itself."""
    short = Record(**vars(record) | {"sums": (), "state": "", "state_sum": 0, "metrics": {}, "sick": record.sick[:1]})
    return short.to_text()


def restorable(held: Mapping[str, Sequence[Record]]) -> list[RestorableSnapshot]:
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
    whole = filter(None, (_whole(snapshot, copies) for snapshot, copies in found.items()))
    return sorted(whole, key=lambda c: (newest_first(c.snapshot.attempt, c.snapshot.step), c.snapshot), reverse=True)


def _whole(snapshot: SnapshotId, copies: list[tuple[str, Record]]) -> RestorableSnapshot | None:
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
    return RestorableSnapshot(snapshot, {rank: shards[rank].plan_sha256 for rank in sorted(shards)}, hosts)
