"""Timelines that Perfetto and HolisticTraceAnalysis read."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import UserError
from phalanx.telemetry.perfetto import export_per_rank, export_timeline
from phalanx.telemetry.queries import Trace
from phalanx.telemetry.trace_imports.importing import import_traces
from tests.telemetry.trace_runs import GROUPS, four_ranks, span, write_run


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return write_run(tmp_path_factory.mktemp("run"), four_ranks(), GROUPS)


def exported(trace: Trace, path: Path, *steps: int, **chosen: Any) -> dict[str, Any]:
    export_timeline(trace, path, *steps, **chosen)
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return json.loads(content)


def slices(timeline: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in timeline["traceEvents"] if one["ph"] == "X"]


def test_each_rank_is_a_process_with_a_lane_for_each_kind_and_group(trace: Trace, tmp_path: Path) -> None:
    timeline = exported(trace, tmp_path / "t.json", 1, 2)
    assert len(slices(timeline)) == 2 * 4 * 9 and timeline["baseTimeNanoseconds"] == 1000 * 10**9 + 200 * 10**6
    names = {
        (one["pid"], one["tid"]): one["args"]["name"]
        for one in timeline["traceEvents"]
        if one["ph"] == "M" and one["name"] == "thread_name"
    }
    lanes = {(one["pid"], names[one["pid"], one["tid"]], one["cat"]) for one in slices(timeline)}
    assert {lane for rank, *lane in map(list, lanes) if rank == 0 for lane in [tuple(lane)]} == {
        ("step", "step"),
        ("compute", "forward"),
        ("compute", "backward"),
        ("compute", "optimizer"),
        ("waiting", "wait"),
        ("data", "data"),
        ("communication pipeline", "collective"),
        ("communication shard", "collective"),
    }
    processes = [one["args"]["name"] for one in timeline["traceEvents"] if one["name"] == "process_name"]
    assert processes[0] == "rank 0 (host0, stage 0)" and processes[3] == "rank 3 (host1, stage 1)"
    forward = next(one for one in slices(timeline) if one["cat"] == "forward")
    assert (forward["ts"], forward["dur"]) == (5000.0, 20000.0)
    assert forward["args"] == {"step": 1, "chunk": 0, "micro_batch": 0}


def test_arrows_lead_from_a_send_into_its_receive(trace: Trace, tmp_path: Path) -> None:
    timeline = exported(trace, tmp_path / "t.json.gz", 0, 2)
    arrows = defaultdict(dict)
    for one in timeline["traceEvents"]:
        if one["ph"] in ("s", "f"):
            arrows[one["id"]][one["ph"]] = one
    assert len(arrows) == 3 * 2
    for ends in arrows.values():
        start, end = (_slice_at(timeline, ends[phase]) for phase in "sf")
        assert start["name"] == "send activations" and end["name"] == "recv activations"
        assert end["pid"] == start["args"]["peer"] and start["args"]["step"] == end["args"]["step"]


def _slice_at(timeline: dict[str, Any], at: dict[str, Any]) -> dict[str, Any]:
    lane = [one for one in slices(timeline) if (one["pid"], one["tid"]) == (at["pid"], at["tid"])]
    (found,) = [one for one in lane if one["ts"] <= at["ts"] < one["ts"] + one["dur"]]
    return found


def test_a_part_of_it_has_only_its_arrows(trace: Trace, tmp_path: Path) -> None:
    timeline = exported(trace, tmp_path / "t.json", 0, 0, ranks=[0, 1, 3], groups=["pipeline"])
    assert {one["pid"] for one in slices(timeline)} == {0, 1, 3}
    assert {one["args"].get("group") for one in slices(timeline)} == {None, "pipeline"}
    ends = [(one["ph"], one["pid"]) for one in timeline["traceEvents"] if one["ph"] in "sf"]
    assert ends == [("s", 1), ("f", 3)]


def test_slices_of_a_lane_never_overlap_but_one_inside_the_other(tmp_path: Path) -> None:
    gather = {"name": "all_gather", "group": "shard"}
    rows = [span(0, 0, "step", 0, 100), span(0, 0, "forward", 0, 50), span(0, 0, "forward", 10, 20)]
    rows += [span(0, 0, "collective", at, at + 30, **gather) for at in (0.0, 10.0, 20.0, 35.0, 60.0)]
    lanes = defaultdict(list)
    for one in slices(exported(write_run(tmp_path / "run", rows), tmp_path / "t.json")):
        lanes[one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
    assert len(lanes) == 1 + 1 + 3
    for lane in lanes.values():
        for start, end in lane:
            assert not [one for one in lane if start < one[0] < end < one[1]]


def test_what_is_not_kept_is_not_written(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no spans are kept"):
        export_timeline(trace, tmp_path / "t.json", 100, 200)
    with pytest.raises(UserError, match=r"groups = 'nosuch': no such group.*give some of pipeline, shard"):
        export_timeline(trace, tmp_path / "t.json", groups=["pipeline", "nosuch"])
    assert not list(tmp_path.iterdir())


def test_files_of_ranks_come_back_as_the_same_run(trace: Trace, tmp_path: Path) -> None:
    files = export_per_rank(trace, tmp_path / "ranks", ranks=[0, 1, 2, 3])
    assert sorted(files) == [0, 1, 2, 3]
    assert import_traces([tmp_path / "ranks"], tmp_path / "again")[:2] == ("kineto", 4)
    again = Trace.open(tmp_path / "again")
    (before,), (after,) = (one.step_breakdown().to_pylist() for one in (trace, again))
    assert after == pytest.approx(before, abs=1e-6)
    assert len(again.transfers()) == len(trace.transfers())
    assert again.launch_skew()["ranks"].to_pylist() == trace.launch_skew()["ranks"].to_pylist()
    assert again.groups().to_pylist() == trace.groups().to_pylist()


CLIENTS = Path(sys.prefix) / "clients"
"""Where `make` puts HolisticTraceAnalysis: apart, since with its pandas beside Arrow each start of that takes long."""

_READ = """
import json, sys, warnings
warnings.simplefilter("ignore")  # of pandas, about HolisticTraceAnalysis itself
from hta.trace_analysis import TraceAnalysis

files = {int(rank): path for rank, path in json.loads(sys.argv[1]).items()}
analysis = TraceAnalysis(trace_files=files, trace_dir=sys.argv[2], include_last_profiler_step=True)
breakdown = analysis.get_temporal_breakdown(visualize=False)
overlap = analysis.get_comm_comp_overlap(visualize=False)
found = {name: table[name].tolist() for table in (breakdown, overlap) for name in table.columns}
print(json.dumps(found, default=str), file=sys.stderr)
"""


@pytest.mark.skipif(
    not (CLIENTS / "hta").is_dir() and importlib.util.find_spec("hta") is None,
    reason="HolisticTraceAnalysis is not installed: run make",
)
def test_holistic_trace_analysis_reads_it(tmp_path: Path) -> None:
    """A real client: its own figures are those of the run."""
    rows = four_ranks(4)
    for step in range(4):  # a collective that compute hides for 10 of its 16 ms
        rows += [
            span(rank, step, "collective", 200 * step + 59, 200 * step + 75, name="all_gather", group="context")
            for rank in range(2)
        ]
    rows = [row for row in rows if not (row["rank"] < 2 and row["name"] == "reduce_scatter")]
    trace = write_run(tmp_path / "run", rows, GROUPS | {"context": [[0, 1]]})
    files = export_per_rank(trace, tmp_path / "ranks", ranks=[0, 1])
    names = json.dumps({rank: str(path) for rank, path in files.items()})
    done = subprocess.run(
        [sys.executable, "-c", _READ, names, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(CLIENTS)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stderr.splitlines()[-1])
    assert sorted(found["rank"]) == [0, 1]
    compute_us = 4 * (20 + 40 + 10) * 1000
    assert found["compute_time(us)"] == pytest.approx([compute_us] * 2, rel=1e-3)
    assert found["comp_comm_overlap_pctg"] == pytest.approx([100 * 10 / 20] * 2, rel=0.01)
