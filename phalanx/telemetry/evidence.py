"""What a run's files say about its speed, gathered once as small tables; `phalanx.telemetry.verdict` judges them.

Whatever cannot be read or was not recorded is named in `Evidence.missing`, with how to get it, and the rest is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from phalanx.core.errors import UserError
from phalanx.telemetry.loggers import read_json_lines
from phalanx.telemetry.message_pairs import pairs_sql
from phalanx.telemetry.queries import Trace
from phalanx.telemetry.slow_ranks import LEAST_STEPS, SlowRanks, find_slow_ranks
from phalanx.telemetry.summaries import BREAKDOWN, skew_by_group

Rows = list[dict[str, Any]]

_MOST_RANK_STEPS = 1 << 20
_MOST_SPANS = 1 << 21
_SPANS_OF_STEP = 50
"""What single spans and sums by type are asked of: the newest steps that hold about so many."""


@dataclass(frozen=True)
class Missing:
    """Evidence that is not there.

    Attributes:
        what: it is.
        how: to get it; a sentence.
        command: that gets it; empty: there is none.
    """

    what: str
    how: str
    command: str = ""


@dataclass(frozen=True)
class Evidence:
    """What is known of a run; rows are of the steps `first_step` to `last_step`, seconds of one step.

    Attributes:
        run: its folder, for commands.
        ranks, hosts, steps: how many.
        times: `Trace.step_times`.
        breakdown: seconds by kind of span (``forward`` …, ``other``, ``step``); empty: not known.
        averages: `Trace.rank_averages`: a row for each rank.
        slow: which ranks compute longer than those alike; None: not known.
        host_of: name of the host by rank.
        stages: pipeline stage by rank; empty: there is no pipeline.
        waits: for each group of ranks: ``group, first_rank, members, least_s`` (what the member that waits least waits:
            what moving bytes costs at least), ``mean_s``.
        wires: for each group or pair of ranks: ``group, ranks, is_pair, wire_s`` (seconds that its collectives take the
            member that comes last, which waits for bytes only).
        skew: `phalanx.telemetry.summaries.skew_by_group`.
        mfu: `Trace.mfu`.
        incidents: `Trace.incidents`.
        counters: mean of each host's counters: ``host, gpu, name, value``.
        not_finite: the first step whose loss or gradient norm was not finite, with its figures; None: all were.
        figures: steps of ``metrics.jsonl``, first and last.
        missing: what is not there, or cannot be read.
        lost: what of the telemetry is lost; empty: nothing is known to be.
    """

    run: str
    ranks: int = 0
    hosts: int = 0
    steps: int = 0
    first_step: int = 0
    last_step: int = 0
    times: Rows = field(default_factory=list)
    breakdown: Mapping[str, float] = field(default_factory=dict)
    averages: pa.Table | None = None
    slow: SlowRanks | None = None
    host_of: Mapping[int, str] = field(default_factory=dict)
    stages: Mapping[int, int] = field(default_factory=dict)
    waits: Rows = field(default_factory=list)
    wires: Rows = field(default_factory=list)
    skew: Rows = field(default_factory=list)
    mfu: Rows = field(default_factory=list)
    incidents: Rows = field(default_factory=list)
    counters: Rows = field(default_factory=list)
    not_finite: Mapping[str, Any] | None = None
    figures: tuple[int, int] | None = None
    missing: tuple[Missing, ...] = ()
    lost: str = ""

    @property
    def step_s(self) -> float:
        """Median seconds of a step; NaN: not known."""
        each = sorted(row["median_s"] for row in self.times)
        return each[len(each) // 2] if each else math.nan


_WAITS = """
with whole as (select count(distinct step) as steps from steps),
each as (
    select g."group", g.ranks[1] as first_rank, g.rank, any_value(len(g.ranks)) as members,
        sum(total_ns) / any_value(steps) / 1e9 as wait_s
    from phases p join groups g on p.rank = g.rank and p."group" = g."group", whole
    where kind = 'wait' group by all
)
select "group", first_rank, any_value(members) as members,
    case when count(*) = any_value(members) then min(wait_s) else 0 end as least_s,
    sum(wait_s) / any_value(members) as mean_s
from each group by "group", first_rank order by "group", first_rank
"""

_WIRES = f"""
with launches as (
    select s.step, s."group", s.name, g.ranks[1] as first_rank, g.ranks, s.micro_batch, s.end_ns - s.start_ns as ns,
        row_number() over (
            partition by s.step, s."group", s.name, s.micro_batch, s.rank order by s.start_ns
        ) as occurrence
    from spans s join groups g on s.rank = g.rank and s."group" = g."group"
    where s.kind = 'collective' and s.peer < 0 and len(g.ranks) > 1
), each as (
    select step, "group", name, any_value(ranks) as ranks, first_rank, min(ns) as ns
    from launches group by step, "group", name, first_rank, micro_batch, occurrence having count(*) > 1
), messages as (
    {
    pairs_sql(
        "spans",
        's."group", step, s.name, [s.rank, s.peer] as ranks, s.rank as first_rank,'
        " least(s.end_ns - s.start_ns, r.end_ns - r.start_ns) as ns",
    )
}
), typical as (
    select "group", any_value(ranks) as ranks, name, first_rank, false as is_pair, median(ns) * count(*) as ns,
        count(distinct step) as steps from each group by "group", name, first_rank
    union all
    select "group", ranks, name, first_rank, true, median(ns) * count(*), count(distinct step)
    from messages group by "group", ranks, name, first_rank
)
select "group", any_value(ranks) as ranks, is_pair, sum(ns / steps) / 1e9 as wire_s
from typical group by "group", first_rank, is_pair, case when is_pair then ranks end order by "group", wire_s desc
"""

_COUNTERS = "select host, gpu, name, avg(value) as value from counters group by host, gpu, name order by all"


def gather(run: Path, first: int | None = None, last: int | None = None) -> Evidence:
    """Read what the files of a run say of steps `first` to `last` (included).

    Without steps it is all but the first, in which everything is made and compiled.

    Raises:
        UserError: `run` has neither spans nor figures of steps.
    """
    found = _read_figures(Evidence(str(run)), run, first, last)
    try:
        trace = Trace.open(run).shared()
    except UserError:
        if found.figures is None:
            raise
        how = "let phalanx train record spans, or call record_spans in a loop of your own (docs/trace.md)"
        return replace(found, missing=(*found.missing, Missing("spans of the ranks", how)))
    return _Reading(trace, found).read(first, last)


class _Reading:
    """Asks one question after the other; what fails is noted, and the others are asked all the same."""

    def __init__(self, trace: Trace, found: Evidence) -> None:
        self._trace, self._found = trace, found
        self._missing = list(found.missing)

    def read(self, first: int | None, last: int | None) -> Evidence:
        trace = self._trace
        times = self._rows("seconds of steps", lambda: trace.step_times(first, last))
        if first is None and len(times) > LEAST_STEPS:
            times = times[1:]
            first = times[0]["step"]
        if not times:
            self._miss("steps in the spans", "record at least five steps, each as a span of kind step (docs/trace.md)")
            lost = self._look_for_losses()
            return replace(self._found, missing=tuple(self._missing), lost=lost)
        averages = self._ask("sums of ranks", lambda: trace.rank_averages(first, last))
        ranks = len(averages) if averages is not None else 0
        few = self._newest(times, _MOST_RANK_STEPS, ranks), times[-1]["step"]
        fewest = self._newest(times, _MOST_SPANS // _SPANS_OF_STEP, ranks), times[-1]["step"]
        slow = self._ask("forward and backward of ranks", lambda: find_slow_ranks(trace, *few))
        found = replace(
            self._found,
            ranks=ranks,
            hosts=len(trace.hosts),
            steps=len(times),
            first_step=times[0]["step"],
            last_step=times[-1]["step"],
            times=times,
            averages=averages,
            slow=slow,
            host_of={} if averages is None else _texts(averages, "rank", "host"),
            breakdown=self._breakdown(first, last),
            stages={row["rank"]: row["stage"] for row in self._sql("groups of ranks", "from stages", few)},
            waits=self._sql("waits by group", _WAITS, few),
            wires=self._sql("single spans of collectives", _WIRES, fewest),
            skew=self._ask("launches of collectives", lambda: skew_by_group(trace, *fewest)) or [],
            mfu=self._rows("figures of steps", lambda: trace.mfu(first, last)),
            incidents=self._rows("incidents", lambda: trace.incidents()),
            counters=self._sql("counters of hosts", _COUNTERS, (first, last)),
        )
        self._look_for_losses()  # at last: that some files are damaged shows only when they are read
        return replace(found, missing=(*self._missing, *_gaps(found)))

    def _look_for_losses(self) -> str:
        lost = self._ask("counters of hosts", self._trace.lost)
        for what, how in lost.lines() if lost is not None else ():
            self._missing.insert(0, Missing(what, how))
        return "" if lost is None else "; ".join(lost.sentences)

    def _newest(self, times: Rows, most: int, ranks: int) -> int:
        """First of the newest steps that hold about `most` ranks and steps; five at least."""
        steps = max(LEAST_STEPS, most // max(1, ranks))
        return int(times[max(0, len(times) - steps)]["step"])

    def _breakdown(self, first: int | None, last: int | None) -> dict[str, float]:
        rows = self._rows("time by kind", lambda: self._trace.step_breakdown(first, last))
        return {kind: rows[0][f"{kind}_s"] or 0.0 for kind in (*BREAKDOWN, "step")} if rows else {}

    def _rows(self, what: str, ask: Callable[[], pa.Table]) -> Rows:
        found = self._ask(what, ask)
        return [] if found is None else found.to_pylist()

    def _sql(self, what: str, query: str, steps: tuple[int | None, int | None]) -> Rows:
        return self._rows(what, lambda: self._trace.ask(query, *steps))

    def _ask(self, what: str, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except (UserError, pa.ArrowException, OSError, ValueError, KeyError) as error:
            # Parts that were cut off, or written by a version of other columns.
            line = str(error).strip().partition("\n")[0]
            self._miss(what, f"cannot be read ({line}): move damaged files out of {self._trace.folder}")
            return None

    def _miss(self, what: str, how: str) -> None:
        self._missing.append(Missing(what, how))


def _texts(table: pa.Table, key: str, column: str) -> dict[Any, str]:
    return dict(zip(table[key].to_pylist(), table[column].cast(pa.string()).to_pylist(), strict=True))


def _gaps(found: Evidence) -> Iterable[Missing]:
    """What was never recorded, as far as a verdict would use it."""
    missed = found.breakdown
    if found.averages is not None and missed and not any(missed.get(kind) for kind in ("forward", "backward")):
        yield Missing(
            "forward and backward passes", "record them: spans.attach(model), or spans of these kinds (docs/trace.md)"
        )
    has_groups = bool(found.waits or found.wires)
    if found.ranks > 1 and not has_groups and missed and not missed.get("wait"):
        yield Missing("communication", "only the groups of phalanx train record it")
    if has_groups and not found.wires:
        yield Missing(
            "single spans of collectives",
            "they are kept for half an hour and around incidents: make the report while the run goes on,"
            " or ask for newer steps with --steps",
        )
    if found.slow is not None:
        for reason in found.slow.abstains:
            yield Missing(
                f"comparison of ranks: {reason}",
                "compare with a run on other hosts, or test the host",
                f"phalanx trace compare OTHER_RUN {found.run}",
            )
    if not any(row["mfu"] is not None for row in found.mfu):
        why = "the device's peak rate is unknown, logging.mfu is false, or metrics.jsonl has no figures of these steps"
        yield Missing("MFU", why)


def _read_figures(found: Evidence, run: Path, first: int | None, last: int | None) -> Evidence:
    """What ``metrics.jsonl`` says: which steps there are, and the first that was not finite."""
    path = run / "metrics.jsonl"
    try:
        entries: Sequence[Mapping[str, Any]] = [one for one in read_json_lines(path) if one["kind"] == "step"]
    except OSError:
        entries = []
    entries = [
        one for one in entries if (first is None or one["step"] >= first) and (last is None or one["step"] <= last)
    ]
    if not entries:
        how = "phalanx train writes metrics.jsonl; phalanx runs import makes it of other people's figures"
        return replace(found, missing=(*found.missing, Missing("figures of steps (loss, MFU)", how)))
    strange = next((one for one in entries if one.get("not_finite")), None)
    steps = [one["step"] for one in entries]
    return replace(found, figures=(min(steps), max(steps)), not_finite=strange)
