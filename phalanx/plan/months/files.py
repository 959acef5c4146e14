"""Failure classes from TOML: files that come with the planner, or a person's own. Torch-free.

source = "who counted them"

[[class]]
name = "GPU"
failures_per_1000_host_days = 2.22
effect = "stops"              # or "slow", "taken out"
repair_median_s = 73440.0     # and repair_p90_s; or repair_fixed_s, repair_mean_s (without memory), repair_values_s
repair_p90_s = 1183680.0
detection_s = 60.0            # else what the command line says
memory_survives = true        # what other hosts hold in memory
mark = "measured"             # or "derived", "assumed"
source = "…"
date = "2024-07"

[lemons]                      # may be left out
share_ratio = 0.012
rate_ratio = 12.5             # failures of a lemon over those of a usual host
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.plan.months.values import Duration, FailureClass, Failures
from phalanx.plan.toml_tree import read_tree
from phalanx.plan.types import Mark

FOLDER = Path(__file__).with_name("failures")
_KEYS = {
    *("name", "failures_per_1000_host_days", "effect", "detection_s", "slowdown_ratio", "memory_survives"),
    *(
        "repair_fixed_s",
        "repair_mean_s",
        "repair_median_s",
        "repair_p90_s",
        "repair_values_s",
        "mark",
        "source",
        "date",
    ),
}
_MARKS: tuple[Mark, ...] = ("measured", "derived", "assumed")


def known() -> list[str]:
    """Names of the files that come with the planner."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_failures(name: str) -> Failures:
    """The failures of a file that comes with the planner, or of a person's.

    Raises:
        UserError: there is no such file, or something in it is wrong.
    """
    if name not in known() and not name.endswith(".toml"):
        cure = f"choose one of {', '.join(known())}, or name a .toml file"
        raise UserError("there are no such failures", cure=cure, field="failures", value=name)
    path = FOLDER / f"{name}.toml" if name in known() else Path(name)
    content = read_tree(path)
    try:
        return _failures(content)
    except UserError as error:
        told = str(error).removesuffix(f": {error.problem}; {error.cure}")
        raise UserError(error.problem, cure=error.cure, field=f"{path.name}: {told}") from None


def _failures(content: Mapping[str, Any]) -> Failures:
    _refuse_unknown(content, {"source", "class", "lemons"}, "")
    tables, lemons = content.get("class"), content.get("lemons", {})
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise _says_too_little("class", "write [[class]] with its keys below, once for each kind of failure")
    if not isinstance(lemons, dict):
        raise _says_too_little("lemons", "write [lemons] with share_ratio and rate_ratio below")
    _refuse_unknown(lemons, {"share_ratio", "rate_ratio", "mark", "source", "date"}, "lemons.")
    return Failures(
        tuple(_class(table) for table in tables),
        lemon_share=_number(lemons, "share_ratio", "lemons.", 0.0),
        lemon_times=_number(lemons, "rate_ratio", "lemons.", 1.0),
        source=_text(content, "source", ""),
    )


def _class(table: Mapping[str, Any]) -> FailureClass:
    name = _text(table, "name", "class: ")
    where = f"{name}: "
    _refuse_unknown(table, _KEYS, where)
    if (mark := _text(table, "mark", where)) not in _MARKS:
        cure = f"choose one of {', '.join(_MARKS)}"
        raise UserError("there is no such mark", cure=cure, field=f"mark of {name}", value=mark)
    survives = table.get("memory_survives", True)
    if not isinstance(survives, bool):
        cure = "write true or false"
        raise UserError("is neither", cure=cure, field=f"{where}memory_survives", value=survives)
    return FailureClass(
        name,
        _number(table, "failures_per_1000_host_days", where) / 1000,
        table.get("effect", ""),
        _repair(table, where),
        _number(table, "detection_s", where) if "detection_s" in table else None,
        _number(table, "slowdown_ratio", where, 1.1),
        survives,
    )


_REPAIRS = ({"repair_values_s"}, {"repair_median_s", "repair_p90_s"}, {"repair_mean_s"}, {"repair_fixed_s"})


def _repair(table: Mapping[str, Any], where: str) -> Duration:
    given = {key for key in table if key.startswith("repair_")}
    if not given:
        return Duration.fixed(0.0)
    if given not in _REPAIRS:
        cure = "write repair_median_s with repair_p90_s, or one of repair_fixed_s, repair_mean_s, repair_values_s"
        raise UserError("are no one way to repair", cure=cure, field=f"{where}{', '.join(sorted(given))}")
    if "repair_values_s" in given:
        values = table["repair_values_s"]
        if not isinstance(values, list):
            cure = "write it as [.., ..]"
            raise UserError("is no list", cure=cure, field=f"{where}repair_values_s", value=values)
        return Duration.observed(tuple(_plain(value, f"{where}repair_values_s") for value in values))
    if "repair_median_s" in given:
        return Duration.lognormal(*(_number(table, f"repair_{which}_s", where) for which in ("median", "p90")))
    if "repair_mean_s" in given:
        return Duration.exponential(_number(table, "repair_mean_s", where))
    return Duration.fixed(_number(table, "repair_fixed_s", where))


def _number(table: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    if key not in table and default is not None:
        return default
    if key not in table:
        raise _says_too_little(f"{where}{key}", f"add it, as {FOLDER / 'llama3.toml'} has it")
    return _plain(table[key], f"{where}{key}")


def _plain(value: object, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError("is no number", cure="write it as one", field=field, value=value)
    return float(value)


def _text(table: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(table.get(key), str):
        raise _says_too_little(f"{where}{key}", f"add it in quotes, as {FOLDER / 'llama3.toml'} has it")
    return str(table[key])


def _says_too_little(field: str, cure: str) -> UserError:
    return UserError("the file says too little", cure=cure, field=field)


def _refuse_unknown(table: Mapping[str, Any], known_keys: set[str], prefix: str) -> None:
    for key in table:
        if key not in known_keys:
            cure = f"known are {', '.join(sorted(known_keys))}"
            raise UserError("there is no such key", cure=cure, field=f"{prefix}{key}")
