"""The OpenAPI description: bodies describe themselves, there is no second set of classes.

The web pages: a login that takes the token, the job, and its incidents.

The interface for people and programs: what can be asked, what is answered, and its description.

Handlers run in the driver's event loop. None does more than a few milliseconds of work at once: lists come in pages,
files are read in threads, streams wait.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs

import msgspec
from fastapi import FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from phalanx import __version__
from phalanx.core.errors import UserError
from phalanx.run.api import bodies
from phalanx.run.api import job as streams
from phalanx.run.api.guard import Guard, Sessions
from phalanx.run.api.job import CONTENT_TYPE, Job, Metrics, OrderError, unknown_host
from phalanx.run.incidents.incident_pages import listed, load, to_markdown
from phalanx.run.incidents.report import Incident
from phalanx.run.reports.job_page import incident_page, page
from phalanx.run.reports.recent_events import SHOWN_HOSTS
from phalanx.run.secrets import Token

_WHAT = {
    401: "without the token",
    404: "there is none",
    408: "the request does not come to its end",
    409: "it does not fit the state of the job",
    413: "the request is too large",
    422: "the request is wrong",
    503: "not now",
}
_ALWAYS = (401, 408, 413, 422)

Answers = dict[int | str, dict[str, Any]]


def answers(body: type, *errors: int, open: bool = False) -> Answers:
    """What a route answers: a body as JSON, or one of these errors.

    Args:
        open: it needs no token.
    """
    found: Answers = {
        200: {"description": "OK", "content": {"application/json": {"schema": _reference(body.__name__)}}}
    }
    return {**found, **_errors(*errors, open=open)}


def stream(name: str, *errors: int) -> Answers:
    """A route that answers lines of JSON."""
    schema = {"type": "string", "description": f"one {name} as JSON on each line; empty lines keep it open"}
    return {200: {"description": "OK", "content": {"application/x-ndjson": {"schema": schema}}}, **_errors(*errors)}


def markdown() -> Answers:
    """A route that answers a page."""
    return {200: {"description": "OK", "content": {"text/markdown": {"schema": {"type": "string"}}}}, **_errors(404)}


def text() -> Answers:
    """A route that answers in the format of Prometheus."""
    return {200: {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}, **_errors()}


def describe(app: FastAPI) -> dict[str, Any]:
    """The whole description."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, summary=_SUMMARY, routes=app.routes)
        parts = found.setdefault("components", {})
        parts["schemas"] = {**parts.get("schemas", {}), **bodies.schemas()}
        parts["schemas"].pop("HTTPValidationError", None)
        parts["schemas"].pop("ValidationError", None)
        parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer", "description": _TOKEN}}
        for path, operations in found["paths"].items():
            for operation in operations.values():
                operation["security"] = [] if path == "/health" else [{"token": []}]
        app.openapi_schema = found
    return app.openapi_schema


_SUMMARY = "One job that phalanx run keeps running."
_TOKEN = "The job's token, 64 hexadecimal digits, from its token file."


def _errors(*statuses: int, open: bool = False) -> Answers:
    body = {"application/json": {"schema": _reference("Wrong")}}
    always = () if open else _ALWAYS
    return {status: {"description": _WHAT[status], "content": body} for status in sorted({*statuses, *always})}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


_MOST_ITEMS = 400

_LOGIN = """<!doctype html><html lang="en"><meta charset="utf-8"><title>phalanx run</title>
<style>:root{{color-scheme:light dark}}body{{font:16px system-ui;margin:4em auto;max-width:34em}}
input{{font:inherit;width:24em}}</style>
<h1>phalanx run</h1><p>{words}</p><form method="post" action="/login">
<input type="password" name="token" autocomplete="off" autofocus> <button>Enter</button></form></html>"""


def add_pages(app: FastAPI, job: Job) -> None:
    """The job, and its incidents; they only read."""

    @app.get("/", include_in_schema=False)
    async def the_job() -> Response:
        incidents = await asyncio.to_thread(listed, job.folder)
        return HTMLResponse(page(job.overview(SHOWN_HOSTS), job.hub.since(job.hub.last - _MOST_ITEMS), incidents))

    @app.get("/incidents/{number}", include_in_schema=False)
    async def one_incident(number: Annotated[int, Path(ge=1, le=2**31)]) -> Response:
        return HTMLResponse(incident_page(await asyncio.to_thread(load, job.folder, number)))


def add_login(app: FastAPI, token: Token, sessions: Sessions) -> None:
    """Where a browser shows the token once, and gets a session that only reads."""

    @app.get("/login", include_in_schema=False)
    async def form() -> Response:
        return HTMLResponse(_LOGIN.format(words="The token is in the job's token file."))

    @app.post("/login", include_in_schema=False)
    async def enter(request: Request) -> Response:
        given = parse_qs((await request.body()).decode(errors="replace")).get("token", [""])[0].strip()
        if not hmac.compare_digest(given.encode(errors="replace"), token.reveal().encode()):
            return HTMLResponse(_LOGIN.format(words="That is not the token of this job."), 401)
        answer = RedirectResponse("/", 303)
        is_secure = request.url.scheme == "https"
        answer.set_cookie(sessions.cookie, sessions.issue(), httponly=True, samesite="strict", secure=is_secure)
        return answer


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
