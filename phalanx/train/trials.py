"""What a run tries before its first step: the fastest attention kernel that is right, and the micro-batch that fits.

*Attention on a GPU:* the fastest kernel that passes a trial of the run's own shape on every rank.

It is settled once, before the first step, outside of what is compiled, and kept in the checkpoints: a run that goes on
tries the kernel that it had first, and says so where it has to take another.

*Micro-batch:* how many sequences go through the model at once and what is computed again, where the config leaves that
open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from phalanx.core.errors import UserError
from phalanx.kernels.attention import CausalKernel, Kernel
from phalanx.kernels.attention_trial import Trial, find_fault
from phalanx.train.derived.kernel_choice import AttentionChoice, attention_lines, kernels_to_try, title
from phalanx.train.derived.memory_fit import LEVELS, Choice, Fit
from phalanx.train.derived.run_numbers import cpu_micro_batch
from phalanx.train.run_folder import Refused
from phalanx.train.system_errors import too_big
from phalanx.train.training_run import Run

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


def choose_passes(run: Run, say: Callable[[str], None], *, keep: bool = False) -> None:
    """Settle `run.progress.micro_batch` and ``recompute``; on a GPU from memory that is predicted, and said in a line.

    The choice depends on sizes and memory alone, never on a stopwatch, so that a run repeated on the same machine does
    the same arithmetic. It is one for all ranks, and is kept in the checkpoints.

    Args:
        keep: the micro-batch of `run.progress` stays, and nothing less than what it says is computed again.
    """
    progress, config = run.progress, run.config
    wanted = progress.micro_batch if keep else config.train.micro_batch
    if run.device.torch_device.type == "cpu":
        share = config.train.global_batch // run.trainer.data_ranks
        asked = config.train.recompute
        micro_batch = wanted or cpu_micro_batch(share, config.data.sequence_length)
        run.take(Choice(micro_batch, "none" if asked == "auto" else asked))
        return
    refused = _refused(run) if run.ranks.size > 1 else None
    if refused is not None:
        keep, wanted = False, config.train.micro_batch
    run.fit = Fit.of(
        config,
        run.trainer.config,
        config.parallel,
        run.device.precision,
        device_bytes=run.ranks.peers.lowest(run.device.memory_bytes()),
        micro_batch=wanted,
    )
    fit = run.fit

    def decide() -> list[Any]:
        choice = fit.choose()
        if keep and progress.recompute in fit.levels:
            choice = max(choice, fit.predicted(wanted, progress.recompute), key=fit.saving)
        smaller = refused and _smaller(fit, choice, refused)
        if refused and smaller:
            say(f"a rank had no memory for micro-batch {refused.micro_batch}, recompute {refused.recompute}: now less")
        choice = smaller or choice
        return [choice.micro_batch, choice.recompute]

    run.take(fit.predicted(*run.ranks.decide(decide)))
    run.device.release_unused()
    say(fit.line(run.choice))


def _refused(run: Run) -> Refused | None:
    """What a rank of this layout had no memory for in an earlier start, on all ranks alike."""
    found = Refused.read(run.folder) if run.ranks.is_first else None
    told = run.ranks.peers.broadcast(asdict(found) if found else None)
    return Refused(**told) if told and told["layout"] == str(run.config.parallel.layout) else None


def _smaller(fit: Fit, choice: Choice, refused: Refused) -> Choice | None:
    """The first choice after `choice` that takes less than what was refused; None: it does itself, or none does."""
    if fit.share % refused.micro_batch or refused.recompute not in LEVELS:
        return None  # of another batch
    too_much_bytes = fit.predicted(refused.micro_batch, refused.recompute).predicted_bytes
    found: Choice | None = choice
    while found is not None and found.predicted_bytes >= too_much_bytes:
        found = fit.smaller(found)
    return None if found == choice else found
