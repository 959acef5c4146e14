"""Where ranks are and what groups are, in words: host, stage, tensor …, and the dimension that a group spans.

Taken from a layout where one is given, else from the groups themselves: a rank is the stage that it is in its pipeline
group. Nothing is assumed of the order of ranks.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.core.layout import AXES, Axis, Layout
from phalanx.detect.hangs.flight_records import GroupId
from phalanx.telemetry.trace_imports.rows import axis_of

_AXIS_OF: Mapping[str, Axis] = {
    **{axis: axis for axis in AXES},
    "pp": "pipeline",
    "dp": "replicate",
    "data": "replicate",
    "ddp": "replicate",
    "hsdp": "replicate",
    "fs": "shard",
    "fsdp": "shard",
    "cp": "context",
    "sp": "context",
    "tp": "tensor",
    "stage": "pipeline",
}
_DIMENSIONS = ("pipeline", "replicate", "data", "shard", "context", "expert", "tensor")
"""Of which a rank has a coordinate, in the order in which they are said."""

_NO_WORDS = frozenset(("parallel", "group", "with", "pg", "process", "mesh", "distributed", "undefined", "none"))
_ALL = frozenset(("default", "world", "all"))
_MOST_NAMED = 3


@dataclass
class RankPlaces:
    """Of one job.

    Args:
        ranks: of the job.
        groups: process groups with their members.
        host_of: where ranks run, as far as is known.
        layout: None: it is not known.
    """

    ranks: Collection[int]
    groups: Mapping[GroupId, Sequence[int]] = field(default_factory=dict)
    host_of: Mapping[int, str] = field(default_factory=dict)
    layout: Layout | None = None

    def __post_init__(self) -> None:
        self._spanned = {} if self.layout is None else _spanned(self.layout)
        self._numbers: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
        self._coordinates: dict[int, dict[str, int]] = defaultdict(dict)
        alike: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        for group, members in self.groups.items():
            alike[self.dimension(group.description, members)].add(tuple(members))
        for dimension, found in alike.items():
            for number, members in enumerate(sorted(found)):
                self._numbers[dimension, members] = (number, len(found))
                if dimension in _DIMENSIONS and len(members) > 1 and self.layout is None:
                    for place, rank in enumerate(members):
                        self._coordinates[rank].setdefault(dimension, place)

    def dimension(self, description: str, members: Sequence[int]) -> str:
        """What a group spans: ``tensor``, ``pipeline``, ``data``, ``expert``, ``shard·context``, ``all`` …

        By its description; where that is none of a dimension, by the layout; else the description itself.
        """
        known = dimension_of(description)
        if known in _DIMENSIONS:
            return known
        if len(members) == len(self.ranks) > 0:
            return "all"
        return self._spanned.get(tuple(sorted(members)), known or "unnamed")

    def group_name(self, group: GroupId, members: Sequence[int]) -> str:
        """Such as ``shard-1``: the second group of its dimension; ``all`` where there is one alone."""
        dimension = self.dimension(group.description, members)
        number, count = self._numbers.get((dimension, tuple(members)), (0, 1))
        return f"{dimension}-{number}" if count > 1 else dimension

    def coordinates(self, rank: int) -> dict[str, int]:
        """Place of a rank along each dimension that the job uses; empty: not known."""
        if self.layout is None or rank >= self.layout.world_size:
            found = self._coordinates.get(rank, {})
            return {name: found[name] for name in _DIMENSIONS if name in found}
        here = self.layout.coordinates(rank)
        return {axis: getattr(here, axis) for axis in AXES if self.layout.size(axis) > 1}

    def describe(self, rank: int) -> str:
        """Such as ``rank 12 (host h3, stage 2, tensor 1)``."""
        host = [f"host {self.host_of[rank]}"] if rank in self.host_of else []
        words = [f"{'stage' if axis == 'pipeline' else axis} {n}" for axis, n in self.coordinates(rank).items()]
        where = ", ".join([*host, *words])
        return f"rank {rank} ({where})" if where else f"rank {rank}"

    def describe_all(self, ranks: Iterable[int]) -> str:
        """The first few of them, and how many more."""
        named = sorted(ranks)
        words = [self.describe(rank) for rank in named[:_MOST_NAMED]]
        if left := len(named) - len(words):
            return f"{', '.join(words)} and {left} more"
        return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"

    def hosts(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Where they are, each once, in the order of ranks."""
        return tuple(dict.fromkeys(self.host_of[rank] for rank in sorted(ranks) if rank in self.host_of))


def dimension_of(description: str) -> str:
    """By the words of frameworks: Megatron's ``TENSOR_MODEL_PARALLEL_GROUP``, torch's ``mesh_dp_shard`` …"""
    axis = axis_of(description)
    if axis != description:
        return axis
    words = [word for word in re.split(r"[^a-z0-9·]+", description.lower()) if word and word not in _NO_WORDS]
    if words[-1:] == ["cp"] or (len(words) == 2 and words[1] == "model"):  # data with context, TENSOR_MODEL_PARALLEL
        words = words[:-1]
    if words and set(words) <= _ALL:
        return "all"
    if len(words) == 1:
        short = {"dp": "data", "ddp": "data", "data": "data", "ep": "expert"}
        return short.get(words[0]) or str(_AXIS_OF.get(words[0], words[0]))
    return "-".join(words)


def _spanned(layout: Layout) -> dict[tuple[int, ...], str]:
    """By members: the axes of each group that the layout may have."""
    used: list[Axis] = [axis for axis in AXES if layout.size(axis) > 1]
    found: dict[tuple[int, ...], str] = {}
    for count in range(1, len(used) + 1):
        for axes in itertools.combinations(used, count):
            for members in layout.groups(axes):
                found.setdefault(tuple(sorted(members)), "·".join(axes))
    return found


def read_layout(text: str) -> Layout:
    """A layout as people write it: ``pp4·dp2·tp2``, ``pipeline=4,tensor=2``, or a run folder, whose config says it.

    Raises:
        UserError: it is none of these.
    """
    place = Path(text)
    config = place / "config.json" if place.is_dir() else place
    if config.suffix == ".json" and config.is_file():
        try:
            given = json.loads(config.read_text()).get("parallel", {})
        except (ValueError, OSError, AttributeError, RecursionError) as error:
            raise UserError(f"cannot be read: {error}", cure="name a run folder", field=str(config)) from error
        return _layout({axis: given.get(axis) or 1 for axis in AXES}, text)
    sizes: dict[str, Any] = {}
    for word in re.split(r"[\s,·x]+", text.strip()):
        found = re.fullmatch(r"([a-z]+)=?(\d{1,7})", word.lower())
        axis = _AXIS_OF.get(found[1]) if found else None
        if found is None or axis is None or axis in sizes:
            raise UserError(
                "is no layout", cure="write it like pp4,dp2,tp2, or name a run folder", field="--layout", value=text
            )
        sizes[axis] = int(found[2])
    return _layout(sizes, text)


def _layout(sizes: Mapping[str, Any], text: str) -> Layout:
    try:
        return Layout(**{one.name: int(sizes.get(one.name, 1)) for one in fields(Layout)})
    except (ValueError, TypeError) as error:
        raise UserError(str(error), cure="an axis has one rank or more", field="--layout", value=text) from error


def read_hosts(path: Path, world_size: int) -> dict[int, str]:
    """Host of each rank, by a file of one line for each host in the order of ranks.

    A line is ``HOST slots=8`` (as MPI has it), ``HOST:8``, or ``HOST 0-7 16``, which names its ranks; ``HOST`` alone
    where there is a line for each rank. ``#`` begins a comment.

    Args:
        world_size: ranks of the job.

    Raises:
        UserError: it cannot be read, says something else, or does not say where each rank is: a guess may blame
            the wrong host.
    """
    try:
        lines = [line.partition("#")[0].split() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", cure="name a file of hosts", field="--hosts") from error
    lines = [line for line in lines if line]
    cure = "write lines like 'h3 slots=8' or 'h3 24-31', or one line for each rank"
    bare = sum(len(line) == 1 and ":" not in line[0] for line in lines)
    if bare and not bare == len(lines) == world_size:
        problem = f"does not say how many of {world_size} ranks each host has"
        raise UserError(problem, cure=cure, field="--hosts", value=str(path))
    found: dict[int, str] = {}
    rank, is_counted = 0, bool(bare)
    for line in lines:
        name, _, slots = line[0].partition(":")
        counted = re.fullmatch(r"(\d{1,6})" if slots else r"slots=(\d{1,6})", slots or " ".join(line[1:]))
        if counted is not None:
            named: Sequence[int] = range(rank, rank + int(counted[1]))
            is_counted = True
        elif len(line) == 1:
            named = range(rank, rank + 1)
        else:
            named = _ranks(line[1:], path)
        if twice := found.keys() & set(named):
            raise UserError(f"places rank {min(twice)} on two hosts", cure=cure, field="--hosts", value=str(path))
        found |= dict.fromkeys(named, name)
        rank = max(found, default=-1) + 1
    if is_counted and len(found) != world_size:
        raise UserError(
            f"is of {len(found)} ranks, and the job has {world_size}",
            cure=f"{cure}; --ranks says how many the job has where dumps do not show it",
            field="--hosts",
            value=str(path),
        )
    return found


def _ranks(words: Sequence[str], path: Path) -> list[int]:
    ranks: list[int] = []
    for word in words:
        found = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?,?", word)
        if found is None:
            raise UserError(
                "is no rank of a host", cure="write lines like 'h3 24-31' or 'h3 slots=8'", field=str(path), value=word
            )
        ranks += range(int(found[1]), int(found[2] or found[1]) + 1)
    return ranks
