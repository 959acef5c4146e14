"""Names of monitoring systems to metrics of the catalogue: by a file that users may replace in part.

The same rules turn into PromQL, so that a server sends one series per host and metric, and are applied here to the
columns of files and to a run's own counters.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import UserError
from phalanx.detect.monitoring.metric_alignment import NEAREST_S, Grid, combine, nearest
from phalanx.detect.monitoring.metric_catalogue import CATALOGUE, Combine, known_metric
from phalanx.detect.monitoring.metric_table import MetricTable

_KEYS = ("series", "kind", "scale", "over", "complement", "query", "combine")


@dataclass(frozen=True)
class NameRule:
    """One way to get a metric.

    Attributes:
        metric: of the catalogue.
        series: names; several are added up.
        kind: of counters the rate per second is taken.
        scale: factor to the catalogue's unit.
        over: series that it is divided by, added up; empty: none.
        complement: 1 less the value.
        query: PromQL of the user in place of all that; empty: none.
        combine: over the devices of a host.
    """

    metric: str
    series: tuple[str, ...]
    kind: Literal["gauge", "counter"]
    scale: float
    over: tuple[str, ...]
    complement: bool
    query: str
    combine: Combine

    def promql(self, host_label: str, selector: str, window_s: float) -> str:
        """What a Prometheus server is asked: one series per host.

        Args:
            host_label: by which devices are put together: ``instance``, ``Hostname``, ``node``.
            selector: further matchers, such as ``job="dcgm"``; empty: none.
            window_s: how far back samples count; a host that is silent for so long has no value.
        """
        window = f"{max(1, round(window_s * 1000))}ms"
        if self.query:
            return self.query.replace("{window}", window).replace("{selector}", selector)
        of = {"counter": "irate", "gauge": "last_over_time"}[self.kind]
        how = {"mean": "avg", "sum": "sum", "max": "max"}[self.combine]

        def total(names: Sequence[str], of: str) -> str:
            return " + ".join(f"{how} by ({host_label}) ({of}({_with(one, selector)}[{window}]))" for one in names)

        text = total(self.series, of)
        if self.over:
            text = f"({text}) / ({total(self.over, 'last_over_time')})"
        if self.scale != 1:
            text = f"({text}) * {self.scale:g}"
        return f"1 - ({text})" if self.complement else text


Names = Mapping[str, tuple[NameRule, ...]]
"""Alternatives by metric, the first with data is taken."""


@dataclass(frozen=True)
class RawSeries:
    """Samples under the name that their source has for them.

    Attributes:
        name: as in the file of names.
        machine: host.
        times_s: ascending, since 1970 [samples].
        values: [samples].
        device: GPU, port or disk of the host.
    """

    name: str
    machine: str
    times_s: NDArray[np.float64]
    values: NDArray[np.float64]
    device: str = ""


def load_names(path: Path | None = None) -> Names:
    """The package's names, and in the place of some metrics those of a file.

    Raises:
        UserError: the file cannot be read, or says what no rule is.
    """
    text = files("phalanx.detect.monitoring").joinpath("metric_names.toml").read_text("utf-8")
    found = _rules(tomllib.loads(text), "metric_names.toml")
    if path is None:
        return found
    try:
        given = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", cure="name a file of TOML", value=str(path)) from None
    except (ValueError, RecursionError) as error:
        cure = "see docs/detect_data.md for an example"
        raise UserError(f"is no TOML: {error}", cure=cure, value=str(path)) from None
    return {**found, **_rules(given, str(path))}


def _rules(given: Mapping[str, Any], where: str) -> dict[str, tuple[NameRule, ...]]:
    found = {}
    for metric, alternatives in given.items():
        known_metric(metric)
        if not isinstance(alternatives, list) or not all(isinstance(one, dict) for one in alternatives):
            cure = f"write [[{metric}]] above its lines"
            raise UserError("holds no list of alternatives", cure=cure, field=where, value=metric)
        found[metric] = tuple(_rule(metric, one, where) for one in alternatives)
    return found


def _rule(metric: str, given: Mapping[str, Any], where: str) -> NameRule:
    def refuse(problem: str, cure: str) -> UserError:
        return UserError(problem, cure=cure, field=f"{where}: {metric}")

    if unknown := given.keys() - set(_KEYS):
        raise refuse(f"has no setting {sorted(unknown)[0]!r}", f"use {', '.join(_KEYS)}")
    series, query = given.get("series", []), given.get("query", "")
    if not isinstance(query, str) or not isinstance(series, list) or not all(isinstance(one, str) for one in series):
        raise refuse("series is no list of names, or query no text", 'write series = ["NAME"]')
    if not series and not query:
        raise refuse("has neither series nor query", 'write series = ["NAME"]')
    kind, how = given.get("kind", "gauge"), given.get("combine", CATALOGUE[metric].combine)
    if kind not in ("gauge", "counter") or how not in ("mean", "sum", "max"):
        raise refuse("has an odd kind or combine", "use gauge or counter, and mean, sum or max")
    scale, over, complement = given.get("scale", 1.0), given.get("over", []), given.get("complement", False)
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    is_over = isinstance(over, list) and all(isinstance(one, str) for one in over)
    if not is_number or not is_over or not isinstance(complement, bool):
        raise refuse("has an odd scale, over or complement", "give a number, a list of names, and true or false")
    return NameRule(
        metric, tuple(series), cast("Any", kind), float(scale), tuple(over), complement, query, cast("Combine", how)
    )


def _with(name: str, selector: str) -> str:
    """A series of PromQL with further matchers."""
    if not selector:
        return name
    return f"{name[:-1]},{selector}}}" if name.endswith("}") else f"{name}{{{selector}}}"


def table_by_names(
    raw: Sequence[RawSeries],
    names: Names,
    grid: Grid,
    *,
    machines: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
    within_s: float | None = None,
) -> MetricTable:
    """Samples of any names on one grid, as the rules say; names of the catalogue itself are taken as they are.

    Args:
        machines: rows; None: all that reported, sorted.
        metrics: of the catalogue; None: all for which there are series.
        within_s: how far a sample may be from the moment that it stands for; None: see `metric_alignment.NEAREST_S`.

    Raises:
        UserError: no series has a known name.
    """
    by_name: dict[str, dict[str, list[RawSeries]]] = {}
    for one in raw:
        by_name.setdefault(one.name, {}).setdefault(one.machine, []).append(one)
    hosts = tuple(machines) if machines is not None else tuple(sorted({one.machine for one in raw}))
    found: dict[str, NDArray[np.float32]] = {}
    bound_s = within_s if within_s is not None else max(NEAREST_S, 1.5 * grid.period_s)
    for metric in metrics or CATALOGUE:
        plain = NameRule(metric, (metric,), "gauge", 1.0, (), False, "", CATALOGUE[metric].combine)
        for rule in (plain, *names.get(metric, ())):
            needed = [*rule.series, *rule.over]
            if needed and all(name in by_name for name in needed):
                found[metric] = _by_rule(rule, by_name, hosts, grid, bound_s)
                break
    if not found:
        seen = ", ".join(sorted(by_name)[:8]) or "none"
        cure = "give a file of names (--names), or name columns as the catalogue does"
        raise UserError(f"no series has a known name (there are {seen})", cure=cure)
    values = np.stack([found[metric] for metric in found])
    return MetricTable(values, tuple(found), hosts, grid.start_s, grid.period_s)


def _by_rule(
    rule: NameRule,
    by_name: Mapping[str, Mapping[str, Sequence[RawSeries]]],
    machines: Sequence[str],
    grid: Grid,
    within_s: float,
) -> NDArray[np.float32]:
    values = np.full((len(machines), grid.samples), np.nan, np.float32)
    moments_s = grid.times_s()

    def of(name: str, machine: str, kind: str) -> NDArray[np.float32] | None:
        devices = by_name[name].get(machine)
        if not devices:
            return None
        one_each = []
        for one in devices:
            times_s, samples = rates(one.times_s, one.values) if kind == "counter" else (one.times_s, one.values)
            one_each.append(nearest(times_s, samples, moments_s, within_s))
        return combine(np.stack(one_each), rule.combine)

    for row, machine in enumerate(machines):
        parts = [part for name in rule.series if (part := of(name, machine, rule.kind)) is not None]
        under = [part for name in rule.over if (part := of(name, machine, "gauge")) is not None]
        if len(parts) == len(rule.series) and len(under) == len(rule.over):
            with np.errstate(divide="ignore", invalid="ignore"):
                value = np.sum(parts, axis=0) / (np.sum(under, axis=0) if under else 1) * np.float32(rule.scale)
            values[row] = 1 - value if rule.complement else value
    return values


def rates(times_s: NDArray[np.float64], values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of a counter, per second, at the later of two samples; where it was reset nothing is known."""
    if len(times_s) < 2:
        return times_s[:0], values[:0]
    steps_s, changes = np.diff(times_s), np.diff(values)
    is_good = (steps_s > 0) & (changes >= 0)
    return times_s[1:][is_good], changes[is_good] / steps_s[is_good]
