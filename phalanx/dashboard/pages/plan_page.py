"""Plan: what was predicted of a step beside what it took: time, MFU, memory, and where the difference comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from fastapi import APIRouter, Request
from fastapi.responses import Response

from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.dashboard.data_source import Run
from phalanx.dashboard.kept_prediction import FILE, expected_parts, measured_parts, number, read_prediction
from phalanx.dashboard.page_frame import Page, PageFrame, stamp
from phalanx.dashboard.run_telemetry import RunTelemetry, found_telemetry
from phalanx.figures.plan import memory_bars, step_breakdown
from phalanx.figures.step_parts import expected_beside_measured
from phalanx.figures.style import Figure, empty
from phalanx.telemetry.evidence import gather
from phalanx.telemetry.verdict import Verdict, judge
from phalanx.train.predicted_cost import WORDS

PAGE = Page("plan", "Plan", "/plan")

_LARGE = 0.15
_MOST_HOSTS_JUDGED = 256
_METRICS_STEPS = 50


@dataclass(frozen=True)
class Compared:
    """One figure, predicted and measured; None: not known. `change`: how much more was measured, a ratio."""

    what: str
    predicted: str
    measured: str
    change: float | None
    note: str = ""
    is_good_high: bool = False

    @property
    def look(self) -> str:
        """Whether a person should look at it: ``bad``, ``good`` or nothing."""
        if self.change is None or abs(self.change) <= _LARGE:
            return ""
        return "good" if (self.change > 0) == self.is_good_high else "bad"


def build_router(frame: PageFrame) -> APIRouter:
    """The page, its figures and the verdict."""
    router = APIRouter()
    _add_page(router, frame)
    _add_figures(router, frame)
    return router


def _add_page(router: APIRouter, frame: PageFrame) -> None:
    @router.get(PAGE.path)
    def page(run: str = "", steps: str = "") -> Response:
        found = frame.source.run(run)
        prediction = read_prediction(found.folder) if found.folder is not None else None
        telemetry, _ = found_telemetry(frame, found)
        details = (prediction or {}).get("prediction") or {}
        return frame.page(
            PAGE,
            "plan.html",
            found,
            freshness=frame.source.freshness(found),
            prediction=prediction,
            rows=_rows(prediction, telemetry, steps) if prediction is not None else [],
            parts=_parts(prediction, telemetry, steps) if prediction is not None else [],
            most_off=WORDS.get(str((prediction or {}).get("most_off")), ""),
            details=details,
            notes=[str(note) for note in details.get("notes") or []],
            has_spans=telemetry is not None,
            is_judged=telemetry is not None and len(telemetry.trace.hosts) <= _MOST_HOSTS_JUDGED,
            steps=steps,
        )

    @router.get("/plan/verdict")
    def verdict(request: Request, run: str = "") -> Response:
        """What limits the run, by its evidence; asked for after the page, since it reads more."""
        found = frame.source.run(run)
        telemetry, _ = found_telemetry(frame, found)
        judged: Verdict | None = None
        if telemetry is not None and found.folder is not None:
            folder = found.folder
            judged = telemetry.remember(("verdict", telemetry.stamp()), lambda: judge(gather(folder)))
        return frame.part(request, "plan_verdict.html", verdict=judged, run=found)


def _add_figures(router: APIRouter, frame: PageFrame) -> None:
    @router.get("/plan/step")
    def step(request: Request, run: str = "", steps: str = "") -> Response:
        found = frame.source.run(run)
        folder, (telemetry, _) = _folder_of(found), found_telemetry(frame, found)

        def make() -> Figure:
            expected = expected_parts(read_prediction(folder))
            if telemetry is None:
                return expected_beside_measured(expected, measured_of_training(read_prediction(folder)))
            first, last = telemetry.steps_of(steps)
            measured = measured_parts(telemetry.breakdown(first, last), as_predicted=bool(expected))
            return expected_beside_measured(expected, measured)

        return frame.figure(request, (stamp(folder / FILE), telemetry.stamp() if telemetry is not None else ()), make)

    @router.get("/plan/parts")
    def parts(request: Request, run: str = "") -> Response:
        folder = _folder_of(frame.source.run(run))

        def make() -> Figure:
            details = (read_prediction(folder) or {}).get("prediction") or {}
            rows = [
                {"path": one["path"], "seconds": float(one["seconds"]), "mark": one["mark"], "hidden": hidden}
                for key, hidden in (("parts", False), ("hidden", True))
                for one in details.get(key) or []
            ]
            return step_breakdown(rows) if rows else empty("Where a step goes", "the prediction has no parts")

        return frame.figure(request, stamp(folder / FILE), make)

    @router.get("/plan/memory")
    def memory(request: Request, run: str = "") -> Response:
        folder = _folder_of(frame.source.run(run))

        def make() -> Figure:
            details = (read_prediction(folder) or {}).get("prediction") or {}
            rows = [
                {"pipeline_rank": one["pipeline_rank"], "kind": name.removesuffix("_bytes"), "bytes": float(size)}
                for one in details.get("memory") or []
                for name, size in one.items()
                if name.endswith("_bytes") and name != "total_bytes"
            ]
            if not rows:
                return empty("Memory", "the prediction does not say")
            return memory_bars(rows, float(details["device_memory_bytes"]))

        return frame.figure(request, stamp(folder / FILE), make)


def _folder_of(run: Run) -> Path:
    if run.folder is None:
        cure = "give its run folder to phalanx dashboard, on a host that can read it"
        raise UserError("the prediction lies in the run folder, and only the driver's URL is known", cure=cure)
    return run.folder


def measured_of_training(prediction: Mapping[str, Any] | None) -> pa.Table:
    """What training timed itself of its first steps, as `measured_parts`; an empty table: nothing."""
    measured = (prediction or {}).get("measured")
    if not measured:
        return pa.table({})
    whole = {"expected": {"parts": measured["parts"], "step_s": measured["step_s"]}}
    return pa.Table.from_pylist([{f"{name}_s": seconds for name, seconds in expected_parts(whole).items()}])


def _rows(prediction: Mapping[str, Any], telemetry: RunTelemetry | None, steps: str) -> list[Compared]:
    expected, measured = prediction["expected"], prediction.get("measured") or {}
    details = prediction.get("prediction") or {}
    rows = []
    step_s = _measured_step(telemetry, steps) or number(measured.get("step_s"))
    interval = expected.get("interval_s")
    note = f"8 of 10 cases: {_time(interval[0])} to {_time(interval[1])}" if interval else ""
    rows.append(_compared("step", number(expected["step_s"]), step_s, _time, note))
    figures = telemetry.figures(_METRICS_STEPS) if telemetry is not None else {}
    for what, wanted, name, show in (
        ("tokens/s", details.get("tokens_per_s"), "tokens_per_s", units.count),
        ("MFU", details.get("mfu_ratio"), "mfu", _percent),
    ):
        rows.append(_compared(what, number(wanted), figures.get(name), show, is_good_high=True))
    has_libraries = bool(measured.get("with_libraries"))
    memory = _compared(
        "memory of the first rank",
        number(expected.get("memory_bytes")),
        number(measured.get("memory_bytes")),
        units.size,
        "what libraries took is measured too, and not predicted" if has_libraries else "",
    )
    rows.append(memory)
    return [row for row in rows if row.predicted or row.measured]


def _compared(
    what: str,
    predicted: float | None,
    measured: float | None,
    show: Any,
    note: str = "",
    *,
    is_good_high: bool = False,
) -> Compared:
    change = measured / predicted - 1 if predicted and measured is not None else None
    return Compared(
        what,
        show(predicted) if predicted is not None else "",
        show(measured) if measured is not None else "",
        change,
        note,
        is_good_high,
    )


def _measured_step(telemetry: RunTelemetry | None, steps: str) -> float | None:
    """The mean of the median rank's steps: what `step_breakdown` adds up to, but for how long ranks differ."""
    if telemetry is None:
        return None
    times = telemetry.window(steps).step_times["median_s"].to_pylist()
    return sum(times) / len(times) if times else None


def _parts(prediction: Mapping[str, Any], telemetry: RunTelemetry | None, steps: str) -> list[dict[str, Any]]:
    """Each part, predicted and measured, and what share of the step's difference it is; the largest first."""
    wanted = expected_parts(prediction)
    if telemetry is not None:
        first, last = telemetry.steps_of(steps)
        table = measured_parts(telemetry.breakdown(first, last), as_predicted=True)
    else:
        table = measured_of_training(prediction)
    row = table.to_pylist()[0] if table.num_rows else {}
    found = {name.removesuffix("_s"): value for name, value in row.items() if value is not None}
    if "step" not in found:
        return []
    whole_s = found["step"] - wanted["step"]
    names = {"passes": "forward and backward passes", "wait": "waiting for other ranks", "data": "waiting for data"}
    names |= {"other": "between spans"}
    parts = [
        {
            "what": names.get(name, name),
            "predicted_s": wanted.get(name),
            "measured_s": found.get(name),
            "difference_s": found.get(name, 0.0) - wanted.get(name, 0.0),
            "share": (found.get(name, 0.0) - wanted.get(name, 0.0)) / whole_s if whole_s else None,
        }
        for name in dict.fromkeys([*wanted, *found])
        if name != "step" and (found.get(name) or wanted.get(name))
    ]
    return sorted(parts, key=lambda part: -abs(part["difference_s"]))


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"
