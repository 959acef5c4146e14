"""`phalanx simulate failures`: what failures, checkpoints and spares make of weeks and months. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import AS_JSON, HTML, Decorator, group, in_words_of

if TYPE_CHECKING:  # NumPy and rich take tenths of a second; help pages do without them
    from phalanx.simulate.failure_report import FailureReport

_EXAMPLES = """\b
Examples:
  phalanx simulate failures --devices 12288 --spares 32
  phalanx simulate failures --devices 16384 --failures llama3 --interval best --spares best
  phalanx simulate failures --devices 12288 --steps 400000 --step-s 6.34 --days 120 --price 2 --compare
  phalanx simulate failures --devices 3072 --spares 16 --trace fault_trace.json --html year.html
"""


def _number(name: str, default: float, words: str) -> Decorator:
    metavar = "S" if name.endswith("-s") else "X"
    return click.option(name, type=float, default=default, metavar=metavar, help=f"{words} [{default:g}].")


_WORK = group(
    click.option("--devices", type=click.IntRange(min=1), required=True, metavar="N", help="Devices of the job."),
    click.option("--devices-per-host", type=click.IntRange(min=1), default=8, metavar="N", help="On each host [8]."),
    _number("--step-s", 1.0, "One step, healthy and with all hosts"),
    click.option("--steps", type=click.IntRange(min=0), default=0, metavar="N", help="To be made; else what fits."),
    click.option("--days", type=float, metavar="X", help="Watched; with --steps, given up after these [30]."),
    _number("--price", 0.0, "Money per device and hour"),
)
_FAILURES = group(
    click.option("--failures", default="meta-rsc1", metavar="NAME|FILE", help="Rates by class [meta-rsc1]."),
    click.option("--per-1000-host-days", type=float, metavar="X", help="Rate of all classes together, instead."),
    click.option("--trace", type=click.Path(path_type=Path), metavar="FILE", help="Recorded faults instead (JSON)."),
    click.option("--years", type=click.Choice(["blocks", "hosts", "recorded", "rates"]), help="From them [blocks]."),
    click.option("--trace-hosts", type=click.IntRange(1, 1_000_000), metavar="N", help="Recorded hosts [400]."),
    click.option("--lemon-share", type=float, metavar="X", help="Hosts that fail far more often, of all."),
    click.option("--lemon-times", type=float, metavar="X", help="How many times as often as a usual host."),
    click.option("--evict-after", type=int, default=0, metavar="N", help="Stops after which a host is replaced [0]."),
    _number("--idle-ratio", 1.0, "How often spares fail, over hosts of the job"),
)
_RECOVERY = group(
    _number("--detection-s", 60.0, "Until a failure and its host are known"),
    _number("--restart-s", 300.0, "From then until steps are made again"),
    _number("--load-s", 0.0, "Loading a durable checkpoint, beside that"),
    _number("--memory-load-s", 0.0, "Loading from memory, beside that"),
    _number("--queue-s", 0.0, "The scheduler's, before each start"),
    _number("--find-slow-s", 1000.0, "Until a slow host is found"),
    _number("--spread", 0.0, "Standard deviation over mean of these"),
    _number("--planned-per-day", 0.0, "Planned interruptions"),
    _number("--planned-s", 0.0, "What one takes, without the restart"),
)
_CHECKPOINTS = group(
    click.option("--interval", default="1800", metavar="S|best", help="Training between durable checkpoints [1800]."),
    _number("--stall-s", 5.0, "By which one holds training up"),
    _number("--persist-s", 0.0, "After which it is durable"),
    _number("--memory-interval-s", 0.0, "Training between snapshots in memory of hosts; 0: none"),
    _number("--memory-stall-s", 0.0, "By which one holds training up"),
)
_HOSTS = group(
    click.option("--spares", default="best", metavar="N|best", help="Hosts that wait, ready [best]."),
    click.option("--cold", type=click.IntRange(min=0), default=0, metavar="N", help="Hosts that may be asked for [0]."),
    _number("--provision-s", 0.0, "Until such a one, or a repaired one, is ready"),
    click.option("--when-missing", type=click.Choice(["wait", "shrink"]), default="wait", help="Of hosts [wait]."),
    click.option("--shrink-by", type=click.IntRange(min=1), default=1, metavar="N", help="Hosts by which it does [1]."),
    click.option("--smallest", type=click.IntRange(min=0), default=0, metavar="N", help="Fewest hosts [half of them]."),
    _number("--patience-s", 0.0, "Waited for a host before it shrinks"),
)
_OUTPUT = group(
    click.option(
        "--runs", type=click.IntRange(1, 1_000_000), default=1000, metavar="N", help="Runs that are played [1000]."
    ),
    click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N", help="The same gives the same [0]."),
    click.option("--compare", is_flag=True, help="Play other intervals and spares, too, with the same failures."),
    AS_JSON,
    HTML,
)


@click.command(epilog=_EXAMPLES)
@_WORK
@_FAILURES
@_RECOVERY
@_CHECKPOINTS
@_HOSTS
@_OUTPUT
@click.help_option("-h", "--help")
def command(runs: int, seed: int, compare: bool, as_json: bool, html: Path | None, **options: Any) -> None:
    """Play months of a job whose hosts fail: how much of the time trains, when it is done, what it costs.

    Failures are drawn by classes from rates that come with Phalanx (infinitehbd, llama3, meta-rsc1, meta-rsc2, minder)
    or from a file, or from recorded faults. Beside what is played stand closed forms, and other intervals and spares.
    """
    from phalanx.api.simulation import simulate
    from phalanx.cli.tables import make_console

    with make_console().status(f"playing {runs:,} runs …", spinner="dots"), in_words_of(options, _FIELDS):
        report = simulate(runs=runs, seed=seed, compare=compare, **options)
    _show(report, as_json, html)


_FIELDS = {
    "hosts": "devices",
    "price_per_device_hour": "price",
    "interval_s": "interval",
    "smallest_hosts": "smallest",
}
"""Options by fields of the simulation that are called otherwise."""


def _show(report: FailureReport, as_json: bool, html: Path | None) -> None:
    from phalanx.cli.tables import make_console, print_page_path
    from phalanx.simulate.failure_report import head_lines, months_json, months_text

    if html is not None:
        from phalanx.figures.pages.page_blocks import write_page
        from phalanx.simulate.failure_report import months_figures, months_sections

        write_page(html, head_lines(report)[0], months_sections(report), months_figures(report))
    if as_json:
        click.echo(json.dumps(months_json(report), indent=1, allow_nan=False))
        return
    console = make_console()
    console.print(months_text(report), highlight=False)
    print_page_path(console, html)
