"""`phalanx detect`: which machine is slow, stuck, silently wrong or about to fail."""

from __future__ import annotations

import click

from phalanx.cli.options import LazyGroup

SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "all": ("phalanx.cli.detect_all:command", "Every judge on one run, a line each."),
    "drift": ("phalanx.cli.detect_drift:command", "Steps that become longer, and which part of them grew."),
    "loss": ("phalanx.cli.detect_loss:command", "Spikes and divergences of the loss, and the batch that did it."),
    "diverge": ("phalanx.cli.detect_diverge:command", "The first step at which two runs differ, and in which tensor."),
    "machines": ("phalanx.cli.detect_machines:command", "The faulty machine, by the monitoring metrics of all."),
    "generate": ("phalanx.cli.detect_generate:command", "Make up monitoring data of jobs, with labels, to try judges."),
    "corruption": (
        "phalanx.cli.detect_corruption:command",
        "Which rank of a run holds other bits than its peers, by digests compared while it trained.",
    ),
    "stragglers": (
        "phalanx.cli.detect_stragglers:command",
        "Slow machines, unbalanced stages, uneven sequence lengths.",
    ),
    "hang": ("phalanx.cli.detect_hang:command", "Which rank holds up a job that stands still."),
    "logs": ("phalanx.cli.detect_logs:command", "Why a job failed, by the lines of all its ranks."),
    "offenders": (
        "phalanx.cli.detect_offenders:command",
        "Hosts that fail again and again, by a history of incidents.",
    ),
}


@click.group(cls=LazyGroup, lazy=SUBCOMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Who is slow, stuck, silently wrong or about to fail: judges of traces, dumps, metrics, states and logs.

    Each prints one line first, then why and what to do. The exit status is 0 where nothing is wrong, 1 where something
    is, 2 for bad input, 3 where the evidence says nothing.
    """
