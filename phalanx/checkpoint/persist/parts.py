"""What the writer of a shard leaves beside it in the area, for the publisher: a small JSON file. Torch-free.

It stays in the published checkpoint, listed in the manifest like every other file, and tells which rank wrote what.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from phalanx.checkpoint.format.manifest import FileEntry
from phalanx.checkpoint.format.record import Record
from phalanx.checkpoint.persist.contract import Task


class Writing(NamedTuple):
    """Which checkpoint of which start of which job: parts of another are never mixed in."""

    step: int
    attempt: int
    set_id: str
    nonce: str

    @staticmethod
    def of(task: Task) -> Writing:
        """What `task` is part of."""
        return Writing(*task.record.snapshot, task.destination.nonce)


@dataclass(frozen=True)
class Part:
    """A shard that is written.

    Attributes:
        writing: of which checkpoint.
        rank: whose shard.
        file: it.
        record: the slot's, without its sums, which said what the memory was; the file has its own.
    """

    writing: Writing
    rank: int
    file: FileEntry
    record: Record

    @staticmethod
    def of(task: Task, file: FileEntry) -> Part:
        """The shard of `task` is in `file`."""
        return Part(Writing.of(task), task.plan.rank, file, replace(task.record, sums=()))

    def to_bytes(self) -> bytes:
        """As JSON."""
        tree = asdict(self) | {"file": self.file.model_dump()}
        return (json.dumps(tree, indent=1, ensure_ascii=False) + "\n").encode()

    @staticmethod
    def from_bytes(content: bytes) -> Part:
        """The reverse of `to_bytes`.

        Raises:
            ValueError, TypeError, KeyError: it is something else.
        """
        tree: dict[str, Any] = json.loads(content)
        file = FileEntry.model_validate(tree["file"])
        record = Record.from_text(json.dumps(tree["record"]))
        return Part(Writing(*tree["writing"]), tree["rank"], file, record)


def part_name(rank: int) -> str:
    """Name of the part of `rank` in an area."""
    return f"part-{rank}.json"
