"""Run folders whose steps drift, or not, in a way that is known: sums by rank, step and type, and metrics.jsonl.

Each step every rank reads its batch, goes forward and backward, then all members of its group exchange gradients,
which begins when the last one is there; then the optimizer. So a rank that is late keeps the others waiting, as in a
real run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from phalanx.telemetry.span_store import PHASES, STEPS, write_part

BEGIN_NS = 1_760_000_000 * 10**9
USUAL_S = {"data": 0.005, "forward": 0.3, "backward": 0.6, "optimizer": 0.04, "outside spans": 0.015}
BYTES_S = 0.04
STEP_S = sum(USUAL_S.values()) + BYTES_S
GROUP = "shard"

Shape = Literal["jump", "creep"]


@dataclass(frozen=True)
class Noise:
    """Standard deviations as shares of what is timed.

    Attributes:
        step: of one rank from step to step.
        common: of all ranks together, lasting some ten steps (an autoregression of 0.9).
        stalls: share of steps in which a rank stalls, for up to half a step (Pareto).
        between: of ranks, for the whole run.
    """

    step: float = 0.01
    common: float = 0.005
    stalls: float = 0.001
    between: float = 0.01


@dataclass(frozen=True)
class Drift:
    """What happens: `part` of the named ranks (None: all) grows by `growth` of a step from step `onset` on.

    `part` may also be ``bytes`` (of the group), or ``skew``: each step another rank is late in its forward pass, by a
    time whose mean is `growth` of a step.
    """

    part: str
    growth: float
    shape: Shape = "jump"
    onset: int = 200
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class DriftingRun:
    """A run of which all is known; `restart_at`: its second start begins there; `more`: what else drifts in it."""

    ranks: int = 8
    steps: int = 400
    drift: Drift | None = None
    noise: Noise = field(default_factory=Noise)
    evaluate_every: int = 0
    checkpoint_every: int = 0
    restart_at: int = 0
    seed: int = 0
    more: tuple[Drift, ...] = ()

    def write(self, folder: Path, *, spans: bool = True) -> Path:
        """Write it as a training and its writers leave it; without `spans` only ``metrics.jsonl``."""
        parts, arrive_s, step_s = self._times()
        ends_ns = BEGIN_NS + np.round(np.cumsum(step_s) * 1e9).astype(np.int64)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text("".join(self._lines(step_s)))
        if spans:
            self._write_spans(folder / "telemetry", parts, arrive_s, step_s, ends_ns)
        return folder

    def _times(self) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        """Seconds by part, ranks x steps; when each rank was at the exchange, from the step's begin; the step."""
        random, noise = np.random.default_rng(self.seed), self.noise
        shape = (self.ranks, self.steps)
        common = np.zeros(self.steps)
        for step in range(1, self.steps):
            common[step] = 0.9 * common[step - 1] + random.normal(0, noise.common * 0.44)
        lasting = 1 + random.normal(0, noise.between, (self.ranks, 1))
        parts = {
            name: usual * np.maximum(lasting * (1 + common + random.normal(0, noise.step, shape)), 0.1)
            for name, usual in USUAL_S.items()
        }
        stalls = (random.random(shape) < noise.stalls) * np.minimum(0.05 * random.pareto(1.5, shape), 0.5) * STEP_S
        parts["forward"] += stalls
        moving_s = BYTES_S * np.maximum(1 + random.normal(0, 3 * noise.step, self.steps), 0.2)
        for drift in ([self.drift] if self.drift is not None else []) + list(self.more):
            self._drift(drift, parts, moving_s, random)
        parts["snapshot"] = np.zeros(shape)
        self._events(parts)
        arrive_s = sum(parts[name] for name in ("data", "forward", "backward", "outside spans"))
        parts["wait"] = arrive_s.max(axis=0) - arrive_s + moving_s
        total = arrive_s + parts["wait"] + parts["optimizer"] + parts["snapshot"]
        longest = total.max(axis=0)
        parts["outside spans"] = parts["outside spans"] + longest - total  # a step ends together
        return parts, arrive_s, longest

    def _drift(
        self, drift: Drift, parts: dict[str, np.ndarray], moving_s: np.ndarray, random: np.random.Generator
    ) -> None:
        place = np.arange(1, self.steps + 1)
        ramp = (place - drift.onset + 1) / (self.steps - drift.onset + 1) if drift.shape == "creep" else 1.0
        grown_s = drift.growth * STEP_S * np.where(place >= drift.onset, ramp, 0.0)
        if drift.part == "bytes":
            moving_s += grown_s
        elif drift.part == "skew":
            late = random.integers(self.ranks, size=self.steps)
            parts["forward"][late, np.arange(self.steps)] += grown_s * random.gamma(8, 1 / 8, self.steps)
        else:
            chosen = list(range(self.ranks)) if drift.ranks is None else list(drift.ranks)
            parts[drift.part][chosen] += grown_s

    def _events(self, parts: dict[str, np.ndarray]) -> None:
        for begin in (0, self.restart_at - 1) if self.restart_at else (0,):
            for late, factor in enumerate((3.0, 0.4, 0.2, 0.1)):  # compiling, caches
                if begin + late < self.steps:
                    parts["forward"][:, begin + late] *= 1 + factor
        if self.evaluate_every:
            parts["forward"][:, self.evaluate_every :: self.evaluate_every] *= 1.3
        if self.checkpoint_every:
            parts["snapshot"][:, self.checkpoint_every - 1 :: self.checkpoint_every] = 0.2
            parts["optimizer"][:, self.checkpoint_every :: self.checkpoint_every] *= 2

    def _lines(self, step_s: np.ndarray) -> list[str]:
        lines: list[dict[str, Any]] = [{"kind": "start", "step": 0}]
        for place, seconds in enumerate(step_s.tolist()):
            step = place + 1
            if step == self.restart_at:
                lines.append({"kind": "start", "step": place})
            figures = {"loss": 3.0, "lr": 1e-3, "grad_norm": 1.0, "tokens": step * 4096, "tokens_per_s": 4096 / seconds}
            lines.append({"kind": "step", "step": step, **figures, "step_s": seconds, "mfu": 0.4 * STEP_S / seconds})
            if self.evaluate_every and step % self.evaluate_every == 0:
                lines.append({"kind": "evaluation", "step": step, "validation_loss": 3.0})
            if self.checkpoint_every and step % self.checkpoint_every == 0:
                lines.append({"kind": "checkpoint", "step": step, "checkpoint/stall_s": 0.2})
        return [json.dumps(line) + "\n" for line in lines]

    def _write_spans(
        self,
        telemetry: Path,
        parts: Mapping[str, np.ndarray],
        arrive_s: np.ndarray,
        step_s: np.ndarray,
        ends_ns: np.ndarray,
    ) -> None:
        rank, place = (one.ravel() for one in np.indices((self.ranks, self.steps)))
        attempt = (place + 1 >= self.restart_at).astype(int) if self.restart_at else np.zeros(len(rank), int)
        host = np.array([f"host{one // 2}" for one in range(self.ranks)])[rank]
        columns: dict[str, Any] = {"host": host, "attempt": attempt, "rank": rank, "step": place + 1}
        kinds = {name: parts[name].ravel() for name in parts if name != "outside spans"}
        kinds["step"] = step_s[place]
        steps = columns | {"end_ns": ends_ns[place]}
        steps |= {name: 0 for name in STEPS.names if name not in steps}
        steps |= {f"{name}_ns": np.round(seconds * 1e9).astype(np.int64) for name, seconds in kinds.items()}
        begins_ns = ends_ns[place] - np.round(step_s[place] * 1e9).astype(np.int64)
        at_ns = begins_ns + np.round(arrive_s.ravel() * 1e9).astype(np.int64)
        waits_ns = np.round(parts["wait"].ravel() * 1e9).astype(np.int64)
        typed = {"name": "reduce_scatter", "group": GROUP, "chunk": -1, "count": 1, "bytes": 1 << 20}
        phases = pa.concat_tables(
            _table(
                columns | typed | {"kind": kind, "total_ns": waits_ns, "longest_ns": waits_ns, "first_start_ns": at_ns},
                PHASES,
            )
            for kind in ("collective", "wait")
        )
        table = _table(steps, STEPS)
        for number, name in enumerate(sorted(set(host))):
            for start in sorted(set(attempt)):
                kept = (host == name) & (attempt == start)
                own = pa.array(kept)
                write_part(telemetry, "steps", name, table.filter(own), int(start), number)
                both = pa.array(np.concatenate([kept, kept]))
                write_part(telemetry, "phases", name, phases.filter(both), int(start), number)
        starts = sorted(set(attempt.tolist()))
        members = list(range(self.ranks))
        (telemetry / "groups").mkdir(exist_ok=True)
        (telemetry / "groups" / "host0.jsonl").write_text(
            "".join(
                json.dumps({"rank": one, "attempt": start, "group": GROUP, "ranks": members}) + "\n"
                for start in starts
                for one in members
            )
        )


def _table(columns: Mapping[str, Any], schema: pa.Schema) -> pa.Table:
    rows = len(columns["rank"])
    arrays = []
    for column in schema:
        values = columns[column.name]
        values = np.full(rows, values) if np.isscalar(values) else values
        kind = column.type
        arrays.append(
            pa.array(values).dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else pa.array(values, kind)
        )
    return pa.Table.from_arrays(arrays, schema=schema)
