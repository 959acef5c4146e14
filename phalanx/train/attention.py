"""Which kernel of attention a run on a GPU uses: the fastest that passes a trial of the run's own shape on every rank.

It is settled once, before the first step, outside of what is compiled, and kept in the checkpoints: a run that goes on
tries the kernel that it had first, and says so where it has to take another.
"""

from __future__ import annotations

import torch

from phalanx.core.errors import UserError
from phalanx.kernels.attention import CausalKernel, Kernel
from phalanx.kernels.attention_trial import Trial, find_fault
from phalanx.train.derived.attention import AttentionChoice, attention_lines, kernels_to_try, title
from phalanx.train.failures import too_big
from phalanx.train.run import Run

_NO_MEMORY = "no memory"


def settle_attention(run: Run, micro_batch: int) -> bool:
    """Choose the kernel of plain causal attention for `micro_batch` sequences at once, where the run needs one.

    All ranks call it together.

    Returns:
        Whether a rank has memory for one layer's attention.

    Raises:
        UserError: the kernel that `model.attention_backend` asks for fails, or has broken the device.
    """
    names = kernels_to_try(run.config)
    if not names or run.device.torch_device.type != "cuda":
        return True
    if run.attention is not None and run.attention.micro_batch == micro_batch:
        return True
    length, former = run.config.data.sequence_length, run.progress.attention_kernel
    trial = run.trainer.attention_trial(micro_batch, length)
    refused: list[str] = []
    if not set(names) & set(trial.kernels):
        raise UserError(
            "sequences that are split over a ring of ranks cannot be attended to by this kernel",
            cure=f"set it to auto, or one of {', '.join(trial.kernels[:-1])}",
            field="model.attention_backend",
            value=names[0],
        )
    for kernel in _in_turn(names, trial, former):
        reason = _fault(kernel, trial, run)
        first = run.ranks.peers.lowest([reason != _NO_MEMORY, run.ranks.peers.rank, reason] if reason else None)
        if first is not None and first[2] == _NO_MEMORY:
            return False
        if first is None:
            run.trainer.use_attention(CausalKernel(kernel, length))
            changed = former if former not in ("", kernel) else ""
            run.attention = AttentionChoice(kernel, micro_batch, str(trial.shape), tuple(refused), changed)
            return True
        refused.append(f"{title(kernel)} ({first[2]})")
    raise UserError(
        f"the kernel fails its self-test with {trial.shape}: {'; '.join(refused)}",
        cure="set it to auto, which takes the fastest kernel that passes",
        field="model.attention_backend",
        value=run.config.model.attention_backend,
    )


def require_attention(run: Run) -> None:
    """Settle the kernel for the run's own micro-batch, if that is not done yet, and keep its name with the progress.

    Raises:
        UserError: as of `settle_attention`, or there is no memory for one layer's attention.
    """
    micro_batch = run.progress.micro_batch
    if not settle_attention(run, micro_batch):
        raise too_big(run.config, micro_batch, MemoryError("one layer's attention"))
    if run.attention is not None:
        run.progress.attention_kernel = run.attention.kernel


def _in_turn(names: tuple[str, ...], trial: Trial, former: str) -> list[Kernel]:
    """Kernels that can be tried, from the former one on."""
    possible = [kernel for kernel in trial.kernels if kernel in names]
    first = next((place for place, kernel in enumerate(possible) if kernel == former), 0)
    return possible[first:]


def _fault(kernel: Kernel, trial: Trial, run: Run) -> str:
    attend = None if trial.attend is None else trial.attend(kernel)
    try:
        return find_fault(kernel, trial.shape, run.device.torch_device, attend)
    except torch.OutOfMemoryError:
        return _NO_MEMORY


def described_attention(run: Run) -> str:
    """The kernels of a run on a GPU, in words; empty on a CPU."""
    if run.device.torch_device.type != "cuda":
        return ""
    lines = attention_lines(run.config, "cuda")
    if run.attention is None:
        return "; ".join(f"{line.kernel} ({line.why.partition(';')[0]})" for line in lines)
    others = [f"{line.kernel} in {line.layers}" for line in lines if "window" in line.layers]
    return "; ".join([str(run.attention), *others])
