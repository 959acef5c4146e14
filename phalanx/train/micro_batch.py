"""How many sequences go through the model at once and what is computed again, where the config leaves that open."""

from __future__ import annotations

from collections.abc import Callable

import torch

from phalanx.train.derived.figures import cpu_micro_batch
from phalanx.train.derived.fit import Choice, Fit
from phalanx.train.run import Run


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
    run.fit = Fit.of(
        config,
        run.trainer.config,
        config.parallel,
        "bf16" if run.device.compute_dtype == torch.bfloat16 else "fp32",
        device_bytes=run.ranks.peers.lowest(run.device.memory_bytes()),
        micro_batch=wanted,
    )
    choice = run.fit.choose()
    if keep and progress.recompute in run.fit.levels:
        choice = max(choice, run.fit.predicted(wanted, progress.recompute), key=run.fit.saving)
    micro_batch, level = run.ranks.peers.broadcast([choice.micro_batch, choice.recompute])
    run.take(run.fit.predicted(micro_batch, level))
    run.device.release_unused()
    say(run.fit.line(run.choice))
