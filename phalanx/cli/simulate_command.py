"""`phalanx simulate`: what if the network, the machines or the failures were others. Needs no torch."""

from __future__ import annotations

import click

from phalanx.cli.options import LazyGroup

SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "network": (
        "phalanx.cli.simulate_network:command",
        "A fabric of switches: conflicts of paths, congestion control, placement, link flaps.",
    ),
    "failures": (
        "phalanx.cli.simulate_failures:command",
        "Weeks and months: failures, restarts, checkpoints, spares; effective time, days, cost.",
    ),
    "stragglers": (
        "phalanx.cli.simulate_stragglers:command",
        "What waiting for the slowest of many ranks costs.",
    ),
}


@click.group(cls=LazyGroup, lazy=SUBCOMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """What if: networks, failures over months, slow ranks, without a single device."""
