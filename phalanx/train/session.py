"""One `phalanx train` from its config to the summary that a person reads at its end."""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote

import torch
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.core.fault_points import points_from_environment
from phalanx.core.phases import Phases
from phalanx.launch.cores import bind_started_elsewhere
from phalanx.launch.environment import Worker
from phalanx.launch.rank_failures import errors_named
from phalanx.model.shapes import flops_per_token, num_parameters
from phalanx.telemetry.loggers import MetricsLogger, Silent, open_loggers
from phalanx.train.assemble import assemble
from phalanx.train.config import RunConfig
from phalanx.train.derived.run_layout import axes_text
from phalanx.train.derived.run_numbers import default_folder
from phalanx.train.device import resident_bytes
from phalanx.train.loop import Outcome, train
from phalanx.train.predicted_cost import Expected
from phalanx.train.ranks import Ranks, meet
from phalanx.train.reports.display import Display, make_display
from phalanx.train.reports.preparation_progress import PrepareDisplay
from phalanx.train.reports.reporter import Reporter, describe
from phalanx.train.run_folder import RunFolder, open_for_training, told_changes
from phalanx.train.stop_request import exit_status
from phalanx.train.system_errors import explained
from phalanx.train.training_run import Run
from phalanx.train.trials import described_attention
from phalanx.train.weights.sampling import continue_text
from phalanx.train.weights.trained import open_trained

_LESS = "set train.micro_batch lower, train.recompute=full, or choose a smaller model or data.sequence_length"
_WORTH_SAYING_S = 0.01
_PHASES = {
    "template": "imports",
    "fork": "fork",
    "exec": "processes",
    "store": "groups",
    "mesh": "groups",
    "peers": "groups",
    "data": "text",
    "model": "model",
    "checkpoint": "checkpoint",
}


def train_rank(worker: Worker, config: RunConfig, config_path: Path, expected: Expected | None = None) -> int:
    """What each of several ranks does: `train_session`, of which rank 0 alone writes and shows anything."""
    with errors_named(worker, config.parallel.layout):
        if worker.launcher != "phalanx":
            bind_started_elsewhere(worker.local_rank, worker.local_world_size)
        ranks = meet(worker, config.parallel)
        try:
            with ranks.abort.watched(lambda: ranks.is_under_way):
                return train_session(config, config_path, Console(quiet=worker.rank > 0), ranks, expected)
        except UserError as error:
            ranks.abort.say(error)
            raise
        except Exception as error:
            why = ranks.abort.said()
            if why is None:
                raise
            raise why from error
        finally:
            ranks.close()


def train_session(
    config: RunConfig,
    config_path: Path,
    console: Console,
    ranks: Ranks | None = None,
    expected: Expected | None = None,
) -> int:
    """Train as `config` says, in its run folder.

    Args:
        ranks: the processes that train together, each of which calls this; None: this one alone.
        expected: what a step was predicted to cost, which is held against the first ones; None: nothing was.

    Returns:
        0 when the last step is done; 128 and the signal's number when a signal ended the run early.

    Raises:
        UserError: for everything a person can mend.
    """
    base_bytes = resident_bytes()
    _require_a_gpu_if_asked(config)
    ranks = ranks or Ranks()
    path = default_folder(config, config_path)
    folder = open_for_training(config, path) if ranks.is_first else RunFolder(path)
    ranks.peers.barrier()
    display = make_display(console)
    if folder.note:
        display.note(folder.note)
    if folder.changes:
        display.note(told_changes(folder.changes))
    try:
        with explained("the run", _LESS):
            with PrepareDisplay(console) as progress:
                points = points_from_environment(os.environ)
                run = assemble(config, folder, display.note, progress.show, ranks, points)
            display.note(headline(run))
            outcome = _train_and_let_go(run, display, expected, base_bytes)
    finally:
        display.close()
        folder.release()
    console.print(closing(run, outcome), highlight=False, soft_wrap=not console.is_terminal)
    if config.evaluate.sample_prompt and not outcome.stopped_by and ranks.is_first:
        console.print(Panel(Text(sample(run)), title="a sample", title_align="left"))
    return exit_status(outcome.stopped_by)


def _require_a_gpu_if_asked(config: RunConfig) -> None:
    """Refuse what only a GPU can do, where there is none, before anything is written."""
    asked = config.asks_for_a_gpu()
    if asked and not torch.cuda.is_available():
        raise UserError(f"{asked} needs a GPU, and none is visible here", cure="set it to 'auto'")


def headline(run: Run) -> str:
    """What is going to be trained, on what."""
    config, model = run.config, run.trainer.config
    peak = "" if run.peak is None else f", peak {run.peak.flops_per_s / 1e12:.2f} TFLOP/s ({run.peak.source})"
    tokens_per_step = config.train.global_batch * config.data.sequence_length
    each = " for each rank" if run.ranks.size > 1 else ""
    return (
        f"{units.count(num_parameters(model))} parameters, {run.total_steps} steps of {tokens_per_step:,} tokens "
        f"in micro-batches of {run.progress.micro_batch} x {config.data.sequence_length}\n"
        f"text: {units.count(run.prepared.num_tokens('train'))} tokens to train on, "
        f"{units.count(run.prepared.num_tokens('validation'))} held out\n"
        f"device: {run.device.name}, {run.device.threads} thread(s){each}, {_arithmetic(run)}{peak}\n"
        f"{_attention(run)}{_spread(run)}"
        f"folder: {run.folder.path}"
    )


def _arithmetic(run: Run) -> str:
    """In which types matrices are multiplied."""
    dtype = str(run.device.compute_dtype).removeprefix("torch.")
    layers = run.config.train.fp8_layers(run.trainer.config.layers)
    if not layers:
        return dtype
    emulated = ", emulated" if run.device.torch_device.type == "cpu" else ""
    return f"fp8 (blocks {layers.start} to {layers.stop - 1} of {run.trainer.config.layers}{emulated}) and {dtype}"


def _attention(run: Run) -> str:
    """By which kernels a GPU attends."""
    described = described_attention(run)
    return f"attention: {described}\n" if described else ""


def _spread(run: Run) -> str:
    """Ranks, layout and start-up, where there is more than one rank."""
    if run.ranks.size == 1:
        return ""
    layout = run.config.parallel.layout
    return f"ranks: {run.ranks.size}, {axes_text(layout)} ({layout}), {started(run.ranks.phases)}\n"


def started(phases: Phases) -> str:
    """How long starting took, and what of it was worth a word: ``started in 2.4 s (imports 2.0, groups 0.2)``.

    Every phase is kept in the metrics.
    """
    seconds: dict[str, float] = {}
    for name, value in phases.seconds.items():
        shown = _PHASES.get(name.partition("/")[0], "")
        seconds[shown] = seconds.get(shown, 0.0) + value
    parts = [f"{name} {value:.2f}" for name, value in seconds.items() if name and value >= _WORTH_SAYING_S]
    return f"started in {phases.total_s:.1f} s" + (f" ({', '.join(parts)})" if parts else "")


def closing(run: Run, outcome: Outcome) -> str:
    """How the run went, and what can be done with it."""
    progress = run.progress
    if outcome.stopped_by:
        where = f"after step {progress.step} of {run.total_steps}"
        where += ", in the evaluation at the end" if progress.step >= run.total_steps else ""
        return f"[yellow]stopped by {outcome.stopped_by}[/] {where}; the same command goes on from there"
    lines = [
        f"[green]done[/]: {progress.step} steps, {units.count(progress.tokens)} tokens "
        f"in {units.duration(progress.train_s)} of training"
    ]
    skipped = int(run.judge.skipped)
    if skipped:
        lines.append(f"{skipped} update(s) skipped by the bad-step policy")
    if outcome.evaluation is not None:
        lines.append(f"held-out text: {describe(outcome.evaluation)}")
    lines.append(f'sample from it: [bold]phalanx generate {escape(quote(str(run.folder.path)))} "…"[/]')
    return "\n".join(lines)


def sample(run: Run) -> str:
    """What the trained model makes of `evaluate.sample_prompt`; the same in every run of the same seed."""
    wanted = run.config.evaluate
    model = run.trainer.whole_model or open_trained(run.folder.path, lambda _: None).model
    pieces = continue_text(model, run.prepared.tokenizer, wanted.sample_prompt, max_new_tokens=wanted.sample_tokens)
    return wanted.sample_prompt + "".join(pieces)


def _train_and_let_go(run: Run, display: Display, expected: Expected | None, base_bytes: int) -> Outcome:
    """Train; what lies in memory is given back only where the last checkpoint is durable."""
    clean = False
    try:
        outcome = _train(run, display, expected, base_bytes)
        clean = True
        return outcome
    finally:
        run.saver.finish(clean=clean)


def _train(run: Run, display: Display, expected: Expected | None, base_bytes: int) -> Outcome:
    config = run.config
    logger = _open_loggers(run, display)
    logger.log_event("start", run.progress.step, run.ranks.phases.metrics())
    try:
        flops = flops_per_token(run.trainer.config, config.data.sequence_length).total
        on_host = run.device.torch_device.type == "cpu"
        reporter = Reporter(run, display, logger, flops, expected, base_bytes if on_host else 0)
        reporter.watch.start()
        return train(run, reporter)
    finally:
        logger.close()


def _open_loggers(run: Run, display: Display) -> MetricsLogger:
    """Figures leave the run on one rank only."""
    if not run.ranks.is_first:
        return Silent()
    config = run.config
    return open_loggers(
        config.logging, run.folder.path, run.progress.step, config.model_dump(mode="json"), display.note
    )
