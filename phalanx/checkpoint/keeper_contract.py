"""What ranks, the keeper of their host, its persister and its peers on other hosts promise each other.

A rank leases memory for its shard: some slots, each large enough for one snapshot of it. It copies a snapshot into a
slot that is free and says so (`Keeper.taken`). The keeper then, in the background: sums and examines it and writes the
record that commits it; sends it to the peer host; hands it to the persister. A slot is free unless it holds the newest
committed copy of the shard, is not committed yet, or is being replicated or persisted.

Of all snapshots that keepers hold, `restorable` says which can be restored, newest first. The newest state is the one
of the highest attempt, and within that of the highest step. An attempt begins from the newest state it may trust, so
whatever it wrote itself comes after that; a snapshot of an earlier attempt with a higher step lies on a branch that was
given up (its host could not be reached, or a person went back), and is not taken up again while there is anything of a
later attempt. Of one attempt and step, memory goes before durable storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from phalanx.checkpoint.format.shard_plan import JobPlan, Record, ShardPlan, SnapshotId, is_stale, sick_tensors


class RefusedError(RuntimeError):
    """A later attempt has been seen: this process is a leftover of an earlier one, and must not write."""


class NotBegunError(RuntimeError):
    """An attempt of which no rank of this host has told: it may come yet, or somebody has made it up."""


@dataclass(frozen=True)
class Endpoint:
    """Where the keeper of a host can be reached by those of other hosts.

    Attributes:
        host: name of the host (or of what plays one).
        addresses: of its network interfaces, the one to be used first.
        port: TCP; 0 where it does not listen.
        interface: name of the interface that was chosen, and its speed where it is known.
        interface_bits_per_s: None: unknown.
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


class Vault(Protocol):
    """The memory inside the keeper, as its own threads (replicas, persister) see it. Every method may be called from
    any thread."""

    def place(self, plan: ShardPlan, snapshot: SnapshotId) -> Slot:
        """Memory for a replica that is about to arrive; never that of the newest committed copy of the shard.

        Only ranks of this host begin attempts, whose numbers were claimed in storage: a replica cannot.

        Raises:
            RefusedError: a later attempt has begun. NotBegunError: this one has not.
            OSError: there is no memory left.
        """
        ...

    def commit(self, plan: ShardPlan, slot: Slot, record: Record) -> None:
        """The replica in `slot` is whole and checked."""
        ...

    def abandon(self, plan: ShardPlan, slot: Slot) -> None:
        """What was to come into `slot` did not."""
        ...

    def held(self) -> list[Held]:
        """Committed copies."""
        ...

    def pin(self, snapshot: SnapshotId, rank: int) -> AbstractContextManager[tuple[Record, ShardPlan, int]]:
        """A committed copy, which is not overwritten within the context, and the descriptor of its memory (read only).

        Raises:
            LookupError: it is not there any more.
        """
        ...


class ReplicaPlaces(NamedTuple):
    """Which host keeps the replica of which; by name."""

    peer_of: dict[str, str]
    warnings: Sequence[str]


@dataclass(frozen=True)
class Replicated:
    """What became of sending one snapshot of a rank to the keeper of another host.

    Attributes:
        rank, step: of the snapshot.
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
        hurry: see `phalanx.checkpoint.keeper_contract.Taken`.
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
        rank, step: of the task.
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


class Persister(Protocol):
    """The keeper's handle of the persister process; its methods do not wait."""

    def prepare(self) -> None:
        """Start the process, unless there is one, so that the first task does not have to: its imports take time."""
        ...

    def submit(self, task: PersistTask) -> None:
        """Hand over a task; the process is started if there is none, and again if it has died."""
        ...

    def fileno(self) -> int:
        """Readable when there is an outcome, or the process has died; -1 while there is none."""
        ...

    def outcomes(self) -> list[PersistOutcome]:
        """What has come; of tasks of a process that died, failures."""
        ...

    def close(self) -> None:
        """End the process, also in the middle of a task."""
        ...


Stage = Literal["committed", "replicated", "durable"]


class KeeperLostError(RuntimeError):
    """The keeper is gone or cannot be reached; what it kept is lost, training need not be."""


@dataclass(frozen=True)
class Taken:
    """A snapshot that has been copied into a slot.

    Attributes:
        step: optimizer steps done.
        state: JSON text, of rank 0; empty on others.
        stepped: as in `Record`.
        persist: whether it shall become a durable checkpoint; the same on all ranks.
        hurry: examine and persist it as fast as possible instead of sparing the cores: training waits for it.
        metrics: as in `Record`.
        unix_ns: when.
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
        stage: which; ``durable`` is told to every rank when the whole checkpoint is published.
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


class Keeper(Protocol):
    """A rank's connection to the keeper of its host. Its methods do not wait unless they say so.

    Raises:
        KeeperLostError: from any method, once it is gone. RefusedError: a later attempt has been seen.
    """

    @property
    def last_attempt(self) -> int:
        """The highest attempt that the keeper had seen before this connection."""
        ...

    def held(self) -> list[Held]:
        """Committed copies of shards, own and replicas, of any rank; waits for the answer."""
        ...

    def read(self, snapshot: SnapshotId, rank: int) -> AbstractContextManager[tuple[Record, ShardPlan, memoryview]]:
        """A committed copy, to be read within the context and checked against its sums; waits until it is handed over.

        Raises:
            LookupError: it is not there any more.
        """
        ...

    def begin(self, attempt: int, set_id: str, shards: int) -> None:
        """This connection belongs to `attempt`, and its shards to the set; lower attempts are refused from now on."""
        ...

    def resume_from(self, snapshot: SnapshotId) -> None:
        """Training goes on from `snapshot`, of an earlier attempt; to be called after `begin`, before the first `slot`.

        Later copies of earlier attempts, which were not whole, are void; else they would count as the newest, and the
        only whole snapshot would be written over first. Waits for the answer.
        """
        ...

    def lease(self, plan: ShardPlan, job: JobPlan | None, slots: int, destination: Destination | None) -> None:
        """Ask for memory; it is allocated, and touched here and there, in the background (see `ready`).

        Memory of an earlier lease of the same rank and size is taken over, with what is committed in it. If it cannot
        be had, `poll` returns a problem at stage ``committed`` of step -1.

        Args:
            job: rank 0's; its host publishes.
            destination: None where nothing is ever made durable.
        """
        ...

    def replicate_to(self, peer: Endpoint | None, attempt: int, secret: bytes) -> None:
        """Send every committed snapshot of this rank to the keeper at `peer`; talk to those with `secret`, no others.

        What an earlier attempt than `attempt` wanted to send is given up.
        """
        ...

    @property
    def endpoint(self) -> Endpoint:
        """Where other keepers reach this one; it begins to listen when first asked; waits for the answer."""
        ...

    @property
    def ready(self) -> bool:
        """Whether the memory of the lease is there and can be written without page faults."""
        ...

    @property
    def busy(self) -> bool:
        """Whether the next snapshot cannot be taken yet: no memory, no free slot, or the last one is not committed, and
        replicated where that is asked for."""
        ...

    @property
    def persisting(self) -> bool:
        """Whether a snapshot of this rank is on its way to durable storage."""
        ...

    def slot(self) -> Slot:
        """A slot to write the next snapshot into; only while not `busy`."""
        ...

    def taken(self, slot: Slot, taken: Taken) -> None:
        """`slot` holds a snapshot now."""
        ...

    def poll(self) -> list[SnapshotProgress]:
        """What has happened since the last call."""
        ...

    def wait(self, step: int, stage: Stage, timeout_s: float) -> list[SnapshotProgress]:
        """Wait until the snapshot of `step` has come to `stage`, or failed to; all that happened meanwhile.

        Raises:
            TimeoutError: it has not.
        """
        ...

    def finish(self) -> None:
        """The job has ended well: the keeper ends, once every rank of the host has said so."""
        ...

    def close(self) -> None:
        """Hang up; the lease ends, what is committed stays until the keeper's time to live is over."""
        ...


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


def summary(keeper: Keeper) -> list[str]:
    """The records of what a keeper holds, without their long parts, for `restorable` on every rank."""
    return [brief(copy.record) for copy in keeper.held()]


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
    choices = [_choice(snapshot, copies) for snapshot, copies in found.items()]
    whole = [choice for choice in choices if choice is not None]
    return sorted(whole, key=lambda c: (newest_first(c.snapshot.attempt, c.snapshot.step), c.snapshot), reverse=True)


def _choice(snapshot: SnapshotId, copies: list[tuple[str, Record]]) -> RestorableSnapshot | None:
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
