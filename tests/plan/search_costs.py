"""A cost model that is quick and plain, to search with: exact times, bounds that lie below them, and memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phalanx.plan.search.frontier import CostModel
from phalanx.plan.types import Job, Model, Part, Prediction, RankMemory, Strategy

GPT3 = Model(layers=96, hidden=12288, heads=96, vocab_rows=51200, max_sequence=2048)


@dataclass(frozen=True)
class FakeScores:
    step_s: Any
    memory_bytes: Any


@dataclass
class FakeCosts:
    """Costs of `job`; bounds lie up to `slack` below the exact values, differently for every layout."""

    job: Job
    slack: float = 0.05
    predicted: list[Strategy] = field(default_factory=list)

    @property
    def costs(self) -> CostModel:
        return CostModel(self.score, self.predict)

    def times(self, s: Strategy) -> dict[str, Any]:
        passes = s.micro_batches(self.job.global_batch)
        again = {"none": 0.0, "attention": 0.05, "elementwise": 0.1, "mlp": 0.15, "full": 1 / 3}[s.recompute]
        covered = {"none": 1.0, "chunked": 0.5, "fused": 0.3}[s.tensor_overlap]
        one = s.micro_batch / (s.pipeline * s.tensor * s.context) * (1 + 0.2 / s.micro_batch)
        idle = 1.0 if s.schedule == "1f1b" else 0.7 if s.schedule == "interleaved_1f1b" else 0.5
        return {
            "compute/layers": passes * one * (1 + again),
            "pipeline/bubble": (s.pipeline - 1) / s.chunks * one * idle * (1 + again),
            "pipeline/sends": 0.002 * (s.stages - 1),
            "tensor/exposed": passes * one * 0.02 * (s.tensor - 1) * covered,
            "context/exposed": passes * one * 0.05 * (s.context - 1) * (1.0 if s.context_method == "ring" else 1.5),
            "data/reduce": (0.1 + 0.05 * (s.zero == 3)) * (1 - 1 / s.data) / (s.pipeline * s.tensor),
            "optimizer": 0.2 / (s.pipeline * s.tensor * s.shard),
        }

    def memory(self, s: Strategy) -> Any:
        split = s.shard * s.context
        kept = {"none": 4.0, "attention": 2.0, "elementwise": 1.5, "mlp": 1.0, "full": 0.3}[s.recompute]
        state = 4 + 4 / (split if s.zero > 1 else 1) + 8 / (split if s.zero else 1)
        state = state - 4 * (1 - 1 / split) * (s.zero == 3)
        flight = 1 + (s.pipeline - 1) / (s.pipeline * s.chunks)
        return state / (s.pipeline * s.tensor) + kept * s.micro_batch * flight / (s.tensor * s.context)

    def noise(self, s: Strategy) -> Any:
        mixed = s.pipeline * 31 + s.shard * 17 + s.tensor * 13 + s.micro_batch * 7 + s.chunks * 3 + s.context * 5
        return np.asarray((mixed + len(s.recompute) + len(s.schedule)) % 11) / 11

    def score(self, s: Strategy) -> FakeScores:
        exact = sum(self.times(s).values())
        return FakeScores(exact * (1 - self.slack * self.noise(s)), self.memory(s) * (1 - self.slack * self.noise(s)))

    def predict(self, s: Strategy) -> Prediction:
        self.predicted.append(s)
        times = {path: float(seconds) for path, seconds in self.times(s).items()}
        parts = tuple(Part(path, seconds, "assumed", "made up") for path, seconds in times.items())
        memory = RankMemory(
            pipeline_rank=0,
            parameters=float(self.memory(s)),
            gradients=0.0,
            optimizer=0.0,
            activations=0.0,
            loss_head=0.0,
            communication=0.0,
            fragmentation=0.0,
        )
        step_s = sum(times.values())
        return Prediction(self.job, s, "none", int(s.world_size), step_s, parts, (), (memory,), (), 1.0, 0.5)
