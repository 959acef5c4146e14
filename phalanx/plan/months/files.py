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

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.plan.months.values import Duration, FailureClass, Failures
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
    path = FOLDER / f"{name}.toml" if name in known() else Path(name)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError:
        cure = f"choose one of {', '.join(known())}, or name a TOML file"
        raise UserError("there are no such failures", cure=cure, field="failures", value=name) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"it is no TOML ({error})", cure="mend the file", field="failures", value=name) from None
    try:
        return _failures(content)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        cure = f"write it as {FOLDER / 'llama3.toml'} is"
        raise UserError(f"it says too little ({error})", cure=cure, field="failures", value=name) from None


def _failures(content: Mapping[str, Any]) -> Failures:
    _refuse_unknown(content, {"source", "class", "lemons"}, "")
    classes = tuple(_class(table) for table in content["class"])
    lemons = content.get("lemons", {})
    _refuse_unknown(lemons, {"share_ratio", "rate_ratio", "mark", "source", "date"}, "lemons.")
    return Failures(
        classes,
        lemon_share=float(lemons.get("share_ratio", 0.0)),
        lemon_times=float(lemons.get("rate_ratio", 1.0)),
        source=str(content["source"]),
    )


def _class(table: Mapping[str, Any]) -> FailureClass:
    name = str(table["name"])
    _refuse_unknown(table, _KEYS, f"{name}: ")
    if table["mark"] not in _MARKS:
        raise UserError("there is no such mark", cure=f"choose one of {', '.join(_MARKS)}", field=f"mark of {name}")
    detection_s = table.get("detection_s")
    return FailureClass(
        name,
        float(table["failures_per_1000_host_days"]) / 1000,
        table["effect"],
        _repair(table),
        None if detection_s is None else float(detection_s),
        float(table.get("slowdown_ratio", 1.1)),
        bool(table.get("memory_survives", True)),
    )


def _repair(table: Mapping[str, Any]) -> Duration:
    if "repair_values_s" in table:
        return Duration.observed(tuple(float(value) for value in table["repair_values_s"]))
    if "repair_median_s" in table:
        return Duration.lognormal(float(table["repair_median_s"]), float(table["repair_p90_s"]))
    if "repair_mean_s" in table:
        return Duration.exponential(float(table["repair_mean_s"]))
    return Duration.fixed(float(table.get("repair_fixed_s", 0.0)))


def _refuse_unknown(table: Mapping[str, Any], known_keys: set[str], prefix: str) -> None:
    for key in table:
        if key not in known_keys:
            cure = f"known are {', '.join(sorted(known_keys))}"
            raise UserError("there is no such key", cure=cure, field=f"{prefix}{key}")
