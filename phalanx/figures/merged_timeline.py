"""What chosen ranks did from when to when, on one axis: bars by kind, a lane for each rank, messages as lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from phalanx.figures.series import packed
from phalanx.figures.style import HATCHED, SPAN_COLORS, Figure, Row, axis, empty, figure
from phalanx.telemetry.message_pairs import matched_messages
from phalanx.telemetry.spans import KINDS

_SECONDS_FROM_NS = 10e9
_WORK_ROW, _COMMUNICATION_ROW, _BAR = 0.2, 0.22, 0.36
"""In the lane of a rank, of height 1: its work above the middle, its communication below, and how high a bar is."""
_COMMUNICATION = ("collective", "wait")
_HATCHES = {"wait": "x", "collective": "/", "backward": "\\", "data": "."}
_MOST_TEXTS = 600
_MOST_HATCHED = 1500
"""Each hatched bar has a pattern of its own in the page."""
_MOST_LANES_NAMED = 64
_TEXTS = ("kind", "name", "group", "host")


@dataclass(frozen=True)
class _Axis:
    """Of time: where it begins, and its unit."""

    origin_ns: int
    unit_ns: float
    unit: str

    def at(self, times_ns: np.ndarray) -> np.ndarray:
        return (times_ns - self.origin_ns) / self.unit_ns


def merged_timeline(
    spans: pa.Table,
    *,
    ranks: Sequence[int] | None = None,
    steps: tuple[int, int] | None = None,
    clock_offsets_ns: Mapping[str, int] | None = None,
    most_bars: int = 5000,
    with_messages: bool = True,
) -> Figure:
    """Spans of several ranks on one axis of time.

    Of more than `most_bars` spans the longest are drawn, which the title says.

    Args:
        spans: of `phalanx.telemetry.span_store.SPANS`; those of `Trace.timeline` are by one clock already.
        ranks: None: all.
        steps: the first and the last; None: all.
        clock_offsets_ns: of hosts, by how much their clocks are ahead; 0 where a host is not named.
        with_messages: lines from each send to its receive (`phalanx.telemetry.message_pairs`).
    """
    spans = _chosen(spans, ranks, steps)
    if not spans.num_rows:
        return empty("Timeline", "no spans of these ranks and steps")
    columns = _columns(spans, clock_offsets_ns or {})
    origin_ns = int(columns["start_ns"].min())
    whole_ns = int(columns["end_ns"].max()) - origin_ns
    time = _Axis(origin_ns, *((1e9, "s") if whole_ns >= _SECONDS_FROM_NS else (1e6, "ms")))
    lanes = np.unique(columns["rank"])
    lane = np.searchsorted(lanes, columns["rank"])
    is_bar = columns["kind"] != "step"
    length_ns = columns["end_ns"] - columns["start_ns"]
    drawn = np.flatnonzero(is_bar)
    total = len(drawn)
    if total > most_bars:
        drawn = np.sort(drawn[np.argpartition(-length_ns[drawn], most_bars)[:most_bars]])
    traces = [_bars(columns, drawn, lane, time, kind) for kind in KINDS if (columns["kind"][drawn] == kind).any()]
    lines = _messages(columns, lane, time, most_bars) if with_messages else []
    first, last = int(columns["step"].min()), int(columns["step"].max())
    what = f"{len(lanes):,} rank{'s' * (len(lanes) > 1)}, " + (
        f"step {first}" if first == last else f"steps {first} to {last}"
    )
    shown = f" (the {most_bars:,} longest of {total:,} spans)" if total > most_bars else ""
    named = lanes if len(lanes) <= _MOST_LANES_NAMED else lanes[:: -(-len(lanes) // _MOST_LANES_NAMED)]
    return figure(
        [*traces, *lines],
        f"Timeline of {what}{shown}",
        height=min(max(150 + 46 * len(lanes), 240), 900),
        description=_told(columns, what, whole_ns, time),
        barmode="overlay",
        hovermode="closest",
        xaxis=axis(f"{time.unit} since the first span", rangemode="tozero"),
        yaxis=axis(
            "rank",
            tickvals=np.searchsorted(lanes, named).tolist(),
            ticktext=[str(rank) for rank in named],
            range=[len(lanes) - 0.5, -0.5],
            showgrid=False,
        ),
        shapes=_step_lines(columns, time),
    )


def _chosen(spans: pa.Table, ranks: Sequence[int] | None, steps: tuple[int, int] | None) -> pa.Table:
    if ranks is not None:
        spans = spans.filter(pc.is_in(spans["rank"], pa.array(list(ranks), spans["rank"].type)))
    if steps is not None:
        spans = spans.filter(pc.and_(pc.greater_equal(spans["step"], steps[0]), pc.less_equal(spans["step"], steps[1])))
    return spans


def _columns(spans: pa.Table, offsets_ns: Mapping[str, int]) -> dict[str, np.ndarray]:
    """All columns as arrays, in the order of the starts, times by one clock."""
    columns = {name: spans[name].cast(pa.string()).to_numpy() for name in _TEXTS}
    for name in ("rank", "step", "chunk", "micro_batch", "peer", "bytes", "start_ns", "end_ns"):
        columns[name] = spans[name].to_numpy()
    if offsets_ns:
        ahead_ns = np.array([offsets_ns.get(host, 0) for host in columns["host"]], np.int64)
        columns |= {name: columns[name] - ahead_ns for name in ("start_ns", "end_ns")}
    order = np.argsort(columns["start_ns"], kind="stable")
    return {name: values[order] for name, values in columns.items()}


def _bars(columns: Mapping[str, np.ndarray], drawn: np.ndarray, lane: np.ndarray, time: _Axis, kind: str) -> Row:
    """The bars of one kind; what is told apart by colour is too by row, hatching and, where few, by its letters."""
    places = drawn[columns["kind"][drawn] == kind]
    lengths = (columns["end_ns"][places] - columns["start_ns"][places]) / time.unit_ns
    offset = _COMMUNICATION_ROW if kind in _COMMUNICATION else -_WORK_ROW
    marker: dict[str, Any] = {"color": SPAN_COLORS[kind], "line": {"width": 0}}
    if kind in _HATCHES and len(drawn) <= _MOST_HATCHED:
        marker["pattern"] = {**HATCHED, "shape": _HATCHES[kind]}
    trace = {
        "type": "bar",
        "orientation": "h",
        "name": kind,
        "base": packed(time.at(columns["start_ns"][places])),
        "x": packed(lengths),
        "y": packed(lane[places] + offset),
        "width": _BAR,
        "marker": marker,
        "hovertext": [_described(columns, place) for place in places],
        "hovertemplate": f"%{{hovertext}}<br>%{{x:.4g}} {time.unit} from %{{base:.6g}} {time.unit}<extra></extra>",
    }
    if len(drawn) <= _MOST_TEXTS:
        trace |= {"text": [_short(columns, place) for place in places], "textposition": "inside"}
        trace |= {"insidetextanchor": "middle", "textangle": 0, "constraintext": "both"}
    return trace


def _described(columns: Mapping[str, np.ndarray], place: int) -> str:
    """Such as ``rank 3, step 12: forward chunk 0, micro-batch 2``."""
    one = {name: values[place] for name, values in columns.items()}
    parts = [f"rank {one['rank']}, step {one['step']}: {one['kind']} {one['name']}".rstrip()]
    if one["chunk"] >= 0:
        parts.append(f"chunk {one['chunk']}")
    if one["micro_batch"] >= 0:
        parts.append(f"micro-batch {one['micro_batch']}")
    if one["group"]:
        parts.append(f"of {one['group']}")
    if one["peer"] >= 0:
        parts.append(f"with rank {one['peer']}")
    if one["bytes"] > 0:
        parts.append(f"{one['bytes'] / 2**20:.3g} MiB")
    return ", ".join(parts)


def _short(columns: Mapping[str, np.ndarray], place: int) -> str:
    kind, micro_batch = columns["kind"][place], columns["micro_batch"][place]
    if kind in ("forward", "backward"):
        return f"{kind[0].upper()}{micro_batch}" if micro_batch >= 0 else kind[0].upper()
    return str(columns["name"][place] or kind) if kind in _COMMUNICATION else str(kind)


def _messages(columns: Mapping[str, np.ndarray], lane: np.ndarray, time: _Axis, most: int) -> list[Row]:
    pairs = matched_messages(columns)
    if not pairs:
        return []
    pairs = pairs[:most]
    x, y = np.full(3 * len(pairs), np.nan), np.full(3 * len(pairs), np.nan)
    sends, receives = (np.array(side) for side in zip(*pairs, strict=True))
    x[0::3] = time.at(columns["start_ns"][sends])
    x[1::3] = time.at(columns["end_ns"][receives])
    y[0::3], y[1::3] = lane[sends] + _COMMUNICATION_ROW, lane[receives] + _COMMUNICATION_ROW
    return [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "message, to the dot",
            "x": packed(x),
            "y": packed(y),
            "line": {"color": "#7F7F7F", "width": 1},
            "marker": {"size": [0, 5, 0] * len(pairs), "color": "#7F7F7F"},
            "hoverinfo": "skip",
        }
    ]


def _step_lines(columns: Mapping[str, np.ndarray], time: _Axis) -> list[Row]:
    """A thin line where the first rank begins a step."""
    places = np.flatnonzero(columns["kind"] == "step")
    _, first = np.unique(columns["step"][places], return_index=True)
    if len(first) > 100:
        return []
    starts = time.at(columns["start_ns"][places[first]]).tolist()
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 1, "dash": "dot", "color": "#7F7F7F"}}
    return [line | {"x0": x, "x1": x} for x in starts]


def _told(columns: Mapping[str, np.ndarray], what: str, whole_ns: int, time: _Axis) -> str:
    lengths_ns = columns["end_ns"] - columns["start_ns"]
    by_kind = {kind: float(lengths_ns[columns["kind"] == kind].sum()) for kind in KINDS if kind != "step"}
    ranks_ns = len(np.unique(columns["rank"])) * whole_ns
    most = sorted(((ns, kind) for kind, ns in by_kind.items() if ns), reverse=True)[:4]
    parts = ", ".join(f"{kind} {100 * ns / ranks_ns:.0f} %" for ns, kind in most)
    return f"Timeline of {what}: {whole_ns / time.unit_ns:.4g} {time.unit}" + f"; of a rank's time {parts}" * bool(
        parts
    )
