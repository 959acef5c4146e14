"""Sends and receives among spans: which is which by its name, and which receive takes what was sent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import duckdb
import numpy as np
import pyarrow as pa

_SIDE = re.compile(r"(?:^|[^a-z])(send|receive|recv)")


def side_of(name: str) -> Literal["send", "receive"] | None:
    """Of a span's name, such as ``send``, ``forward-recv``; None: not a message."""
    found = _SIDE.search(name)
    return None if found is None else "send" if found.group(1) == "send" else "receive"


def pairs_sql(spans: str, columns: str) -> str:
    """SQL that joins each send among spans (``s``) with its receive (``r``).

    The n-th send of a name and group from one rank to another in a step belongs to the n-th receive there. What a pair
    is called is the spans' name without the side, ``name``; ``occurrence`` counts from 1.

    Args:
        spans: a table with the columns of `phalanx.telemetry.span_store.SPANS`, or more.
        columns: to select.
    """
    return f"""
        with ends as (
            select * replace (
                    trim(regexp_replace(name, '(send|receive|recv)( (to|from) rank [0-9]+)?', ''), ' -_') as name
                ), regexp_matches(name, '(^|[^a-z])send') as is_send
            from {spans} where kind = 'collective' and peer >= 0
                and regexp_matches(name, '(^|[^a-z])(send|receive|recv)')
        ), numbered as (
            select *, row_number() over (
                partition by step, "group", name, is_send, rank, peer order by start_ns, micro_batch
            ) as occurrence from ends
        )
        select {columns} from numbered s join numbered r using (step, "group", name, occurrence)
        where s.is_send and not r.is_send and s.rank = r.peer and s.peer = r.rank"""


def matched_messages(columns: Mapping[str, np.ndarray]) -> list[tuple[int, int]]:
    """Places of sends and of their receives, as `pairs_sql` joins them.

    Args:
        columns: `kind`, `name`, `group`, `rank`, `peer`, `step`, `micro_batch` and `start_ns`, of equal length.
    """
    rows = np.flatnonzero((columns["peer"] >= 0) & (columns["kind"] == "collective"))
    if not len(rows):
        return []
    texts = ("kind", "name", "group")
    names = (*texts, "rank", "peer", "step", "micro_batch", "start_ns")
    table = pa.table(
        {name: pa.array(columns[name][rows], pa.string() if name in texts else None) for name in names}
        | {"place": pa.array(rows, pa.int64())}
    )
    connection = duckdb.connect()
    connection.register("messages", table)
    return connection.sql(pairs_sql("messages", "s.place, r.place") + " order by 1").fetchall()
