"""The lines that a person reads before the first step of a run and after the last one."""

from __future__ import annotations

from shlex import quote

from rich.markup import escape

from phalanx.core import units
from phalanx.core.phases import Phases
from phalanx.model.shapes import num_parameters
from phalanx.train.derived.run_layout import axes_text
from phalanx.train.reports.reporter import LONGER, describe
from phalanx.train.run_progress import TrainResult
from phalanx.train.training_run import Run, described_attention

_SHOWN_FROM_S = 0.01
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


def headline(run: Run) -> str:
    """What is going to be trained, on what."""
    config, model, device = run.config, run.trainer.model_config, run.device
    length, several = config.data.sequence_length, run.ranks.size > 1
    peak = "" if run.peak is None else f", peak {run.peak.flops_per_s / 1e12:.2f} TFLOP/s ({run.peak.source})"
    arithmetic = str(device.compute_dtype).removeprefix("torch.")
    if fp8 := config.train.fp8_layers(model.layers):
        emulated = ", emulated" if device.torch_device.type == "cpu" else ""
        arithmetic = f"fp8 (blocks {fp8.start} to {fp8.stop - 1} of {model.layers}{emulated}) and {arithmetic}"
    attention, layout = described_attention(run), config.parallel.layout
    lines = [
        f"{units.count(num_parameters(model))} parameters, {run.total_steps} steps of "
        f"{config.train.global_batch * length:,} tokens in micro-batches of {run.progress.micro_batch} x {length}",
        f"text: {units.count(run.prepared.num_tokens('train'))} tokens to train on, "
        f"{units.count(run.prepared.num_tokens('validation'))} held out",
        f"device: {device.name}, {device.threads} thread(s){' for each rank' if several else ''}, {arithmetic}{peak}",
        *([f"attention: {attention}"] if attention else []),
        *([f"ranks: {run.ranks.size}, {axes_text(layout)} ({layout}), {started(run.ranks.phases)}"] if several else []),
        f"folder: {run.folder.path}",
    ]
    return "\n".join(lines)


def started(phases: Phases) -> str:
    """How long starting took, and the phases that took long enough: ``started in 2.4 s (imports 2.0, groups 0.2)``.

    The metrics have every phase.
    """
    seconds: dict[str, float] = {}
    for name, value in phases.seconds.items():
        shown = _PHASES.get(name.partition("/")[0], "")
        seconds[shown] = seconds.get(shown, 0.0) + value
    parts = [f"{name} {value:.2f}" for name, value in seconds.items() if name and value >= _SHOWN_FROM_S]
    return f"started in {phases.total_s:.1f} s" + (f" ({', '.join(parts)})" if parts else "")


def closing(run: Run, result: TrainResult) -> str:
    """How the run went, and what can be done with it."""
    if result.stopped_by:
        where = f"after step {result.steps} of {run.total_steps}"
        where += ", in the evaluation at the end" if result.steps >= run.total_steps else ""
        return f"[yellow]stopped by {result.stopped_by}[/] {where}; the same command goes on from there"
    lines = [
        f"[green]done[/]: {result.steps} steps, {units.count(result.tokens)} tokens "
        f"in {units.duration(run.progress.train_s)} of training"
    ]
    skipped = int(run.judge.skipped)
    if 2 * skipped > result.steps:
        lines.append(
            f"[yellow]most updates were skipped[/], {skipped} of {result.steps}: the loss or the gradient was not "
            "finite or far too large; lower optim.lr, or look at the data"
        )
    elif skipped:
        lines.append(f"{skipped} update(s) skipped by the bad-step policy")
    if untrained := run.progress.untrained:
        lines.append(f"[yellow]{untrained} of {result.steps} steps had no target[/] and changed nothing; {LONGER}")
    if result.evaluation is not None:
        lines.append(f"held-out text: {describe(result.evaluation)}")
    lines.append(f'sample from it: [bold]phalanx generate {escape(quote(str(run.folder.path)))} "…"[/]')
    return "\n".join(lines)
