"""The telemetry of a run for pages: a window of its newest steps, held in memory while its files are the same.

Several parts of one page ask for the same at once; with 12,288 ranks opening the files takes longer than the question.
So the sums of a window are read once, and asked there.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from phalanx.core.errors import UserError
from phalanx.core.layout import AXES, Layout
from phalanx.dashboard.data_source import Run
from phalanx.dashboard.page_frame import PageFrame
from phalanx.dashboard.remembered import Remembered
from phalanx.telemetry import run_tables
from phalanx.telemetry.alike_ranks import groups_of
from phalanx.telemetry.queries import Trace
from phalanx.telemetry.rank_states import JobState, newest_step, rank_states
from phalanx.telemetry.run_list import read_config
from phalanx.telemetry.run_presence import presences
from phalanx.telemetry.slow_ranks import SlowRanks, find_slow_ranks

T = TypeVar("T")

WINDOW = 20
"""Steps that are looked at unless others are asked for: so many tell chance from a slow rank, and are soon past."""

RECENT = 6
"""Steps in which a rank that has become slow is noticed."""

MOST_RANKS_WITH_LAST = 1024
"""Of more ranks it takes too long to look up what each did last."""

_MOST_HOSTS_WITH_SPANS = 256

_OWN_AND_PEERS = """
with each as (
    select rank, step, sum(forward_ns + backward_ns) / 1e9 as own_s, sum(step_ns) / 1e9 as step_s
    from steps group by rank, step having sum(forward_ns + backward_ns) > 0
), placed as (select e.*, coalesce(stage, 0) as stage from each e left join stages using (rank)
), usual as (select stage, step, median(own_s) as peers_s from placed group by stage, step)
select p.rank, p.step, p.own_s, u.peers_s, p.step_s from placed p join usual u using (stage, step)
where list_contains($ranks, p.rank) order by p.step, p.rank
"""


@dataclass(frozen=True)
class HeldTrace(Trace):
    """A trace whose sums of one window of steps are in memory; who asks it holds `lock`."""

    window: tuple[int, int] = (0, 0)
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)
    _held: list[Any] = field(default_factory=list, repr=False, compare=False)

    def connect(
        self,
        first: int | None = None,
        last: int | None = None,
        *,
        hosts: Sequence[str] | None = None,
        ranks: Sequence[int] | None = None,
        tables: Collection[str] = tuple(run_tables.TABLES),
    ) -> Any:
        """The connection that is held where the window is asked for, else a new one."""
        if (first, last) != self.window or hosts is not None or ranks is not None:
            return super().connect(first, last, hosts=hosts, ranks=ranks, tables=tables)
        if not self._held:
            # With very many hosts single spans take too long, and only sums are asked.
            is_large = len(self.hosts) > _MOST_HOSTS_WITH_SPANS
            asked = ("steps",) if is_large else tuple(run_tables.TABLES)

            def read() -> Any:
                without = self._damaged
                return run_tables.connect(self.folder, first, last, None, asked, without=without, held=("steps",))

            self._held.append(self._answer(read))
        return self._held[0]


@dataclass(frozen=True)
class WindowOfSteps:
    """What is known of all ranks over some steps.

    Attributes:
        averages: `Trace.rank_averages`, a row for each rank.
        stages: pipeline stage of each of its rows.
        step_times: `Trace.step_times`, a row for each step.
    """

    first: int
    last: int
    averages: pa.Table
    stages: list[int]
    slow: SlowRanks
    step_times: pa.Table


class RunTelemetry:
    """The telemetry of one run.

    Raises:
        UserError: the run has none.
    """

    def __init__(self, run: Run, remembered: Remembered, unix_s: Callable[[], float] = time.time) -> None:
        if run.folder is None:
            cure = "give its run folder to phalanx dashboard, on a host that can read it"
            raise UserError("telemetry lies in the run folder, and only the driver's URL is known", cure=cure)
        self.run, self.folder = run, run.folder
        self.trace = Trace.open(run.folder)
        self._remembered, self._unix_s = remembered, unix_s

    def remember(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """An answer of this run, made once."""
        return self._remembered.get((*key, str(self.folder)), make)

    def stamp(self) -> tuple[object, ...]:
        """What it holds: equal while nothing was written."""
        return self._remembered.get(("stamp", self.folder, round(self._unix_s(), 1)), self._stamp)

    def _stamp(self) -> tuple[object, ...]:
        telemetry = self.trace.folder
        loose = [*telemetry.glob("live/*.arrows"), telemetry / "incidents.jsonl", telemetry / "clocks"]
        return (str(telemetry), _written_in(telemetry / "steps"), *(_state_of(path) for path in loose))

    def newest(self) -> int:
        """The newest step that any rank has begun."""
        found = self._remembered.get(("newest", self.stamp()), lambda: newest_step(self.trace))
        if found is None:
            raise UserError("no step has telemetry yet", cure="wait for the first step", value=str(self.folder))
        return found

    def steps_of(self, text: str) -> tuple[int, int]:
        """Of ``A:B``, ``A`` or nothing: the newest steps.

        Raises:
            UserError: it is no range of steps.
        """
        if not text:
            return self.newest() - WINDOW + 1, self.newest()
        first, _, last = text.partition(":")
        try:
            found = int(first), int(last or first)
        except ValueError:
            raise _no_steps(text) from None
        if found[0] > found[1]:
            raise _no_steps(text)
        return found

    def window(self, text: str = "") -> WindowOfSteps:
        """All ranks over some steps."""
        first, last = self.steps_of(text)
        return self._remembered.get(("window", self.stamp(), first, last), lambda: self._window(first, last))

    def slow_now(self) -> SlowRanks:
        """Which ranks are slow over the window; while steps come, a rank that is so in the newest few counts as well:
        what began a moment ago is a small part of the window."""
        found = self.window().slow
        if not self.run.is_live:
            return found
        newest = self.newest()
        recent = self.window(f"{newest - RECENT}:{newest - 1}").slow if newest > RECENT else found
        known = {one["rank"] for one in found.slow}
        return recent if any(one["rank"] not in known for one in recent.slow) else found

    def _held(self, first: int, last: int) -> HeldTrace:
        key = ("held", self.stamp(), first, last)
        return self._remembered.get(key, lambda: HeldTrace(self.trace.folder, (first, last)))

    def _window(self, first: int, last: int) -> WindowOfSteps:
        trace = self._held(first, last)
        with trace.lock:
            averages = trace.rank_averages(first, last)
            slow = find_slow_ranks(trace, first, last)
            step_times = trace.step_times(first, last)
        stage_of = {row["rank"]: row["stage"] for row in slow.ranked}
        stages = [stage_of.get(rank, 0) for rank in averages["rank"].to_pylist()]
        return WindowOfSteps(first, last, averages, stages, slow, step_times)

    def state(self) -> JobState:
        """Where all ranks stand now."""
        newest = self.newest()
        key = ("state", self.stamp(), self.run.is_live and int(self._unix_s()))
        return self._remembered.get(key, lambda: self._state(newest))

    def _state(self, newest: int) -> JobState:
        first = newest - WINDOW + 1
        trace = self._held(first, newest)
        with trace.lock:
            connection = trace.connect(first, newest)
            ranks = connection.sql("select count(distinct rank) from all_steps").fetchall()[0][0]
            known = presences(self.folder) if self.run.is_live and ranks <= MOST_RANKS_WITH_LAST else ()
            return rank_states(
                trace,
                int(self._unix_s() * 1e9),
                is_running=self.run.is_live,
                is_complete=self.run.row.state == "finished",
                connection=connection,
                with_last=ranks <= MOST_RANKS_WITH_LAST,
                paused={one.rank for one in known if one.life() == "paused"},
                began_ns=int(1e9 * max((one.began_unix_s for one in known), default=0)),
            )

    def own_times(self, first: int, last: int, ranks: Sequence[int]) -> pa.Table:
        """For each step of these ranks: seconds of its own work, and the median of those of its pipeline stage."""
        trace, asked = self._held(first, last), {"ranks": [int(rank) for rank in ranks]}
        with trace.lock:
            return trace.connect(first, last).sql(_OWN_AND_PEERS, params=asked).to_arrow_table()

    def breakdown(self, first: int, last: int) -> pa.Table:
        """`Trace.step_breakdown`."""
        trace = self._held(first, last)
        with trace.lock:
            return trace.step_breakdown(first, last)

    def figures(self, newest: int) -> dict[str, float]:
        """Means of ``tokens_per_s`` and ``mfu`` over so many of the newest steps in the run's figures."""
        query = (
            "select avg(tokens_per_s) as tokens_per_s, avg(mfu) as mfu"
            f" from (select * from metrics order by step desc limit {newest})"
        )

        def ask() -> dict[str, float]:
            rows = run_tables.connect(self.trace.folder, None, None, None, ()).sql(query).to_arrow_table().to_pylist()
            return {name: value for name, value in rows[0].items() if value is not None}

        return self.remember(("figures", self.stamp(), newest), ask)

    def incidents(self) -> list[dict[str, Any]]:
        """What went wrong, the newest first: ``at_ns, kind, step, rank, host, says``; None: not at one rank or host."""
        return self._remembered.get(("incidents", self.stamp()), self._incidents)

    def _incidents(self) -> list[dict[str, Any]]:
        found = []
        for row in self.trace.incidents().to_pylist():
            says = _object(row["details"])
            rank = says.get("rank")
            found.append(
                {
                    "at_ns": row["at_ns"],
                    "kind": row["kind"] or "unknown",
                    "step": row["step"] if row["step"] is not None else _whole(says.get("step")),
                    "rank": _whole(rank),
                    "host": says.get("host") if isinstance(says.get("host"), str) else None,
                    "says": {name: value for name, value in says.items() if name not in ("at_ns", "kind")},
                }
            )
        return found[::-1]

    def step_at(self, unix_ns: int) -> int | None:
        """The step that was under way at a time; None: it was before the first or after the last."""

        def ask() -> int | None:
            query = "select step from all_steps where end_ns >= $at and end_ns - step_ns <= $at order by end_ns limit 1"
            rows = self.trace.connect().sql(query, params={"at": unix_ns}).fetchall()
            return int(rows[0][0]) if rows else None

        return self.remember(("step at", self.stamp(), unix_ns), ask)

    def hosts_of(self, ranks: Sequence[int]) -> list[str]:
        """The hosts of these ranks: spans of others need not be opened."""
        wanted = set(ranks)
        return sorted({one.host for one in self.state().ranks if one.rank in wanted})

    def group_names(self) -> list[str]:
        """Names of the groups that communicate, by their axes."""

        return sorted({one["group"] for one in self.groups()})

    def groups(self) -> list[dict[str, Any]]:
        """`phalanx.telemetry.alike_ranks.groups_of`."""
        return self._remembered.get(("groups", self.stamp()), lambda: groups_of(self.trace.folder))

    def layout(self) -> Layout | None:
        """How ranks are spread: as the run's config says, else as the groups that were recorded; None: not known."""
        return self._remembered.get(("layout", self.stamp()), self._layout)

    def _layout(self) -> Layout | None:
        world = 1 + max((one.rank for one in self.state().ranks), default=0)
        try:
            parallel = read_config(self.folder).get("parallel", {})
            layout = Layout(*(max(1, int(parallel.get(axis, 1))) for axis in AXES))
        except (UserError, TypeError, ValueError, AttributeError):
            layout = Layout()
        if layout.world_size >= world:
            return layout
        return layout_of_groups(self.groups(), world)


def open_telemetry(frame: PageFrame, run: Run) -> RunTelemetry:
    """That of a run, for a page.

    Raises:
        UserError: it has none.
    """
    return RunTelemetry(run, frame.remembered, frame.unix_s)


def found_telemetry(frame: PageFrame, run: Run) -> tuple[RunTelemetry | None, str]:
    """That of a run in which some step began; None: there is none, and why."""
    try:
        telemetry = open_telemetry(frame, run)
        telemetry.newest()
    except UserError as error:
        return None, str(error)
    return telemetry, ""


def layout_of_groups(groups: Sequence[dict[str, Any]], least: int) -> Layout | None:
    """The layout in which these are the groups; None: there is none, or they do not tell.

    Ranks of which nothing was recorded are taken to be tensor ranks beside those that were: imported traces often hold
    only the first of each tensor group.

    Args:
        groups: of `phalanx.telemetry.alike_ranks.groups_of`.
        least: ranks that the layout has at least.
    """
    sizes = {axis: max((len(one["ranks"]) for one in groups if one["group"] == axis), default=1) for axis in AXES}
    strides = [
        min(b - a for a, b in zip(one["ranks"], one["ranks"][1:], strict=False))
        for one in groups
        if one["group"] in AXES and len(one["ranks"]) > 1
    ]
    if sizes["tensor"] == 1 and strides:
        sizes["tensor"] = max(1, min(strides))
    layout = Layout(**sizes)
    if layout.world_size < least or layout.world_size == 1:
        return None
    for one in groups:
        if one["group"] in AXES and layout.members(one["ranks"][0], [one["group"]]) != tuple(one["ranks"]):
            return None
    return layout


def ranks_of(text: str) -> list[int]:
    """Of ``0-7,64``.

    Raises:
        UserError: it names no ranks.
    """
    ranks: set[int] = set()
    try:
        for part in filter(None, text.replace(" ", "").split(",")):
            first, dash, last = part.partition("-")
            low, high = int(first), int(last if dash else first)
            if high - low > 1 << 20:
                raise ValueError("too many")
            ranks |= set(range(low, high + 1))
    except ValueError:
        raise UserError("are no ranks", cure="give some such as 0-7,64", field="ranks", value=text) from None
    return sorted(ranks)


def ranks_text(ranks: Sequence[int]) -> str:
    """``0-7,64`` of ranks in order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _no_steps(text: str) -> UserError:
    return UserError("is no range of steps", cure="give one such as 100:200", field="steps", value=text)


def _written_in(folder: Path) -> int:
    """Which folders of hosts lie there, and when something was put into each."""
    try:
        with os.scandir(folder) as entries:
            return hash(tuple(sorted((entry.name, entry.stat().st_mtime_ns) for entry in entries)))
    except OSError:
        return 0


def _state_of(path: Path) -> tuple[object, ...]:
    try:
        found = path.stat()
    except OSError:
        return (path.name,)
    return path.name, found.st_size, found.st_mtime_ns
