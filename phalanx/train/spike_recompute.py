"""A step whose gradient norm jumps is computed again: a healthy jump comes again with the same bits.

See `phalanx.detect.corruption.norm_spikes`. The host reads the norm of every step, so it waits for the device.
"""

from __future__ import annotations

import time
from contextlib import suppress

from torch import Tensor

from phalanx.data.batch import Batch
from phalanx.detect.corruption.digest_file import RecomputedStep, append_digests
from phalanx.detect.corruption.norm_spikes import NormHistory
from phalanx.train.training_run import Run


class SpikeRecompute:
    """All ranks call it alike: the norm is that of the whole gradient, the same bits on each."""

    def __init__(self, run: Run) -> None:
        self._run = run
        sigma = run.config.telemetry.recompute_sigma
        self._history = NormHistory(sigma) if sigma else None

    def settle(self, batch: Batch, loss: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Loss, norm and divisor (`phalanx.optim.build.OptimizerSet.clip`) of the gradients that are there.

        After a jump these are computed again, and the second result stays: it is the right one if it is no jump, and
        the same if the first was none of the machine's.
        """
        run = self._run
        norm, scale = run.optimizer.clip()
        if self._history is None:
            return loss, norm, scale
        first = float(norm)
        if self._history.is_spike(first):
            run.trainer.zero_grad()
            again = run.accumulate_gradients(batch)
            norm, scale = run.optimizer.clip()
            if (float(norm), float(again)) != (first, float(loss)):
                self._tell(first, float(norm))
            loss = again
        if not self._history.is_spike(float(norm)):
            self._history.add(float(norm))
        return loss, norm, scale

    def _tell(self, first: float, second: float) -> None:
        run = self._run
        if not run.ranks.is_first:
            return
        step = run.progress.step + 1
        with suppress(OSError):
            record = RecomputedStep(step, run.saver.attempt, time.time(), repr(first), repr(second))
            append_digests(run.folder.path, [record])
        run.note(f"step {step} was computed twice and gave a gradient norm of {first:.4g}, then {second:.4g}")
