"""Spans of some steps as columns of numbers, with the time that each pass waited for others taken out.

Spans come from a run's telemetry (`read_columns`) or from any Arrow table with the columns of
`phalanx.telemetry.span_store.SPANS` (`SpanColumns.of`). Three things are settled here, once for all that follows:

- A pass that lies inside another one counts once, for the outer.
- Waits inside most passes (a tensor-parallel all-reduce in each layer) are not the rank's own time. The groups of these
  waits are *lockstep* groups: their ranks go through a pass together.
- What has other waits in it (an update, for the norm of all gradients; the first pass, for weights that are gathered)
  is cut into pieces at these waits, so that what each piece waits for can be told.
- A collective that nothing waited for ended before somebody looked; when is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from phalanx.telemetry.queries import Trace
from phalanx.telemetry.span_store import row_numbers
from phalanx.telemetry.spans import KINDS

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]

FORWARD, BACKWARD = KINDS.index("forward"), KINDS.index("backward")
COLLECTIVE, WAIT, STEP = KINDS.index("collective"), KINDS.index("wait"), KINDS.index("step")
DATA, OPTIMIZER = KINDS.index("data"), KINDS.index("optimizer")
_BUSY = (DATA, FORWARD, BACKWARD, OPTIMIZER, KINDS.index("snapshot"))
"""What occupies a rank, in the order in which it does it."""

READ_KINDS = ("step", "data", "forward", "backward", "collective", "wait", "optimizer", "snapshot")
TEXTS = ("kind", "name", "group", "host")
_SETTLED = ("waited_ns", "piece", "pieces", "is_hidden")
NUMBERS = ("rank", "step", "chunk", "micro_batch", "peer", "bytes", "start_ns", "end_ns")
_COLUMNS = (*NUMBERS, *_SETTLED, "kind", "label")

_PIPELINE = "pipeline"
_MOST_PASSES = 0.5  # with a wait of a group inside make it a lockstep group
_NO_WAIT = 0.02  # of a collective's length


@dataclass(frozen=True)
class SpanColumns:
    """Columns of equal length; in order of rank, start and end (the longer first).

    Attributes:
        rank, step, chunk, micro_batch, peer, bytes: as recorded.
        start_ns, end_ns: by one clock, as far as it is known.
        kind: place in `phalanx.telemetry.spans.KINDS`.
        label: place in `labels`, which are pairs of a span's name and group.
        waited_ns: of passes, what they waited inside.
        piece, pieces: which piece it is of how many, from 1 on; 0: it is whole.
        is_hidden: 1 for a collective whose result was there when it was asked for: it ended earlier than recorded.
        lockstep: groups whose ranks go through passes together.
        hosts: by rank.
    """

    rank: Numbers
    step: Numbers
    chunk: Numbers
    micro_batch: Numbers
    peer: Numbers
    bytes: Numbers
    start_ns: Numbers
    end_ns: Numbers
    kind: Numbers
    label: Numbers
    labels: tuple[tuple[str, str], ...]
    waited_ns: Numbers
    piece: Numbers
    pieces: Numbers
    is_hidden: Numbers
    lockstep: frozenset[str] = frozenset()
    hosts: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rank)

    @classmethod
    def of(cls, table: pa.Table) -> SpanColumns:
        """Of a table with the columns of `SPANS`; what belongs to no step is left out."""
        columns = {name: _numbers(table[name]) for name in NUMBERS}
        codes = {name: _codes(table[name]) for name in TEXTS}
        places = np.array([KINDS.index(text) if text in READ_KINDS else -1 for text in codes["kind"][1]], np.int64)
        kind = places[codes["kind"][0]] if len(places) else np.zeros(0, np.int64)
        names, groups = codes["name"], codes["group"]
        label = names[0] * max(1, len(groups[1])) + groups[0]
        used, label = np.unique(label, return_inverse=True)
        labels = tuple((names[1][int(one) // len(groups[1])], groups[1][int(one) % len(groups[1])]) for one in used)
        keep = np.flatnonzero((kind >= 0) & (columns["step"] >= 0))
        order = keep[np.lexsort((-columns["end_ns"][keep], columns["start_ns"][keep], columns["rank"][keep]))]
        ordered: dict[str, Any] = {name: column[order] for name, column in columns.items()}
        ordered |= {name: np.zeros(len(order), np.int64) for name in _SETTLED}
        found = cls(
            **ordered,
            kind=kind[order],
            label=label[order].astype(np.int64),
            labels=labels,
            hosts=_hosts(columns["rank"], *codes["host"]),
        )
        return found._settled()

    def at(self, rows: NDArray[np.intp] | Flags) -> SpanColumns:
        """Some of the rows."""
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in _COLUMNS}
        return replace(self, **columns)

    def _settled(self) -> SpanColumns:
        spans = self._without_inner()
        if not len(spans):
            return spans
        spans = replace(spans, is_hidden=_hidden(spans))
        busy = np.flatnonzero(np.isin(spans.kind, _BUSY))
        waits = np.flatnonzero(spans.kind == WAIT)
        outer = busy[_enclosing(spans, busy, waits)] if len(busy) else np.full(len(waits), -1)
        is_inside = _encloses(spans, outer, waits)
        waits, outer = waits[is_inside], outer[is_inside]
        is_pass = np.isin(spans.kind[outer], (FORWARD, BACKWARD))
        lockstep = spans._lockstep_groups(outer[is_pass], waits[is_pass])
        is_of_all = np.array([group in lockstep for _, group in spans.labels] or [False])[spans.label[waits]]
        together = is_pass & is_of_all
        waited = np.zeros(len(spans), np.int64)
        np.add.at(waited, outer[together], (spans.end_ns - spans.start_ns)[waits[together]])
        spans = replace(spans, waited_ns=np.minimum(waited, spans.end_ns - spans.start_ns), lockstep=lockstep)
        is_message = spans.peer[waits] >= 0
        return spans._cut(outer[~together & ~is_message], waits[~together & ~is_message])

    def _without_inner(self) -> SpanColumns:
        """Passes inside passes of the same rank are a part of them."""
        busy = np.flatnonzero(np.isin(self.kind, _BUSY))
        if not len(busy):
            return self
        start, end, first = self.start_ns[busy], self.end_ns[busy], self.start_ns.min()
        base = self.rank[busy] * (int(self.end_ns.max() - first) + 1)
        until = np.maximum.accumulate(base + end - first)
        is_inner = np.zeros(len(busy), bool)
        is_inner[1:] = (base + end - first)[1:] <= until[:-1]
        is_inner &= start < end
        keep = np.ones(len(self), bool)
        keep[busy[is_inner]] = False
        return self.at(keep)

    def _lockstep_groups(self, outer: NDArray[np.intp], waits: NDArray[np.intp]) -> frozenset[str]:
        passes = max(1, int(np.isin(self.kind, (FORWARD, BACKWARD)).sum()))
        groups = [group for _, group in self.labels]
        found = set()
        for group in set(groups):
            if not group or _PIPELINE in group.split("·"):
                continue
            own = np.array([one == group for one in groups])[self.label[waits]]
            if len(np.unique(outer[own])) >= _MOST_PASSES * passes:
                found.add(group)
        return frozenset(found)

    def _cut(self, outer: NDArray[np.intp], waits: NDArray[np.intp]) -> SpanColumns:
        """Pieces between the waits inside, of what has such."""
        if not len(outer):
            return self
        order = np.lexsort((self.start_ns[waits], outer))
        outer, waits = outer[order], waits[order]
        whole, first, counts = np.unique(outer, return_index=True, return_counts=True)
        source = np.repeat(whole, counts + 1)
        begins = np.cumsum(counts + 1) - (counts + 1)
        start_ns, end_ns = self.start_ns[source], self.end_ns[source]
        after = np.arange(len(outer)) - np.repeat(first, counts) + np.repeat(begins, counts)
        end_ns[after] = np.maximum(self.start_ns[waits], start_ns[after])
        start_ns[after + 1] = self.end_ns[waits]
        keep = np.ones(len(self), bool)
        keep[whole] = False
        end_ns = np.maximum(end_ns, start_ns)
        # what it waited in lockstep is taken to lie in the longest piece
        number = np.arange(len(source)) - np.repeat(begins, counts + 1) + 1
        longest = np.lexsort((end_ns - start_ns, source))[np.cumsum(counts + 1) - 1]
        waited = np.zeros(len(source), np.int64)
        waited[longest] = np.minimum(self.waited_ns[source[longest]], (end_ns - start_ns)[longest])
        pieces = replace(
            self.at(source), start_ns=start_ns, end_ns=end_ns, waited_ns=waited, piece=number,
            pieces=np.repeat(counts + 1, counts + 1),
        )  # fmt: skip
        return joined([self.at(keep), pieces])


def joined(parts: Sequence[SpanColumns]) -> SpanColumns:
    """Parts of the same labels as one, in order."""
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}
    order = np.lexsort((-columns["end_ns"], columns["start_ns"], columns["rank"]))
    ordered: dict[str, Any] = {name: column[order] for name, column in columns.items()}
    return replace(parts[0], **ordered)


def read_columns(trace: Trace, first: int, last: int) -> SpanColumns:
    """Spans of steps `first` to `last` of a run, by one clock where clocks of hosts were compared."""
    table = "aligned_spans" if any((trace.folder / "clocks").glob("*.jsonl")) else "spans"
    kinds = ", ".join(f"'{kind}'" for kind in READ_KINDS)
    columns = ", ".join(f'"{name}"' for name in (*TEXTS, *NUMBERS))
    return SpanColumns.of(trace.ask(f"select {columns} from {table} where kind in ({kinds})", first, last))


def _hidden(spans: SpanColumns) -> Numbers:
    """Which collectives had ended when their result was asked for: their wait, which ends with them, took no time."""
    rows = np.flatnonzero((spans.kind == COLLECTIVE) | (spans.kind == WAIT))
    found = np.zeros(len(spans), np.int64)
    if not len(rows):
        return found
    number, first = row_numbers(spans.rank[rows], spans.label[rows], spans.end_ns[rows])
    length = (spans.end_ns - spans.start_ns)[rows]
    is_wait = spans.kind[rows] == WAIT
    waited = np.full(len(first), -1, np.int64)
    np.maximum.at(waited, number[is_wait], length[is_wait])
    own = waited[number]
    found[rows] = ~is_wait & (own >= 0) & (own <= _NO_WAIT * length)
    return found


def _enclosing(spans: SpanColumns, busy: NDArray[np.intp], inner: NDArray[np.intp]) -> NDArray[np.intp]:
    """For each of `inner`, the place in `busy` of the last one that begins no later, on any rank."""
    first = spans.start_ns.min()
    width = int(spans.end_ns.max() - first) + 1
    keys = spans.rank * width + spans.start_ns - first
    found: NDArray[np.intp] = np.searchsorted(keys[busy], keys[inner], side="right") - 1
    return np.maximum(found, 0)


def _encloses(spans: SpanColumns, outer: NDArray[np.intp], inner: NDArray[np.intp]) -> Flags:
    if not len(inner):
        return np.zeros(0, bool)
    is_known = outer >= 0
    same = spans.rank[outer] == spans.rank[inner]
    within = (spans.start_ns[outer] <= spans.start_ns[inner]) & (spans.end_ns[inner] <= spans.end_ns[outer])
    found: Flags = is_known & same & within
    return found


def _hosts(rank: Numbers, code: Numbers, names: Sequence[str]) -> dict[int, str]:
    """The host of each rank; of one that was moved, that of its last spans."""
    distinct, last = np.unique(rank[::-1], return_index=True)
    return {int(one): names[code[len(rank) - 1 - at]] for one, at in zip(distinct, last, strict=True)}


def _numbers(column: pa.ChunkedArray) -> Numbers:
    return np.asarray(column.to_numpy(), np.int64)


def _codes(column: pa.ChunkedArray) -> tuple[Numbers, list[str]]:
    """Numbers of a column of texts, and the texts."""
    if not len(column):
        return np.zeros(0, np.int64), []
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    array = column.unify_dictionaries().combine_chunks()
    array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    return array.indices.to_numpy().astype(np.int64), [text or "" for text in array.dictionary.to_pylist()]
