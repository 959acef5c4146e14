"""The telemetry of a run as DuckDB views, over the files where they lie.

| table | holds |
|---|---|
| ``spans`` | every span, by the clock of its host |
| ``aligned_spans`` | the same by one clock, with ``error_ns``: how far it may be off; null: not known |
| ``phases`` | sums of a rank and step by type of span |
| ``steps`` | sums of a rank and step by kind; what lies inside another part counts for the inner one |
| ``counters`` | the hosts' own counters, once a second |
| ``groups`` | rank, group, its members in order, its place among them |
| ``stages`` | rank and its pipeline stage; ranks without a pipeline group are not there |
| ``clocks`` | host, attempt, at_ns, offset_ns (how far it is ahead of the reference host), error_ns, drift_ns_per_s … |
| ``incidents`` | at_ns, kind, details as JSON |
| ``communicators`` | ranks of NCCL's communicators and how many collectives they launched, where `ncclras` was asked |
| ``metrics`` | figures of steps in ``metrics.jsonl``: loss, grad_norm, tokens, tokens_per_s, step_s, mfu |

What a later attempt did again counts once, as it did it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import duckdb
import pyarrow as pa

from phalanx.core.errors import UserError
from phalanx.telemetry import span_store
from phalanx.telemetry.counters import COUNTERS
from phalanx.telemetry.host_clocks import WANDER_PER_S

TABLES = {
    "spans": span_store.SPANS,
    "phases": span_store.PHASES,
    "steps": span_store.STEPS,
    "counters": COUNTERS,
}

_LINES = {
    "groups": {"rank": "INTEGER", "attempt": "INTEGER", "group": "VARCHAR", "ranks": "INTEGER[]"},
    "clocks": {
        "host": "VARCHAR",
        "attempt": "INTEGER",
        "at_ns": "BIGINT",
        "offset_ns": "BIGINT",
        "error_ns": "DOUBLE",
        "drift_ns_per_s": "DOUBLE",
        "drift_error_ns_per_s": "DOUBLE",
        "bend_ns": "DOUBLE",
        "round_trip_ns": "BIGINT",
        "exchanges": "INTEGER",
        "reference": "VARCHAR",
    },
    "communicators": {
        "at_ns": "BIGINT",
        "communicator": "VARCHAR",
        "size": "INTEGER",
        "rank": "INTEGER",
        "host": "VARCHAR",
        "pid": "INTEGER",
        "gpu": "INTEGER",
        "status": "VARCHAR",
        "error": "VARCHAR",
        "collective": "VARCHAR",
        "launched": "BIGINT",
    },
    "metrics": {
        "kind": "VARCHAR",
        "step": "BIGINT",
        "loss": "DOUBLE",
        "grad_norm": "DOUBLE",
        "tokens": "BIGINT",
        "tokens_per_s": "DOUBLE",
        "step_s": "DOUBLE",
        "mfu": "DOUBLE",
    },
}
"""Columns of files of JSON lines."""

VIEWS = ("aligned_spans", "groups", "stages", "clocks", "incidents", "communicators", "metrics")

_SQL_MEMORY = "1500MB"

NEWEST_WITH_UNFINISHED = """
create or replace view newest as
select step, coalesce(max(attempt) filter (step_ns > 0), max(attempt)) as attempt from all_steps group by step
"""
"""In the place of `newest`, for those who ask for single spans; means would be distorted by a step that was cut off."""

_ALIGNED = f"""
create view aligned_spans as
with every as (  -- an estimate that names no attempt is of all
    select host, unnest(case when attempt is null then attempts else [attempt] end) as attempt, at_ns,
        offset_ns::double as offset_ns, error_ns, coalesce(drift_ns_per_s, 0) as drift,
        coalesce(drift_error_ns_per_s, 0) as drift_error,
        case when host = reference then 0 else {WANDER_PER_S * 1e9} / 2 end as wander,
        coalesce(bend_ns, 0) as bend_ns
    from clocks, (select list(distinct attempt) as attempts from newest)
), points as (
    select * exclude (drift, bend_ns),
        lead(error_ns) over later as next_error_ns,
        lead(bend_ns) over later as next_bend_ns,
        (lead(at_ns) over later - at_ns) / 1e9 as between_s,
        coalesce((lead(offset_ns) over later - offset_ns) / nullif((lead(at_ns) over later - at_ns) / 1e9, 0), drift)
            as slope,
        -- the first estimate also holds for what was before it
        case when row_number() over later = 1 then -9223372036854775807 else at_ns end as from_ns
    from every window later as (partition by host, attempt order by at_ns)
), placed as (
    select s.*, c.* exclude (host, attempt, at_ns, from_ns), (s.start_ns - c.at_ns) / 1e9 as after_s
    from spans s asof left join points c on s.host = c.host and s.attempt = c.attempt and s.start_ns >= c.from_ns
), shifted as (
    select * exclude (error_ns), coalesce(offset_ns + slope * after_s, 0) as shift_ns,
        coalesce(slope * ((end_ns - start_ns) / 1e9), 0) as stretch_ns,
        error_ns + case
            when after_s >= 0 and between_s > 0 then (next_error_ns - error_ns) * after_s / between_s
                + greatest(next_bend_ns, wander * after_s * (between_s - after_s))
            when between_s > 0 then -after_s * (error_ns + next_error_ns) / between_s
                + wander * -after_s * (between_s - after_s)
            else abs(after_s) * drift_error + wander * after_s ** 2
        end as error_ns
    from placed
)
select * exclude (
    offset_ns, drift_error, wander, next_error_ns, next_bend_ns, between_s, slope, after_s, shift_ns, stretch_ns
) replace (
    start_ns - shift_ns::bigint as start_ns, end_ns - (shift_ns + stretch_ns)::bigint as end_ns
) from shifted
"""

_GROUPS = """
create view groups as
select distinct rank, "group", ranks, list_position(ranks, rank) - 1 as place from all_groups
where attempt = (select max(attempt) from all_groups)
"""

_STAGES = """
create view stages as
select rank, min(place) as stage from groups where list_contains(string_split("group", '·'), 'pipeline') group by rank
"""


def connect(
    folder: Path,
    first: int | None,
    last: int | None,
    hosts: Sequence[str] | None,
    tables: Collection[str] = tuple(TABLES),
    ranks: Sequence[int] | None = None,
    without: Container[Path] = (),
    held: Container[str] = (),
) -> Any:
    """A DuckDB connection with the tables, cut to steps and hosts; it reads nothing until it is asked.

    Args:
        folder: `telemetry` of a run.
        first: step; None: from the beginning.
        last: step, included; None: to the end.
        hosts: None: all.
        ranks: files of hosts that had none of these are left out; None: all. Those of the others may hold more ranks.
        tables: of `TABLES`, whose files are opened; others are empty but for what is being written.
        without: files that are damaged.
        held: of `TABLES`: they are read now, into memory. Each question to a table of thousands of files looks at all.
    """
    folder = folder.resolve()  # once: of thousands of files it would take longer than reading them
    connection = duckdb.connect()
    connection.execute(f"set memory_limit = '{_SQL_MEMORY}'")
    connection.execute("set enable_progress_bar = false")  # it is written to where answers go, after some seconds
    know = _register_storage(connection, folder)
    live, streams = span_store.read_streams(folder)  # before parts are looked for, which they may become any moment
    within = f"step between {-(2**62) if first is None else int(first)} and {2**62 if last is None else int(last)}"
    live_tables = {"spans": live}
    if live.num_rows:
        live_tables["phases"], live_tables["steps"] = span_store.sums(live)
    if ranks is not None and not hosts:  # files of all others are not even looked for
        own = {part.path.parent.name for part in _parts(folder, "steps", (None, None), None, ranks, streams)}
        hosts = sorted(own | set(live["host"].cast(pa.string()).to_pylist()))
    for table, schema in TABLES.items():
        columns = ", ".join(f'"{name}"' for name in schema.names)
        sources = []
        chosen = _parts(folder, table, (first, last), hosts, ranks, streams) if table in tables else []
        chosen = [part for part in chosen if part.path not in without]
        know([part.path for part in chosen])
        files = _read(connection, [str(part.path) for part in chosen])
        if files is not None:
            connection.register(f"{table}_files", files)
            sources.append(f"select {columns} from {table}_files")
        rows = live_tables.get(table)
        connection.register(f"{table}_live", schema.empty_table() if rows is None else rows)
        sources.append(f"select {columns} from {table}_live")
        where = "" if table == "counters" else f" where {within}"
        rows_of = f"all_{table} as select * from ({' union all by name '.join(sources)}){where}"
        if table in held:  # to keep the order of thousands of files, threads wait for each other
            connection.execute("set preserve_insertion_order = false")
            connection.execute(f"create temp table {rows_of}")
            connection.execute("set preserve_insertion_order = true")
        else:
            connection.execute(f"create view {rows_of}")
    connection.execute(
        # What an attempt had done after its last checkpoint was done again by the next: that is what counts.
        "create view newest as select step, max(attempt) as attempt from all_steps where step_ns > 0 group by step"
    )
    for table in ("spans", "phases", "steps"):
        connection.execute(f"create view {table} as select * from all_{table} semi join newest using (step, attempt)")
    connection.execute("create view counters as select * from all_counters")
    for view, kind in (("all_groups", "groups"), ("clocks", "clocks")):
        lines = list(_host_files(folder / kind, None if ranks is None else hosts))
        know(lines)
        _lines(connection, view, kind, lines)
    _lines(connection, "communicators", "communicators", _there(folder / "communicators.jsonl"))
    _lines(connection, "all_metrics", "metrics", _there(folder.parent / "metrics.jsonl"))
    connection.execute(
        f"create view metrics as select * exclude (kind) from all_metrics where kind = 'step' and {within}"
    )
    # Object storage has no appending: there each host has a file of its own.
    _incidents(connection, [*_there(folder / "incidents.jsonl"), *folder.glob("incidents/*.jsonl")])
    for view in (_ALIGNED, _GROUPS, _STAGES):
        connection.execute(view)
    return connection


def read_only(connection: Any, folder: Path, query: str) -> pa.Table:
    """Answer a question that only reads, from these tables and the run's own files; the connection is locked by it.

    Raises:
        UserError: it is not SQL, or would do more than read.
    """
    try:
        kinds = [str(one.type).rpartition(".")[2].upper() for one in duckdb.extract_statements(query)]
        if len(kinds) != 1 or kinds[0] not in ("SELECT", "EXPLAIN"):
            raise UserError("is not one SELECT", cure="ask one question that only reads", field="sql", value=query)
        allowed = ", ".join(f"'{_quoted(path.resolve())}'" for path in (folder, folder.parent / "metrics.jsonl"))
        connection.execute(f"set allowed_directories = ['{_quoted(folder.resolve())}']")
        connection.execute(f"set allowed_paths = [{allowed}]")
        connection.execute(
            "set enable_external_access = false; set python_enable_replacements = false; set lock_configuration = true"
        )
        return connection.sql(query).to_arrow_table()
    except duckdb.Error as error:
        cure = "tables: " + ", ".join((*TABLES, *VIEWS))
        raise UserError(str(error), cure=cure, field="sql", value=query) from error


def _register_storage(connection: Any, folder: Path) -> Callable[[Iterable[Path]], None]:
    """Let a connection read object storage, if the run lies there; what is returned takes files that were listed."""
    if getattr(folder, "fs", None) is None:
        return lambda paths: None
    from phalanx.telemetry.remote_reads import RemoteReads

    reads = RemoteReads(cast(Any, folder))
    connection.register_filesystem(reads)
    return lambda paths: reads.know(cast(Any, paths))


def _read(connection: Any, paths: list[str]) -> Any:
    """Parquet files as one relation, without those that were cut off; None: none is left."""
    if not paths:
        return None
    try:
        return connection.read_parquet(paths)
    except duckdb.Error:  # looked for only now: opening every file takes as long as some questions
        # In object storage a file is there as a whole or not at all.
        whole = [path for path in paths if "://" in path or span_store.is_whole(Path(path))]
        if len(whole) == len(paths):
            raise
        return connection.read_parquet(whole) if whole else None


def _parts(
    folder: Path,
    table: str,
    steps: tuple[int | None, int | None],
    hosts: Sequence[str] | None,
    ranks: Sequence[int] | None,
    streams: Container[span_store.Stream],
) -> list[span_store.Part]:
    """Parts that may hold something of these steps, hosts and ranks, and that are no streams any more."""
    wanted: Sequence[str | None] = hosts or [None]
    found = [part for host in wanted for part in span_store.parts(folder, table, host)]
    chosen = [part for part in found if part.stream not in streams]
    if table == "counters":
        return chosen
    first, last = steps
    chosen = [
        part
        for part in chosen
        if (last is None or part.first_step <= last) and (first is None or part.last_step >= first)
    ]
    if ranks is None:
        return chosen
    return [part for part in chosen if any(part.first_rank <= rank <= part.last_rank for rank in ranks)]


def _host_files(folder: Path, hosts: Sequence[str] | None) -> Iterable[Path]:
    if hosts is None:
        return folder.glob("*.jsonl")
    return [path for host in hosts for path in _there(folder / f"{host}.jsonl")]


def _lines(connection: Any, view: str, kind: str, paths: Iterable[Path]) -> None:
    """A view of files of JSON lines; a line that a crash has torn is left out."""
    columns = _LINES[kind]
    names = [f"'{_quoted(path.resolve())}'" for path in sorted(paths)]
    if names:
        types = ", ".join(f"'{name}': '{type_}'" for name, type_ in columns.items())
        how = f"format = 'newline_delimited', ignore_errors = true, columns = {{{types}}}"
        source = f"read_json([{', '.join(names)}], {how})"
    else:
        empty = ", ".join(f'null::{type_} as "{name}"' for name, type_ in columns.items())
        source = f"(select {empty} where false)"
    connection.execute(f"create view {view} as select * from {source}")


def _there(path: Path) -> list[Path]:
    return [path] if path.is_file() else []


def _incidents(connection: Any, paths: Sequence[Path]) -> None:
    """Kinds of incidents differ in what they say, so that details stay JSON."""
    columns = "(line ->> '$.at_ns')::bigint as at_ns, line ->> '$.kind' as kind, line as details"
    if paths:
        names = ", ".join(f"'{_quoted(path.resolve())}'" for path in paths)
        source = f"read_json_objects([{names}], format = 'newline_delimited', ignore_errors = true)"
        connection.execute(f"create view incidents as select {columns} from (select json as line from {source})")
    else:
        connection.execute("create view incidents as select 0::bigint as at_ns, '' as kind, '' as details where false")


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")
