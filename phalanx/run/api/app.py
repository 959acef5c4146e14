"""The interface for people and programs: routes, answers, their OpenAPI description, and the web pages.

Handlers run in the driver's event loop. None does more than a few milliseconds of work at once: lists come in pages,
files are read in threads, streams wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path as FilePath
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
from phalanx.core.addresses import is_loopback
from phalanx.core.errors import UserError
from phalanx.run.api import bodies
from phalanx.run.api import job as streams
from phalanx.run.api.guard import Guard, Sessions
from phalanx.run.api.http_server import HttpServer
from phalanx.run.api.job import CONTENT_TYPE, JobControl, Metrics, OrderError, unknown_host
from phalanx.run.clock import read_clocks
from phalanx.run.config import RunConfig
from phalanx.run.driver.driver import Driver
from phalanx.run.driver.write_ahead import Book
from phalanx.run.incidents.incident_pages import listed, load, to_markdown
from phalanx.run.incidents.report import Incident
from phalanx.run.job_folder import card_of_this_process, local_socket, write_card
from phalanx.run.reports.job_page import incident_page, page
from phalanx.run.reports.recent_events import SHOWN_HOSTS, Hub
from phalanx.run.secrets import TlsFiles, Token, read_token, server_context
from phalanx.run.wire.driver_address import Address, parse, publish, published
from phalanx.telemetry.alerts.run_metrics import TrainingFigures

_STATUSES = {
    401: "without the token",
    404: "there is none",
    408: "the request does not come to its end",
    409: "it does not fit the state of the job",
    413: "the request is too large",
    422: "the request is wrong",
    503: "not now",
}
_FROM_EVERY_ROUTE = (401, 408, 413, 422)

Answers = dict[int | str, dict[str, Any]]


def _answers(media_type: str, schema: dict[str, Any], *errors: int, needs_token: bool = True) -> Answers:
    """What a route answers, for its OpenAPI description: content, or one of these errors as JSON."""
    found: Answers = {200: {"description": "OK", "content": {media_type: {"schema": schema}}}}
    wrong = {"application/json": {"schema": {"$ref": "#/components/schemas/Wrong"}}}
    for status in sorted({*errors, *(_FROM_EVERY_ROUTE if needs_token else ())}):
        found[status] = {"description": _STATUSES[status], "content": wrong}
    return found


def _json_answers(body: type, *errors: int, needs_token: bool = True) -> Answers:
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    return _answers("application/json", schema, *errors, needs_token=needs_token)


def _stream_answers(name: str, *errors: int) -> Answers:
    description = f"one {name} as JSON on each line; empty lines keep it open"
    return _answers(NDJSON, {"type": "string", "description": description}, *errors)


def _describe(app: FastAPI) -> dict[str, Any]:
    """The whole OpenAPI description; bodies describe themselves, there is no second set of classes."""
    if app.openapi_schema is None:
        summary = "One job that phalanx run keeps running."
        found = get_openapi(title=app.title, version=app.version, summary=summary, routes=app.routes)
        parts = found.setdefault("components", {})
        _, schemas = msgspec.json.schema_components(bodies.BODIES, ref_template="#/components/schemas/{name}")
        parts["schemas"] = {**parts.get("schemas", {}), **schemas}
        parts["schemas"].pop("HTTPValidationError", None)
        parts["schemas"].pop("ValidationError", None)
        token = "The job's token, 64 hexadecimal digits, from its token file."
        parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer", "description": token}}
        for path, operations in found["paths"].items():
            for operation in operations.values():
                operation["security"] = [] if path == "/health" else [{"token": []}]
        app.openapi_schema = found
    return app.openapi_schema


_MOST_ITEMS = 400

_LOGIN = """<!doctype html><html lang="en"><meta charset="utf-8"><title>phalanx run</title>
<style>:root{{color-scheme:light dark}}body{{font:16px system-ui;margin:4em auto;max-width:34em}}
input{{font:inherit;width:24em}}</style>
<h1>phalanx run</h1><p>{words}</p><form method="post" action="/login">
<input type="password" name="token" autocomplete="off" autofocus> <button>Enter</button></form></html>"""


def _add_pages(app: FastAPI, job: JobControl, token: Token, sessions: Sessions) -> None:
    """Web pages, which only read, and the login: a browser shows the token once and gets a session."""

    @app.get("/", include_in_schema=False)
    async def the_job() -> Response:
        incidents = await asyncio.to_thread(listed, job.folder)
        return HTMLResponse(page(job.overview(SHOWN_HOSTS), job.hub.since(job.hub.last - _MOST_ITEMS), incidents))

    @app.get("/incidents/{number}", include_in_schema=False)
    async def one_incident(number: Annotated[int, Path(ge=1, le=2**31)]) -> Response:
        return HTMLResponse(incident_page(await asyncio.to_thread(load, job.folder, number)))

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


def make_app(job: JobControl, token: Token, unix_s: Callable[[], float] = time.time) -> Guard:
    """The interface of a job, behind its guard."""
    app = FastAPI(title=f"phalanx run {job.state.job.name}", version=__version__, docs_url=None, redoc_url=None)
    sessions = Sessions(token, job.state.job.name, unix_s)
    _add_errors(app)
    _add_reading(app, job)
    _add_incidents(app, job)
    _add_logs(app, job)
    _add_orders(app, job)
    _add_pages(app, job, token, sessions)
    app.openapi = lambda: _describe(app)  # type: ignore[method-assign]
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
        cure = "correct it; GET /openapi.json describes what is taken"
        return _json(bodies.Wrong("; ".join(found)[:1000], cure), 422)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        wrong = bodies.Wrong(str(error.detail), "GET /openapi.json describes what there is")
        response = _json(wrong, error.status_code)
        response.headers.update(error.headers or {})
        return response


def _add_reading(app: FastAPI, job: JobControl) -> None:
    metrics = Metrics(job.reading, job.training)
    open_health = _json_answers(bodies.Health, needs_token=False)
    prometheus = _answers("text/plain", {"type": "string"})

    @app.get("/health", summary="The driver answers; needs no token", responses=open_health)
    async def health() -> Response:
        return _json(bodies.Health())

    @app.get("/api/status", summary="The job now", responses=_json_answers(bodies.Status))
    async def status(
        most: Annotated[int, Query(ge=0, le=1000, description="hosts that are listed, those in trouble first")] = 256,
    ) -> Response:
        return _json(bodies.status_body(job.overview(most)))

    @app.get("/api/hosts", summary="Hosts, in pages", responses=_json_answers(bodies.Hosts, 404))
    async def hosts(
        after: Annotated[str, Query(max_length=253, description="name of the last host of the page before")] = "",
        most: Annotated[int, Query(ge=1, le=500)] = 200,
        state: Annotated[StateName | None, Query(description="only those in this state")] = None,
    ) -> Response:
        page, more = job.page(after, most, state)
        return _json(bodies.Hosts(bodies.host_bodies(page), more))

    @app.get("/api/hosts/{host}", summary="One host", responses=_json_answers(bodies.HostBody, 404))
    async def one_host(host: HostName) -> Response:
        found = job.hosts([host])
        if not found:
            raise unknown_host(host)
        return _json(bodies.host_bodies(found)[0])

    @app.get("/metrics", summary="For Prometheus", responses=prometheus)
    async def read_metrics() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)


def _add_incidents(app: FastAPI, job: JobControl) -> None:
    markdown = _answers("text/markdown", {"type": "string"}, 404)

    @app.get("/api/incidents", summary="Incidents, the oldest first", responses=_json_answers(bodies.Incidents))
    async def incidents(
        last: Annotated[int, Query(ge=1, le=1000, description="so many of the newest")] = 100,
    ) -> Response:
        found = (await asyncio.to_thread(listed, job.folder))[-last:]
        names = bodies.IncidentLine.__struct_fields__
        lines = [bodies.IncidentLine(*(getattr(one, name) for name in names)) for one in found]
        return _json(bodies.Incidents(lines))

    @app.get("/api/incidents/{number}", summary="One incident", responses=_json_answers(Incident, 404))
    async def one_incident(number: Number) -> Response:
        return _json(await asyncio.to_thread(load, job.folder, number))

    @app.get("/api/incidents/{number}/page", summary="One incident, as a page", responses=markdown)
    async def page(number: Number) -> Response:
        incident = await asyncio.to_thread(load, job.folder, number)
        return PlainTextResponse(to_markdown(incident), media_type="text/markdown")


def _add_logs(app: FastAPI, job: JobControl) -> None:
    followers = _FollowerLimit()

    @app.get("/api/logs", summary="Newest lines of ranks", responses=_json_answers(bodies.LogLines, 404))
    async def logs(rank: Rank = None, last: Last = 100) -> Response:
        await asyncio.to_thread(streams.check_rank, job, rank)
        return _json(bodies.LogLines(await streams.newest_lines(job, rank, last)))

    @app.get("/api/logs/follow", summary="Lines of ranks as they come", responses=_stream_answers("LogLine", 404, 503))
    async def follow_logs(rank: Rank = None, last: Last = 20, seconds: Seconds = 3600.0) -> Response:
        await asyncio.to_thread(streams.check_rank, job, rank)
        return followers.stream(streams.follow_lines(job, rank, last, seconds))

    said = "What was said lately: alerts, incidents, lines"

    @app.get("/api/items", summary=said, responses=_json_answers(bodies.Items))
    async def items(since: Since = 0) -> Response:
        return _json(bodies.Items(job.hub.since(since), job.hub.last))

    @app.get("/api/items/follow", summary="The same as it comes", responses=_stream_answers("Item", 503))
    async def follow_items(since: Since = 0, seconds: Seconds = 3600.0) -> Response:
        return followers.stream(streams.follow_items(job.hub, since, seconds))


class _FollowerLimit:
    def __init__(self) -> None:
        self._left = MOST_STREAMS

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


def _add_orders(app: FastAPI, job: JobControl) -> None:
    @app.post("/api/stop", summary="Stop the job", responses=_json_answers(bodies.Done, 409, 503))
    async def stop(order: StopOrder) -> Response:
        return _json(bodies.Done(job.stop(order.giver, 0.0 if order.without_grace else order.grace_s)))

    done = _json_answers(bodies.Done, 404, 409, 503)

    @app.post("/api/hosts/{host}/drain", summary="A host leaves when another can take its place", responses=done)
    async def drain(host: HostName, order: Order) -> Response:
        return _json(bodies.Done(job.drain(host, order.giver)))

    @app.post("/api/hosts/{host}/evict", summary="A host leaves at once", responses=done)
    async def evict(host: HostName, order: Order) -> Response:
        return _json(bodies.Done(job.evict(host, order.giver)))

    @app.post("/api/hosts/{host}/return", summary="A host may come back, or stays", responses=done)
    async def give_back(host: HostName, order: Order) -> Response:
        return _json(bodies.Done(job.give_back(host, order.giver)))


_log = logging.getLogger(__name__)

# File of the run folder that says where the interface listens; a driver that is started again takes the same port.
ADDRESS = "http"


@contextlib.asynccontextmanager
async def serve_job(
    config: RunConfig,
    folder: FilePath,
    driver: Driver,
    book: Book,
    hub: Hub,
    training: Callable[[], TrainingFigures | None] = lambda: None,
) -> AsyncIterator[None]:
    """Serve people within it; the run folder's card says where, and after the job how it has ended.

    Raises UserError where the address cannot be listened at, or a certificate cannot be read.
    """
    token = read_token(config.token_path.absolute())
    job = JobControl(driver, book, hub, folder, config.log_folder.absolute(), driver.now, training)
    files = config.tls.files
    # The token proves who a person is: browsers and Prometheus need no certificate of their own.
    tls = server_context(TlsFiles(files.certificate, files.key)) if files is not None else None
    card = card_of_this_process(config, folder, read_clocks().unix_s)
    host, _, port = config.http.rpartition(":")  # checked by the config; port 0 is any
    wanted, before = Address(host.strip("[]"), int(port)), None
    with contextlib.suppress(OSError, UserError, IndexError):
        before = parse(published(folder / ADDRESS)()[0])  # an earlier driver of this job listened there
    async with HttpServer(make_app(job, token), wanted, before, tls, local_socket(folder)) as server:
        publish(folder / ADDRESS, server.address)
        # A server that listens everywhere is found by the name of this machine.
        here = server.address.host
        name = socket.gethostname() if here in ("0.0.0.0", "::", "") else here
        if is_loopback(name) and name != here:
            name = "127.0.0.1"
        url = f"{'http' if tls is None else 'https'}://{Address(name, server.address.port)}"
        card = msgspec.structs.replace(card, http=url, local="" if server.local is None else str(server.local))
        write_card(folder, card)
        try:
            yield
        finally:
            if (end := driver.finished) is not None:
                try:
                    write_card(folder, msgspec.structs.replace(card, status=end.status, ended=end.reason))
                except OSError as error:  # the journal says it too
                    _log.warning("how the job has ended could not be written to %s: %s", folder, error)
