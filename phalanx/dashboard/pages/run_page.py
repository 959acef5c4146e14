"""Run: its figures live, what the model makes of a prompt, the text of any batch, its settings, and why it ended."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response
from pydantic import BaseModel, Field

from phalanx.core.errors import UserError
from phalanx.dashboard.batch_of_run import MOST_SHOWN, BatchText, text_of_step
from phalanx.dashboard.data_source import Run
from phalanx.dashboard.machines_now import troubles_of
from phalanx.dashboard.page_frame import LIVE_S, Page, PageFrame, read_form, stamp, url
from phalanx.dashboard.run_curves import (
    SMALL_PIXELS,
    X_NAMES,
    Axes,
    columns_in,
    held_out_beside,
    metrics_paths,
    seconds_left,
    small_curve,
    title_of,
)
from phalanx.figures.curves import X
from phalanx.run.incidents.incident_pages import incidents_folder
from phalanx.telemetry.run_list import flattened, keep_note, keep_tags, read_config, read_kept
from phalanx.telemetry.run_samples import read_samples, read_why_none

PAGE = Page("run", "Run", "/run")

_SPANS = (1, 10, 50, 200, 1000)
_ENDED_S = 10.0
"""A run that has ended may be gone on with: it is looked at so often."""
_BESIDE_LOSS = ("loss", "validation_loss")
_MOST_HOSTS = 3


class RunView(BaseModel):
    """What of a run is shown."""

    run: str = ""
    x: X = "step"
    span: float = Field(1, ge=1, le=1e6)
    log: bool = False

    def query(self, **changes: Any) -> dict[str, Any]:
        """Of a link to the same with some changes."""
        usual = type(self)().model_dump()
        kept = {name: value for name, value in (self.model_dump() | changes).items() if value != usual.get(name)}
        return {name: 1 if value is True else value for name, value in kept.items()}


View = Annotated[RunView, Query()]


def build_router(frame: PageFrame) -> APIRouter:
    """The page and its parts."""
    router = APIRouter()
    _add_page(router, frame)
    _add_figures(router, frame)
    _add_batch(router, frame)
    _add_notes(router, frame)
    return router


def _add_page(router: APIRouter, frame: PageFrame) -> None:
    @router.get(PAGE.path)
    def page(view: View) -> Response:
        run = frame.source.run(view.run)
        view.run = run.id
        figures = frame.metrics.read(metrics_paths([run]), within_s=0.1, sample=8)
        columns = [name for name in columns_in(list(figures.values()), [run]) if name not in _BESIDE_LOSS]
        return frame.page(
            PAGE,
            "run.html",
            run,
            freshness=frame.source.freshness(run),
            view=view,
            columns={name: title_of(name) for name in columns},
            small_pixels=SMALL_PIXELS,
            x_names=X_NAMES,
            spans=sorted({*_SPANS, view.span}),
            every_s=LIVE_S if run.is_live else _ENDED_S,
            kept=read_kept(run.folder) if run.folder is not None else {},
            **_state(frame, run),
            **_troubles(frame, run),
            **_about(run),
        )

    @router.get("/run/state")
    def state(request: Request, run: str = "") -> Response:
        found = frame.source.run(run)
        return frame.part(request, "run_state.html", run=found, **_state(frame, found))

    @router.get("/run/troubles")
    def troubles(request: Request, run: str = "") -> Response:
        found = frame.source.run(run)
        return frame.part(request, "run_troubles.html", run=found, **_troubles(frame, found))

    @router.get("/run/samples")
    def samples(request: Request, run: str = "", step: int | None = None) -> Response:
        found = frame.source.run(run)
        return frame.part(request, "run_samples.html", run=found, chosen=step, **_samples(found))


def _add_figures(router: APIRouter, frame: PageFrame) -> None:
    @router.get("/run/figure")
    def figure(request: Request, view: View, column: Annotated[str, Query(max_length=200)] = "loss") -> Response:
        run = frame.source.run(view.run)
        axes = Axes(column, view.x, view.span, view.log)
        frame.metrics.read(metrics_paths([run]))
        incidents = incidents_folder(run.folder) if run.folder is not None and run.card is not None else None
        state = (run.name, *frame.metrics.progress(metrics_paths([run])), *stamp(incidents))

        def make() -> dict[str, Any]:
            if column == "loss":
                return held_out_beside(frame.metrics, run, axes)
            return small_curve(frame.metrics, run, axes)

        return frame.figure(request, state, make)


def _add_batch(router: APIRouter, frame: PageFrame) -> None:
    @router.get("/run/batch")
    def batch(run: str = "", step: Annotated[int, Query(ge=1)] = 1, first: Annotated[int, Query(ge=0)] = 0) -> Response:
        """The text that the run read in one step, some samples at a time."""
        found = frame.source.run(run)
        problem, text = _not_done(found, step), None
        try:
            text = _batch(frame, found, step, first)
        except UserError as error:
            problem = " ".join(filter(None, (problem, str(error))))
        return frame.page(
            PAGE,
            "run_batch.html",
            found,
            freshness=frame.source.freshness(found),
            step=step,
            first=first,
            text=text,
            problem=problem,
            most_shown=MOST_SHOWN,
        )


def _add_notes(router: APIRouter, frame: PageFrame) -> None:
    @router.post("/run/note")
    async def change_note(request: Request) -> Response:
        """Name, note and tags of the run, as people want them; what is not given stays."""
        form = await read_form(request)

        def change() -> str:
            run = frame.source.run(form.get("run", ""))
            if run.folder is None or frame.source.is_stored:
                raise UserError("its folder is not here", cure="note it where the folder is", value=run.name)
            if "tags" in form:
                wanted, before = form["tags"].split(), read_kept(run.folder).get("tags", ())
                keep_tags(run.folder, wanted, [tag for tag in before if tag not in wanted])
            keep_note(run.folder, form.get("note"), form.get("name"))
            return run.id

        run_id = await asyncio.to_thread(change)
        frame.source.forget()
        return RedirectResponse(url(PAGE.path, run=run_id), 303)


def _state(frame: PageFrame, run: Run) -> dict[str, Any]:
    figures = frame.metrics.read(metrics_paths([run]), within_s=0, sample=8)
    block = next((one.block for one in figures.values()), None)
    return {"left_s": seconds_left(run, block) if run.is_live and block is not None else None}


def _troubles(frame: PageFrame, run: Run) -> dict[str, Any]:
    """What is the matter with its figures and processes, and with its machines."""
    return {"troubles": frame.troubles.of(run), "hosts": troubles_of(frame, run), "most_hosts": _MOST_HOSTS}


def _about(run: Run) -> dict[str, Any]:
    """Settings, the newest starts and samples."""
    settings: list[tuple[str, str]] = []
    starts: list[dict[str, Any]] = []
    problem = ""
    if run.folder is None:
        problem = "Only the driver of this job is known here; settings and figures are in its run folder."
    else:
        try:
            settings = [
                (key, json.dumps(value, ensure_ascii=False)) for key, value in flattened(read_config(run.folder))
            ]
        except UserError as error:
            problem = error.problem
        starts = _starts(run)
    return {"settings": settings, "starts": starts, "config_problem": problem, "chosen": None} | _samples(run)


def _starts(run: Run) -> list[dict[str, Any]]:
    """What the run was started on, the newest first, as dotted keys."""
    assert run.folder is not None, "asked for only where there is a folder"
    try:
        found = json.loads((run.folder / "environment.json").read_text())
    except (OSError, ValueError, RecursionError):
        return []
    entries = found if isinstance(found, list) else [found]
    return [dict(flattened(entry)) for entry in reversed(entries) if isinstance(entry, dict)]


def _not_done(run: Run, step: int) -> str:
    """That the text of a step was never read; empty: it was, or that is not known."""
    row = run.row
    if row.step is None or step <= row.step:
        return ""
    if row.total_steps is not None and step > row.total_steps:
        words = f"the run has {row.total_steps:,} steps, of which {row.step:,} are done"
        return f"Step {step:,} does not exist: {words}. It would read this."
    yet = "has not been made yet" if run.is_live else "was never made"
    return f"Step {step:,} {yet}: {row.step:,} steps are done. It would read this."


def _samples(run: Run) -> dict[str, Any]:
    """What there is, and why a start that was asked for samples makes none."""
    if run.folder is None:
        return {"samples": [], "no_samples": ""}
    return {"samples": read_samples(run.folder), "no_samples": read_why_none(run.folder)}


def _batch(frame: PageFrame, run: Run, step: int, first: int) -> BatchText:
    figures = frame.metrics.read(metrics_paths([run]), within_s=2)
    block = next((one.block for one in figures.values() if one.is_whole), None)
    return text_of_step(run, block, step, first, frame.remembered)
