"""One `phalanx train` from its config to the summary at its end: in this process, alone or as one of several ranks."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from phalanx.core.errors import UserError
from phalanx.core.fault_points import points_from_environment
from phalanx.ipc.stop_request import exit_status
from phalanx.launch.cores import bind_started_elsewhere
from phalanx.launch.environment import Worker
from phalanx.model.shapes import flops_per_token
from phalanx.telemetry.loggers import MetricsLogger, open_loggers
from phalanx.telemetry.run_list import ALL_DONE, note_end
from phalanx.telemetry.run_log import ENDED, RunLog
from phalanx.telemetry.run_samples import keep_why_none
from phalanx.train.assemble import assemble
from phalanx.train.config import RunConfig
from phalanx.train.derived.run_numbers import default_folder
from phalanx.train.device import resident_bytes
from phalanx.train.loop import train
from phalanx.train.moved_folder import kept_together
from phalanx.train.predicted_cost import Expected
from phalanx.train.ranks import Ranks, meet
from phalanx.train.reports.callbacks import Callback
from phalanx.train.reports.display import Display, make_display
from phalanx.train.reports.logged_display import LoggedDisplay
from phalanx.train.reports.prediction_check import Watch
from phalanx.train.reports.preparation_progress import PrepareDisplay
from phalanx.train.reports.reporter import Reporter, RunSizes
from phalanx.train.run_folder import RunFolder, changes_text, open_for_training
from phalanx.train.run_progress import TrainResult
from phalanx.train.running import seen
from phalanx.train.summary import closing, headline
from phalanx.train.system_errors import explained
from phalanx.train.training_run import Run
from phalanx.train.watching import watched
from phalanx.train.weights.sampling import continue_text
from phalanx.train.weights.trained import open_trained

_LESS = "set train.micro_batch lower, train.recompute=full, or choose a smaller model or data.sequence_length"


def rank_status(worker: Worker, config: RunConfig, config_path: Path, expected: Expected | None = None) -> int:
    """The exit status of a rank that `phalanx train` or another launcher started."""
    result = run_rank(worker, config, config_path, Console(emoji=False), expected, leaves=True)
    return exit_status(result.stopped_by)


def run_rank(
    worker: Worker,
    config: RunConfig,
    config_path: Path,
    console: Console,
    expected: Expected | None = None,
    callbacks: Sequence[Callback] = (),
    *,
    leaves: bool = False,
) -> TrainResult:
    """What each of several ranks does: `run_session`, of which rank 0 alone writes, shows and calls back.

    Args:
        leaves: the process ends with an error that this raises, and keeps its connections until it has said so.
    """
    if worker.launcher != "phalanx":
        bind_started_elsewhere(worker.local_rank, worker.local_world_size)
    ranks = meet(worker, config.parallel)
    has_failed = True
    try:
        with ranks.abort.watched(lambda: ranks.is_under_way):
            own = console if worker.rank == 0 else Console(emoji=False, quiet=True)
            result = run_session(config, config_path, own, ranks, expected, callbacks)
        has_failed = False
        return result
    except UserError as error:
        ranks.abort.announce(error)
        raise
    except Exception as error:
        # A rank that gave up breaks the connections of the others: what they see is not the cause.
        why = ranks.abort.announced()
        if why is None:
            raise
        raise why from error
    finally:
        # Others see at once that it has closed its connections, and whoever started it ends all for that: its own word,
        # which leaves with the error, is to be there before.
        if has_failed and leaves:
            atexit.register(ranks.close)
        else:
            ranks.close()


def run_session(
    config: RunConfig,
    config_path: Path,
    console: Console,
    ranks: Ranks | None = None,
    expected: Expected | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Train as `config` says, in its run folder.

    Args:
        ranks: the processes that train together, each of which calls this; None: this one alone.
        expected: what a step was predicted to cost, with which the first ones are compared; None: nothing was.
    """
    base_bytes = resident_bytes()
    # Refused before anything is written.
    asked = config.asks_for_a_gpu()
    if asked and not torch.cuda.is_available():
        raise UserError(f"{asked} needs a GPU, and none is visible here", cure="set it to 'auto'")
    ranks = ranks or Ranks()
    path = default_folder(config, config_path)
    folder = open_for_training(config, path) if ranks.is_first else RunFolder(path)
    start = ranks.peers.broadcast(folder.starts)  # the others find the folder there
    with seen(config.logging, path, ranks, start) as log:
        result = _run_in(folder, config, console, ranks, log, expected, callbacks, base_bytes)
        if log is not None:
            log.note(ENDED + (f"stopped by {result.stopped_by}" if result.stopped_by else ALL_DONE))
        return result


def _run_in(
    folder: RunFolder,
    config: RunConfig,
    console: Console,
    ranks: Ranks,
    log: RunLog | None,
    expected: Expected | None,
    callbacks: Sequence[Callback],
    base_bytes: int,
) -> TrainResult:
    """Train in a folder that is open; it is given back at the end."""
    display = make_display(console)
    if log is not None:
        display = LoggedDisplay(display, log, is_first=ranks.is_first)
    if folder.note:
        display.note(folder.note)
    if folder.changes:
        display.note(changes_text(folder.changes))
    result: TrainResult | None = None
    try:
        with (
            kept_together(folder, display.note),
            watched(config, folder, ranks, display.note) as ending,
            explained("the run", _LESS),
        ):
            ranks.record_spans(folder.path, config.telemetry, display.note)
            with PrepareDisplay(console, log.note if log is not None else lambda _: None) as progress:
                points = points_from_environment(os.environ)
                run = assemble(config, folder, display.note, progress.show, ranks, points)
            display.note(headline(run))
            if config.evaluate.sample_at_evaluations and run.trainer.whole_model is None:
                why = "no rank holds the whole model"
                display.note(
                    f"evaluate.sample_at_evaluations has no effect: {why}; "
                    "`phalanx generate` samples from any checkpoint"
                )
                if ranks.is_first:
                    keep_why_none(folder.path, why)
            result = ending.result = train_assembled(run, display, expected, base_bytes, callbacks)
    finally:
        ranks.end_recording(waits=result is not None)
        display.close()
        folder.release()
    if ranks.is_first:
        _require_kept(run, result)
    last = closing(run, result)
    console.print(last, highlight=False, soft_wrap=not console.is_terminal)
    if log is not None:
        log.note(Text.from_markup(last).plain)
    if config.evaluate.sample_prompt and not result.stopped_by and ranks.is_first:
        text = sample(run)
        console.print(Panel(Text(text), title="a sample", title_align="left"))
        if log is not None:
            log.note(f"a sample:\n{text}")
    return result


def _require_kept(run: Run, result: TrainResult) -> None:
    """Refuse to call a run done whose folder was removed while it trained, in part or as a whole."""
    folder = run.folder
    gone = [path.name for path in (folder.path / "config.json", folder.tokenizer) if not path.exists()]
    if not run.config.checkpoint.folder and not any(folder.checkpoints.glob("step-*")):
        gone.append("checkpoint")
    if gone:
        problem = f"was removed while the run trained, and has no {', no '.join(gone)} now"
        cure = "give the same command again: it goes on from the newest checkpoint that is left there, if any"
        note_end(folder.path, result.steps, problem, folder.starts)
        raise UserError(problem, cure=cure, field="run.folder", value=str(folder.path))


def train_assembled(
    run: Run,
    display: Display,
    expected: Expected | None = None,
    base_bytes: int = 0,
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Train, with figures written to every logger of the run.

    Args:
        base_bytes: memory of the process before anything of the run was made.
    """
    config, clean = run.config, False
    try:
        logger: MetricsLogger = MetricsLogger()
        if run.ranks.is_first:  # figures leave the run on one rank only
            settings = config.model_dump(mode="json")
            logger = open_loggers(config.logging, run.folder.path, run.progress.step, settings, display.note)
        logger.log_event("start", run.progress.step, run.ranks.phases.metrics())
        try:
            reporter = make_reporter(run, display, logger, expected, base_bytes, callbacks)
            tokens = config.train.global_batch * config.data.sequence_length
            reporter.watch.start(tokens, run.total_steps - run.progress.step)
            run.ranks.spans.startup(run.ranks.phases, run.progress.step + 1)
            result = train(run, reporter)
            why = f"stopped by {result.stopped_by}" if result.stopped_by else ALL_DONE
        except BaseException as error:
            why = run.ranks.why_ended(error)
            raise
        finally:
            logger.close()
            if run.ranks.is_first:
                note_end(run.folder.path, run.progress.step, why, run.folder.starts)
        clean = True
        return result
    finally:
        # What lies in memory is given back only where the last checkpoint is durable.
        run.saver.finish(clean=clean)


def make_reporter(
    run: Run,
    display: Display,
    logger: MetricsLogger,
    expected: Expected | None = None,
    base_bytes: int = 0,
    callbacks: Sequence[Callback] = (),
) -> Reporter:
    """The reporter of a run; a user's `callbacks` are called on rank 0."""
    length, is_first, device = run.config.data.sequence_length, run.ranks.is_first, run.device
    sizes = RunSizes(
        total_steps=run.total_steps,
        length=length,
        flops_per_token=flops_per_token(run.trainer.model_config, length).total,
        peak_flops_per_s=None if run.peak is None else run.peak.flops_per_s * run.ranks.size,
        memory_bytes=device.memory_in_use_bytes,
        samples_left=run.evaluation_samples_left,
    )
    watch = Watch(
        expected if is_first else None,
        display.note,
        run.folder.path,
        device,
        run.progress,
        str(run.config.parallel.layout),
        lambda: run.ranks.waits.waited_ns,
        base_bytes if device.torch_device.type == "cpu" else 0,
    )
    return Reporter(sizes, run.progress, display, logger, watch, tuple(callbacks) if is_first else ())


def sample(run: Run) -> str:
    """What the trained model makes of `evaluate.sample_prompt`; the same in every run of the same seed."""
    settings = run.config.evaluate
    model = run.trainer.whole_model or open_trained(run.folder.path, lambda _: None).model
    pieces = continue_text(model, run.prepared.tokenizer, settings.sample_prompt, max_new_tokens=settings.sample_tokens)
    return settings.sample_prompt + "".join(pieces)
