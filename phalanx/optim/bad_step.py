"""The bad-step policy: which updates to skip, decided on the device from the loss and the norm of the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.optim.config import BadStepConfig

# The spread is taken as at least this share of the mean: on a constant history any rounding error would be an outlier.
_LEAST_RELATIVE_SPREAD = 0.01


class BadStepJudge:
    """Judges every step by the ones before it; nothing here waits for the device.

    A step is bad when its loss or gradient norm is not finite, or when one of them lies more than ``sigma`` standard
    deviations above the mean of the last ``history`` finite steps (once there are ``min_history``). Only upwards: a
    loss that falls fast is no fault. When the policy is off, no step is bad, and the counters stay at zero.

    A step without a target is left out, whatever the policy: it is not bad, and nothing is learnt of it.

    The state (`state_tensors`) belongs into checkpoints, so that a resumed run skips the same steps.
    """

    def __init__(self, config: BadStepConfig, device: torch.device | str = "cpu") -> None:
        self._config = config
        self._history = torch.zeros(config.history, 2, dtype=torch.float64, device=device)
        self._seen = torch.zeros((), dtype=torch.int64, device=device)
        self._skipped = torch.zeros_like(self._seen)
        self._in_a_row = torch.zeros_like(self._seen)
        self._worst = torch.zeros_like(self._seen)
        self._slots = torch.arange(config.history, device=device)
        self._trained = torch.zeros((), dtype=torch.bool, device=device)
        self._untrained = torch.zeros_like(self._seen)
        self._mailbox = _Mailbox(self._worst)

    @torch.no_grad()
    def judge(self, loss: Tensor, grad_norm: Tensor, untrained: Tensor | None = None) -> Tensor:
        """The verdict, from the norm before clipping: a float32 scalar on the device, 1.0 to skip, 0.0 to update.

        Args:
            untrained: a bool scalar on the device: the step has no target; None: it has.
        """
        untrained = self._trained if untrained is None else untrained
        self._untrained += untrained
        if not self._config.enabled:
            return untrained.float()
        values = torch.stack([loss.detach(), grad_norm.detach()]).to(self._history)
        finite, limit = torch.isfinite(values).all() & ~untrained, self._limit()
        bad = (~finite | (values > limit).any()) & ~untrained
        # A value that is not finite leaves the history as it is; one that is too large enters it as the limit it broke,
        # so that a lasting change of level becomes the new normal after a few steps.
        slot = (self._seen % self._config.history).view(1)
        entry = torch.where(finite, torch.minimum(values, limit), self._history.index_select(0, slot))
        self._history.index_copy_(0, slot, entry)
        self._seen += finite
        self._skipped += bad
        self._in_a_row.add_(~untrained).mul_(bad | untrained)
        # The longest run of bad steps so far: news reach the host late, and a good step in between would hide it.
        torch.maximum(self._worst, self._in_a_row, out=self._worst)
        self._mailbox.post()
        return (bad | untrained).float()

    def _limit(self) -> Tensor:
        """The largest loss and gradient norm that are not outliers; infinite while too little is known."""
        if not self._config.sigma:
            return torch.full_like(self._history[0], torch.inf)
        known = self._seen.clamp(max=self._config.history)
        used = (self._slots < known).unsqueeze(1)
        mean = (self._history * used).sum(0) / known
        variance = ((self._history - mean).square() * used).sum(0) / (known - 1)
        spread = torch.maximum(variance.sqrt(), _LEAST_RELATIVE_SPREAD * mean.abs())
        return torch.where(known >= self._config.min_history, mean + self._config.sigma * spread, torch.inf)

    @property
    def skipped(self) -> Tensor:
        """Updates skipped in the whole run, an int64 scalar on the device."""
        return self._skipped

    @property
    def untrained(self) -> Tensor:
        """Steps without a target since this judge was made, an int64 scalar on the device."""
        return self._untrained

    @property
    def hopeless(self) -> bool:
        """Whether too many steps in a row were bad: cheap, waits for nothing; on a GPU a step or two late."""
        return self._mailbox.read() >= self._config.max_in_a_row

    def raise_if_hopeless(self) -> None:
        """Stop the run when it is `hopeless`.

        Raises:
            UserError: ``max_in_a_row`` steps in a row were skipped since this judge was made or loaded.
        """
        worst = self._mailbox.read()
        if worst >= self._config.max_in_a_row:
            raise UserError(
                f"{worst} updates in a row were skipped: the loss or the gradient was not finite or far too large",
                cure="lower optim.lr, look at the data of these steps, or loosen optim.bad_step",
                field="optim.bad_step.max_in_a_row",
                value=self._config.max_in_a_row,
            )

    def state_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold: the tensors themselves, not copies."""
        own = {"history": self._history, "seen": self._seen}
        return own | {"skipped": self._skipped, "in_a_row": self._in_a_row}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the state of a checkpoint.

        Raises:
            UserError: a tensor is missing, or the history has another length than this config's.
        """
        for name, mine in self.state_tensors().items():
            theirs = tensors.get(name)
            if theirs is None or theirs.shape != mine.shape:
                found = "nothing" if theirs is None else f"shape {tuple(theirs.shape)}"
                raise UserError(
                    f"the checkpoint holds {found} for bad_step.{name}, this run needs shape {tuple(mine.shape)}",
                    cure="resume with the same optim.bad_step.history",
                )
            mine.copy_(theirs)
        self._worst.zero_()
        self._mailbox.post()


class _Mailbox:
    """The last value of a device scalar that has reached the host, without waiting for it."""

    def __init__(self, source: Tensor) -> None:
        self._source = source
        on_gpu = source.device.type == "cuda"
        self._letter = torch.zeros((), dtype=source.dtype, pin_memory=True) if on_gpu else source
        self._event: Any = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._last = 0

    def post(self) -> None:
        # Unless the value before is still on its way: the buffer must not change under the copy.
        if self._event is not None and self._event.query():
            self._last = int(self._letter)
            self._letter.copy_(self._source, non_blocking=True)
            self._event.record()

    def read(self) -> int:
        if self._event is None or self._event.query():
            self._last = int(self._letter)
        return self._last
