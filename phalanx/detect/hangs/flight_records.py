"""What a rank's NCCL flight record says: what it has launched in which group, and what of that is not done.

Read from a dump of torch (versions 2.1 to 2.10), or from what `condense` leaves of one. Three things are not as they
look:

- A group's id counts on each rank by itself, and groups of one description are many. What joins them over ranks is
  description and members; names grow in the order in which groups were made, and so do ids.
- Without ``TORCH_NCCL_ENABLE_TIMING`` nothing is ever ``started``: ``scheduled`` only says that it is not complete.
- What is launched as a bundle (``batch_isend_irecv``) has one closing entry whose state is that of all; the entries of
  its parts stay ``scheduled`` for ever.

The recorder is a ring: it forgets the oldest, done or not. So that something is missing before the oldest entry says
nothing. What it has forgotten may still be known: collectives of a group end in order, the watchdog counts them, and a
rank that has finished what it launched later was not held up by it.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

_TRANSFER = re.compile(r"(?P<what>send|recv) (?P<own>\d{1,9})(?:->|<-)(?P<peer>\d{1,9})")
_SAME_SIZE = frozenset(
    ("all_reduce", "broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "_all_gather_base", "_reduce_scatter_base")
)
"""All ranks have to give as many values; of the others each may give what it likes."""

_KEPT = (
    *("record_id", "pg_id", "process_group", "collective_seq_id", "p2p_seq_id", "seq_id", "profiling_name", "state"),
    *("is_p2p", "input_sizes", "input_dtypes", "time_discovered_started_ns"),
)
_MOST_RANKS = 1 << 20
_LONGEST_RING = 10_000_000

UNKNOWN_CALL = "coalesced"  # name of a launch of which parts may be missing
AT_ONCE = 4
"""Transfers that a rank may launch before it waits for the first of them: both ways with both neighbours. A ring has at
least as many places."""


class GroupId(NamedTuple):
    """A process group, the same on all of its ranks.

    Attributes:
        members: as ranges, such as ``0-6/2 9``; empty: not known.
        turn: of several groups that are alike, in the order in which they were made.
    """

    description: str
    members: str
    turn: int = 0


class Transfer(NamedTuple):
    """A send to `peer`, or a receive from it; a rank of the job."""

    is_send: bool
    peer: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Something that a rank has launched.

    Attributes:
        order: among all launches of the rank.
        number: among the collectives of the group.
        turn: among its transfers, as this rank counts them.
        shape: what has to be the same on all ranks, such as ``120 Float``; empty: nothing is known.
        is_started: on the GPU; only known where `FlightRecord.has_timing`.
        transfers: empty: it is a collective.
        created_ns: Unix time at which it was launched; 0: not known.
    """

    order: int
    number: int
    turn: int
    name: str
    shape: str = ""
    is_done: bool = False
    is_started: bool = False
    transfers: tuple[Transfer, ...] = ()
    created_ns: int = 0


@dataclass
class GroupPart:
    """What a rank has launched in a group.

    Attributes:
        newest: number of the last collective that is known to be launched; -1: none is.
        status: launched and completed last, as the rank's watchdog counts them; collectives and transfers alike, so it
            says nothing of a group that has both. None: not known.
    """

    launches: list[Launch] = field(default_factory=list)
    newest: int = -1
    status: tuple[int, int] | None = None
    has_transfers: bool = False
    is_unused: bool = False

    @property
    def counts_calls(self) -> bool:
        """Whether `status` may count collectives: it may lag behind what is launched while it is read."""
        near = not self.launches or self.status is None or self.newest - 1 <= self.status[0] <= self.newest
        return not self.has_transfers and near


@dataclass
class FlightRecord:
    """Of one rank.

    Attributes:
        passed: order of the newest launch that is done; what was launched before it and is not done held up nothing.
        oldest: order of the oldest entry that was in the ring; nothing is known of what was launched before it.
        lacks: something that is not done is known not to be here, or cannot be made out.
        has_groups: it names all groups that the rank has used.
        has_strays: it has launches of a group without its members.
    """

    parts: dict[GroupId, GroupPart] = field(default_factory=dict)
    passed: int = -1
    oldest: int = 0
    has_timing: bool = False
    lacks: bool = False
    has_groups: bool = False
    has_strays: bool = False

    @property
    def tells_all(self) -> bool:
        """Whether it holds everything that may hold up the rank."""
        return not self.lacks and (self.oldest <= 0 or self.oldest + AT_ONCE - 1 <= self.passed)


class MemberTexts:
    """Members of groups as text and as ranks; each text is read once, since thousands of ranks repeat it."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._ranks: dict[str, tuple[int, ...]] = {"": ()}

    def text(self, given: Any) -> str:
        """One text for the same members; empty where they cannot be read."""
        key = str(given)
        if key not in self._texts:
            ranks = _ranks_of(key)
            self._texts[key] = _ranges(ranks)
            self._ranks.setdefault(self._texts[key], ranks)
        return self._texts[key]

    def ranks(self, text: str) -> tuple[int, ...]:
        """The ranks of what `text` has returned."""
        return self._ranks[text]


def read_record(dump: Mapping[str, Any], texts: MemberTexts) -> FlightRecord:
    """What a dump says, or a condensed one.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, IndexError: it is not a dump, or nothing is left of it.
    """
    entries, left_out = dump["entries"], dump.get("left_out", 0)
    if left_out and not entries:
        raise ValueError("all entries were left out")
    ids = _group_ids(dump, texts)
    found = FlightRecord({group: GroupPart() for group in ids.values()})
    extent = dump["extent"] if "extent" in dump else _extent(entries)
    found.passed, found.oldest, found.lacks = extent["newest_completed"], extent["oldest"], left_out > 0
    found.has_timing = any(e.get("state") == "started" or e.get("time_discovered_started_ns") for e in entries)
    found.has_groups = 0 < len(ids) >= len(_dict(dump, "pg_status"))
    statuses = _statuses(dump, entries)
    for bundle in _bundles(entries):
        name = _name(entries[bundle[0]])
        group = ids.setdefault(name, GroupId(" ".join(reversed(_group_words(entries[bundle[0]]))), ""))
        found.has_strays |= not group.members
        part = found.parts.setdefault(group, GroupPart())
        launch = _launch([entries[place] for place in bundle], texts.ranks(group.members), extent)
        part.newest = max(part.newest, launch.number)
        part.has_transfers |= bool(launch.transfers) or any(_int(entries[i], "p2p_seq_id") > 0 for i in bundle)
        if launch.transfers or not _is_transfer(entries[bundle[-1]]):
            part.launches.append(launch)
        else:  # the peer is not known: the ring has forgotten it, or this version of torch does not record it
            found.lacks |= not launch.is_done
    here = {_order(entry, place) for place, entry in enumerate(entries)}
    for name, group in ids.items():
        part = found.parts.setdefault(group, GroupPart())
        part.status = statuses.get(name)
        part.is_unused = (
            not part.launches and name not in statuses and len(statuses) == len(_dict(dump, "pg_status")) > 0
        )
        _settle(part, found.passed, here if extent["is_active"] else set(), statuses.get(name, (-1, -1)))
        if part.status is not None:  # whether the watchdog has something under way that is not here
            launched, done = part.status
            pending = [one.number for one in part.launches if not one.is_done and not one.transfers]
            if pending:
                found.lacks |= part.counts_calls and min(pending) > done + 1
                found.lacks |= not part.has_transfers and launched > part.newest
            else:
                found.lacks |= launched > done and all(one.is_done for one in part.launches)
    return found


def condense(dump: Mapping[str, Any], most_entries: int = 1 << 30) -> dict[str, Any]:
    """What matters of a dump, in the form of a dump: what is not done, and per group the newest that is.

    Args:
        most_entries: where more remain, those between the first and the last of each group go. What has gone though it
            was not done is counted as ``left_out``.
    """
    entries = dump["entries"]
    extent = dump["extent"] if "extent" in dump else _extent(entries)
    kept: dict[tuple[str, bool], list[int]] = defaultdict(list)
    newest: dict[tuple[str, bool], int] = {}
    for bundle in _bundles(entries):
        key = (_name(entries[bundle[0]]), _is_transfer(entries[bundle[0]]))
        if entries[bundle[-1]].get("state") == "completed":
            newest[key] = bundle[-1]
        else:
            kept[key] += bundle
    # As many of the first of each group as fit, and the last: where it stands and how far it was launched.
    first = max(map(len, kept.values()), default=0)
    while first > 1 and sum(min(len(group), first + 1) for group in kept.values()) > most_entries:
        first //= 2
    places = [place for group in kept.values() for place in dict.fromkeys([*group[:first], *group[-1:]])]
    left_out = dump.get("left_out", 0) + sum(map(len, kept.values())) - len(places)
    texts = MemberTexts()
    config = {
        name: {"name": one.get("name", name), "desc": one.get("desc", ""), "ranks": texts.text(one.get("ranks", ""))}
        for name, one in _dict(dump, "pg_config").items()
    }
    return {
        "version": dump.get("version", ""),
        "pg_config": config,
        "pg_status": dict(_dict(dump, "pg_status")),
        "extent": extent,
        "left_out": left_out,
        "entries": [
            {"record_id": _order(entries[place], place)}
            | {key: entries[place][key] for key in _KEPT if entries[place].get(key) is not None}
            for place in sorted({*places, *newest.values()})
        ],
    }


def _bundles(entries: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Places of entries that were launched as one, in the order in which they were closed."""
    bundles: dict[tuple[Any, ...], list[int]] = {}
    for place, entry in enumerate(entries):
        is_transfer = _is_transfer(entry)
        number = _int(entry, "p2p_seq_id") if is_transfer else _number(entry)
        bundles.setdefault((_name(entry), is_transfer, number if number >= 0 else -1 - place), []).append(place)
    return sorted(bundles.values(), key=lambda bundle: bundle[-1])


def _launch(bundle: Sequence[Mapping[str, Any]], members: Sequence[int], extent: Mapping[str, Any]) -> Launch:
    closing = bundle[-1]
    state = closing.get("state")
    is_closed = len(bundle) == 1 or _op(closing) == "coalesced"
    parts = bundle[: len(bundle) - (len(bundle) > 1 and is_closed)]
    # Of the oldest bundle the ring may have forgotten the first parts.
    is_known = _op(closing) != "coalesced" or _order(bundle[0], 0) > extent["oldest"] or extent["oldest"] <= 0
    return Launch(
        _order(closing, 0),
        max(map(_number, bundle)),
        _int(closing, "p2p_seq_id"),
        " and ".join(dict.fromkeys(map(_op, parts))) if is_known else UNKNOWN_CALL,
        ", ".join(filter(None, map(_shape, parts))) if is_known else "",
        # A dump of what is active has lost a closing entry only because it is done.
        state == "completed" or (not is_closed and extent["is_active"]),
        state == "started",
        tuple(filter(None, (_transfer(entry, members) for entry in parts))),
        max(0, _int(closing, "time_created_ns")),
    )


def _settle(part: GroupPart, passed: int, here: Collection[int], status: tuple[int, int]) -> None:
    """Leave out what is done though it does not say so.

    Args:
        here: orders of all entries of a dump of what is active; empty: it is of all.
    """
    part.launches.sort(key=lambda launch: launch.order)
    done = max((one.number for one in part.launches if one.is_done and not one.transfers), default=-1)

    def is_over(one: Launch) -> bool:
        if not one.transfers:  # collectives of a group end in order
            return 0 <= one.number <= done
        # Its closing entry may be what is missing after it, since that is done.
        return bool(here) and (one.turn == status[0] == status[1] or (one.order < passed and one.order + 1 not in here))

    part.launches = [one for one in part.launches if one.is_done or not is_over(one)]


def _extent(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    orders = [_order(entry, place) for place, entry in enumerate(entries)]
    done = [order for order, entry in zip(orders, entries, strict=True) if entry.get("state") == "completed"]
    first, last, here = min(orders, default=-1), max(orders, default=-1), set(orders)
    newest = max(done, default=-1)
    if not done and last - first < _LONGEST_RING:
        # Only what is active is in such a dump: what is left out between its entries is done.
        newest = next((order for order in range(last, first, -1) if order not in here), -1)
    return {"newest_completed": newest, "is_active": not done, "oldest": max(first, 0)}


def _group_ids(dump: Mapping[str, Any], texts: MemberTexts) -> dict[str, GroupId]:
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, one in _dict(dump, "pg_config").items():
        alike[str(one.get("desc", "")), texts.text(one.get("ranks", ""))].append(name)
    return {
        name: GroupId(*key, turn) if key[1] else GroupId(f"{key[0]} {name}", "")
        for key, names in alike.items()
        for turn, name in enumerate(sorted(names, key=_age))
    }


def _statuses(dump: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    # The watchdog counts by id; entries say which name an id has, and the order of names is that of ids.
    status = {key: one for key, one in _dict(dump, "pg_status").items() if isinstance(one, dict)}
    names = {str(entry["pg_id"]): _name(entry) for entry in entries if "pg_id" in entry}
    names |= _between(sorted(status, key=_age), sorted(_dict(dump, "pg_config"), key=_age), names)
    return {
        names[key]: (int(one.get("last_enqueued_collective", -1)), int(one.get("last_completed_collective", -1)))
        for key, one in status.items()
        if key in names
    }


def _between(ids: Sequence[str], names: Sequence[str], known: Mapping[str, str]) -> dict[str, str]:
    """Ids with their names: between two that are known there are as many of both, or they cannot be joined."""
    found: dict[str, str] = {}
    here = [(at, names.index(known[key])) for at, key in enumerate(ids) if known.get(key) in names]
    if any(one[1] >= other[1] for one, other in pairwise(here)):
        return {}
    for (id_from, name_from), (id_to, name_to) in pairwise([(-1, -1), *here, (len(ids), len(names))]):
        if id_to - id_from == name_to - name_from:
            found.update(zip(ids[id_from + 1 : id_to], names[name_from + 1 : name_to], strict=True))
    return found


def _age(name: str) -> tuple[int, int, str]:
    return (0, int(name), "") if name.isdecimal() and len(name) < 10 else (1, 0, name)


def _dict(dump: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = dump.get(key) or {}
    if not isinstance(found, dict):
        raise TypeError(key)
    return found


def _order(entry: Mapping[str, Any], place: int) -> int:
    order = _int(entry, "record_id")
    return order if order >= 0 else place


def _int(entry: Mapping[str, Any], key: str) -> int:
    value = entry.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else -1


def _number(entry: Mapping[str, Any]) -> int:
    return _int(entry, "collective_seq_id" if "collective_seq_id" in entry else "seq_id")


def _group_words(entry: Mapping[str, Any]) -> list[str]:
    """The name of its group, and its description where there is one."""
    group = entry.get("process_group", entry.get("pg_name", ""))
    return list(map(str, group)) if isinstance(group, list | tuple) else [str(group)]


def _name(entry: Mapping[str, Any]) -> str:
    return _group_words(entry)[0]


def _op(entry: Mapping[str, Any]) -> str:
    """Such as ``all_reduce``."""
    return str(entry.get("profiling_name", "")).rpartition(":")[2].split(" ")[0] or "collective"


def _is_transfer(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("is_p2p")) or _op(entry) in ("send", "recv")


def _transfer(entry: Mapping[str, Any], members: Sequence[int]) -> Transfer | None:
    found = _TRANSFER.search(str(entry.get("profiling_name", "")))
    if found is None:
        return None
    peer = int(found["peer"])
    return Transfer(found["what"] == "send", members[peer] if peer < len(members) else peer)


def _shape(entry: Mapping[str, Any]) -> str:
    """Type and, where all have to give as much, number of values; NCCL does not mind how they are arranged."""
    types, sizes = entry.get("input_dtypes"), entry.get("input_sizes")
    if not types or not sizes or _op(entry) in ("barrier", "all_reduce_barrier", "gather", "scatter"):
        return ""
    kinds = "/".join(dict.fromkeys(map(str, types)))
    if _op(entry) not in _SAME_SIZE:
        return kinds
    return f"{sum(math.prod(map(int, size)) for size in sizes)} {kinds}"


def _ranks_of(text: str) -> tuple[int, ...]:
    """Of ``[0, 2, 4]`` or of ranges; in the order given, which is that of ranks within the group."""
    ranks: list[int] = []
    for word in re.findall(r"\d+(?:-\d+(?:/\d+)?)?", text):
        first, _, rest = word.partition("-")
        last, _, step = rest.partition("/")
        if len(word) > 30 or len(ranks) > _MOST_RANKS or int(last or first) - int(first) > _MOST_RANKS:
            return ()
        ranks += range(int(first), int(last or first) + 1, int(step or 1) or 1)
    return tuple(ranks)


def _ranges(ranks: Sequence[int]) -> str:
    """The reverse of `_ranks_of`."""
    words, start = [], 0
    while start < len(ranks):
        end, step = start + 1, ranks[start + 1] - ranks[start] if start + 1 < len(ranks) else 0
        while step > 0 and end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if end - start < 3:
            end = start + 1
            words.append(str(ranks[start]))
        else:
            words.append(f"{ranks[start]}-{ranks[end - 1]}" + (f"/{step}" if step > 1 else ""))
        start = end
    return " ".join(words)
