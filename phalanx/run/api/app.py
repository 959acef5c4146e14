"""The interface for people and programs: what can be asked, what is answered, and its description. Torch-free.

Handlers run in the driver's event loop. None does more than a few milliseconds of work at once: lists come in pages,
files are read in threads, streams wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Literal

import msgspec
from fastapi import FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from phalanx import __version__
from phalanx.core.errors import UserError
from phalanx.run.api import bodies, streams
from phalanx.run.api.description import answers, describe, markdown, stream, text
from phalanx.run.api.guard import Guard, Sessions
from phalanx.run.api.job import Job, OrderError, unknown_host
from phalanx.run.api.metrics import CONTENT_TYPE, Metrics
from phalanx.run.api.pages import add_login, add_pages
from phalanx.run.incidents.facts import Incident
from phalanx.run.incidents.page import to_markdown
from phalanx.run.incidents.store import listed, load
from phalanx.run.secrets import Token

MOST_STREAMS = 32
NDJSON = "application/x-ndjson"

StateName = Literal["joining", "spare", "active", "unknown", "suspect", "draining", "evicted", "gone"]
HostName = Annotated[str, Path(description="name of a host", max_length=253)]
Number = Annotated[int, Path(ge=1, le=2**31, description="number of an incident")]
Rank = Annotated[int | None, Query(ge=0, le=2**31, description="of one rank; without it, of all together")]
Last = Annotated[int, Query(ge=0, le=10_000, description="so many of the newest lines")]
Since = Annotated[int, Query(ge=0, le=2**53, description="those after this number")]
Seconds = Annotated[float, Query(ge=0, le=86_400, description="the stream ends after so long")]


class Order(BaseModel):
    """Who gives an order."""

    model_config = ConfigDict(extra="forbid")
    who: str = Field("", max_length=64, description="is written into the journal; empty: a person over HTTP")

    @property
    def giver(self) -> str:
        """On one line, without anything that moves a terminal."""
        return "".join(letter for letter in self.who if letter.isprintable()).strip() or "a person over HTTP"


class StopOrder(Order):
    """How the job is stopped."""

    without_grace: bool = Field(False, description="SIGKILL at once, instead of SIGTERM first; as grace_s 0")
    grace_s: float | None = Field(
        None,
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        description="seconds between SIGTERM and SIGKILL; null: as run.policy.grace_s has it",
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> StopOrder:
        if self.without_grace and self.grace_s:
            raise ValueError(f"without_grace and grace_s = {self.grace_s:g} contradict each other")
        return self

    @property
    def seconds(self) -> float | None:
        """None: as the policy has it."""
        return 0.0 if self.without_grace else self.grace_s


def make_app(job: Job, token: Token, unix_s: Callable[[], float] = time.time) -> Guard:
    """The interface of a job, behind its guard."""
    app = FastAPI(title=f"phalanx run {job.state.job.name}", version=__version__, docs_url=None, redoc_url=None)
    sessions = Sessions(token, job.state.job.name, unix_s)
    _add_errors(app)
    _add_reading(app, job)
    _add_logs(app, job)
    _add_orders(app, job)
    add_pages(app, job)
    add_login(app, token, sessions)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    return Guard(app, token, sessions)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(OrderError)
    async def refused(request: Request, error: OrderError) -> Response:
        return _json(bodies.Wrong(error.problem, error.cure), error.status)

    @app.exception_handler(UserError)
    async def not_found(request: Request, error: UserError) -> Response:
        return _json(bodies.Wrong(error.problem, str(error).partition(f"{error.problem}; ")[2]), 404)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        found = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:5]]
        return _json(
            bodies.Wrong("; ".join(found)[:1000], "correct it; GET /openapi.json describes what is taken"), 422
        )

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        wrong = bodies.Wrong(str(error.detail), "GET /openapi.json describes what there is")
        response = _json(wrong, error.status_code)
        response.headers.update(error.headers or {})
        return response


def _add_reading(app: FastAPI, job: Job) -> None:
    metrics = Metrics(job.reading)

    @app.get("/health", summary="The driver answers; needs no token", responses=answers(bodies.Health, open=True))
    async def health() -> Response:
        return _json(bodies.Health())

    @app.get("/api/status", summary="The job now", responses=answers(bodies.Status))
    async def status(
        most: Annotated[int, Query(ge=0, le=1000, description="hosts that are listed, those in trouble first")] = 256,
    ) -> Response:
        return _json(bodies.status_body(job.overview(most)))

    @app.get("/api/hosts", summary="Hosts, in pages", responses=answers(bodies.Hosts, 404))
    async def hosts(
        after: Annotated[str, Query(max_length=253, description="name of the last host of the page before")] = "",
        most: Annotated[int, Query(ge=1, le=500)] = 200,
        state: Annotated[StateName | None, Query(description="only those in this state")] = None,
    ) -> Response:
        page, more = job.page(after, most, state)
        return _json(bodies.Hosts(bodies.host_bodies(page), more))

    @app.get("/api/hosts/{host}", summary="One host", responses=answers(bodies.HostBody, 404))
    async def one_host(host: HostName) -> Response:
        found = job.hosts([host])
        if not found:
            raise unknown_host(host)
        return _json(bodies.host_bodies(found)[0])

    @app.get("/metrics", summary="For Prometheus", responses=text())
    async def read_metrics() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    _add_incidents(app, job)


def _add_incidents(app: FastAPI, job: Job) -> None:
    @app.get("/api/incidents", summary="Incidents, the oldest first", responses=answers(bodies.Incidents))
    async def incidents(
        last: Annotated[int, Query(ge=1, le=1000, description="so many of the newest")] = 100,
    ) -> Response:
        found = (await asyncio.to_thread(listed, job.folder))[-last:]
        names = bodies.IncidentLine.__struct_fields__
        lines = [bodies.IncidentLine(*(getattr(one, name) for name in names)) for one in found]
        return _json(bodies.Incidents(lines))

    @app.get("/api/incidents/{number}", summary="One incident", responses=answers(Incident, 404))
    async def one_incident(number: Number) -> Response:
        return _json(await asyncio.to_thread(load, job.folder, number))

    @app.get("/api/incidents/{number}/page", summary="One incident, as a page", responses=markdown())
    async def page(number: Number) -> Response:
        incident = await asyncio.to_thread(load, job.folder, number)
        return PlainTextResponse(to_markdown(incident), media_type="text/markdown")


def _add_logs(app: FastAPI, job: Job) -> None:
    bound = _Bound(MOST_STREAMS)

    @app.get("/api/logs", summary="Newest lines of ranks", responses=answers(bodies.LogLines, 404))
    async def logs(rank: Rank = None, last: Last = 100) -> Response:
        await asyncio.to_thread(streams.check_rank, job, rank)
        return _json(bodies.LogLines(await streams.newest_lines(job, rank, last)))

    @app.get("/api/logs/follow", summary="Lines of ranks as they come", responses=stream("LogLine", 404, 503))
    async def follow_logs(rank: Rank = None, last: Last = 20, seconds: Seconds = 3600.0) -> Response:
        await asyncio.to_thread(streams.check_rank, job, rank)
        return bound.stream(streams.follow_lines(job, rank, last, seconds))

    @app.get("/api/items", summary="What was said lately: alerts, incidents, lines", responses=answers(bodies.Items))
    async def items(since: Since = 0) -> Response:
        return _json(bodies.Items(job.hub.since(since), job.hub.last))

    @app.get("/api/items/follow", summary="The same as it comes", responses=stream("Item", 503))
    async def follow_items(since: Since = 0, seconds: Seconds = 3600.0) -> Response:
        return bound.stream(streams.follow_items(job.hub, since, seconds))


class _Bound:
    """Not more than so many streams at once."""

    def __init__(self, most: int) -> None:
        self._left = most

    def stream(self, source: AsyncIterator[bytes]) -> Response:
        if not self._left:
            raise OrderError(503, f"{MOST_STREAMS} others follow this job already", "try again later")
        return StreamingResponse(self._counted(source), media_type=NDJSON)

    async def _counted(self, source: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        self._left -= 1
        try:
            async for block in source:
                yield block
        finally:
            self._left += 1


def _add_orders(app: FastAPI, job: Job) -> None:
    @app.post("/api/stop", summary="Stop the job", responses=answers(bodies.Done, 409, 503))
    async def stop(order: StopOrder) -> Response:
        return _json(bodies.Done(job.stop(order.giver, order.seconds)))

    done = answers(bodies.Done, 404, 409, 503)

    @app.post("/api/hosts/{host}/drain", summary="A host leaves when another can take its place", responses=done)
    async def drain(host: HostName, order: Order) -> Response:
        return _json(bodies.Done(job.drain(host, order.giver)))

    @app.post("/api/hosts/{host}/evict", summary="A host leaves at once", responses=done)
    async def evict(host: HostName, order: Order) -> Response:
        return _json(bodies.Done(job.evict(host, order.giver)))

    @app.post("/api/hosts/{host}/return", summary="A host may come back, or stays", responses=done)
    async def give_back(host: HostName, order: Order) -> Response:
        return _json(bodies.Done(job.give_back(host, order.giver)))
