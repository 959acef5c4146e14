"""The dependency graph of steps, from what their spans say.

    graph = build_graph(spans, places)

Nodes are what a worker did: a pass, an update, a wait for its batch, its part in a collective or a message; and one
*meeting* for each collective and message, at which the last member arrives. Edges say what had to end before:

========================  ===========================================================================================
a worker's passes         the one before it, in the order recorded, whatever the schedule (1F1B, interleaved, V)
a receive                 goes before the pass that takes what it brought: of its direction and micro-batch
a message                 meets when both ends have begun it (pipeline edges)
a collective              meets when all members have begun it (tensor and data-parallel edges); the worker's next pass
                          comes after it, unless it ended while one was under way, which then hid it
beginning any of these    after what ended last on this worker, a send excepted, for nothing waits for it; a collective
                          also after the one before it of its name and group
========================  ===========================================================================================

A step begins at 0; steps are independent of each other. What a node adds to the latest of those before it is its
duration: of passes the own time of the slowest member of the worker and what all of them waited inside; of collectives
and messages the time from the meeting to its end, which is the transfer alone (arXiv 2505.05713, 3.2). What lay between
is the *delay*, which a replay may count or leave out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import UserError
from phalanx.detect.stragglers.job_places import JobPlaces
from phalanx.detect.stragglers.replay import CircleError, Edges, Schedule, Seconds, schedule_of
from phalanx.detect.stragglers.span_columns import (
    BACKWARD,
    COLLECTIVE,
    DATA,
    FORWARD,
    OPTIMIZER,
    Flags,
    Numbers,
    SpanColumns,
)
from phalanx.telemetry.message_pairs import side_of
from phalanx.telemetry.span_store import row_numbers
from phalanx.telemetry.spans import KINDS

Places = NDArray[np.intp]

SEND, RECEIVE, MEETING_OF_ALL = 1, 2, 0
_LEAST_SLACK_OF_STEP = 2e-6
_MOST_SLACK_NS = 100_000
"""Times that are kept in 32 bits, as of other people's traces, end up to so much after what follows begins."""


@dataclass(frozen=True)
class Operations:
    """What workers did; a row each, in order of step, worker and start.

    Attributes:
        step: place in the steps of the graph.
        worker: number.
        kind: place in `KINDS`.
        operation: place in `names`, such as ``forward`` or ``reduce_scatter (shard)``.
        alike: a number for what takes equally long by right: the same piece of an operation, with as many bytes.
        side: of a collective `MEETING_OF_ALL`; of a message `SEND` or `RECEIVE`.
        is_whole: it is no piece of a pass that is cut.
        chunk, micro_batch: as recorded.
        start_s, end_s: from the beginning of the step; of the last member of the worker.
        duration_s: see the module.
        usual_s: the same, if the slowest members of the worker were like the others.
        names: of operations.
    """

    step: Numbers
    worker: Numbers
    kind: Numbers
    operation: Numbers
    alike: Numbers
    is_whole: Flags
    side: Numbers
    chunk: Numbers
    micro_batch: Numbers
    start_s: Seconds
    end_s: Seconds
    duration_s: Seconds
    usual_s: Seconds
    names: tuple[str, ...]

    @property
    def is_compute(self) -> Flags:
        """Which are not collectives or messages."""
        found: Flags = self.kind != COLLECTIVE
        return found

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class StepGraph:
    """Steps as a graph.

    Attributes:
        steps: their numbers, ascending.
        operations: nodes 0 to n - 1; then come meetings, whose duration is 0, and the beginning.
        schedule: nodes by level, with their edges.
        recorded_s: how long each step took, by its operations.
        unordered: how many steps were left out, since what was recorded of them contradicts itself.
    """

    steps: Numbers
    operations: Operations
    schedule: Schedule
    recorded_s: Seconds
    unordered: int = 0

    def durations(self, of_operations: Seconds) -> Seconds:
        """Durations of all nodes, from those of the operations (n, or n by scenarios)."""
        shape = (self.schedule.nodes, *of_operations.shape[1:])
        found = np.zeros(shape)
        found[: len(of_operations)] = of_operations
        return found

    def step_times(self, of_operations: Seconds, *, delays: bool = False) -> Seconds:
        """How long steps take with these durations of operations (seconds): steps, or steps by scenarios."""
        ends = self.schedule.ends(self.durations(of_operations), delays=delays)
        operations = self.operations
        found = np.zeros((len(self.steps), *ends.shape[1:]))
        np.maximum.at(found, operations.step, ends[: len(operations)])
        return found


def build_graph(spans: SpanColumns, places: JobPlaces) -> StepGraph:
    """The graph of all steps that spans are of.

    Raises:
        UserError: the times of spans contradict each other in every step.
    """
    steps, step = np.unique(spans.step, return_inverse=True)
    operations, meeting, stream = _operations(spans, places, step.reshape(-1).astype(np.int64), len(steps))
    nodes = len(operations) + int(meeting.max(initial=-1)) + 1 + 1
    try:
        schedule = schedule_of(nodes, _edges(operations, meeting, stream))
    except CircleError as circle:
        bad = steps[np.unique(operations.step[circle.nodes[circle.nodes < len(operations)]])]
        left = spans.at(~np.isin(spans.step, bad))
        if not len(left) or not len(bad):
            raise UserError(
                "operations wait for each other, by the times of their spans",
                cure="look at the clocks of hosts (docs/trace.md), or give other steps",
            ) from circle
        return replace(graph := build_graph(left, places), unordered=graph.unordered + len(bad))
    recorded_s = np.zeros(len(steps))
    np.maximum.at(recorded_s, operations.step, operations.end_s)
    return StepGraph(steps.astype(np.int64), operations, schedule, recorded_s)


def _operations(
    spans: SpanColumns, places: JobPlaces, step: Numbers, steps: int
) -> tuple[Operations, Numbers, Numbers]:
    """Spans as operations of workers, with the meeting of each (-1: none) and what is in one order with others."""
    is_compute = np.isin(spans.kind, (DATA, FORWARD, BACKWARD, OPTIMIZER, KINDS.index("snapshot")))
    is_collective = spans.kind == COLLECTIVE
    in_lockstep = np.array([group in spans.lockstep for _, group in spans.labels] or [False])
    is_collective &= ~(in_lockstep[spans.label] & _is_inside_pass(spans))
    begins = np.full(steps, np.iinfo(np.int64).max)
    np.minimum.at(begins, step, spans.start_ns)
    rows = np.flatnonzero(is_compute | is_collective)
    spans, step = spans.at(rows), step[rows]
    at = places.places_of(spans.rank)
    worker = places.worker[at]
    known = {"send": SEND, "receive": RECEIVE, None: MEETING_OF_ALL}
    sides = np.array([known[side_of(name)] for name, _ in spans.labels] or [0])
    side = np.where((spans.kind == COLLECTIVE) & (spans.peer >= 0), sides[spans.label], MEETING_OF_ALL)
    what = (spans.kind, spans.label, spans.chunk, spans.micro_batch, spans.piece)
    occurrence = _occurrences(spans.rank, step, spans.peer, *what)
    peer = _peer_workers(spans, places)
    # ranks of a worker do the same together: a row of it stands for all of them
    number, first = row_numbers(step, worker, peer, occurrence, *what)
    count = len(first)
    start_ns, end_ns = np.full(count, np.iinfo(np.int64).min), np.full(count, np.iinfo(np.int64).min)
    np.maximum.at(start_ns, number, spans.start_ns)
    np.maximum.at(end_ns, number, spans.end_ns)
    own_ns, waited_ns = np.zeros(count, np.int64), np.full(count, np.iinfo(np.int64).max)
    np.maximum.at(own_ns, number, spans.end_ns - spans.start_ns - spans.waited_ns)
    np.minimum.at(waited_ns, number, spans.waited_ns)
    usual_ns = _usual_of_members(number, spans.end_ns - spans.start_ns - spans.waited_ns)
    order = np.lexsort((end_ns, start_ns, worker[first], step[first]))
    first = first[order]
    start_ns, end_ns = start_ns[order], end_ns[order]
    names, operation = _operation_names(spans, first, side)
    base = begins[step[first]]
    operations = Operations(
        step[first],
        worker[first],
        spans.kind[first],
        operation,
        row_numbers(operation, spans.piece[first], spans.pieces[first], spans.bytes[first])[0],
        spans.pieces[first] == 0,
        side[first].astype(np.int64),
        spans.chunk[first],
        spans.micro_batch[first],
        (start_ns - base) / 1e9,
        (end_ns - base) / 1e9,
        (own_ns + waited_ns)[order] / 1e9,
        (usual_ns + waited_ns)[order] / 1e9,
        names,
    )
    meeting = _meetings(spans, places, first, operations, peer[first])
    # collectives of a name and group follow each other; messages do not wait for each other
    lane = np.where(operations.side == MEETING_OF_ALL, spans.label[first], -1 - np.arange(count))
    stream, _ = row_numbers(operations.step, operations.worker, lane)
    hidden = np.ones(count, np.int64)
    np.minimum.at(hidden, number, spans.is_hidden)
    return _with_transfers(operations, meeting, stream, hidden[order] == 1), meeting, stream


def _usual_of_members(number: Numbers, own_ns: Numbers) -> Numbers:
    """Of the members' times of each operation, the one that three of four do not exceed; the lower one of two."""
    order = np.lexsort((own_ns, number))
    first = np.flatnonzero(np.diff(number[order], prepend=-1))
    counts = np.diff(np.append(first, len(order)))
    found: Numbers = own_ns[order][first + 3 * (counts - 1) // 4]
    return found


def _is_inside_pass(spans: SpanColumns) -> Flags:
    """Which spans begin within a pass of their rank (spans are in order of rank and start)."""
    is_pass = np.isin(spans.kind, (FORWARD, BACKWARD))
    at = np.where(is_pass, np.arange(len(spans)), -1)
    last = np.maximum.accumulate(at) if len(at) else at
    found: Flags = (last >= 0) & (spans.rank[last] == spans.rank) & (spans.end_ns[last] > spans.start_ns)
    return found


def _peer_workers(spans: SpanColumns, places: JobPlaces) -> Numbers:
    known = np.isin(spans.peer, places.ranks)
    peer = np.full(len(spans), -1, np.int64)
    peer[known] = places.worker[places.places_of(spans.peer[known])]
    return peer


def _operation_names(spans: SpanColumns, rows: Places, side: Numbers) -> tuple[tuple[str, ...], Numbers]:
    """What operations are alike, for people: passes by kind and name, messages by direction, collectives by group."""
    key = spans.kind[rows] * (len(spans.labels) + 1) * 3 + spans.label[rows] * 3 + side[rows]
    distinct, where = np.unique(key, return_inverse=True)
    texts = []
    for one in distinct:
        kind, rest = divmod(int(one), (len(spans.labels) + 1) * 3)
        name, group = spans.labels[rest // 3]
        if kind != COLLECTIVE:
            part = name if kind == OPTIMIZER or name in ("input", "weights") else ""
            texts.append(f"{KINDS[kind]} {part}".strip())
        elif rest % 3 != MEETING_OF_ALL:
            texts.append(f"{'backward' if _is_backward(name) else 'forward'} messages")
        else:
            texts.append(f"{name} ({group})" if group else name)
    names = tuple(dict.fromkeys(texts))
    codes = np.array([names.index(text) for text in texts] or [0], np.int64)
    return names, codes[where.reshape(-1)]


def _is_backward(name: str) -> bool:
    return "backward" in name or "gradient" in name


def _meetings(spans: SpanColumns, places: JobPlaces, rows: Places, operations: Operations, peer: Numbers) -> Numbers:
    """Which collective or message each operation is part of: a number from 0 on; -1: it is none."""
    found = np.full(len(rows), -1, np.int64)
    comm = np.flatnonzero(operations.kind == COLLECTIVE)
    if not len(comm):
        return found
    label = spans.label[rows][comm]
    worker, step, side = operations.worker[comm], operations.step[comm], operations.side[comm]
    bases = [_without_side(name) + "\0" + group for name, group in spans.labels]
    plain = {text: at for at, text in enumerate(dict.fromkeys(bases))}
    base = np.array([plain[text] for text in bases], np.int64)[label]
    at = places.places_of(spans.rank[rows][comm])
    group_of = np.full(len(comm), -1, np.int64)
    for number, (_, group) in enumerate(spans.labels):
        if group in places.groups:
            own = label == number
            group_of[own] = places.groups[group][at[own]]
    is_message = (side != MEETING_OF_ALL) & (peer[comm] >= 0)
    sender = np.where(side == SEND, worker, peer[comm])
    taker = np.where(side == SEND, peer[comm], worker)
    micro_batch = operations.micro_batch[comm]
    nth = _occurrences(worker, step, base, side, np.where(is_message, peer[comm], micro_batch))
    # whoever is in no group that is known meets nobody
    alone = ~is_message & (group_of < 0)
    one = np.where(is_message, sender, np.where(alone, np.arange(len(comm)), group_of))
    other = np.where(is_message, taker, micro_batch)
    kind = np.where(is_message, 0, np.where(alone, 2, 1))
    found[comm], _ = row_numbers(step, kind, base, one, other, nth)
    return found


def _without_side(name: str) -> str:
    side = side_of(name)
    if side is None:
        return name
    for word in ("receive", "recv", "send"):
        name = name.replace(word, "")
    return name.strip(" -_")


def _with_transfers(operations: Operations, meeting: Numbers, stream: Numbers, is_hidden: Flags) -> Operations:
    """Durations of collectives and messages: from when the last member came and the one before was done.

    Of hidden ones the end is not known, but that it was no later. Another member that had to wait tells it; else they
    are taken to have lasted as long as others that are alike.
    """
    comm = np.flatnonzero(meeting >= 0)
    if not len(comm):
        return operations
    number, count = meeting[comm], int(meeting.max()) + 1
    latest, before = np.zeros(count), np.full(count, np.inf)
    np.maximum.at(latest, number, operations.start_s[comm])
    previous, later = _chains(comm, stream[comm])
    np.minimum.at(before, meeting[later], operations.end_s[previous])
    ready = np.maximum(latest, np.where(np.isfinite(before), before, 0.0))
    took = np.maximum(operations.end_s[comm] - ready[number], 0.0)
    hidden = is_hidden[comm]
    least = np.full(count, np.inf)
    np.minimum.at(least, number[~hidden], took[~hidden])
    alike = operations.alike[comm]
    usual = np.full(int(alike.max()) + 1, np.inf)
    for one in np.unique(alike[hidden]):
        seen = took[(alike == one) & ~hidden]
        usual[one] = float(np.median(seen)) if len(seen) else float(took[alike == one].min())
    guess = np.where(np.isfinite(least[number]), least[number], usual[alike])
    took = np.where(hidden, np.minimum(took, guess), took)
    operations.duration_s[comm] = took
    operations.end_s[comm] = np.where(
        hidden, np.minimum(operations.end_s[comm], ready[number] + took), operations.end_s[comm]
    )
    return operations


def _edges(operations: Operations, meeting: Numbers, stream: Numbers) -> Edges:
    count, meetings = len(operations), int(meeting.max(initial=-1)) + 1
    begin = count + meetings
    lane = operations.step * (int(operations.worker.max(initial=0)) + 1) + operations.worker
    slack_s = min(_MOST_SLACK_NS / 1e9, _LEAST_SLACK_OF_STEP * float(np.median(operations.end_s))) if count else 0.0
    compute, comm = np.flatnonzero(operations.is_compute), np.flatnonzero(~operations.is_compute)
    pairs = [_chains(compute, lane[compute])]
    blocking = np.flatnonzero(operations.is_compute | (operations.side != SEND))
    pairs.append(_beginnings(operations, comm, blocking, lane, slack_s))
    pairs.append(_chains(comm, stream[comm]))
    pairs.append(_consumers(operations, comm, compute, lane, slack_s))
    source, target = (np.concatenate(column).astype(np.int64) for column in zip(*pairs, strict=True))
    # What begins with a collective begins its meeting, and that ends it.
    entry = np.where(meeting[target] >= 0, count + meeting[target], target)
    delay_s = _delays(operations, source, target)[target]
    is_first = np.ones(count, bool)
    is_first[target] = False
    first = np.flatnonzero(is_first)
    first_entry = np.where(meeting[first] >= 0, count + meeting[first], first)
    members = np.flatnonzero(meeting >= 0)
    return Edges(
        np.concatenate([source, np.full(len(first), begin), count + meeting[members]]),
        np.concatenate([entry, first_entry, members]),
        np.concatenate([delay_s, operations.start_s[first], np.zeros(len(members))]),
    )


def _delays(operations: Operations, source: Numbers, target: Numbers) -> Seconds:
    """For each operation, how long after the last of those before it it began."""
    ready = np.full(len(operations), -np.inf)
    np.maximum.at(ready, target, operations.end_s[source])
    return np.maximum(operations.start_s - np.where(np.isfinite(ready), ready, 0.0), 0.0)


def _chains(rows: Places, lanes: Numbers) -> tuple[Numbers, Numbers]:
    """Each of `rows` after the one before it in its lane; rows are in order of time."""
    order = np.argsort(lanes, kind="stable")
    rows, lanes = rows[order], lanes[order]
    same = np.flatnonzero(lanes[1:] == lanes[:-1])
    return rows[same].astype(np.int64), rows[same + 1].astype(np.int64)


def _beginnings(
    operations: Operations, comm: Places, blocking: Places, lane: Numbers, slack_s: float
) -> tuple[Numbers, Numbers]:
    """For each collective and message, what of its worker ended last before it began."""
    order = np.lexsort((operations.start_s[blocking], operations.end_s[blocking], lane[blocking]))
    enders = blocking[order]
    at = _last_not_after(lane[enders], operations.end_s[enders], lane[comm], operations.start_s[comm] + slack_s)
    for _ in range(8):  # what began no earlier, a transfer of no length, cannot be what it waited for
        late = (at >= 0) & (operations.start_s[enders[at]] >= operations.start_s[comm])
        if not late.any():
            break
        at[late] -= 1
    is_own = (at >= 0) & (lane[enders[at]] == lane[comm]) & (operations.start_s[enders[at]] < operations.start_s[comm])
    return enders[at[is_own]].astype(np.int64), comm[is_own].astype(np.int64)


def _last_not_after(lanes: Numbers, times: Seconds, wanted_lanes: Numbers, wanted: Seconds) -> Places:
    """The last place whose lane is at most the wanted one, and of it whose time is no later; -1: there is none.

    Args:
        lanes, times: in order of lane and time.
    """
    if not len(lanes):
        return np.full(len(wanted), -1, np.intp)
    width = float(max(times.max(), wanted.max(initial=0.0))) + 1.0
    found: Places = np.searchsorted(lanes * width + times, wanted_lanes * width + wanted, side="right") - 1
    return found


def _consumers(
    operations: Operations, comm: Places, compute: Places, lane: Numbers, slack_s: float
) -> tuple[Numbers, Numbers]:
    """Which pass waits for which receive or collective."""
    if not len(compute) or not len(comm):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    side = operations.side[comm]
    gathered, received = comm[side == MEETING_OF_ALL], comm[side == RECEIVE]
    # a collective that ends while a pass is under way is hidden by it
    ended_s = operations.end_s[gathered]
    at = _last_not_after(lane[compute], operations.start_s[compute], lane[gathered], ended_s - slack_s)
    under_way = (at >= 0) & (lane[compute[at]] == lane[gathered])
    under_way &= operations.end_s[compute[at]] > ended_s + slack_s
    under_way &= operations.start_s[compute[at]] < ended_s - slack_s
    exposed, after = gathered[~under_way], at[~under_way] + 1
    is_next = (after < len(compute)) & (lane[compute[np.minimum(after, len(compute) - 1)]] == lane[exposed])
    sources, targets = [exposed[is_next]], [compute[after[is_next]]]
    for is_backward, kind in ((False, FORWARD), (True, BACKWARD)):
        names = np.array(["backward" in name for name in operations.names])
        own = received[names[operations.operation[received]] == is_backward]
        passes = compute[operations.kind[compute] == kind]
        if kind == BACKWARD:  # gradients of weights follow those of inputs, which take what was received
            weights = np.array([name == "backward weights" for name in operations.names])
            passes = passes[~weights[operations.operation[passes]]]
        takes = _takers(operations, own, passes, lane, slack_s)
        sources.append(own[takes >= 0])
        targets.append(takes[takes >= 0])
    return np.concatenate(sources).astype(np.int64), np.concatenate(targets).astype(np.int64)


def _takers(operations: Operations, received: Places, passes: Places, lane: Numbers, slack_s: float) -> Places:
    """For each receive the pass that takes it: the next of its micro-batch, else the next at all; -1: none."""
    found = np.full(len(received), -1, np.intp)
    width = int(max(operations.micro_batch.max(initial=0), 0)) + 2
    for lanes in (lane * width + operations.micro_batch + 1, lane):
        left = np.flatnonzero(found < 0)
        if not len(left) or not len(passes):
            break
        order = np.lexsort((operations.start_s[passes], lanes[passes]))
        ordered, own = passes[order], received[left]
        earliest = np.nextafter(operations.end_s[own] - slack_s, -np.inf)
        at = _last_not_after(lanes[ordered], operations.start_s[ordered], lanes[own], earliest) + 1
        is_own = (at < len(ordered)) & (lanes[ordered[np.minimum(at, len(ordered) - 1)]] == lanes[own])
        found[left[is_own]] = ordered[at[is_own]]
    return found


def _occurrences(*columns: Numbers) -> Numbers:
    """For each row, how many rows before it are the same; rows are in order of time within each."""
    number, _ = row_numbers(*columns)
    order = np.argsort(number, kind="stable")
    ordered = number[order]
    first = np.maximum.accumulate(np.where(np.diff(ordered, prepend=-1) != 0, np.arange(len(ordered)), 0))
    found = np.empty(len(number), np.int64)
    found[order] = np.arange(len(ordered)) - first
    return found
