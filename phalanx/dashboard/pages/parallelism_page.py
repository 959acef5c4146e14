"""Parallelism: a rank's place, groups and last event, what flows where, and the pipeline as it ran beside its plan."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from fastapi import APIRouter, Request
from fastapi.responses import Response

from phalanx.core.errors import UserError
from phalanx.core.layout import AXES, Layout
from phalanx.dashboard.data_source import Run
from phalanx.dashboard.kept_prediction import FILE, expected_parts, measured_parts, read_prediction
from phalanx.dashboard.page_frame import Page, PageFrame, stamp
from phalanx.dashboard.run_telemetry import RunTelemetry, open_telemetry, ranks_text
from phalanx.figures.communication import communication_matrix
from phalanx.figures.lattice import rank_flows, rank_lattice
from phalanx.figures.measured_pipeline import measured_timeline, replayed
from phalanx.figures.norms import layer_norms
from phalanx.figures.pipeline import pipeline_beside_plan
from phalanx.figures.step_parts import expected_beside_measured
from phalanx.figures.style import Figure, empty
from phalanx.parallel.pipeline.schedules import make_table
from phalanx.telemetry.layer_norms import QUANTITIES, read_norms
from phalanx.telemetry.run_list import read_config

PAGE = Page("parallelism", "Parallelism", "/parallelism")

_MOST_WHOLE = 512
"""Of more ranks, the matrix shows those of the chosen one's groups."""
_NORMS = "telemetry/norms.jsonl"


def build_router(frame: PageFrame) -> APIRouter:
    """The page and its figures."""
    router = APIRouter()
    _add_page(router, frame)
    _add_figures(router, frame)
    return router


def _add_page(router: APIRouter, frame: PageFrame) -> None:
    @router.get(PAGE.path)
    def page(run: str = "", rank: int | None = None, steps: str = "") -> Response:
        found = frame.source.run(run)
        values: dict[str, Any] = {"problem": "", "layout": None, "flows": [], "here": None, "place": []}
        values |= {"rank": rank or 0, "steps": steps, "quantities": [], "shown_steps": "", "has_pipeline": False}
        values |= {"world": 0}
        try:
            telemetry = open_telemetry(frame, found)
            values |= _shown(telemetry, found, rank, steps)
        except UserError as error:
            values["problem"] = str(error)
        return frame.page(PAGE, "parallelism.html", found, freshness=frame.source.freshness(found), **values)


def _add_figures(router: APIRouter, frame: PageFrame) -> None:
    @router.get("/parallelism/lattice")
    def lattice(request: Request, run: str = "", rank: int = 0) -> Response:
        telemetry = open_telemetry(frame, frame.source.run(run))

        def make() -> Figure:
            layout = telemetry.layout()
            if layout is None:
                return empty(f"Place of rank {rank}", "neither a config nor recorded groups say how ranks are spread")
            return rank_lattice(layout, _inside(layout, rank), last_events=_last_events(telemetry, layout))

        return frame.figure(request, (*telemetry.stamp(), telemetry.run.is_live and int(frame.unix_s())), make)

    @router.get("/parallelism/bytes")
    def matrix(request: Request, run: str = "", rank: int = 0, steps: str = "") -> Response:
        telemetry = open_telemetry(frame, frame.source.run(run))
        return frame.figure(request, telemetry.stamp(), lambda: _matrix(telemetry, rank, steps))

    @router.get("/parallelism/pipeline")
    def pipeline(request: Request, run: str = "", rank: int = 0, steps: str = "") -> Response:
        telemetry = open_telemetry(frame, frame.source.run(run))
        return frame.figure(request, telemetry.stamp(), lambda: _pipeline(telemetry, rank, steps))

    @router.get("/parallelism/parts")
    def parts(request: Request, run: str = "", steps: str = "") -> Response:
        telemetry = open_telemetry(frame, frame.source.run(run))

        def make() -> Figure:
            expected = expected_parts(read_prediction(telemetry.folder))
            first, last = telemetry.steps_of(steps)
            measured = measured_parts(telemetry.breakdown(first, last), as_predicted=bool(expected))
            return expected_beside_measured(expected, measured)

        return frame.figure(request, (*telemetry.stamp(), stamp(telemetry.folder / FILE)), make)

    @router.get("/parallelism/norms")
    def norms(request: Request, run: str = "", quantity: str = "gradient") -> Response:
        folder = open_telemetry(frame, frame.source.run(run)).folder
        return frame.figure(request, stamp(folder / _NORMS), lambda: layer_norms(read_norms(folder), quantity))


def _shown(telemetry: RunTelemetry, run: Run, rank: int | None, steps: str) -> dict[str, Any]:
    state, layout = telemetry.state(), telemetry.layout()
    step = _one_step(telemetry, steps)
    if rank is None:
        slow = telemetry.window().slow.slow
        rank = state.wrong[0].rank if state.wrong else slow[0]["rank"] if slow else state.ranks[0].rank
    values: dict[str, Any] = {
        "rank": rank,
        "here": next((one for one in state.ranks if one.rank == rank), None),
        "shown_steps": str(step),
        "layout": layout,
        "has_pipeline": layout is not None and layout.pipeline > 1,
        "world": layout.world_size if layout is not None else len(state.ranks),
        "quantities": _written(telemetry),
    }
    if layout is None:
        return values
    here = layout.coordinates(_inside(layout, rank))
    values["place"] = [(axis, at, size) for axis, at, size in zip(AXES, here, layout.sizes, strict=True) if size > 1]
    values["flows"] = [
        {
            "axis": flow.axis,
            "count": len(flow.ranks),
            "ranks": ranks_text(flow.ranks) if len(flow.ranks) <= 64 else f"{flow.ranks[0]} … {flow.ranks[-1]}",
            "what": flow.what,
            "receives_from": flow.receives_from,
            "sends_to": flow.sends_to,
        }
        for flow in rank_flows(layout, rank, chunks=_schedule(run)[1])
    ]
    return values


def _inside(layout: Layout, rank: int) -> int:
    if not 0 <= rank < layout.world_size:
        cure = f"give one from 0 to {layout.world_size - 1}"
        raise UserError("there is no such rank", cure=cure, field="rank", value=rank)
    return rank


def _one_step(telemetry: RunTelemetry, steps: str) -> int:
    """The newest that is finished, or the first of those that are asked for."""
    if steps:
        return telemetry.steps_of(steps)[0]
    done = telemetry.window().step_times["step"].to_pylist()
    return done[-1] if done else telemetry.newest()


def _last_events(telemetry: RunTelemetry, layout: Layout) -> dict[int, str]:
    """What each rank did last; empty where that is known of few: the figure crosses out those without."""
    state = telemetry.state()
    if len(state.ranks) < 0.9 * layout.world_size:
        return {}
    newest_ns = max(one.end_ns for one in state.ranks)
    return {
        one.rank: f"{one.last.strip()}, step {one.step}, {(newest_ns - one.end_ns) / 1e9:.2f} s before the newest"
        for one in state.ranks
        if one.last and one.standing not in ("dead", "stopped first", "behind")
    }


def _matrix(telemetry: RunTelemetry, rank: int, steps: str) -> Figure:
    step, layout = _one_step(telemetry, steps), telemetry.layout()
    ranks, groups = None, telemetry.groups()
    if layout is not None and layout.world_size > _MOST_WHOLE:
        # Numbers of ranks become places among those that are shown: a matrix of all would be empty but for a few rows.
        chosen = {rank, *(other for flow in rank_flows(layout, _inside(layout, rank)) for other in flow.ranks)}
        ranks = sorted(chosen)[:_MOST_WHOLE]
    spans = telemetry.trace.timeline(step, step, ranks=ranks, hosts=telemetry.hosts_of(ranks) if ranks else None)
    if not spans.num_rows:
        return empty("Bytes between ranks", f"single spans of step {step} are not kept any more")
    return communication_matrix(spans.filter(pc.equal(spans["kind"].cast(pa.string()), "collective")), groups)


def _schedule(run: Run) -> tuple[str, int]:
    """Of the config: its name and the model chunks of each pipeline rank; 1F1B with one where it does not say."""
    try:
        parallel = read_config(run.folder).get("parallel", {}) if run.folder is not None else {}
    except UserError:
        return "1f1b", 1
    schedule = str(parallel.get("schedule", "1f1b"))
    return schedule, int(parallel.get("chunks") or (1 if schedule == "1f1b" else 2))


def _pipeline(telemetry: RunTelemetry, rank: int, steps: str) -> Figure:
    layout, step = telemetry.layout(), _one_step(telemetry, steps)
    if layout is None or layout.pipeline == 1:
        return empty("Pipeline", "this run has no pipeline")
    members = layout.members(_inside(layout, rank), ["pipeline"])
    spans = telemetry.trace.timeline(step, step, ranks=members, hosts=telemetry.hosts_of(members) or None)
    passes = spans.filter(
        pc.and_(
            pc.is_in(spans["kind"].cast(pa.string()), pa.array(["forward", "backward"])),
            pc.greater_equal(spans["micro_batch"], 0),
        )
    )
    if not passes.num_rows:
        return empty("Pipeline", f"no passes with a micro-batch are kept of step {step}")
    schedule, chunks = _schedule(telemetry.run)
    micro_batches = 1 + int(pc.max(passes["micro_batch"]).as_py())
    try:
        table = make_table(schedule, layout.pipeline, chunks, micro_batches)  # type: ignore[arg-type]
        measured = measured_timeline(spans, table, members)
        return pipeline_beside_plan(measured, replayed(measured), plan_name="as planned, with even passes")
    except (UserError, ValueError, IndexError) as error:
        return empty("Pipeline", f"its passes are not those of {schedule}: {error}")


def _written(telemetry: RunTelemetry) -> list[str]:
    key = ("norms", *stamp(telemetry.folder / _NORMS))
    return telemetry.remember(key, lambda: _quantities(telemetry))


def _quantities(telemetry: RunTelemetry) -> list[str]:
    found = set(read_norms(telemetry.folder)["quantity"].to_pylist())
    return [name for name in QUANTITIES if name in found]
