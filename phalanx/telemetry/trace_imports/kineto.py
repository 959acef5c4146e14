"""Traces of PyTorch's profiler (Kineto), one file for each rank.

Kernels become spans: NCCL's as collectives of their process group, all others as forward, backward or optimizer by
where they were launched. A kernel of the autograd engine's thread is backward; one within ``Optimizer.step`` is the
optimizer's. Kernels of a kind that follow each other within 20 µs become one span: single operators are what the
profiler shows better. Without kernels (training on a CPU) top-level operators take their place.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.telemetry.spans import NONE, Kind
from phalanx.telemetry.trace_imports.rows import (
    ITEM_BYTES,
    ImportedRank,
    ImportedSpan,
    Interval,
    axis_of,
    uncovered,
    union,
)

_STEP = re.compile(r"ProfilerStep#(\d+)")
_COLLECTIVE = re.compile(r"nccl(?:Dev)?Kernel_([A-Za-z]+)|(?:nccl|gloo):(\w+)")
_OPTIMIZER = re.compile(r"Optimizer\.step|## optimizer ##", re.IGNORECASE)
_DATA = re.compile(r"enumerate\(DataLoader|## ?data", re.IGNORECASE)
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_SMALL_GAP_NS = 20_000
_OWN_NAMES = ("backward", "optimizer")  # of kernels that `phalanx trace export --per-rank` wrote


def read_kineto_trace(path: Path) -> dict[str, Any] | None:
    """The trace in a file (``.json`` or ``.json.gz``); None: it is none of Kineto.

    Raises:
        UserError: it is not JSON.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            trace = json.load(file)
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise UserError(f"cannot be read as JSON ({error})", cure="give whole traces", field=str(path)) from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return None
    return trace


def kineto_rank(trace: dict[str, Any], path: Path, number: int) -> tuple[int, ImportedRank]:
    """A rank and its spans.

    Args:
        trace: of `read_kineto_trace`.
        path: its file, whose name may say the rank (``rank-3.json``, ``rank3``) where the trace does not.
        number: of the file; what is left as rank.
    """
    named = re.search(r"rank[-_]?(\d+)", path.name)
    rank = int(trace.get("distributedInfo", {}).get("rank", named.group(1) if named else number))
    reader = _Reader(trace, rank)
    found = ImportedRank(str(trace.get("host_name") or f"rank-{rank}"), reader.spans(), reader.groups)
    return rank, found


class _Reader:
    def __init__(self, trace: dict[str, Any], rank: int) -> None:
        self._rank = rank
        self._base_ns = int(trace.get("baseTimeNanoseconds", 0))
        self._whole = [one for one in trace["traceEvents"] if one.get("ph") == "X" and "dur" in one]
        self._annotations = [one for one in self._whole if one.get("cat") in ("user_annotation", "cpu_op")]
        self._descriptions = {
            str(one.get("pg_name")): str(one.get("pg_desc") or one.get("pg_name"))
            for one in trace.get("distributedInfo", {}).get("pg_config", [])
            if isinstance(one, dict)
        }
        self.groups: dict[str, tuple[int, ...]] = {}
        self._steps = self._find_steps()

    def spans(self) -> list[ImportedSpan]:
        """All of it."""
        work = [one for one in self._whole if one.get("cat") in _DEVICE]
        launches = self._launches() if work else {}
        if not work:
            work = self._top_operators()
        backward_threads = {
            (one["pid"], one["tid"]) for one in self._annotations if one["name"].startswith("autograd::engine::")
        }
        optimizer = union(self._interval(one) for one in self._annotations if _OPTIMIZER.search(one["name"]))
        busy: dict[Kind, list[Interval]] = {"forward": [], "backward": [], "optimizer": []}
        found = [ImportedSpan(step, "step", "", start, end) for step, start, end in self._steps]
        for one in work:
            start_ns, end_ns = self._interval(one)
            collective = _COLLECTIVE.match(one["name"])
            if collective:
                found.append(self._collective(one, collective))
                continue
            launch = launches.get(one.get("args", {}).get("correlation"), one)
            own_name = one["name"].partition(" ")[0]
            if own_name in _OWN_NAMES:
                busy[own_name].append((start_ns, end_ns))
            elif (launch["pid"], launch["tid"]) in backward_threads:
                busy["backward"].append((start_ns, end_ns))
            elif _holds(optimizer, self._interval(launch)[0]):
                busy["optimizer"].append((start_ns, end_ns))
            else:
                busy["forward"].append((start_ns, end_ns))
        taken: list[Interval] = []
        for kind in ("optimizer", "backward", "forward"):  # streams run at once; an instant counts for one of them
            for _, start_ns, end_ns in uncovered(union(busy[kind], _SMALL_GAP_NS), taken):
                found += [
                    ImportedSpan(step, kind, "", since, until) for step, since, until in self._cut(start_ns, end_ns)
                ]
            taken = union([*taken, *busy[kind]])
        for one in self._annotations:
            if _DATA.search(one["name"]):
                start_ns, end_ns = self._interval(one)
                found.append(ImportedSpan(self._step_at(start_ns), "data", "", start_ns, end_ns))
        return [one for one in found if one.step != NONE]

    def _find_steps(self) -> list[tuple[int, int, int]]:
        """Number, start and end; without marks of steps the whole trace is step 0."""
        marked = [
            (int(found.group(1)), *self._interval(one))
            for one in self._annotations
            if one.get("cat") == "user_annotation" and (found := _STEP.fullmatch(one["name"]))
        ]
        if marked:
            return sorted(marked, key=lambda step: step[1])
        times = [time for one in self._whole if one.get("cat") != "Trace" for time in self._interval(one)]
        return [(0, min(times), max(times))] if times else []

    def _step_at(self, at_ns: int) -> int:
        number = bisect_right([start for _, start, _ in self._steps], at_ns) - 1
        return self._steps[number][0] if number >= 0 and at_ns < self._steps[number][2] else NONE

    def _cut(self, start_ns: int, end_ns: int) -> list[tuple[int, int, int]]:
        """A span cut where steps end; what lies in no step is left out."""
        return [
            (step, max(start_ns, start), min(end_ns, end))
            for step, start, end in self._steps
            if start_ns < end and end_ns > start
        ]

    def _launches(self) -> dict[int, dict[str, Any]]:
        return {
            one["args"]["correlation"]: one
            for one in self._whole
            if one.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in one.get("args", {})
        }

    def _top_operators(self) -> list[dict[str, Any]]:
        """Operators of a CPU that lie in no other, and its collectives."""
        found, ends = [], dict[tuple[Any, Any], float]()
        for one in sorted(self._annotations, key=lambda one: (one["ts"], -one["dur"])):
            thread = (one["pid"], one["tid"])
            if one.get("cat") == "user_annotation":
                if _COLLECTIVE.match(one["name"]):
                    found.append(one)
            elif one["ts"] >= ends.get(thread, 0.0):
                found.append(one)
                ends[thread] = one["ts"] + one["dur"]
        return found

    def _collective(self, one: dict[str, Any], name: re.Match[str]) -> ImportedSpan:
        start_ns, end_ns = self._interval(one)
        details = one.get("args", {})
        title = details.get("Collective name") or name.group(1) or name.group(2)
        group = str(details.get("Process Group Name", ""))
        group = axis_of(str(details.get("Process Group Description") or self._descriptions.get(group, group)))
        if members := re.findall(r"\d+", str(details.get("Process Group Ranks", ""))):
            self.groups[group] = tuple(map(int, members))
        ends = (int(details.get("Dst Rank", NONE)), int(details.get("Src Rank", NONE)))  # of transfers
        peer = next((rank for rank in ends if rank not in (NONE, self._rank)), NONE)
        item_bytes = ITEM_BYTES.get(str(details.get("dtype", "")), 1)
        values = max(int(details.get("In msg nelems", 0)), int(details.get("Out msg nelems", 0)))
        return ImportedSpan(
            self._step_at(start_ns),
            "collective",
            _snake(title),
            start_ns,
            end_ns,
            group,
            peer=peer,
            num_bytes=values * item_bytes,
        )

    def _interval(self, one: dict[str, Any]) -> Interval:
        start_ns = self._base_ns + round(one["ts"] * 1e3)
        return start_ns, start_ns + round(one["dur"] * 1e3)


def _holds(intervals: Sequence[Interval], at_ns: int) -> bool:
    number = bisect_right(intervals, (at_ns, 1 << 63)) - 1
    return number >= 0 and at_ns < intervals[number][1]


def _snake(name: str) -> str:
    """``AllReduce`` and ``allreduce`` as ``all_reduce``."""
    known = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}
    known |= {"alltoall": "all_to_all", "alltoallv": "all_to_all", "sendrecv": "send_recv"}
    plain = name.lower().replace("_", "")
    return known.get(plain, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
