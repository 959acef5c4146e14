"""What the keeper asks of the persister of its host. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from phalanx.checkpoint.format.plan import JobPlan, ShardPlan
from phalanx.checkpoint.format.record import Record


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
class Task:
    """One shard to be written; with `job`, also the whole checkpoint to be published.

    Attributes:
        record: its sums are checked while it is read; what does not match is not written.
        descriptor: the slot's memory, which stays as it is until the outcome has come.
        job: of rank 0's shard: gather the parts of all shards, and publish.
        hurry: see `phalanx.checkpoint.keeper.contract.Taken`.
    """

    plan: ShardPlan
    record: Record
    descriptor: int
    destination: Destination
    job: JobPlan | None = None
    hurry: bool = False


@dataclass(frozen=True)
class Outcome:
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

    def submit(self, task: Task) -> None:
        """Hand over a task; the process is started if there is none, and again if it has died."""
        ...

    def fileno(self) -> int:
        """Readable when there is an outcome, or the process has died; -1 while there is none."""
        ...

    def outcomes(self) -> list[Outcome]:
        """What has come; of tasks of a process that died, failures."""
        ...

    def close(self) -> None:
        """End the process, also in the middle of a task."""
        ...
