"""Questions about a run, each a named function that returns a table, by DuckDB over the files where they lie.

    trace = Trace.open("runs/shakespeare")
    trace.rank_averages(100, 200)          # time by kind for each rank: what a heat map shows
    trace.step_breakdown(100, 200)         # where the time of a step went
    trace.sql("select rank, max(end_ns - start_ns) from spans where kind = 'forward' group by rank")

Tables that SQL may ask: `phalanx.telemetry.run_tables`. Steps that are not given are all steps; `last` is included.
Sums are kept for good; questions to single spans (`between_spans`, `launch_skew`, `transfers`, `timeline`) are answered
for as long as spans are kept.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import duckdb
import pyarrow as pa

from phalanx.core.errors import UserError, not_permitted
from phalanx.core.files import first_refused
from phalanx.telemetry import run_tables
from phalanx.telemetry.lost_telemetry import (
    Loss,
    damaged_parts,
    dropped_spans,
    hosts_without_steps,
    unnoted_hosts,
)
from phalanx.telemetry.message_pairs import pairs_sql
from phalanx.telemetry.run_access import as_text
from phalanx.telemetry.span_store import PARTS
from phalanx.telemetry.spans import KINDS

_STEP_PARTS = f"""
with each as (
    select step, rank, {", ".join(f"sum({kind}_ns) / 1e9 as {kind}_s" for kind in (*PARTS, "step"))}
    from steps group by step, rank having sum(step_ns) > 0
)"""

T = TypeVar("T")

_LONG_LINE = re.compile(r'"maximum_object_size" of (\d+) bytes exceeded while reading file "([^"]+)"')

_OF_FILES = (duckdb.Error, duckdb.IOException, duckdb.InvalidInputException, duckdb.SerializationException)
"""Just these classes, and not what is derived from them: what a damaged file raises, among others."""


@dataclass(frozen=True)
class Trace:
    """The telemetry of one run."""

    folder: Path
    _damaged: dict[Path, str] = field(default_factory=dict, kw_only=True, repr=False, compare=False)

    @classmethod
    def open(cls, run: str | Path, options: Mapping[str, Any] | None = None) -> Trace:
        """Of a run folder, or of the folder ``telemetry`` in it; also of a URL such as ``s3://bucket/run``.

        Args:
            options: of the file system behind a URL, as fsspec names them (``endpoint_url`` …), beside what the
                environment says.

        Raises:
            UserError: no telemetry is there, or storage does not answer.
        """
        path = place_of(run, options)
        # Not `resolve`, which raises a RuntimeError of links that lead in a circle.
        if getattr(path, "fs", None) is None and (shown := as_text(real := Path(os.path.realpath(path)))) != str(real):
            problem = f"{shown}: the name is not UTF-8, and the database cannot open it"
            raise UserError(problem, cure="rename the folder")
        try:
            return cls._within(path)
        except OSError as error:
            if getattr(path, "fs", None) is None:
                if isinstance(error, PermissionError):
                    raise not_permitted(error.filename or path) from error
                cure = "see to the disk, or the mount, that it lies on"
                raise UserError(f"{path} cannot be read ({error.strerror})", cure=cure) from error
            cure = "see to bucket, credentials (in the environment) and network"
            raise UserError(f"{path} cannot be read ({error})", cure=cure) from error

    @classmethod
    def _within(cls, path: Path) -> Trace:
        for folder in (path / "telemetry", path):
            if any((folder / name).exists() for name in ("live", "spans", "steps", "communicators.jsonl")):
                return cls(folder)
        raise UserError(f"no telemetry in {path}", cure="give the folder of a run that recorded spans (docs/trace.md)")

    @property
    def hosts(self) -> list[str]:
        """Hosts that wrote here."""
        done = {path.name for path in self.folder.glob("steps/*")}
        return sorted(done | {path.name.rpartition("-")[0] for path in self.folder.glob("live/*.arrows")})

    def connect(
        self,
        first: int | None = None,
        last: int | None = None,
        *,
        hosts: Sequence[str] | None = None,
        ranks: Sequence[int] | None = None,
        tables: Collection[str] = tuple(run_tables.TABLES),
    ) -> Any:
        """A DuckDB connection with the tables, cut to steps and hosts, and to the hosts of ranks (which may have had
        others besides); it reads nothing until it is asked. Files of other `tables` are not looked for."""
        return run_tables.connect(self.folder, first, last, hosts, tables, ranks, self._damaged)

    def lost(self) -> Loss:
        """What no answer has in it: files that cannot be read, and spans of the whole run that were dropped."""
        self._find_damaged()
        damaged: dict[str, list[Path]] = {}
        for path, table in sorted(self._damaged.items()):
            damaged.setdefault(table, []).append(path)
        lost = {table: tuple(paths) for table, paths in damaged.items()}
        return Loss(lost, dropped_spans(self.folder), unnoted_hosts(self.folder), hosts_without_steps(self.folder))

    def _find_damaged(self, *, decode: bool = False) -> bool:
        """Leave damaged files out from now on; whether there are any that were not known."""
        known = len(self._damaged)
        found = damaged_parts(self.folder.resolve(), tuple(run_tables.TABLES), decode=decode)
        try:
            self._damaged.update({path: table for table, path in found})
        except PermissionError as error:
            raise not_permitted(error.filename or self.folder) from error
        return len(self._damaged) > known

    def sql(self, query: str, first: int | None = None, last: int | None = None) -> pa.Table:
        """Answer any question that only reads.

        Raises:
            UserError: it is not SQL, or would do more than read the tables.
        """
        return self._answer(lambda: run_tables.read_only(self.connect(first, last), self.folder, query))

    def ask(
        self,
        query: str,
        first: int | None = None,
        last: int | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> pa.Table:
        """Answer one of our own questions; what users write goes to `sql`.

        Raises:
            UserError: files are of a version of other columns.
        """
        return self._answer(
            lambda: self._tables(first, last).sql(query, params=dict(parameters or {}) or None).to_arrow_table()
        )

    def _tables(self, first: int | None, last: int | None) -> Any:
        return self.connect(first, last)

    def shared(self) -> Trace:
        """The same for many questions at once: those to the same steps share a connection, which takes longer to make
        than most answers."""
        return _SharedTrace(self.folder, _damaged=self._damaged)

    def _answer(self, ask: Callable[[], T]) -> T:
        """Ask, and where that finds damaged files, ask again without them."""
        while True:
            try:
                return ask()
            except PermissionError as error:
                raise not_permitted(error.filename or self.folder) from error
            except (duckdb.Error, UserError) as error:
                cause = error.__cause__ if isinstance(error, UserError) else error
                is_of_files = type(cause) in _OF_FILES
                if is_of_files and (self._find_damaged() or self._find_damaged(decode=True)):
                    continue
                if isinstance(error, UserError) and not is_of_files:
                    raise
                self._check_rights()
                if isinstance(error, UserError):
                    raise
                line = str(error).strip().partition("\n")[0]
                if (found := _LONG_LINE.search(line)) is not None:
                    cure = f"take the line out, as by: awk 'length < {found[1]}' {found[2]}"
                    raise UserError(f"{found[2]} has a line of more than {found[1]} bytes", cure=cure) from error
                cure = f"move damaged files, and those of another version, out of {self.folder}"
                raise UserError(f"telemetry cannot be read ({line})", cure=cure) from error

    def _check_rights(self) -> None:
        """Where files are closed to this user, that is what is wrong, and not that they are damaged."""
        if getattr(self.folder, "fs", None) is not None:
            return
        refused = first_refused(self.folder, self.folder.parent / "metrics.jsonl")
        if refused is not None:
            raise not_permitted(refused)

    def rank_averages(self, first: int | None = None, last: int | None = None) -> pa.Table:
        """For each rank: host, steps, and mean seconds of a step by kind (``forward_s`` …): a heat map."""
        columns = ", ".join(f"sum({kind}_ns) / count(distinct step) / 1e9 as {kind}_s" for kind in KINDS)
        return self.ask(
            f"select rank, any_value(host) as host, count(distinct step) as steps, {columns} from steps"
            " group by rank order by rank",
            first,
            last,
        )

    def step_times(self, first: int | None = None, last: int | None = None) -> pa.Table:
        """For each step: seconds of the slowest, the median and the fastest rank, which was slowest, when it ended."""
        return self.ask(
            "with each as (select step, rank, sum(step_ns) / 1e9 as step_s, max(end_ns) as end_ns from steps"
            " group by step, rank having sum(step_ns) > 0)"
            " select step, max(step_s) as slowest_s, median(step_s) as median_s, min(step_s) as fastest_s,"
            " arg_max(rank, step_s) as slowest_rank, max(end_ns) as end_ns from each group by step order by step",
            first,
            last,
        )

    def phase_times(self, first: int | None = None, last: int | None = None) -> pa.Table:
        """For each type of span (kind, name, group, chunk): ranks, spans and seconds of a rank and step, the longest
        span, bytes of a rank and step, and GB/s while it ran (null without bytes)."""
        return self.ask(
            """
            with whole as (select count(distinct (step, rank)) as rank_steps from phases)
            select kind, name, "group", chunk, count(distinct rank) as ranks,
                sum("count") / any_value(rank_steps) as spans_per_step,
                sum(total_ns) / any_value(rank_steps) / 1e9 as per_step_s,
                sum(total_ns) / sum("count") / 1e9 as mean_s,
                max(longest_ns) / 1e9 as longest_s,
                sum(bytes) / any_value(rank_steps) as bytes_per_step,
                case when sum(bytes) > 0 and sum(total_ns) > 0 then sum(bytes) / sum(total_ns) end as gb_per_s
            from phases, whole group by kind, name, "group", chunk order by per_step_s desc, kind, name, "group", chunk
            """,
            first,
            last,
        )

    def step_breakdown(self, first: int | None = None, last: int | None = None) -> pa.Table:
        """Mean seconds of a step by what it went on, over ranks and steps; they add up to ``step_s``.

        Communication counts where it was waited for (exposed); what lies inside another part counts once, for the inner
        one; what lies between spans is ``other_s``.
        """
        means = ", ".join(f"avg({kind}_s) as {kind}_s" for kind in PARTS)
        other = f"avg(step_s) - {' - '.join(f'avg({kind}_s)' for kind in PARTS)}"
        return self.ask(
            f"{_STEP_PARTS} select {means}, {other} as other_s, avg(step_s) as step_s, count(*) as rank_steps"
            " from each",
            first,
            last,
        )

    def between_spans(self, first: int | None = None, last: int | None = None) -> pa.Table:
        """For each rank, mean seconds of a step: the step, its parts, what lies between them, what two share.

        It is measured from single spans, so that ``parts_s + between_s`` is ``step_s`` but for ``twice_s``, which parts
        that overlap without one being inside the other count twice (such as two threads that wait at once).
        """
        kinds = ", ".join(f"'{kind}'" for kind in PARTS)
        sums = " + ".join(f"sum({kind}_ns)" for kind in PARTS)
        return self.ask(
            f"""
            with whole as (
                select rank, step, min(start_ns) as start_ns, max(end_ns) as end_ns
                from spans where kind = 'step' group by rank, step
            ), part as (
                select rank, step, greatest(s.start_ns, w.start_ns) as start_ns, least(s.end_ns, w.end_ns) as end_ns
                from spans s join whole w using (rank, step)
                where kind in ({kinds}) and s.end_ns > w.start_ns and s.start_ns < w.end_ns
            ), covered as (  -- each part adds what none before it has covered
                select rank, step, start_ns, end_ns, max(end_ns) over (
                    partition by rank, step order by start_ns, end_ns rows between unbounded preceding and 1 preceding
                ) as until_ns from part
            ), filled as (
                select rank, step, sum(greatest(0, end_ns - greatest(start_ns, coalesce(until_ns, start_ns)))) as ns
                from covered group by rank, step
            ), counted as (select rank, step, {sums} as ns from steps group by rank, step)
            select rank, count(*) as steps,
                avg(w.end_ns - w.start_ns) / 1e9 as step_s,
                avg(coalesce(c.ns, 0)) / 1e9 as parts_s,
                avg(w.end_ns - w.start_ns - coalesce(f.ns, 0)) / 1e9 as between_s,
                avg(coalesce(c.ns, 0) - coalesce(f.ns, 0)) / 1e9 as twice_s
            from whole w left join filled f using (rank, step) left join counted c using (rank, step)
            group by rank order by rank
            """,
            first,
            last,
        )

    def exposed_communication(self, first: int | None = None, last: int | None = None) -> pa.Table:
        """For each group (its axes): seconds of a rank and step that it communicated, that nothing hid, and their share
        of the step. What nothing hid adds up to the ``wait_s`` of the breakdown."""
        return self.ask(
            """
            with whole as (
                select count(*) as rank_steps, avg(ns) / 1e9 as step_s
                from (select sum(step_ns) as ns from steps group by rank, step having sum(step_ns) > 0)
            )
            select "group",
                sum(case when kind = 'collective' then total_ns else 0 end) / any_value(rank_steps) / 1e9 as running_s,
                sum(case when kind = 'wait' then total_ns else 0 end) / any_value(rank_steps) / 1e9 as exposed_s,
                sum(case when kind = 'wait' then total_ns else 0 end)
                    / any_value(rank_steps) / 1e9 / any_value(step_s) as share_of_step,
                sum(case when kind = 'collective' then bytes else 0 end) / any_value(rank_steps) as bytes_per_step
            from phases, whole where kind in ('collective', 'wait') group by "group" order by exposed_s desc, "group"
            """,
            first,
            last,
        )

    def pipeline_bubble(self, first: int | None = None, last: int | None = None) -> pa.Table:
        """For each pipeline stage: seconds of a step that its ranks computed and that they waited for other stages, and
        the share of the step (``bubble``). Empty where no rank is in a pipeline group."""
        return self.ask(
            """
            with waited as (
                select rank, step, sum(total_ns) as wait_ns from phases
                where kind = 'wait' and list_contains(string_split("group"::varchar, '·'), 'pipeline')
                group by rank, step
            ), each as (
                select rank, step, sum(forward_ns + backward_ns) as compute_ns, sum(step_ns) as step_ns
                from steps group by rank, step having sum(step_ns) > 0
            )
            select stage, count(distinct rank) as ranks, avg(compute_ns) / 1e9 as compute_s,
                avg(coalesce(wait_ns, 0)) / 1e9 as waited_s, avg(step_ns) / 1e9 as step_s,
                sum(coalesce(wait_ns, 0)) / sum(step_ns) as bubble
            from each join stages using (rank) left join waited using (rank, step) group by stage order by stage
            """,
            first,
            last,
        )

    def mfu(self, first: int | None = None, last: int | None = None) -> pa.Table:
        """For each step that has figures: when it ended, seconds, tokens/s, MFU (null: the peak rate of the device is
        unknown), the part of the slowest rank that was no forward or backward, and loss."""
        return self.ask(
            """
            with each as (
                select step, rank, sum(step_ns) / 1e9 as step_s, max(end_ns) as end_ns,
                    sum(forward_ns + backward_ns) / 1e9 as compute_s from steps group by step, rank
            ), slowest as (
                select step, max(step_s) as slowest_s, arg_max(compute_s, step_s) as compute_s, max(end_ns) as end_ns
                from each group by step
            )
            select step, end_ns, coalesce(m.step_s, slowest_s) as step_s, tokens_per_s, mfu,
                slowest_s - compute_s as not_compute_s, loss
            from (select step, last(step_s) as step_s, last(tokens_per_s) as tokens_per_s, last(mfu) as mfu,
                last(loss) as loss from metrics group by step) m
            left join slowest using (step) order by step
            """,
            first,
            last,
        )

    def launch_skew(self, first: int | None = None, last: int | None = None) -> pa.Table:
        """For each collective as it happened: how far apart its ranks began it, in seconds, who was first and last.

        The n-th collective of a name and group in a step and micro-batch is the same on all members. Transfers between
        two ranks (`transfers`) and groups whose members are not known are left out. ``together_s`` is from the last
        start to the last end; ``error_s`` is how far the skew may be off, as clocks of hosts are; null: not known.
        """
        return self.ask(
            """
            with launches as (
                select s.step, s."group", s.name, g.ranks, s.micro_batch, s.rank, s.start_ns, s.end_ns, s.bytes,
                    s.host, s.error_ns, row_number() over (
                        partition by s.step, s."group", s.name, s.micro_batch, s.rank order by s.start_ns
                    ) as occurrence
                from aligned_spans s join groups g on s.rank = g.rank and s."group" = g."group"
                where s.kind = 'collective' and s.peer < 0
            )
            select step, "group", name, ranks, micro_batch, occurrence, count(*) as ranks_seen,
                (max(start_ns) - min(start_ns)) / 1e9 as skew_s,
                arg_min(rank, start_ns) as first_rank, arg_max(rank, start_ns) as last_rank,
                min(start_ns) as first_start_ns, (max(end_ns) - max(start_ns)) / 1e9 as together_s,
                max(bytes) as bytes, case
                    when count(distinct host) = 1 then 0
                    when count(error_ns) = count(*)
                    then (arg_min(error_ns, start_ns) + arg_max(error_ns, start_ns)) / 1e9
                end as error_s
            from launches group by step, "group", name, ranks, micro_batch, occurrence having count(*) > 1
            order by step, first_start_ns, ranks, name
            """,
            first,
            last,
        )

    def skew_by_step(self, first: int | None = None, last: int | None = None) -> pa.Table:
        """For each step and group: collectives, mean and largest launch skew in seconds, and the rank that was last
        most often. Skew that grows with steps while compute stays the same is MegaScale's decay of MFU (6.3)."""
        skew = self.launch_skew(first, last)
        connection = duckdb.connect()
        connection.register("skew", skew)
        return connection.sql(
            'select step, "group", count(*) as collectives, avg(skew_s) as mean_s, max(skew_s) as largest_s,'
            ' mode(last_rank) as last_rank from skew group by step, "group" order by step, "group"'
        ).to_arrow_table()

    def transfers(self, first: int | None = None, last: int | None = None) -> pa.Table:
        """For each send with its receive: step, group, name, ranks, times (Unix ns by one clock) and bytes.

        The n-th send of a name from one rank to another in a step belongs to the n-th receive there. ``error_ns`` is
        how far the two ends may be off each other, by the clocks of their hosts; 0 within a host, null: not known.
        """
        return self.ask(
            pairs_sql(
                "aligned_spans",
                'step, s."group", s.name, s.rank as from_rank, s.peer as to_rank, occurrence,'
                " greatest(s.micro_batch, r.micro_batch) as micro_batch,"
                " s.start_ns as send_start_ns, s.end_ns as send_end_ns,"
                " r.start_ns as receive_start_ns, r.end_ns as receive_end_ns,"
                " greatest(s.bytes, r.bytes) as bytes,"
                " case when s.host = r.host then 0 else s.error_ns + r.error_ns end as error_ns",
            )
            + " order by step, send_start_ns, from_rank",
            first,
            last,
        )

    def data_wait(self, first: int | None = None, last: int | None = None) -> pa.Table:
        """For each step: mean and longest wait for a batch in seconds, which rank waited longest, share of the step."""
        return self.ask(
            f"{_STEP_PARTS} select step, avg(data_s) as mean_s, max(data_s) as longest_s,"
            " arg_max(rank, data_s) as rank, sum(data_s) / sum(step_s) as share_of_step from each"
            " group by step order by step",
            first,
            last,
        )

    def incidents(self, first: int | None = None, last: int | None = None) -> pa.Table:
        """What went wrong, in order: at_ns, kind, the step that it names or that was under way then (null: neither),
        details as JSON."""
        named = """
            select distinct at_ns, kind, try_cast(details ->> '$.step' as bigint) as step, details from incidents
            order by at_ns, kind
        """
        # Of very many hosts sums are thousands of files, which only times without a step have to be looked for in.
        found = self._answer(lambda: self.connect(first, last, tables=()).sql(named).to_arrow_table())
        if not found["step"].null_count:
            return found
        return self.ask(
            """
            with whole as (
                select step, min(end_ns - step_ns) as start_ns, max(end_ns) as end_ns from steps group by step
            )
            select at_ns, kind, coalesce(try_cast(details ->> '$.step' as bigint), max(step)) as step, details
            from incidents
            left join whole on at_ns between start_ns and end_ns group by at_ns, kind, details order by at_ns, kind
            """,
            first,
            last,
        )

    def communicators(self) -> pa.Table:
        """For each of NCCL's communicators and collectives, as `ncclras` said last: ranks that answered, how many they
        launched at least and at most, which are behind (within the communicator, and their hosts), and ranks that are
        dead, silent or in error. Empty where no answer was imported."""
        return self.ask(
            """
            with last as (
                select * from communicators semi join (select max(at_ns) as at_ns from communicators) using (at_ns)
                where rank >= 0
            ), most as (
                select communicator, collective, max(launched) as launched from last where collective <> ''
                group by communicator, collective
            ), troubled as (
                select communicator, list(distinct rank order by rank) as ranks from last
                where error <> '' or status in ('DEAD', 'INCOMPLETE', 'NOCOMM', 'ABORT') group by communicator
            )
            select l.communicator, max(l.size) as size, l.collective, count(*) as ranks,
                min(l.launched) as least_launched, max(l.launched) as most_launched,
                coalesce(list(l.rank order by l.rank) filter (l.launched < m.launched), []) as behind,
                coalesce(list(distinct l.host) filter (l.launched < m.launched), []) as behind_hosts,
                coalesce(any_value(t.ranks), []) as troubled
            from last l left join most m using (communicator, collective) left join troubled t using (communicator)
            group by l.communicator, l.collective order by len(behind) desc, l.communicator, l.collective
            """,
            None,
            None,
        )

    def timeline(
        self,
        first: int | None = None,
        last: int | None = None,
        *,
        ranks: Sequence[int] | None = None,
        groups: Sequence[str] | None = None,
        hosts: Sequence[str] | None = None,
    ) -> pa.Table:
        """Spans in order of time by one clock, of chosen ranks and groups; spans that are of no group always come.

        Steps that no rank finished are there too: where a job stopped is what one looks for.

        Args:
            hosts: those of `ranks`, where they are known: files of others are not looked for.
        """
        chosen = ["true"]
        if ranks is not None:
            chosen.append(f"rank in ({', '.join(str(int(rank)) for rank in ranks) or 'null'})")
        if groups is not None:
            chosen.append('("group" = \'\' or list_contains($groups, "group"::varchar))')
        query = f"select * from aligned_spans where {' and '.join(chosen)} order by start_ns, rank, end_ns desc"
        parameters = None if groups is None else {"groups": list(groups)}

        def ask() -> pa.Table:
            connection = self.connect(first, last, hosts=hosts, ranks=ranks, tables=("spans", "steps"))
            connection.execute(run_tables.NEWEST_WITH_UNFINISHED)
            return connection.sql(query, params=parameters).to_arrow_table()

        return self._answer(ask)

    def groups(self) -> pa.Table:
        """For each rank and group: members in order, its place among them, and its pipeline stage (null: none)."""
        return self.ask(
            'select rank, "group", ranks, place, stage from groups left join stages using (rank)'
            ' order by rank, "group"',
            None,
            None,
        )


@dataclass(frozen=True)
class _SharedTrace(Trace):
    """As `Trace.shared` gives it."""

    _connections: dict[tuple[int | None, int | None], Any] = field(default_factory=dict, repr=False, compare=False)

    def _tables(self, first: int | None, last: int | None) -> Any:
        if (first, last) not in self._connections:
            self._connections[first, last] = self.connect(first, last)
        return self._connections[first, last]

    def _find_damaged(self, *, decode: bool = False) -> bool:
        self._connections.clear()
        return super()._find_damaged(decode=decode)

    def _answer(self, ask: Callable[[], T]) -> T:
        asks_files_of_before = bool(self._connections)
        try:
            return super()._answer(ask)
        except UserError:
            if not asks_files_of_before:
                raise
            self._connections.clear()  # a writer has merged or removed files meanwhile
            return super()._answer(ask)


def place_of(run: str | Path, options: Mapping[str, Any] | None = None) -> Path:
    """The folder that is meant by a path or a URL.

    What comes back for a URL has of a `Path` what reading takes, and is typed as that: whoever asks about a run need
    not know where it lies.
    """
    if isinstance(run, str) and "://" in run:
        from phalanx.telemetry.remote_path import RemotePath

        return cast(Path, RemotePath.of(run, options))
    return Path(run) if isinstance(run, str) else run
