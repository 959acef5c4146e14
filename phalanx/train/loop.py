"""The training loop: every step at one look. The work is done in the rooms it calls."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext

from phalanx.checkpoint.stopping import deadline_due, find_deadline
from phalanx.ipc.stop_request import CALLBACK, TIME_IS_UP, StopRequest
from phalanx.optim.schedule import lr_factor
from phalanx.telemetry.run_samples import keep_sample
from phalanx.train.corruption_response import CorruptionResponse
from phalanx.train.device import GarbageCollection
from phalanx.train.evaluation import Evaluation
from phalanx.train.norms_of_layers import NormsOfLayers
from phalanx.train.predicted_cost import OPTIMIZER, PASSES
from phalanx.train.replays import Replays
from phalanx.train.reports.reporter import Reporter
from phalanx.train.reports.step_record import StepProfiler, StepRecord
from phalanx.train.run_progress import TrainResult
from phalanx.train.spike_recompute import SpikeRecompute
from phalanx.train.state_digests import StateDigests
from phalanx.train.training_run import Run
from phalanx.train.weights.sampling import continue_text


def train(run: Run, reporter: Reporter) -> TrainResult:
    """Train from where `run` stands to its last step and evaluate on held-out text, or until it is asked to stop.

    Raises:
        UserError: too many bad steps in a row, weights that make no finite loss, no memory or disk left.
        CallbackError: a user's callback failed.
    """
    run.ranks.pulse.resume(run.progress.step)
    if run.only_in_memory and run.progress.step >= run.total_steps:
        # The run was ended after its last step and before that was durable: no step will do it.
        run.keep(lambda: None, ending=True)
        reporter.kept(run.saver.events())
    deadline = _Deadline(run)

    def reason() -> int:
        is_near = deadline.is_near()  # it times the steps, too
        return CALLBACK if reporter.callbacks.stop else TIME_IS_UP if is_near else 0

    with StopRequest(run.ranks.peers, reason) as stop:
        _evaluate_if_due(run, reporter, stop)  # a clean stop may have left it out
        if not stop.is_agreed:
            _make_steps(run, reporter, stop)
        elif run.only_in_memory:
            run.keep(lambda: None, ending=True)
    run.ranks.pulse.enter("end")
    if reporter.callbacks.error is not None:
        raise reporter.callbacks.error
    return _result(run, reporter, stop)


def _make_steps(run: Run, reporter: Reporter, stop: StopRequest) -> None:
    """All steps that are left, or until all agree to stop.

    One pass of the loop is one optimizer step: gradients of all micro-batches, the verdict of the bad-step policy,
    the update, and, when due, reports, a checkpoint and an evaluation. Nothing in a step waits for the device; figures
    are read back when they are reported.
    """
    config, progress, pulse, watch, spans = run.config, run.progress, run.ranks.pulse, reporter.watch, run.ranks.spans
    record = StepRecord()
    norms = NormsOfLayers(run.trainer, run.folder.path if run.ranks.rank == 0 else None, config.telemetry.norms_every)
    policy = config.telemetry.at_corruption
    response = CorruptionResponse(run.ranks, run.folder.path, policy, run.note, lambda: bool(stop))
    digests, replays, spikes = StateDigests(run, response), Replays(run, response), SpikeRecompute(run)
    profiler = StepProfiler(config.profile, run.folder.path / "profile", run.ranks.rank)
    with GarbageCollection(config.train.garbage_collect_steps) as garbage, run.batches() as batches:
        pulse.begin_steps()
        for batch in watch.over(spans.over(batches, progress.step + 1)):
            # Whether to stop and whether to save has to be agreed by all ranks. The questions are sent before the work
            # of the step and answered after it, so that agreeing costs no wait of its own.
            step = progress.step + 1
            stop.ask()
            run.saver.ask(step)
            profiler.before_step(step)

            replays.check(step, batch, digests.agreed)
            with norms.watching(step):
                loss = run.accumulate_gradients(batch)
            watch.end(PASSES)
            spans.begin_update()
            norms.write(step)
            # A snapshot of the step before may still be copied beside the passes, which only read weights. The update
            # writes them, so from here on the copy must be done.
            with spans.snapshot():
                run.saver.fence()
            loss, norm, grad_scale = spikes.settle(batch, loss)
            digests.take_gradients(step)
            # The verdict stays a tensor, and the optimizer skips by it: reading it here would have the host wait for
            # the device in every step. For the same reason the loss is recorded as a tensor and read when it is shown.
            weight = run.trainer.total_weight
            bad = run.judge.judge(loss, norm, weight == 0)
            lr = run.optimizer.set_lr(lr_factor(config.optim.schedule, progress.step, run.total_steps))
            run.optimizer.step(found_inf=bad, grad_scale=grad_scale)
            run.updated()
            run.note_update(lr)
            watch.end(OPTIMIZER)
            spans.end_update()

            # A step that was skipped counts as progress: its batch is used up, and a resumed run must not see it again.
            samples, length = len(batch) * run.trainer.data_ranks, batch.tokens_BS.shape[1]
            progress.advance(samples, length)
            record.add(step, (loss, norm, bad, weight), lr, progress.tokens, samples * length)
            garbage.after_step(step)
            run.ranks.after_step()
            reporter.note_profile(profiler.after_step(step))

            # The answer belongs to the question of this step, so all ranks leave the loop after the same one.
            ending = stop.agreed() or step == run.total_steps
            if ending or config.logging.due(step) or run.judge.hopeless:
                reporter.report(record.flush())
                run.judge.raise_if_hopeless()
            # The heartbeat goes before what may take long, so that a supervisor sees the step and then a named phase.
            # On a GPU reading the loss would wait for the device, so it is left out there.
            is_known = pulse.is_read and loss.device.type == "cpu" and bool(weight)
            pulse.step(step, loss.item() if is_known else None)
            watch.end_step(ending=ending)
            # Before the checkpoint: none is to hold what copies show to be wrong.
            digests.check(step, saves=ending or run.saver.will_persist(step))
            # First the checkpoint, then the evaluation: whatever ends the process meanwhile costs the evaluation alone.
            _keep(run, reporter, record, ending=ending)
            spans.end_step()
            if _evaluate_if_due(run, reporter, stop):
                record.resume_clock()
            # A stop can also be agreed inside an evaluation, after the checkpoint above was taken as one of many.
            if stop.is_agreed and not ending:
                ending = True
                digests.check(step, saves=True)  # unless it was checked above
                _keep(run, reporter, record, ending=True)
            if ending:
                break
    profiler.close()


def _keep(run: Run, reporter: Reporter, record: StepRecord, *, ending: bool) -> None:
    """Take a checkpoint if one is due; training stands still for it in some modes, and for the last one."""

    def write_down() -> None:
        """Before a checkpoint knows of steps, they are in the metrics; on the screen they come at their own time."""
        reporter.report(record.flush(), shown=False)
        reporter.flush()

    stands_still = ending or run.saver.blocks
    aside = run.ranks.pulse.aside("checkpoint", run.saver.expected_durable_s) if stands_still else nullcontext()
    with aside, run.ranks.spans.snapshot():
        run.keep(write_down, ending=ending)
    events = run.saver.events()
    for event in events:
        if event.name:
            run.ranks.spans.durable(event.step, event.durable_s)
    if reporter.kept(events) and run.saver.blocks:
        record.resume_clock()


def _evaluate_if_due(run: Run, reporter: Reporter, stop: StopRequest) -> bool:
    """Evaluate on held-out text if that is due at this step and was not done; says whether it was done now.

    The checkpoint of the step is there before, so that whatever ends the process costs the evaluation alone, whose
    figures are added to it. What is ended early is shown and not kept.
    """
    progress, tokens = run.progress, run.evaluation_due
    if tokens is None or stop.is_agreed:
        return False
    text = run.held_out(tokens)
    with run.ranks.spans.evaluation(progress.step), run.ranks.pulse.aside("evaluate", reporter.evaluation_s(text)):
        found = run.evaluate(text, lambda text: reporter.watched(text, stop.until_asked(text.batches)))
        if found.is_whole:
            _keep_sample(run)
    reporter.evaluated(progress.step, found)
    if found.is_whole:
        run.evaluated(tokens, found.figures())
        reporter.flush()
    found.require_finite(progress.step)
    return True


def _keep_sample(run: Run) -> None:
    """Continue the prompt of `evaluate` and keep the text, where that is asked for and the model is whole here."""
    settings, model = run.config.evaluate, run.trainer.whole_model
    if settings.sample_at_evaluations and model is not None and run.ranks.is_first:
        tokenizer, prompt = run.prepared.tokenizer, settings.sample_prompt
        text = "".join(continue_text(model, tokenizer, prompt, max_new_tokens=settings.sample_tokens))
        keep_sample(run.folder.path, run.progress.step, prompt, text)


def _result(run: Run, reporter: Reporter, stop: StopRequest) -> TrainResult:
    progress = run.progress
    evaluation, stopped_by = None, stop.name
    if progress.step >= run.total_steps and (not run.has_validation or progress.evaluated >= progress.step):
        stopped_by = ""  # all was done, whatever was asked for
        if run.has_validation:
            text = run.held_out(run.config.evaluate.final_tokens)
            evaluation = Evaluation.from_figures(progress.metrics, text.of_tokens)
            evaluation.require_finite(progress.step)
    newest = reporter.newest
    loss = None if newest is None or newest.untrained else newest.loss
    return TrainResult(progress.step, progress.tokens, loss, evaluation, run.folder.path, stopped_by)


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
