"""Logs: lines of all ranks, searched by text, level, rank and time; live; with a link to every line."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from phalanx.core.errors import UserError
from phalanx.dashboard.data_source import Run
from phalanx.dashboard.lines_of_run import (
    LEVELS,
    MOST_RANKS,
    SOURCES,
    Found,
    LogSearch,
    Source,
    find_lines,
    moment_of,
    ranks_of,
    sources_of,
)
from phalanx.dashboard.page_frame import LIVE_S, Page, PageFrame

PAGE = Page("logs", "Logs", "/logs")

_LINES = 300
_MOST_CHARACTERS = 4000
"""Of a line that is shown."""


class LogsView(BaseModel):
    """Which lines are shown; `at` and `before` in milliseconds since 1970."""

    run: str = ""
    source: Source | Literal[""] = ""
    rank: str = Field("", pattern=r"^\d{0,9}$")
    level: str = ""
    q: str = Field("", max_length=500)
    pattern: bool = False
    since: str = Field("", max_length=40)
    before: int = Field(0, ge=0, le=2**53)
    at: int = Field(0, ge=0, le=2**53)

    def query(self, **changes: Any) -> dict[str, Any]:
        """Of a link to the same with some changes."""
        usual = type(self)().model_dump()
        kept = {name: value for name, value in (self.model_dump() | changes).items() if value != usual.get(name)}
        return {name: 1 if value is True else value for name, value in kept.items()}

    def search(self, sources: list[Source], now_unix_s: float) -> LogSearch:
        """What is looked for; a link to a line shows what stands around it, whatever was searched."""
        source = self.source if self.source in sources else sources[0]
        if self.at:
            return LogSearch(source, at_unix_s=self.at / 1000)
        return LogSearch(
            source,
            int(self.rank) if self.rank else None,
            self.level,
            self.q,
            self.pattern,
            moment_of(self.since, now_unix_s),
            self.before / 1000,
        )


View = Annotated[LogsView, Query()]


def build_router(frame: PageFrame) -> APIRouter:
    """The page and its lines."""
    router = APIRouter()

    @router.get(PAGE.path)
    def page(view: View) -> Response:
        run = frame.source.run(view.run)
        view.run = run.id
        values = _lines(frame, run, view)
        is_tail = not view.at and not view.before
        return frame.page(
            PAGE,
            "logs.html",
            run,
            freshness=frame.source.freshness(run),
            levels=LEVELS,
            source_names=SOURCES,
            every_s=LIVE_S if is_tail else None,
            **values,
        )

    @router.get("/logs/lines")
    def lines(request: Request, view: View) -> Response:
        run = frame.source.run(view.run)
        view.run = run.id
        return frame.part(request, "logs_lines.html", run=run, **_lines(frame, run, view))

    return router


def _lines(frame: PageFrame, run: Run, view: LogsView) -> dict[str, Any]:
    sources = sources_of(run)
    found, problem, ranks = Found(()), "", []
    source = ""
    if sources:
        try:
            search = view.search(sources, frame.unix_s())
            source, ranks = search.source, ranks_of(run, search.source)
            found = find_lines(frame.source, run, search, _LINES)
        except (UserError, ConnectionError) as error:
            problem = str(error)
    return {
        "view": view,
        "sources": sources,
        "source_now": source,
        "found": found,
        "problem": problem,
        "ranks": ranks,
        "most_ranks": MOST_RANKS,
        "most_characters": _MOST_CHARACTERS,
    }
