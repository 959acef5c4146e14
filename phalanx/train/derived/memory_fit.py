"""Micro-batch and recompute, chosen from the memory that they are predicted to take, and whether a layout fits at all.

The prediction is the planner's (`phalanx.plan.memory`, docs/memory.md): weights, gradients, optimizer state,
activations of one micro-batch, loss head, workspace, fragmentation. It depends on settings and sizes alone, never on a
stopwatch or on what a trial left behind, so a run repeated on such a device does the same arithmetic.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.core import units
from phalanx.core.layout import divisors
from phalanx.model.config import ModelConfig
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.layout_choice import Judge, Need, Verdict
from phalanx.plan.jobs import make_job, make_strategy, software_of
from phalanx.plan.memory.rank import rank_memory
from phalanx.plan.types import Job, Precision, Software, Strategy
from phalanx.train.config import RunConfig

Level = Literal["none", "selective", "mlp", "full"]

LEVELS: tuple[Level, ...] = ("none", "selective", "mlp", "full")
"""Of `train.recompute`, from what costs least time to what costs most."""

GPU_MEMORY_SHARE = 0.9
"""Of a GPU's memory, which a prediction may take: the rest is for what is in no tensor (docs/memory.md)."""

# From so many tokens on, a GPU's products are about as fast as they will be: recomputing anything to have more of them
# at once costs more than it gives.
_ENOUGH_TOKENS = 8192

# A prediction that is farther off is reported.
_FAR = 0.1


@dataclass(frozen=True)
class Passes:
    """A way to run the passes."""

    micro_batch: int  # sequences per forward and backward pass
    recompute: Level
    predicted_bytes: float = 0.0  # of the fullest rank at its fullest moment; 0 where nothing was predicted
    allocated_bytes: float = 0.0  # the same without what the allocator is assumed to waste


@dataclass(frozen=True)
class Fit:
    """What there is to choose from, and how much memory each choice takes."""

    job: Job
    parallel: ParallelConfig
    share: int  # sequences per step of one data-parallel rank
    micro_batches: tuple[int, ...]  # from the largest
    levels: tuple[Level, ...]  # of recomputation, from the cheapest
    device_bytes: float  # memory of the smallest device
    offload: float = 0.0  # share of the layers whose activations wait on the host

    @classmethod
    def of(
        cls,
        config: RunConfig,
        model: ModelConfig,
        parallel: ParallelConfig,
        precision: Precision,
        *,
        device_bytes: float,
        on_cpu: bool = False,
        micro_batch: int = 0,
        software: Software | None = None,
    ) -> Fit:
        """The choices that `config` leaves open, in a layout with every axis given.

        Args:
            model: with vocabulary and longest sequence known.
            micro_batch: chosen already, by the config or a schedule; 0: not.
            software: another program that trains; None: ours.
        """
        job = job_of(config, model, parallel, precision, on_cpu=on_cpu)
        share = config.train.global_batch // (parallel.replicate * parallel.shard)
        asked = config.train.recompute
        levels: tuple[Level, ...] = LEVELS if asked == "auto" else (asked,)
        if asked == "auto" and job.software.compiled and config.not_traced():
            levels = ("none", "full")  # what is compiled in pieces cannot choose what of a layer it keeps
        return cls(
            job=job if software is None else replace(job, software=software),
            parallel=parallel,
            share=share,
            micro_batches=(micro_batch,) if micro_batch else tuple(reversed(divisors(share))),
            levels=levels,
            device_bytes=device_bytes,
            offload=0.0 if on_cpu else config.train.offload,
        )

    @property
    def limit_bytes(self) -> float:
        """What a prediction may come to."""
        return GPU_MEMORY_SHARE * self.device_bytes

    def strategy(self, micro_batch: int, recompute: Level) -> Strategy:
        """A choice as the planner has it."""
        return make_strategy(self.parallel, micro_batch=micro_batch, recompute=recompute, offload=self.offload)

    def predicted(self, micro_batch: int, recompute: Level) -> Passes:
        """A choice with its memory."""
        strategy = self.strategy(micro_batch, recompute)
        fullest = max(rank_memory(self.job, strategy), key=lambda rank: rank.total)
        return Passes(micro_batch, recompute, float(fullest.total), float(fullest.total - fullest.fragmentation))

    def choose(self) -> Passes:
        """The largest micro-batch that fits without computing anything again; at a level above only where it has to.

        It has to where less than `_ENOUGH_TOKENS` fit at once; then the cheapest level counts at which as many do, or
        else the one at which most do. Where nothing fits, what takes least memory is chosen, and may yet run.
        """
        best = [found for level in self.levels if (found := self._largest(level)) is not None]
        if not best:
            return self.least()
        enough = min(self.micro_batches[0], -(-_ENOUGH_TOKENS // self.job.sequence))
        return next((c for c in best if c.micro_batch >= enough), max(best, key=lambda c: c.micro_batch))

    def least(self) -> Passes:
        """What takes least memory."""
        # A single micro-batch may take less than several, beside which summed gradients are kept.
        sizes = dict.fromkeys((self.micro_batches[-1], self.micro_batches[0]))
        return min((self.predicted(size, self.levels[-1]) for size in sizes), key=lambda choice: choice.predicted_bytes)

    def need(self) -> Need:
        """Whether this layout fits, and what takes its memory."""
        least = self.least()
        verdict: Verdict = "no" if least.predicted_bytes > self.device_bytes else "barely"
        if least.predicted_bytes <= self.limit_bytes:
            open_levels = self.levels[:-1] if "full" in self.levels[1:] else self.levels
            verdict = "well" if any(self._largest(level) for level in open_levels) else "slowly"
        fullest = max(rank_memory(self.job, self.strategy(least.micro_batch, least.recompute)), key=lambda r: r.total)
        sizes = {
            "weights": fullest.parameters,
            "gradients": fullest.gradients,
            "optimizer state": fullest.optimizer,
            "activations": fullest.activations + fullest.loss_head,
        }
        parts = ", ".join(f"{name} {units.size(size)}" for name, size in sizes.items())
        level = "recompute" if len(self.levels) > 1 else "train.recompute ="
        how = f"micro-batch {least.micro_batch}, {level} {least.recompute}"
        less = []  # settings that would take less memory
        if "full" not in self.levels:
            less.append("train.recompute=auto")
        if len(self.micro_batches) == 1 and self.micro_batches[0] > 1:
            less.append("train.micro_batch=1")
        if self.job.optimizer == "adamw" and self.job.state_bits > 8:
            less.append("optim.state_bits=8")
        what = f"{parts} and workspace ({how})"
        return Need(verdict, least.predicted_bytes, self.device_bytes, what, ", ".join(less))

    def smaller(self, choice: Passes) -> Passes | None:
        """The next choice where memory did not suffice: more computed again, which changes no bit, or fewer sequences.

        None: there is nothing smaller.
        """
        later = self.levels[self.levels.index(choice.recompute) + 1 :] if choice.recompute in self.levels else ()
        again = (self.predicted(choice.micro_batch, level) for level in later)
        fewer = (self.predicted(size, choice.recompute) for size in self.micro_batches if size < choice.micro_batch)
        return next((c for c in itertools.chain(again, fewer) if c.predicted_bytes < choice.predicted_bytes), None)

    def line(self, choice: Passes) -> str:
        """The choice in words: ``micro-batch 8 of 32 sequences, recompute none: 31.20 GiB of 79.10 GiB predicted``."""
        line = (
            f"micro-batch {choice.micro_batch} of {self.share} sequences, recompute {choice.recompute}: "
            f"{units.size(choice.predicted_bytes)} of {units.size(self.device_bytes)} predicted"
        )
        if choice.predicted_bytes > self.device_bytes:
            return f"{line}, more than there is: it will probably not fit"
        return line

    def _largest(self, level: Level) -> Passes | None:
        found = (self.predicted(size, level) for size in self.micro_batches)
        return next((choice for choice in found if choice.predicted_bytes <= self.limit_bytes), None)


def judge_of(
    config: RunConfig,
    model: ModelConfig,
    precision: Precision,
    *,
    device_bytes: float,
    software: Software | None = None,
) -> Judge:
    """Decides whether a layout of a run on GPUs fits, run in the best way that `config` leaves open.

    Args:
        model: with vocabulary and longest sequence known.
        device_bytes: memory of the smallest device.
        software: another program that trains; None: ours.
    """

    def judge(parallel: ParallelConfig, micro_batch: int) -> Need:
        if parallel.tensor_overlap == "auto":  # decided later; it changes when things are held, not how much
            parallel = parallel.model_copy(update={"tensor_overlap": "none"})
        spread = config.model_copy(update={"parallel": parallel})
        fit = Fit.of(
            spread, model, parallel, precision, device_bytes=device_bytes, micro_batch=micro_batch, software=software
        )
        return fit.need()

    return judge


def job_of(
    config: RunConfig, model: ModelConfig, parallel: ParallelConfig, precision: Precision, *, on_cpu: bool
) -> Job:
    """What a step of `config` computes, as the planner has it."""
    return make_job(
        model,
        sequence=config.data.sequence_length,
        global_batch=config.train.global_batch,
        precision=precision,
        optimizer=config.optim.name,
        state_bits=config.optim.state_bits,
        software=software_of(
            model,
            parallel,
            precision,
            compiled=config.train.compile is True or (config.train.compile == "auto" and not on_cpu),
            on_cpu=on_cpu,
            documents=config.data.document_mask,
        ),
    )


def first_level(config: RunConfig) -> Level:
    """What is computed again until it is known what fits."""
    return "none" if config.train.recompute == "auto" else config.train.recompute


def off_line(choice: Passes, measured_bytes: float) -> str:
    """How far a prediction was off, where that is far; else nothing.

    Args:
        measured_bytes: most that was allocated at a time, in steps of which one began with the optimizer's state.
    """
    off = measured_bytes / choice.allocated_bytes - 1 if choice.allocated_bytes else 0.0
    if abs(off) <= _FAR:
        return ""
    predicted = units.size(choice.allocated_bytes)
    return f"memory: {units.size(measured_bytes)} at most, {off:+.0%} of the {predicted} that were predicted"
