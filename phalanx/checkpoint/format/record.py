"""The record of one shard of one snapshot that lies in memory: what makes it whole, and good or not. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

CHUNK_BYTES = 4 << 20
"""The elements of a slot are summed in runs of this many bytes."""


_CONFIG = "run_config"


class SnapshotId(NamedTuple):
    """Shards belong together when all of these are the same."""

    step: int
    attempt: int
    set_id: str


@dataclass(frozen=True)
class Record:
    """Commits a slot: without it, what lies there is nothing.

    Attributes:
        step, attempt, set_id: which snapshot; see `phalanx.checkpoint.format.plan.JobPlan`.
        rank: whose shard.
        shards: how many shards make up the snapshot.
        plan_sha256: of its `ShardPlan`.
        data_bytes: length of the elements in the slot.
        sums: XXH3-64 of every `CHUNK_BYTES` of them.
        state: what training wants back besides tensors, as JSON text; rank 0's shard has it, others an empty string.
        state_sum: XXH3-64 of `state`.
        stepped: whether, since the snapshot before, the optimizer took a step with a learning rate above zero.
        changed: whether any trained tensor of this shard differs from the snapshot before of the same attempt and set;
            None where it has none, or where there is nothing to compare with.
        sick: names of trained and optimizer tensors that hold a number that is not finite; some of them.
        unix_ns: when it was taken.
        metrics: figures for keeping the best, such as ``{"validation_loss": 3.1}``.
    """

    step: int
    attempt: int
    set_id: str
    rank: int
    shards: int
    plan_sha256: str
    data_bytes: int
    sums: tuple[int, ...]
    state: str = ""
    state_sum: int = 0
    stepped: bool = True
    changed: bool | None = None
    sick: tuple[str, ...] = ()
    unix_ns: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def snapshot(self) -> SnapshotId:
        """The snapshot it is a shard of."""
        return SnapshotId(self.step, self.attempt, self.set_id)

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Record:
        """The reverse of `to_text`."""
        tree = json.loads(text)
        return Record(**tree | {"sums": tuple(tree["sums"]), "sick": tuple(tree["sick"])})


def state_text(state: Any, config: Mapping[str, Any]) -> str:
    """What a record keeps as `state`: with the config of the run, which in durable storage the manifest has."""
    return json.dumps(state | {_CONFIG: config} if config and isinstance(state, dict) else state)


def parse_state(text: str) -> tuple[Any, dict[str, Any]]:
    """The state, and the config; that is empty where it was not kept."""
    state = json.loads(text)
    config = state.pop(_CONFIG, {}) if isinstance(state, dict) else {}
    return state, config if isinstance(config, dict) else {}


def is_stale(records: list[Record]) -> bool:
    """Whether the shards of one snapshot together say that training went on and yet nothing that is trained changed."""
    told = [record.changed for record in records if record.changed is not None]
    return bool(told) and not any(told) and any(record.stepped for record in records)


def sick_tensors(records: list[Record]) -> tuple[str, ...]:
    """Names of tensors of any of the shards that hold a number that is not finite."""
    return tuple(sorted({name for record in records for name in record.sick}))
