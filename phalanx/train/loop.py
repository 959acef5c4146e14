"""The training loop: every step at one look. The work is done in the rooms it calls."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.optim.schedule import lr_factor
from phalanx.train.device import GarbageCollection
from phalanx.train.evaluate import Evaluation
from phalanx.train.reports.profiling import StepProfiler
from phalanx.train.reports.record import StepRecord
from phalanx.train.reports.reporting import Reporter
from phalanx.train.run import Run
from phalanx.train.signals import StopRequest


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        stopped_by: name of the signal that ended it before its last step, or an empty string.
        evaluation: of the held-out text at the end; None where the run was stopped or has none.
    """

    stopped_by: str
    evaluation: Evaluation | None


def train(run: Run, reporter: Reporter) -> Outcome:
    """Train from where `run` stands to its last step, or until a signal asks to stop.

    One pass of the loop is one optimizer step: gradients of all micro-batches, the verdict of the bad-step policy,
    the update, and, when due, figures, evaluation and a checkpoint. Nothing in a step waits for the device; figures
    are read back when they are shown.

    Raises:
        UserError: too many bad steps in a row, no memory or disk left.
    """
    config, progress = run.config, run.progress
    _evaluate_if_due(run, reporter)  # a clean stop may have left it out
    record = StepRecord()
    profiler = StepProfiler(config.profile, run.folder.path / "profile", run.ranks.rank)
    with (
        StopRequest(run.ranks.peers) as stop,
        GarbageCollection(config.train.garbage_collect_steps) as garbage,
        run.batches() as batches,
    ):
        for batch in batches:
            step = progress.step + 1
            stop.ask()
            profiler.before_step(step)

            loss = run.accumulate_gradients(batch)
            norm, grad_scale = run.optimizer.clip()
            bad = run.judge.judge(loss, norm)
            lr = run.optimizer.set_lr(lr_factor(config.optim.schedule, progress.step, run.total_steps))
            run.optimizer.step(found_inf=bad, grad_scale=grad_scale)
            run.updated()

            samples, length = run.samples_of(batch), batch.tokens_BS.shape[1]
            progress.advance(samples, length)
            record.add(step, loss, norm, bad, lr, progress.tokens, samples * length)
            garbage.after_step(step)
            run.ranks.after_step()
            reporter.note_profile(profiler.after_step(step))

            ending = stop.agreed() or step == run.total_steps
            saving = ending or config.checkpoint.due(step)
            if saving or config.logging.due(step) or run.judge.hopeless:
                reporter.report(record.flush())
                run.judge.raise_if_hopeless()
            if not ending and _evaluate_if_due(run, reporter):
                record.resume_clock()
            if saving:
                reporter.flush()
                reporter.saved(run.save())
                record.resume_clock()
            if ending:
                break
    profiler.close()
    if progress.step < run.total_steps:
        return Outcome(stop.name, None)
    if not run.has_validation:
        return Outcome("", None)
    final = run.evaluate(config.evaluate.final_tokens)
    reporter.evaluated(progress.step, final)
    return Outcome("", final)


def _evaluate_if_due(run: Run, reporter: Reporter) -> bool:
    """Look at held-out text if that is due at this step and was not done; says whether it was done now."""
    config, progress = run.config.evaluate, run.progress
    if not config.due(progress.step) or progress.evaluated >= progress.step or progress.step >= run.total_steps:
        return False
    reporter.evaluated(progress.step, run.evaluate(config.tokens))
    progress.evaluated = progress.step
    return True
