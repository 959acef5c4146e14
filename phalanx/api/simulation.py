"""Play months of a job whose hosts fail: `simulate`, which `phalanx simulate failures` calls as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any

from phalanx.core.errors import UserError
from phalanx.simulate import failure_trace
from phalanx.simulate.failure_model import (
    DAY_S,
    Checkpoints,
    Failures,
    FailureScenario,
    Pool,
    Recovery,
    Work,
    load_failures,
    require,
)
from phalanx.simulate.failure_report import FailureReport, make_report
from phalanx.simulate.failure_simulation import (
    RunsOutcome,
    best_interval,
    best_spares,
    require_playable,
    simulate_histories,
    with_interval,
    with_spares,
)
from phalanx.simulate.failure_simulation import simulate as play
from phalanx.simulate.failure_trace import Fault

DEFAULTS = MappingProxyType(
    {
        "devices_per_host": 8,
        "step_s": 1.0,
        "steps": 0,
        "days": None,
        "price": 0.0,
        "failures": "meta-rsc1",
        "per_1000_host_days": None,
        "trace": None,
        "years": None,
        "trace_hosts": None,
        "lemon_share": None,
        "lemon_times": None,
        "evict_after": 0,
        "idle_ratio": 1.0,
        "detection_s": 60.0,
        "restart_s": 300.0,
        "load_s": 0.0,
        "memory_load_s": 0.0,
        "queue_s": 0.0,
        "find_slow_s": 1000.0,
        "spread": 0.0,
        "planned_per_day": 0.0,
        "planned_s": 0.0,
        "interval": "1800",
        "stall_s": 5.0,
        "persist_s": 0.0,
        "memory_interval_s": 0.0,
        "memory_stall_s": 0.0,
        "spares": "best",
        "cold": 0,
        "provision_s": 0.0,
        "when_missing": "wait",
        "shrink_by": 1,
        "smallest": 0,
        "patience_s": 0.0,
    }
)
"""Settings of `simulate`: the options of ``phalanx simulate failures``, whose help says what each means."""

_RECORDED_HOSTS = 400  # of InfiniteHBD-Trace
_MOST_REPLAYED = 20_000_000  # faults of all runs together, which are held at once


def simulate(devices: int, *, runs: int = 1000, seed: int = 0, compare: bool = False, **settings: Any) -> FailureReport:
    """Play months of a job on so many devices, run after run, each with failures of its own.

    Args:
        runs: that are played.
        seed: the same gives the same.
        compare: also play other intervals and numbers of spares, with the same failures.
        settings: as `DEFAULTS` has them, such as ``days=90``, ``interval="best"``, ``spares=16``.

    Returns:
        Figures of all runs (`phalanx.simulate.failure_report.months_text` prints them).

    Raises:
        UserError: a setting is unknown or impossible; named as the command's options are.
    """
    unknown = sorted(settings.keys() - DEFAULTS.keys())
    if unknown:
        cure = f"give some of {', '.join(DEFAULTS)}"
        raise UserError("is not a setting of the simulation", cure=cure, field=unknown[0])
    options = {"devices": devices, **DEFAULTS, **settings}
    _check_types({**options, "runs": runs, "seed": seed, "compare": compare})
    _refuse_contradictions(options, compare)
    faults = _recorded(options)
    scenario = _scenario(options, faults)
    is_recorded = bool(faults) and options["years"] != "rates"
    outcome = _replayed(scenario, options, faults, runs, seed) if is_recorded else play(scenario, runs, seed)
    compared = max(runs // 5, 2) if compare else 0
    return make_report(outcome, scenario.failures.source, compared, is_recorded=is_recorded)


_WHOLE = "devices devices_per_host steps trace_hosts evict_after cold shrink_by smallest runs seed".split()  # noqa: SIM905
_TEXTS = ("failures", "years", "when_missing")
_ANYTHING = ("interval", "spares")


def _check_types(options: dict[str, Any]) -> None:
    """Refuse what is neither a number nor a text where one has to be; what is out of range is refused later."""
    for name, value in options.items():
        if value is None and DEFAULTS.get(name, 0) is None:
            continue
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if name == "compare":
            is_right, problem, cure = isinstance(value, bool), "is neither true nor false", "give one of them"
        elif name == "trace":
            is_right, problem, cure = isinstance(value, str | Path), "is not a path", "give a file of recorded faults"
        elif name in _TEXTS:
            is_right, problem = isinstance(value, str), "is not a text"
            cure = f"give one such as {DEFAULTS[name] or 'rates'!r}"
        elif name in _ANYTHING:
            continue
        elif name in _WHOLE:
            is_right = is_number and value == value // 1
            problem, cure = "is not a whole number", "give one"
        else:
            is_right, problem, cure = is_number, "is not a number", "give one"
        if not is_right:
            raise _error(problem, cure, name, options)


def _refuse_contradictions(options: dict[str, Any], compare: bool) -> None:
    for name in ("years", "trace_hosts"):
        if options["trace"] is None and options[name] is not None:
            raise _error("is about recorded faults", "give --trace FILE", name, options)
    for name in ("shrink_by", "smallest", "patience_s"):
        if options["when_missing"] == "wait" and options[name] != DEFAULTS[name]:
            raise _error("is about a job that shrinks", "add --when-missing shrink, or leave it out", name, options)
    options["trace_hosts"] = options["trace_hosts"] or _RECORDED_HOSTS
    if options["trace"] is None:
        return
    if compare and options["years"] != "rates":
        cure = "add --years rates, or leave out one of the two"
        raise UserError("plays failures drawn from rates, not recorded ones", cure=cure, field="--compare")
    for name in ("per_1000_host_days", "lemon_share", "lemon_times"):
        if options[name] is not None:
            option = f"--{name.replace('_', '-')}"
            raise UserError("is about rates, not recorded faults", cure="leave out one of the two", field=option)


def _error(problem: str, cure: str, name: str, options: dict[str, Any]) -> UserError:
    return UserError(problem, cure=cure, field=f"--{name.replace('_', '-')}", value=options[name])


def _recorded(options: dict[str, Any]) -> list[Fault]:
    if options["trace"] is None:
        return []
    path = Path(options["trace"])
    faults = failure_trace.read_trace(path)
    names = len({fault.node for fault in faults})
    if not faults:
        raise UserError("there are no faults", cure="give another file", field="--trace", value=str(path))
    if names > options["trace_hosts"]:
        raise _error("more hosts had faults", f"give {names} at least", "trace_hosts", options)
    return faults


def _scenario(options: dict[str, Any], faults: list[Fault]) -> FailureScenario:
    """What the options say, with the best interval and number of spares where these are asked for."""
    interval_s, spares = _or_best(options, "interval", float), _or_best(options, "spares", int)
    persist_s, memory_s = options["persist_s"], options["memory_interval_s"]
    at_least_s = interval_s or max(1800.0, persist_s, memory_s)
    saved = Checkpoints(at_least_s, options["stall_s"], persist_s, memory_s, options["memory_stall_s"])
    of_pool = ("cold", "provision_s", "when_missing", "shrink_by", "patience_s")
    pool = Pool(spares or 0, smallest_hosts=options["smallest"], **{name: options[name] for name in of_pool})
    of_recovery = ("detection_s", "restart_s", "load_s", "memory_load_s", "queue_s", "find_slow_s", "spread")
    recovery = Recovery(**{name: options[name] for name in (*of_recovery, "planned_per_day", "planned_s")})
    scenario = FailureScenario(_work(options, faults), _failures(options, faults), recovery, saved, pool)
    _check_sense(scenario)
    require_playable(scenario, scenario.all_hosts)
    if interval_s is None:
        scenario = with_interval(scenario, best_interval(scenario))
    if spares is None:
        scenario = with_spares(scenario, best_spares(scenario))
    if faults and options["years"] != "rates" and scenario.all_hosts > options["trace_hosts"]:
        problem = f"{scenario.all_hosts} hosts are more than the {options['trace_hosts']} that were recorded"
        raise UserError(problem, cure="take fewer devices and spares, or --years rates", field="--devices")
    return scenario


def _check_sense(scenario: FailureScenario) -> None:
    """Whether the job is large enough to shrink, and a checkpoint is ever due, and durable, while it is watched."""
    if scenario.pool.shrink_by > scenario.work.hosts:
        cure = f"name a number up to {scenario.work.hosts}"
        raise UserError("the job is not so large", cure=cure, field="shrink_by", value=scenario.pool.shrink_by)
    saved, watched_s = scenario.checkpoints, scenario.work.days * DAY_S
    field = "persist_s" if saved.persist_s > watched_s else "interval_s"
    if getattr(saved, field) > watched_s:
        cure = f"give a number below {watched_s:g}, or more --days"
        problem = f"no checkpoint would be saved in {scenario.work.days:g} days"
        raise UserError(problem, cure=cure, field=field, value=getattr(saved, field))


def _or_best(options: dict[str, Any], name: str, kind: Callable[[str], float]) -> Any:
    """The number that was given; None: the best is asked for."""
    text = options[name]
    if text == "best":
        return None
    try:
        value = kind(str(text))
    except ValueError:
        raise _error("it is no number", "give one, or best", name, options) from None
    if not value >= (1e-3 if name == "interval" else 0):
        cure = "give a millisecond at least" if name == "interval" else "give 0 or more"
        raise _error("it is out of range", cure, name, options)
    return value


def _work(options: dict[str, Any], faults: list[Fault]) -> Work:
    hosts, left = divmod(options["devices"], options["devices_per_host"])
    if left:
        cure = f"give a multiple of {options['devices_per_host']}, or --devices-per-host"
        raise _error("they fill no whole number of hosts", cure, "devices", options)
    days = options["days"]
    if days is None:
        days = _days_of(faults) if faults else 30.0
    return Work(hosts, options["devices_per_host"], options["step_s"], options["steps"], days, options["price"])


def _failures(options: dict[str, Any], faults: list[Fault]) -> Failures:
    if faults:
        failures = failure_trace.rates_of(faults, options["trace_hosts"], _days_of(faults))
    else:
        failures = load_failures(options["failures"])
    rate = options["per_1000_host_days"]
    if rate is not None:
        require("per_1000_host_days", rate, 0, 1e9)
        failures = replace(failures.scaled(rate / 1000), source=f"{rate:g} per 1,000 host-days, as {failures.source}")
    given = {name: options[name] for name in ("lemon_share", "lemon_times") if options[name] is not None}
    return replace(failures, evict_after=options["evict_after"], idle_ratio=options["idle_ratio"], **given)


def _replayed(
    scenario: FailureScenario, options: dict[str, Any], faults: list[Fault], runs: int, seed: int
) -> RunsOutcome:
    hosts = options["trace_hosts"]
    if runs * len(faults) > _MOST_REPLAYED:
        cure = f"give {_MOST_REPLAYED // len(faults):,} at most, or --years rates"
        raise UserError(f"{len(faults):,} faults cannot be played so often", cure=cure, field="--runs", value=runs)
    if options["years"] == "recorded":
        history = failure_trace.replay(faults, runs, seed, hosts)
    elif options["years"] == "hosts":
        history = failure_trace.by_hosts(faults, runs, seed, hosts)
    else:
        history = failure_trace.by_blocks(faults, runs, seed, hosts, _days_of(faults))
    return simulate_histories(scenario, [history], seed)


def _days_of(faults: list[Fault]) -> float:
    return max(fault.ends_s for fault in faults) / DAY_S
