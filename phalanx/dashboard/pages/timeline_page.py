"""Timeline: chosen ranks, groups and steps on one axis of time, with arrows from sends to receives, all in the URL."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response
from starlette.background import BackgroundTask

from phalanx.core.errors import UserError
from phalanx.dashboard.page_frame import Page, PageFrame
from phalanx.dashboard.run_telemetry import RunTelemetry, open_telemetry, ranks_of, ranks_text
from phalanx.figures.merged_timeline import merged_timeline
from phalanx.telemetry.perfetto import export_timeline
from phalanx.telemetry.span_store import parts

PAGE = Page("timeline", "Timeline", "/timeline")

_MOST_RANKS = 64
_FIRST_RANKS = 8
_MOST_ROWS = 100
_MOST_STEPS = 50


def build_router(frame: PageFrame) -> APIRouter:
    """The page, its figure, and the same as a file for Perfetto."""
    router = APIRouter()
    remembered = frame.remembered

    def telemetry_of(run: str) -> RunTelemetry:
        return open_telemetry(frame, frame.source.run(run))

    def spans_of(telemetry: RunTelemetry, ranks: str, steps: str, groups: str) -> pa.Table:
        chosen, (first, last) = _ranks(telemetry, ranks), _steps(telemetry, steps)
        of_groups = tuple(filter(None, groups.split(",")))
        key = ("spans", telemetry.stamp(), tuple(chosen), first, last, of_groups)
        return remembered.get(key, lambda: _spans(telemetry, chosen, first, last, of_groups))

    @router.get(PAGE.path)
    def page(
        request: Request, run: str = "", ranks: str = "", steps: str = "", groups: str = "", messages: bool = True
    ) -> Response:
        found = frame.source.run(run)
        values: dict[str, Any] = {"problem": "", "rows": [], "known_groups": [], "kept": "", "span_count": 0}
        values |= {"ranks": ranks, "steps": steps, "groups": groups, "messages": messages, "shown_ranks": ranks}
        values |= {"earlier": "", "later": "", "height": 400}
        values |= {"zoom": {name: request.query_params.get(name) for name in ("from", "to")}}
        try:
            telemetry = open_telemetry(frame, found)
            chosen, (first, last) = _ranks(telemetry, ranks), _steps(telemetry, steps)
            spans = spans_of(telemetry, ranks, steps, groups)
            values |= {
                "shown_ranks": ranks_text(chosen),
                "shown_steps": f"{first}" if first == last else f"{first}:{last}",
                "earlier": _moved(first, last, -1),
                "later": _moved(first, last, +1) if last < telemetry.newest() else "",
                "known_groups": telemetry.group_names(),
                "kept": _kept(telemetry),
                "rows": _longest(spans),
                "span_count": spans.num_rows,
                "height": min(max(150 + 46 * len(chosen), 240), 900),
            }
            if not spans.num_rows:
                values["problem"] = "no spans of these ranks are kept of these steps"
        except UserError as error:
            values["problem"] = str(error)
        return frame.page(PAGE, "timeline.html", found, freshness=frame.source.freshness(found), **values)

    @router.get("/timeline/figure")
    def figure(
        request: Request, run: str = "", ranks: str = "", steps: str = "", groups: str = "", messages: bool = True
    ) -> Response:
        telemetry = telemetry_of(run)

        def make() -> dict[str, Any]:
            made = merged_timeline(spans_of(telemetry, ranks, steps, groups), with_messages=messages)
            zoom = request.query_params
            try:
                stretch = [float(zoom["from"]), float(zoom["to"])]
            except (KeyError, ValueError):
                return made
            made["layout"]["xaxis"] |= {"range": stretch}
            return made

        return frame.figure(request, telemetry.stamp(), make)

    @router.get("/timeline/perfetto")
    def perfetto(run: str = "", ranks: str = "", steps: str = "", groups: str = "") -> Response:
        """The same as Chrome trace JSON; the file goes once it is sent."""
        telemetry = telemetry_of(run)
        chosen, (first, last) = _ranks(telemetry, ranks), _steps(telemetry, steps)
        if last - first >= _MOST_STEPS:
            cure = f"choose up to {_MOST_STEPS} here, or: phalanx trace export {telemetry.folder} FILE"
            raise UserError("are too many steps for a browser", cure=cure, field="steps", value=steps)
        folder = tempfile.TemporaryDirectory(prefix="phalanx-timeline-")
        path = Path(folder.name) / "timeline.json.gz"
        of_groups = list(filter(None, groups.split(","))) or None
        export_timeline(telemetry.trace, path, first, last, ranks=chosen, groups=of_groups)
        name = f"{telemetry.run.name.replace('/', '-')}-steps-{first}-{last}.json.gz"
        return FileResponse(
            path, media_type="application/gzip", filename=name, background=BackgroundTask(folder.cleanup)
        )

    return router


def _ranks(telemetry: RunTelemetry, text: str) -> list[int]:
    """Those that are named, or the first eight of the pipeline group of the slowest rank.

    Raises:
        UserError: they are too many to be drawn.
    """
    if text:
        chosen = ranks_of(text)
        if len(chosen) > _MOST_RANKS:
            cure = f"choose up to {_MOST_RANKS}; phalanx trace export takes any number"
            raise UserError(f"{len(chosen):,} ranks cannot be told apart", cure=cure, field="ranks", value=text)
        return chosen
    known = [one.rank for one in telemetry.state().ranks]
    slow = telemetry.window().slow.slow
    wrong = telemetry.state().wrong
    centre = wrong[0].rank if wrong else slow[0]["rank"] if slow else known[0] if known else 0
    layout = telemetry.layout()
    if layout is not None and layout.pipeline > 1 and centre < layout.world_size:
        members = [rank for rank in layout.members(centre, ["pipeline"]) if rank in set(known)]
        if len(members) > 1:
            return members[:_FIRST_RANKS]
    near = [rank for rank in known if rank // _FIRST_RANKS == centre // _FIRST_RANKS]
    return near or known[:_FIRST_RANKS]


def _steps(telemetry: RunTelemetry, text: str) -> tuple[int, int]:
    """Those that are named, or the newest that all ranks finished and whose spans are kept."""
    if text:
        first, last = telemetry.steps_of(text)
        if last - first >= 10 * _MOST_STEPS:
            cure = f"choose up to {10 * _MOST_STEPS}"
            raise UserError("are too many steps to be drawn", cure=cure, field="steps", value=text)
        return first, last
    if telemetry.state().wrong:
        return telemetry.newest(), telemetry.newest()
    done = telemetry.window().step_times["step"].to_pylist()
    newest = done[-1] if done else telemetry.newest()
    return newest, newest


def _spans(telemetry: RunTelemetry, ranks: list[int], first: int, last: int, groups: tuple[str, ...]) -> pa.Table:
    hosts = telemetry.hosts_of(ranks) or None
    return telemetry.trace.timeline(first, last, ranks=ranks, groups=groups or None, hosts=hosts)


def _longest(spans: pa.Table) -> list[dict[str, Any]]:
    """The longest spans apart from whole steps: what a figure says, in words."""
    if not spans.num_rows:
        return []
    own = spans.filter(pc.not_equal(spans["kind"].cast(pa.string()), "step"))
    length = pc.subtract(own["end_ns"], own["start_ns"])
    own = own.append_column("length_ns", length).append_column(
        "after_ns", pc.subtract(own["start_ns"], pc.min(spans["start_ns"]))
    )
    return own.sort_by([("length_ns", "descending")]).slice(0, _MOST_ROWS).to_pylist()  # type: ignore[no-any-return]


def _moved(first: int, last: int, direction: int) -> str:
    by = direction * (last - first + 1)
    return f"{first + by}:{last + by}" if first + by >= 0 else ""


def _kept(telemetry: RunTelemetry) -> str:
    """Of which steps single spans are there still."""
    kept = parts(telemetry.trace.folder, "spans")
    if not kept:
        return ""
    return f"{min(part.first_step for part in kept)} to {max(part.last_step for part in kept)}"
