"""The training loop: every step at one look. The work is done in the rooms it calls."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from phalanx.checkpoint.stopping import deadline_due, find_deadline
from phalanx.optim.schedule import lr_factor
from phalanx.train.device import GarbageCollection
from phalanx.train.evaluate import Evaluation
from phalanx.train.predicted_cost import OPTIMIZER, PASSES
from phalanx.train.reports.reporter import Reporter
from phalanx.train.reports.step_record import StepProfiler, StepRecord
from phalanx.train.stop_request import StopRequest
from phalanx.train.training_run import Run


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        stopped_by: what ended it before all was done, such as the name of a signal, or an empty string.
        evaluation: of the held-out text at the end; None where the run was stopped or has none.
    """

    stopped_by: str
    evaluation: Evaluation | None


def train(run: Run, reporter: Reporter) -> Outcome:
    """Train from where `run` stands to its last step and look at held-out text, or until a signal asks to stop.

    Raises:
        UserError: too many bad steps in a row, weights that make no finite loss, no memory or disk left.
    """
    run.ranks.pulse.resume(run.progress.step)
    _keep_the_last_step(run, reporter)
    with StopRequest(run.ranks.peers, _Deadline(run).is_near) as stop:
        _evaluate_if_due(run, reporter, stop)  # a clean stop may have left it out
        if not stop.is_agreed:
            _make_steps(run, reporter, stop)
        elif run.only_in_memory:
            run.keep(lambda: None, ending=True)
    run.ranks.pulse.enter("end")
    return _outcome(run, stop)


def _make_steps(run: Run, reporter: Reporter, stop: StopRequest) -> None:
    """All steps that are left, or until all agree to stop.

    One pass of the loop is one optimizer step: gradients of all micro-batches, the verdict of the bad-step policy,
    the update, and, when due, figures, a checkpoint and an evaluation. Nothing in a step waits for the device; figures
    are read back when they are shown.
    """
    config, progress, pulse, watch = run.config, run.progress, run.ranks.pulse, reporter.watch
    record = StepRecord()
    profiler = StepProfiler(config.profile, run.folder.path / "profile", run.ranks.rank)
    with GarbageCollection(config.train.garbage_collect_steps) as garbage, run.batches() as batches:
        pulse.begin_steps()
        for batch in watch.over(batches):
            # Whether to stop and whether to save has to be agreed by all ranks. The questions are sent before the work
            # of the step and answered after it, so that agreeing costs no wait of its own.
            step = progress.step + 1
            stop.ask()
            run.saver.ask(step)
            profiler.before_step(step)

            loss = run.accumulate_gradients(batch)
            watch.end(PASSES)
            # A snapshot of the step before may still be copied beside the passes, which only read weights. The update
            # writes them, so from here on the copy must be done.
            run.saver.fence()
            norm, grad_scale = run.optimizer.clip()
            # The verdict stays a tensor, and the optimizer skips by it: reading it here would have the host wait for
            # the device in every step. For the same reason the loss is recorded as a tensor and read when it is shown.
            bad = run.judge.judge(loss, norm)
            lr = run.optimizer.set_lr(lr_factor(config.optim.schedule, progress.step, run.total_steps))
            run.optimizer.step(found_inf=bad, grad_scale=grad_scale)
            run.updated()
            run.note_update(lr)
            watch.end(OPTIMIZER)

            # A step that was skipped counts as progress: its batch is used up, and a resumed run must not see it again.
            samples, length = run.samples_of(batch), batch.tokens_BS.shape[1]
            progress.advance(samples, length)
            record.add(step, loss, norm, bad, lr, progress.tokens, samples * length)
            garbage.after_step(step)
            run.ranks.after_step()
            reporter.note_profile(profiler.after_step(step))

            # The answer belongs to the question of this step, so all ranks leave the loop after the same one.
            ending = stop.agreed() or step == run.total_steps
            if ending or config.logging.due(step) or run.judge.hopeless:
                reporter.report(record.flush())
                run.judge.raise_if_hopeless()
            # The heartbeat goes before what may take long, so that a supervisor sees the step and then a named phase.
            pulse.step(step, _loss_at_hand(run, loss))
            watch.end_step(ending=ending)
            # First the checkpoint, then the evaluation: whatever ends the process meanwhile costs the evaluation alone.
            _keep(run, reporter, record, ending=ending)
            if _evaluate_if_due(run, reporter, stop):
                record.resume_clock()
            # A stop can also be agreed inside an evaluation, after the checkpoint above was taken as one of many.
            if stop.is_agreed and not ending:
                ending = True
                _keep(run, reporter, record, ending=True)
            if ending:
                break
    profiler.close()


def _keep(run: Run, reporter: Reporter, record: StepRecord, *, ending: bool) -> None:
    """Take a checkpoint if one is due; training stands still for it in some modes, and for the last one."""
    stands_still = ending or run.saver.blocks
    with run.ranks.pulse.aside("checkpoint", run.saver.expected_durable_s) if stands_still else nullcontext():
        run.keep(partial(_write_down, reporter, record), ending=ending)
    if reporter.kept(run.saver.events()) and run.saver.blocks:
        record.resume_clock()


def _outcome(run: Run, stop: StopRequest) -> Outcome:
    progress = run.progress
    if not run.has_validation and progress.step >= run.total_steps:
        return Outcome("", None)
    if progress.step < run.total_steps or progress.evaluated < progress.step:
        return Outcome(stop.name, None)
    text = run.held_out(run.config.evaluate.final_tokens)
    evaluation = Evaluation.from_figures(progress.metrics, text.of_tokens)
    evaluation.require_finite(progress.step)
    return Outcome("", evaluation)


def _loss_at_hand(run: Run, loss: Tensor) -> float | None:
    """The loss of a step, for whoever supervises the rank, where reading it waits for no device."""
    return loss.item() if run.ranks.pulse.is_read and loss.device.type == "cpu" else None


class _Deadline:
    """When the scheduler ends the job: the last checkpoint has to be durable before."""

    def __init__(self, run: Run) -> None:
        self._saver, self._margin_s = run.saver, run.config.checkpoint.wall_time_margin_s
        self._deadline = find_deadline(os.environ, time.time())
        self._step_began_s = self._longest_step_s = 0.0

    def is_near(self) -> bool:
        """Whether the step that begins now has to be the last one."""
        if self._deadline is None:
            return False
        now_s = time.time()
        if self._step_began_s:
            self._longest_step_s = max(self._longest_step_s, now_s - self._step_began_s)
        self._step_began_s = now_s
        # This step and perhaps one more: with several ranks, all stop in the step after the one in which one wants to.
        expected_s = 2 * self._longest_step_s
        durable_s = self._saver.expected_durable_s
        return deadline_due(self._deadline, now_s, margin_s=self._margin_s, durable_s=durable_s, step_s=expected_s)


def _keep_the_last_step(run: Run, reporter: Reporter) -> None:
    """Where the run was ended after its last step and before that was durable: no step will do it."""
    if run.only_in_memory and run.progress.step >= run.total_steps:
        run.keep(lambda: None, ending=True)
        reporter.kept(run.saver.events())


def _write_down(reporter: Reporter, record: StepRecord) -> None:
    """Before a checkpoint knows of them, steps are in the metrics; on the screen they are at their own time."""
    reporter.report(record.flush(), shown=False)
    reporter.flush()


def _evaluate_if_due(run: Run, reporter: Reporter, stop: StopRequest) -> bool:
    """Look at held-out text if that is due at this step and was not done; says whether it was looked at now.

    The checkpoint of the step is there before, so that whatever ends the process costs the evaluation alone, whose
    figures are added to it. What is ended early is shown and not kept.
    """
    progress, tokens = run.progress, run.evaluation_due
    if tokens is None or stop.is_agreed:
        return False
    text = run.held_out(tokens)
    with run.ranks.pulse.aside("evaluate", reporter.evaluation_s(text)):
        found = run.evaluate(text, lambda text: reporter.watched(text, stop.until_asked(text.batches)))
    reporter.evaluated(progress.step, found)
    if found.is_whole:
        run.evaluated(tokens, found.figures())
        reporter.flush()
    found.require_finite(progress.step)
    return True
