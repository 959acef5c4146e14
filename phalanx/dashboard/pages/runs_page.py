"""Runs: all of a folder with their last figures, curves of those that are chosen, and how their settings differ.

What is shown stands in the URL: how the list is sorted and cut, which runs are chosen, and how their curves are drawn.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal, get_args

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response
from pydantic import BaseModel, Field

from phalanx.core.errors import UserError
from phalanx.dashboard.data_source import Run
from phalanx.dashboard.machines_now import troubles_of
from phalanx.dashboard.page_frame import LIVE_S, Page, PageFrame, read_form, url
from phalanx.dashboard.run_curves import (
    X_NAMES,
    Axes,
    color_of_place,
    columns_in,
    difference,
    metrics_paths,
    overlay,
    title_of,
)
from phalanx.figures.curves import X
from phalanx.telemetry.living_ranks import State
from phalanx.telemetry.run_list import Sort, keep_tags, sort_place

PAGE = Page("runs", "Runs", "/", is_of_run=False)

ALL = "*"
_CHOSEN_AT_FIRST = 10
_MOST_COMPARED = 8
_MOST_WITH_BADGES = 32
_SPANS = (1, 10, 50, 200, 1000)
_COLUMNS: tuple[tuple[Sort, str], ...] = (
    ("name", "run"),
    ("state", "state"),
    ("step", "step"),
    ("tokens", "tokens"),
    ("loss", "loss"),
    ("validation_loss", "held-out"),
    ("tokens_per_s", "tokens/s"),
    ("written", "written"),
)


class RunsView(BaseModel):
    """What of the runs is shown."""

    q: str = Field("", max_length=200)
    tag: str = Field("", max_length=200)
    state: State | Literal[""] = ""
    sort: Sort = "written"
    on: list[str] = Field(default_factory=list, max_length=5000)
    chosen: bool = False
    column: str = Field("loss", max_length=200)
    x: X = "step"
    span: float = Field(1, ge=1, le=1e6)
    log: bool = False

    def query(self, **changes: Any) -> dict[str, Any]:
        """Of a link to the same with some changes."""
        now = self.model_dump() | changes
        usual = type(self)().model_dump()
        kept = {name: value for name, value in now.items() if value != usual[name]}
        return {name: 1 if value is True else value for name, value in kept.items()}

    @property
    def axes(self) -> Axes:
        """How curves are drawn."""
        return Axes(self.column, self.x, self.span, self.log)

    def listed(self, runs: list[Run]) -> list[Run]:
        """Those in the table, in its order."""
        words = self.q.casefold().split()
        kept = [
            run
            for run in runs
            if (not self.tag or self.tag in run.row.tags)
            and (not self.state or run.row.state == self.state or (self.state == "running" and run.is_live))
            and all(word in _searched(run) for word in words)
        ]
        return sorted(kept, key=lambda run: sort_place(run.row, self.sort))

    def chosen_of(self, runs: list[Run], listed: list[Run]) -> list[Run]:
        """Those with curves, in an order that sorting does not change."""
        if ALL in self.on:
            found = listed
        elif self.on or self.chosen:
            wanted = set(self.on)
            found = [run for run in runs if run.id in wanted]
        else:
            found = listed[:_CHOSEN_AT_FIRST]
        return sorted(found, key=lambda run: run.id)


View = Annotated[RunsView, Query()]


def build_router(frame: PageFrame) -> APIRouter:
    """The page and its parts."""
    router = APIRouter()

    @router.get(PAGE.path)
    def page(view: View) -> Response:
        values = _table(frame, view)
        chosen: list[Run] = values["chosen"]
        # Reading of large files begins here; nothing waits for it.
        figures = frame.metrics.read(metrics_paths(chosen), within_s=0, sample=8)
        columns = columns_in(list(figures.values()), chosen)
        rows, problems = difference(chosen) if 2 <= len(chosen) <= _MOST_COMPARED else ([], [])
        return frame.page(
            PAGE,
            "runs.html",
            **values,
            columns={name: title_of(name) for name in dict.fromkeys((*columns, view.column))},
            x_names=X_NAMES,
            spans=sorted({*_SPANS, view.span}),
            tags=sorted({tag for run in values["all_runs"] for tag in run.row.tags}),
            states=get_args(State),
            differing=rows,
            problems=problems,
            most_compared=_MOST_COMPARED,
            live_s=LIVE_S,
        )

    @router.get("/runs/table")
    def table(request: Request, view: View) -> Response:
        return frame.part(request, "runs_table.html", **_table(frame, view))

    @router.get("/runs/figure")
    def figure(request: Request, view: View) -> Response:
        runs = frame.source.runs()
        chosen = view.chosen_of(runs, view.listed(runs))
        frame.metrics.read(metrics_paths(chosen), within_s=0.3, sample=8)
        state = (*((run.id, run.name) for run in chosen), *frame.metrics.progress(metrics_paths(chosen)))
        return frame.figure(request, state, lambda: overlay(frame.metrics, chosen, view.axes, within_s=0))

    @router.post("/runs/tags")
    async def change_tags(request: Request) -> Response:
        """Tags for all runs that are chosen: ``+good -old``, or ``good``."""
        form = await read_form(request)
        words = form.get("tags", "").split()
        add = [word.removeprefix("+") for word in words if not word.startswith("-")]
        remove = [word.removeprefix("-") for word in words if word.startswith("-")]

        def change() -> None:
            for run_id in form.get("runs", "").splitlines():  # browsers send \r\n
                run = frame.source.run(run_id)
                if run.folder is None or frame.source.is_stored:
                    raise UserError("its folder is not here", cure="tag it where the folder is", value=run.name)
                keep_tags(run.folder, add, remove)

        await asyncio.to_thread(change)
        frame.source.forget()
        return RedirectResponse(url("/") + "?" + form.get("back", ""), 303)

    return router


def _table(frame: PageFrame, view: RunsView) -> dict[str, Any]:
    runs = frame.source.runs()
    listed = view.listed(runs)
    chosen = view.chosen_of(runs, listed)
    return {
        "view": view,
        "all_runs": runs,
        "listed": listed,
        "chosen": chosen,
        "colors": {run.id: color_of_place(place) for place, run in enumerate(chosen)},
        "heads": _COLUMNS,
        "badges": {run.id: _badges(frame, run) for run in [run for run in listed if run.is_live][:_MOST_WITH_BADGES]},
    }


def _badges(frame: PageFrame, run: Run) -> list[tuple[str, str, str]]:
    """Colour, two words and the whole story of each thing that is the matter with a run."""
    found = [(one.look, f"{one.sign} {one.words}", one.title) for one in frame.troubles.of(run)]
    hosts = troubles_of(frame, run, with_spans=False)
    if hosts:
        worst = hosts[0]
        words = f"{worst.sign} {len(hosts)} host{'s' * (len(hosts) > 1)} {worst.look}"
        found.append(("bad" if worst.look in ("dead", "cut off", "stopped") else "warn", words, worst.why))
    return found


def _searched(run: Run) -> str:
    row = run.row
    return " ".join((row.name, run.id, row.state, row.why, row.note, *row.tags)).casefold()
