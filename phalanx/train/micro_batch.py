"""How many sequences go through the model at once and what is computed again, where the config leaves that open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from phalanx.train.derived.figures import cpu_micro_batch
from phalanx.train.derived.fit import LEVELS, Choice, Fit
from phalanx.train.run import Run
from phalanx.train.run_folder import Refused


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
