"""`phalanx simulate failures`: what failures, checkpoints and spares make of weeks and months. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import AS_JSON, HTML, Decorator, group, in_words_of
from phalanx.core.errors import UserError

if TYPE_CHECKING:  # NumPy and rich take tenths of a second; help pages do without them
    from phalanx.simulate.failure_model import Failures, Pool, Recovery, Story, Work
    from phalanx.simulate.failure_report import MonthsReport
    from phalanx.simulate.failure_simulation import Outcome
    from phalanx.simulate.failure_trace import Fault

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
    from phalanx.cli.tables import make_console
    from phalanx.simulate.failure_report import make_report

    _refuse_contradictions(options, compare)
    with in_words_of(options, _FIELDS):
        faults = _recorded(options)
        story = _story(options, faults)
    console = make_console()
    with console.status(f"playing {runs:,} runs …", spinner="dots"):
        outcome = _outcome(story, options, faults, runs, seed)
        compared = max(runs // 5, 2) if compare else 0
        is_recorded = bool(faults) and options["years"] != "rates"
        report = make_report(outcome, story.failures.source, compared, is_recorded=is_recorded)
    _show(report, as_json, html)


_FIELDS = {
    "hosts": "devices",
    "price_per_device_hour": "price",
    "interval_s": "interval",
    "smallest_hosts": "smallest",
}
"""Options by fields of the simulation that are called otherwise."""
_RECORDED_HOSTS = 400  # of InfiniteHBD-Trace
_MOST_REPLAYED = 20_000_000  # faults of all runs together, which are held at once


def _refuse_contradictions(options: dict[str, Any], compare: bool) -> None:

    for name in ("years", "trace_hosts"):
        if options["trace"] is None and options[name] is not None:
            field = f"--{name.replace('_', '-')}"
            raise UserError("is about recorded faults", cure="give --trace FILE", field=field, value=options[name])
    for name, usual in (("shrink_by", 1), ("smallest", 0), ("patience_s", 0.0)):
        if options["when_missing"] == "wait" and options[name] != usual:
            field, cure = f"--{name.replace('_', '-')}", "add --when-missing shrink, or leave it out"
            raise UserError("is about a job that shrinks", cure=cure, field=field, value=options[name])
    options["trace_hosts"] = options["trace_hosts"] or _RECORDED_HOSTS
    if options["trace"] is None:
        return
    if compare and options["years"] != "rates":
        cure = "add --years rates, or leave out one of the two"
        raise UserError("plays failures drawn from rates, not recorded ones", cure=cure, field="--compare")
    for name in ("per_1000_host_days", "lemon_share", "lemon_times"):
        if options[name] is not None:
            field = f"--{name.replace('_', '-')}"
            raise UserError("is about rates, not recorded faults", cure="leave out one of the two", field=field)


def _recorded(options: dict[str, Any]) -> list[Fault]:
    if options["trace"] is None:
        return []
    from phalanx.simulate.failure_trace import read_trace

    faults = read_trace(options["trace"])
    names = len({fault.node for fault in faults})
    if not faults:
        raise UserError("there are no faults", cure="give another file", field="--trace", value=str(options["trace"]))
    if names > options["trace_hosts"]:
        cure = f"give {names} at least"
        raise UserError("more hosts had faults", cure=cure, field="--trace-hosts", value=options["trace_hosts"])
    return faults


def _days_of(faults: list[Fault]) -> float:
    return max(fault.ends_s for fault in faults) / 86_400


def _story(options: dict[str, Any], faults: list[Fault]) -> Story:
    """What the options say, with the best interval and number of spares where these are asked for."""
    from phalanx.simulate.failure_model import Checkpoints, Story
    from phalanx.simulate.failure_simulation import (
        best_interval,
        best_spares,
        require_playable,
        with_interval,
        with_spares,
    )

    interval_s, spares = _or_best(options, "interval", float), _or_best(options, "spares", int)
    persist_s, memory_s = options["persist_s"], options["memory_interval_s"]
    at_least_s = interval_s or max(1800.0, persist_s, memory_s)
    saved = Checkpoints(at_least_s, options["stall_s"], persist_s, memory_s, options["memory_stall_s"])
    pool = _pool(options, spares or 0)
    story = Story(_work(options, faults), _failures(options, faults), _recovery(options), saved, pool)
    _check_sense(story)
    require_playable(story, story.all_hosts)
    if interval_s is None:
        story = with_interval(story, best_interval(story))
    if spares is None:
        story = with_spares(story, best_spares(story))
    if faults and options["years"] != "rates" and story.all_hosts > options["trace_hosts"]:
        problem = f"{story.all_hosts} hosts are more than the {options['trace_hosts']} that were recorded"
        raise UserError(problem, cure="take fewer devices and spares, or --years rates", field="--devices")
    return story


def _check_sense(story: Story) -> None:
    """Whether the job is large enough to shrink, and a checkpoint is ever due, and durable, while it is watched."""
    if story.pool.shrink_by > story.work.hosts:
        cure = f"name a number up to {story.work.hosts}"
        raise UserError("the job is not so large", cure=cure, field="shrink_by", value=story.pool.shrink_by)
    saved, watched_s = story.checkpoints, story.work.days * 86_400
    field = "persist_s" if saved.persist_s > watched_s else "interval_s"
    if getattr(saved, field) > watched_s:
        cure = f"give a number below {watched_s:g}, or more --days"
        problem = f"no checkpoint would be saved in {story.work.days:g} days"
        raise UserError(problem, cure=cure, field=field, value=getattr(saved, field))


def _or_best(options: dict[str, Any], name: str, kind: Callable[[str], float]) -> Any:
    """The number that was given; None: the best is asked for."""

    text = options[name]
    if text == "best":
        return None
    try:
        value = kind(text)
    except ValueError:
        raise UserError("it is no number", cure="give one, or best", field=f"--{name}", value=text) from None
    if not value >= (1e-3 if name == "interval" else 0):
        cure = "give a millisecond at least" if name == "interval" else "give 0 or more"
        raise UserError("it is out of range", cure=cure, field=f"--{name}", value=text)
    return value


def _work(options: dict[str, Any], faults: list[Fault]) -> Work:
    from phalanx.simulate.failure_model import Work

    hosts, left = divmod(options["devices"], options["devices_per_host"])
    if left:
        cure = f"give a multiple of {options['devices_per_host']}, or --devices-per-host"
        raise UserError("they fill no whole number of hosts", cure=cure, field="--devices", value=options["devices"])
    days = options["days"]
    if days is None:
        days = _days_of(faults) if faults else 30.0
    return Work(hosts, options["devices_per_host"], options["step_s"], options["steps"], days, options["price"])


def _failures(options: dict[str, Any], faults: list[Fault]) -> Failures:
    from dataclasses import replace

    from phalanx.simulate.failure_model import load_failures, require
    from phalanx.simulate.failure_trace import rates_of

    if faults:
        failures = rates_of(faults, options["trace_hosts"], _days_of(faults))
    else:
        failures = load_failures(options["failures"])
    rate = options["per_1000_host_days"]
    if rate is not None:
        require("per_1000_host_days", rate, 0, 1e9)
        failures = replace(failures.scaled(rate / 1000), source=f"{rate:g} per 1,000 host-days, as {failures.source}")
    given = {name: options[name] for name in ("lemon_share", "lemon_times") if options[name] is not None}
    return replace(failures, evict_after=options["evict_after"], idle_ratio=options["idle_ratio"], **given)


def _recovery(options: dict[str, Any]) -> Recovery:
    from phalanx.simulate.failure_model import Recovery

    names = ("detection_s", "restart_s", "load_s", "memory_load_s", "queue_s", "find_slow_s", "spread")
    return Recovery(**{name: options[name] for name in (*names, "planned_per_day", "planned_s")})


def _pool(options: dict[str, Any], spares: int) -> Pool:
    from phalanx.simulate.failure_model import Pool

    names = ("cold", "provision_s", "when_missing", "shrink_by", "patience_s")
    return Pool(spares, smallest_hosts=options["smallest"], **{name: options[name] for name in names})


def _outcome(story: Story, options: dict[str, Any], faults: list[Fault], runs: int, seed: int) -> Outcome:
    from phalanx.simulate import failure_trace
    from phalanx.simulate.failure_simulation import simulate, simulate_histories

    years, hosts = options["years"] or "blocks", options["trace_hosts"]
    if not faults or years == "rates":
        return simulate(story, runs, seed)
    if runs * len(faults) > _MOST_REPLAYED:
        cure = f"give {_MOST_REPLAYED // len(faults):,} at most, or --years rates"
        raise UserError(f"{len(faults):,} faults cannot be played so often", cure=cure, field="--runs", value=runs)
    if years == "recorded":
        history = failure_trace.replay(faults, runs, seed, hosts)
    elif years == "hosts":
        history = failure_trace.by_hosts(faults, runs, seed, hosts)
    else:
        history = failure_trace.by_blocks(faults, runs, seed, hosts, _days_of(faults))
    return simulate_histories(story, [history], seed)


def _show(report: MonthsReport, as_json: bool, html: Path | None) -> None:
    from phalanx.cli.tables import make_console, tell_page
    from phalanx.simulate.failure_report import head_lines, months_json, months_text

    if html is not None:
        from phalanx.plan.report.page_blocks import write_page
        from phalanx.simulate.failure_report import months_figures, months_sections

        write_page(html, head_lines(report)[0], months_sections(report), months_figures(report))
    if as_json:
        click.echo(json.dumps(months_json(report), indent=1, allow_nan=False))
        return
    console = make_console()
    console.print(months_text(report), highlight=False)
    tell_page(console, html)
