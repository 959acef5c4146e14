"""Answers of ncclras as incidents and communicators.

The samples are put together from the formats in NVIDIA/nccl, src/ras/client_support.cc (commit ebd1e92): the text of
`rasClientRunInit`, `rasClientRunComms` and `rasClientBreakDownErrors`, the JSON of `jsonWriteHeader` and what follows.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import UserError
from phalanx.telemetry.evidence import gather
from phalanx.telemetry.queries import Trace
from phalanx.telemetry.trace_imports.importing import import_traces
from phalanx.telemetry.verdict import judge
from tests.telemetry.trace_runs import GROUPS, four_ranks, write_run

HEAD = """NCCL version 2.28.9 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
"""

HEALTHY = f"""{HEAD}    0         1         2         4         8         8   RUNNING      OK

Errors
======

Warnings
========

"""

BEHIND = f"""{HEAD}    0         1         2         4         8         8   RUNNING  MISMATCH

Errors
======

Warnings
========

#0-0 (00cbe6bb2b2a8e3f) MISMATCH
  Communicator ranks have different AllGather operation counts
  7 ranks have launched up to operation 24
  Rank 5 has not launched any operations -- GPU 1 managed by process 9482 on node 172.16.64.213

  Communicator ranks have different AllReduce operation counts
  6 ranks have launched up to operation 1273
  2 ranks have launched up to operation 1272
  Rank 5 -- GPU 1 managed by process 9482 on node 172.16.64.213
  Rank 6 -- GPU 2 (NVML 6) managed by process 9483 on node 172.16.64.213

"""

TROUBLE = f"""{HEAD}    0         1         2         4         8         8     ABORT  INCOMPLETE,ERROR,MISMATCH

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 9481 on node 172.16.64.213 managing GPU 0

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 1487 on node 172.16.64.212 managing GPU 3

#0-0 (00cbe6bb2b2a8e3f) INCOMPLETE
  Missing communicator data from 2 ranks
  Rank 3 -- GPU 3 managed by process 1487 on node 172.16.64.212
  Rank 4 -- GPU 0 managed by process 9481 on node 172.16.64.213

#0-0 (00cbe6bb2b2a8e3f) ERROR
  Asynchronous error on 1 rank
  Rank 2 reported Remote process error -- GPU 2 managed by process 1486 on node 172.16.64.212

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data

#0-0 (00cbe6bb2b2a8e3f) MISMATCH
  Communicator ranks have different status
  5 ranks have status RUNNING
  Rank 2 has status ABORT -- GPU 2 managed by process 1486 on node 172.16.64.212
"""


def rank(number: int, *, reduced: int = 1273, **status: Any) -> dict[str, Any]:
    state = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    counts = {"Broadcast": 0, "Reduce": 0, "AllGather": 24, "ReduceScatter": 0, "AllReduce": reduced}
    return {
        "rank": number, "host": f"172.16.64.{212 + number // 4}", "pid": 1480 + number, "cuda_dev": number % 4,
        "nvml_dev": number % 4, "status": state | status, "collective_counts": counts,
    }  # fmt: skip


def answer(ranks: list[dict[str, Any]], missing: list[dict[str, Any]] | None = None, timeouts: int = 0) -> str:
    one = {
        "hash": "0xcbe6bb2b2a8e3f", "secondary_hash": "0x1:0x2", "size": 8, "ranks_count": len(ranks),
        "missing_ranks_count": len(missing or []), "ranks": ranks, "missing_ranks": missing or [],
    }  # fmt: skip
    head = {"nccl_version": "2.28.9", "cuda_runtime_version": 12090, "cuda_driver_version": 13000}
    rest = {"timestamp": "2026-11-25 12:00:00", "communicators_count": 1, "communicators": [one]}
    return json.dumps(head | rest | {"ras": {"collection_time_sec": 0.002, "timeouts_count": timeouts}}, indent=2)


def imported(folder: Path, text: str) -> tuple[Trace, list[dict[str, Any]]]:
    source = folder / "ras"
    source.write_text(text)
    os.utime(source, (1000, 1000))
    chosen, _, _ = import_traces([source], folder / "run")
    assert chosen == "nccl-ras"
    trace = Trace.open(folder / "run")
    found = trace.incidents().to_pylist()
    return trace, [{**json.loads(one["details"]), "at_ns": one["at_ns"]} for one in found]


def test_a_healthy_job_has_no_incident(tmp_path: Path) -> None:
    trace, incidents = imported(tmp_path, HEALTHY)
    assert incidents == []
    rows = trace.sql("select size, status, error, rank from communicators").to_pylist()
    assert rows == [{"size": 8, "status": "RUNNING", "error": "", "rank": -1}]


def test_the_text_names_who_is_behind_in_what(tmp_path: Path) -> None:
    trace, incidents = imported(tmp_path, BEHIND)
    names = ("kind", "ranks_of_communicator", "launched", "others_launched")
    assert [tuple(one[name] for name in names) for one in incidents] == [
        ("NCCL: behind in AllGather", [5], [0], 24),
        ("NCCL: behind in AllReduce", [5, 6], [1272, 1272], 1273),
    ]
    assert {one["communicator"] for one in incidents} == {"00cbe6bb2b2a8e3f"}
    assert all(one["hosts"] == ["172.16.64.213"] and one["at_ns"] == 1000 * 10**9 for one in incidents)
    query = "select rank, gpu, pid from communicators where collective = 'AllReduce' order by rank"
    assert [tuple(row.values()) for row in trace.sql(query).to_pylist()] == [(5, 1, 9482), (6, 2, 9483)]


def test_the_text_names_the_dead_the_silent_and_errors(tmp_path: Path) -> None:
    _, incidents = imported(tmp_path, TROUBLE)
    found = {(one["kind"], *one.get("ranks_of_communicator", ()), *one.get("processes", ())) for one in incidents}
    assert found == {
        ("NCCL: no answer", "process 9481 on 172.16.64.213"),
        ("NCCL: process dead", "process 1487 on 172.16.64.212"),
        ("NCCL: no answer", 3, 4),
        ("NCCL: Remote process error", 2),
        ("NCCL: timeouts while asking",),
        ("NCCL: ABORT where others are RUNNING", 2),
    }


def test_the_json_says_the_same_of_every_rank(tmp_path: Path) -> None:
    ranks = [rank(number, reduced=1272 if number in (5, 6) else 1273) for number in range(8)]
    trace, incidents = imported(tmp_path, answer(ranks))
    (one,) = incidents
    assert one["kind"] == "NCCL: behind in AllReduce" and one["ranks_of_communicator"] == [5, 6]
    assert one["hosts"] == ["172.16.64.213"] and one["launched"] == [1272, 1272]
    assert one["at_ns"] == int(time.mktime(time.strptime("2026-11-25 12:00:00", "%Y-%m-%d %H:%M:%S"))) * 10**9
    rows = trace.communicators().to_pylist()
    assert [(row["collective"], row["least_launched"], row["most_launched"], row["behind"]) for row in rows] == [
        ("AllReduce", 1272, 1273, [5, 6]),
        ("AllGather", 24, 24, []),
    ]
    assert rows[0]["ranks"] == 8 and rows[0]["size"] == 8 and rows[0]["behind_hosts"] == ["172.16.64.213"]


def test_the_json_names_the_dead_the_silent_and_errors(tmp_path: Path) -> None:
    gone = [
        {"rank": number, "host": "172.16.64.213", "pid": 9481, "cuda_dev": 0, "nvml_dev": 0,
         "status": {"unresponsive": silent, "considered_dead": dead}}
        for number, silent, dead in ((5, True, True), (6, True, False), (7, False, False))
    ]  # fmt: skip
    ranks = [rank(0, async_error=6), rank(1, abort_flag=True), rank(2), rank(3), rank(4, init_state=7)]
    trace, incidents = imported(tmp_path, answer(ranks, gone, timeouts=3))
    assert {(one["kind"], *one.get("ranks_of_communicator", ())) for one in incidents} == {
        ("NCCL: process dead", 5),
        ("NCCL: no answer", 6),
        ("NCCL: left the communicator", 7),
        ("NCCL: Remote process error", 0),
        ("NCCL: ABORT where others are RUNNING", 1),
        ("NCCL: INIT where others are RUNNING", 4),
        ("NCCL: timeouts while asking",),
    }
    assert trace.communicators().to_pylist()[0]["troubled"] == [0, 1, 5, 6, 7]


def test_it_is_added_to_a_run_that_has_spans(tmp_path: Path) -> None:
    write_run(tmp_path / "run", four_ranks(), GROUPS)
    ranks = [rank(number, reduced=4 if number == 2 else 5) for number in range(4)]
    trace, incidents = imported(tmp_path, answer(ranks))
    assert len(incidents) == 1 and len(trace.step_times()) == 6


def test_a_report_of_it_alone_abstains(tmp_path: Path) -> None:
    imported(tmp_path, BEHIND)
    assert judge(gather(tmp_path / "run")).abstains == ("no rank recorded spans",)


@pytest.mark.parametrize("cut", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("text", [BEHIND, answer([rank(0), rank(1)])])
def test_a_torn_answer_is_refused_or_read_as_far_as_it_is_whole(tmp_path: Path, text: str, cut: float) -> None:
    source = tmp_path / "ras"
    source.write_text(text[: int(cut * len(text))])
    try:
        import_traces([source], tmp_path / "run", "nccl-ras")
    except UserError as error:
        assert "no whole traces of nccl-ras" in str(error)
        assert not (tmp_path / "run").exists()
    else:
        assert "Warnings\n" in source.read_text()
