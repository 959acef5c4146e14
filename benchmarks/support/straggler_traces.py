"""Spans of made-up jobs in which it is known who is slow and why: a slow rank, a heavy stage, uneven sequence lengths.

A step is computed forward from the job's schedule (`phalanx.parallel.pipeline.schedules`) and drawn times: passes of a
worker take as long as its slowest tensor-parallel rank, the others wait inside; messages go when they are made; all
replicas meet at the end. What is written is what `phalanx train` records, and the judge has to find out the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from phalanx.parallel.config import Schedule
from phalanx.parallel.pipeline.schedules import Action, make_table
from phalanx.telemetry.span_store import SPANS, sums, write_part

BEGIN_NS = 1_760_000_000 * 10**9
FORWARD_S, TRANSFER_S, REDUCE_S, UPDATE_S = 0.02, 0.0005, 0.01, 0.01
_TENSOR_SHARE = 0.04  # of a pass that its ranks spend in all-reduces, whoever is slow


@dataclass(frozen=True)
class MadeUpJob:
    """Sizes, noise, and what is wrong.

    Attributes:
        columns, stages, tensor, chunks: layout; ranks are stage by stage, then column by column.
        noise: relative standard deviation of a pass of a rank; `lasting`: of ranks from each other, for good.
        tail: share of steps in which some rank stalls for a while.
        slow: by rank, the factor of its passes and the step from which on they take so much longer.
        odd: by rank, the factor of its passes now and then, and in which share of steps.
        late: by rank, seconds that it waits for each batch; from step `late_from` on.
        heavy: factors of passes by stage.
        lengths: relative standard deviation of micro-batches' work, the same for all ranks that see one.
    """

    columns: int = 4
    stages: int = 4
    tensor: int = 1
    chunks: int = 1
    micro_batches: int = 8
    steps: int = 30
    schedule: Schedule = "1f1b"
    noise: float = 0.02
    lasting: float = 0.005
    tail: float = 0.02
    slow: Mapping[int, tuple[float, int]] = field(default_factory=dict)
    odd: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    late: Mapping[int, float] = field(default_factory=dict)
    late_from: int = 1
    heavy: Mapping[int, float] = field(default_factory=dict)
    lengths: float = 0.0
    ranks_per_host: int = 8
    seed: int = 0

    @property
    def ranks(self) -> int:
        return self.columns * self.stages * self.tensor

    def rank(self, stage: int, column: int, tensor: int = 0) -> int:
        return (stage * self.columns + column) * self.tensor + tensor

    def host(self, rank: int) -> str:
        return f"h{rank // self.ranks_per_host}"


def groups_of(job: MadeUpJob) -> list[tuple[str, tuple[int, ...]]]:
    """Groups as ``(axes, members)``."""
    stages, columns, tensors = range(job.stages), range(job.columns), range(job.tensor)
    found = [("pipeline", tuple(job.rank(s, c, t) for s in stages)) for c in columns for t in tensors]
    found += [("shard", tuple(job.rank(s, c, t) for c in columns)) for s in stages for t in tensors]
    found += [("tensor", tuple(job.rank(s, c, t) for t in tensors)) for s in stages for c in columns]
    return [(axes, members) for axes, members in found if len(members) > 1]


def make_spans(job: MadeUpJob, *, first_step: int = 1, begin_ns: int = BEGIN_NS, steps: int | None = None) -> pa.Table:
    """All spans of the job, a row each, as `SPANS`."""
    return _Maker(job, first_step, begin_ns, steps or job.steps).table()


def write_made_up_run(folder: Path, job: MadeUpJob, spans: pa.Table | None = None, number: int = 1) -> Path:
    """A run as the writers of its hosts leave it; called again, with later spans and number, it grows."""
    spans = make_spans(job) if spans is None else spans
    telemetry = folder / "telemetry"
    hosts = spans["host"].to_numpy()
    for host in sorted(set(hosts.tolist())):
        own = spans.filter(pa.array(hosts == host)).unify_dictionaries()
        own = own.sort_by([("rank", "ascending"), ("start_ns", "ascending")])
        for name, part in zip(("spans", "phases", "steps"), (own, *sums(own)), strict=True):
            write_part(telemetry, name, host, part, 0, number)
    (telemetry / "groups").mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"rank": rank, "attempt": 0, "group": axes, "ranks": members})
        for axes, members in groups_of(job)
        for rank in members
    ]
    (telemetry / "groups" / "h0.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


class _Maker:
    def __init__(self, job: MadeUpJob, first_step: int, begin_ns: int, steps: int) -> None:
        self.job, self.begin_ns, self.first, self.steps = job, begin_ns, first_step, steps
        self.rng = np.random.default_rng([job.seed, first_step])
        self.parts: list[dict[str, Any]] = []
        self.shape = (steps, job.columns)
        lasting = np.random.default_rng([job.seed, 7]).normal(0, job.lasting, job.ranks)
        self.own = np.exp(lasting)[None, :].repeat(steps, axis=0)
        numbers = np.arange(first_step, first_step + steps)
        for rank, (factor, since) in job.slow.items():
            self.own[numbers >= since, rank] *= factor
        for rank, (factor, share) in job.odd.items():
            self.own[np.random.default_rng([job.seed, first_step, rank]).random(steps) < share, rank] *= factor
        stalls = self.rng.random((steps, job.ranks)) < job.tail / max(1, job.ranks)
        self.own[stalls] *= 1.5
        # what a micro-batch costs, the same on all stages of its column, forward and backward
        sigma = job.lengths
        self.lengths = np.exp(self.rng.normal(-(sigma**2) / 2, sigma, (job.micro_batches, *self.shape)))

    def table(self) -> pa.Table:
        job = self.job
        table = make_table(job.schedule, job.stages, job.chunks, job.micro_batches)
        data_s = {at: self._late(at) for at in range(job.stages)}
        free = {at: data_s[at].max(axis=2) for at in range(job.stages)}
        ready: dict[Action, np.ndarray] = {}
        waiting = [list(actions) for actions in table.actions]
        last = table.placement.stages - 1
        for at in range(job.stages):
            self._add(at, "data", np.zeros(data_s[at].shape), data_s[at])
        while any(waiting):
            moved = False
            for at, actions in enumerate(waiting):
                while actions and (need := self._needed(actions[0], last)) in (None, *ready):
                    self._run(at, actions.pop(0), need, free, ready, table.placement, last)
                    moved = True
            assert moved, "the schedule is stuck"
        self._finish(free)
        return self._joined()

    def _late(self, at: int) -> np.ndarray:
        job, rows = self.job, np.full((*self.shape, self.job.tensor), 0.002)
        for rank, seconds in job.late.items():
            stage, rest = divmod(rank, job.columns * job.tensor)
            if stage == at:
                since = max(0, job.late_from - self.first)
                rows[since:, rest // job.tensor, rest % job.tensor] += seconds
        return rows

    def _needed(self, action: Action, last: int) -> Action | None:
        stage, kind, micro_batch = action
        if kind == "F":
            return Action(stage - 1, "F", micro_batch) if stage else None
        if kind == "W":
            return Action(stage, "I", micro_batch)
        if stage == last:
            return Action(stage, "F", micro_batch)
        split = self.job.schedule in ("interleaved_zero_bubble", "zbv")
        return Action(stage + 1, "I" if split else "B", micro_batch)

    def _run(self, at: int, action: Action, need: Any, free: Any, ready: Any, placement: Any, last: int) -> None:
        job, (stage, kind, micro_batch) = self.job, action
        start = free[at]
        comes = need is not None and placement.rank_of(need.stage) != at
        what = f"{'activations' if kind == 'F' else 'gradients'} of stage {need.stage if need else 0}"
        if need is not None:
            arrived = ready[need] + (TRANSFER_S if comes else 0.0)
            if comes:
                posted, peer = start, placement.rank_of(need.stage)
                arrived = np.maximum(arrived, posted + TRANSFER_S)
                of = {"group": "pipeline", "micro_batch": micro_batch, "peer_stage": peer, "bytes": 8 << 20}
                self._add(at, "collective", self._all(posted), self._all(arrived), name=f"receive {what}", **of)
                self._add(at, "wait", self._all(posted), self._all(arrived), name=f"receive {what}", **of)
                self._add(peer, "collective", self._all(ready[need]), self._all(arrived), name=f"send {what}",
                          group="pipeline", micro_batch=micro_batch, peer_stage=at, bytes=8 << 20)  # fmt: skip
            start = np.maximum(start, arrived)
        own, whole = self._pass_times(at, kind, micro_batch)
        begin, end = self._all(start), self._all(start + whole)
        chunk = placement.stages_of(at).index(stage)
        name = {"I": "input", "W": "weights"}.get(kind, "")
        which = "forward" if kind == "F" else "backward"
        self._add(at, which, begin, end, name=name, chunk=chunk, micro_batch=micro_batch)
        if job.tensor > 1:
            self._add(at, "wait", begin + own, end, name="all_reduce", group="tensor")
            self._add(at, "collective", begin + own, end, name="all_reduce", group="tensor", bytes=4 << 20)
        free[at] = ready[action] = start + whole

    def _pass_times(self, at: int, kind: str, micro_batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Own times of ranks (steps x columns x tensor), and of the worker (steps x columns)."""
        job = self.job
        base = FORWARD_S * {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}[kind] / job.chunks * job.heavy.get(at, 1.0)
        ranks = job.columns * job.tensor
        own = self.own[:, at * ranks : (at + 1) * ranks].reshape(*self.shape, job.tensor)
        noise = np.exp(self.rng.normal(0, job.noise, own.shape))
        times = base * own * noise * self.lengths[micro_batch][:, :, None]
        return times, times.max(axis=2) + (base * _TENSOR_SHARE if job.tensor > 1 else 0.0)

    def _finish(self, free: dict[int, np.ndarray]) -> None:
        job = self.job
        for at in range(job.stages):
            start = free[at]
            free[at] = (start.max(axis=1, keepdims=True) + REDUCE_S).repeat(job.columns, axis=1)
            if job.columns > 1:
                of = {"name": "reduce_scatter", "group": "shard", "bytes": 64 << 20}
                for kind in ("collective", "wait"):
                    self._add(at, kind, self._all(start), self._all(free[at]), **of)
        for at in range(job.stages):
            self._add(at, "optimizer", self._all(free[at]), self._all(free[at] + UPDATE_S))
        ends = np.max([free[at].max(axis=1) for at in range(job.stages)], axis=0) + UPDATE_S
        for at in range(job.stages):
            whole = ends[:, None, None].repeat(job.columns, 1).repeat(job.tensor, 2)
            self._add(at, "step", np.zeros(whole.shape), whole)
        self.begins = np.concatenate([[0.0], np.cumsum(ends[:-1] + 0.001)])

    def _all(self, values: np.ndarray) -> np.ndarray:
        return values[:, :, None].repeat(self.job.tensor, axis=2)

    def _add(self, at: int, kind: str, start: np.ndarray, end: np.ndarray, **more: Any) -> None:
        self.parts.append({"at": at, "kind": kind, "start": start, "end": end, **more})

    def _joined(self) -> pa.Table:
        job, cells = self.job, self.steps * self.job.columns * self.job.tensor
        step = np.arange(self.steps)[:, None, None]
        column, tensor = np.arange(job.columns)[None, :, None], np.arange(job.tensor)[None, None, :]
        within = np.broadcast_to(column * job.tensor + tensor, (self.steps, job.columns, job.tensor)).ravel()
        steps = np.broadcast_to(step, (self.steps, job.columns, job.tensor)).ravel()
        base = self.begin_ns + np.round(self.begins[steps] * 1e9).astype(np.int64)
        ranks_of = job.columns * job.tensor
        rank = np.concatenate([within + part["at"] * ranks_of for part in self.parts])
        peer = [
            within + part["peer_stage"] * ranks_of if "peer_stage" in part else np.full(cells, -1)
            for part in self.parts
        ]

        def repeated(name: str, default: Any, type_: Any) -> np.ndarray:
            return np.repeat(np.array([part.get(name, default) for part in self.parts], type_), cells)

        def text(name: str) -> pa.Array:
            words = sorted({part.get(name, "") for part in self.parts})
            codes = np.array([words.index(part.get(name, "")) for part in self.parts], np.int32)
            return pa.DictionaryArray.from_arrays(pa.array(np.repeat(codes, cells)), pa.array(words, pa.string()))

        hosts = -(-job.ranks // job.ranks_per_host)
        columns = {
            "host": pa.DictionaryArray.from_arrays(
                pa.array((rank // job.ranks_per_host).astype(np.int32)), pa.array([f"h{h}" for h in range(hosts)])
            ),
            "attempt": np.zeros(len(rank), np.int32),
            "rank": rank.astype(np.int32),
            "step": np.tile(steps, len(self.parts)) + self.first,
            "kind": text("kind"), "name": text("name"), "group": text("group"),
            "chunk": repeated("chunk", -1, np.int16), "micro_batch": repeated("micro_batch", -1, np.int16),
            "peer": np.concatenate(peer).astype(np.int32), "bytes": repeated("bytes", 0, np.int64),
        }  # fmt: skip
        for name, key in (("start_ns", "start"), ("end_ns", "end")):
            offsets = np.concatenate([np.round(part[key].ravel() * 1e9).astype(np.int64) for part in self.parts])
            columns[name] = np.tile(base, len(self.parts)) + offsets
        return pa.table([pa.array(columns[name]) if isinstance(columns[name], np.ndarray) else columns[name]
                         for name in SPANS.names], schema=SPANS)  # fmt: skip
