"""The application: pages behind the guard, with the files that they need; nothing comes from elsewhere."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import duckdb
import pyarrow as pa
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, Response
from starlette.exceptions import HTTPException

from phalanx.core.errors import UserError, not_permitted
from phalanx.dashboard.access_guard import AccessGuard
from phalanx.dashboard.data_source import DataSource
from phalanx.dashboard.metrics_store import MetricsStore
from phalanx.dashboard.page_frame import HERE, PageFrame
from phalanx.dashboard.pages import (
    findings_page,
    incidents_page,
    logs_page,
    machines_page,
    orders_page,
    parallelism_page,
    plan_page,
    run_page,
    runs_page,
    timeline_page,
)
from phalanx.run.secrets import Token

PAGES: tuple[ModuleType, ...] = (
    runs_page,
    run_page,
    logs_page,
    machines_page,
    timeline_page,
    parallelism_page,
    incidents_page,
    findings_page,
    plan_page,
)
"""In the order of the navigation."""

_STATIC_FILES = {"dashboard.css": "text/css", "dashboard.js": "text/javascript"}
_FOR_EVER = {"cache-control": "public, max-age=31536000, immutable"}  # their URL has the version


def create_app(
    source: DataSource,
    token: Token | None,
    hosts: Collection[str] = (),
    *,
    cache: Path | None = None,
    unix_s: Callable[[], float] = time.time,
) -> AccessGuard:
    """The dashboard as an ASGI application.

    Args:
        token: who shows it may come in; None: everybody.
        hosts: names of hosts that may lead here, besides those of this machine and addresses.
        cache: folder that keeps what was read of large files; None: later starts read them again.

    Raises:
        UserError: plotly is not installed.
    """
    metrics = MetricsStore(cache)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        threading.Thread(target=_warm_up, name="warm up", daemon=True).start()
        yield
        metrics.close()

    app = FastAPI(title="phalanx dashboard", openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan)
    frame = PageFrame(source, metrics, [module.PAGE for module in PAGES], unix_s)
    for module in PAGES:
        app.include_router(module.build_router(frame))
    app.include_router(orders_page.build_router(frame))
    _add_shared_parts(app, frame)
    _add_files(app, plotly_file())
    _add_errors(app, frame)
    return AccessGuard(app, token, hosts, unix_s)


def _warm_up() -> None:
    """What the first page would wait for: Arrow looks for pandas when it makes its first table, and imports it."""
    connection = duckdb.connect()
    connection.register("warm", pa.table({"step": [0]}))
    connection.sql("select max(step) from warm").to_arrow_table()


def plotly_file() -> Path:
    """Plotly's JavaScript, as its package brings it.

    Raises:
        UserError: plotly is not installed.
    """
    spec = importlib.util.find_spec("plotly")
    path = Path(spec.origin).parent / "package_data" / "plotly.min.js" if spec and spec.origin else None
    if path is None or not path.exists():
        raise UserError("figures need the package plotly", cure="run: pip install 'plotly>=6'")
    return path


def _add_files(app: FastAPI, plotly: Path) -> None:
    @app.get("/favicon.ico")
    def no_icon() -> Response:
        """Pages bring theirs; browsers ask for this one beside plain text."""
        return Response(status_code=204)

    @app.get("/static/{version}/plotly.min.js")
    def plotly_script(version: str) -> Response:
        return FileResponse(plotly, media_type="text/javascript", headers=_FOR_EVER)

    @app.get("/static/{version}/{name}")
    def static_file(version: str, name: str) -> Response:
        if name not in _STATIC_FILES:
            raise HTTPException(404, "there is no such file")
        return FileResponse(HERE / "static" / name, media_type=_STATIC_FILES[name], headers=_FOR_EVER)


def _add_shared_parts(app: FastAPI, frame: PageFrame) -> None:
    @app.get("/freshness")
    def freshness(request: Request, run: str = "") -> Response:
        """The line that says when data is old."""
        found = frame.source.run(run)
        return frame.part(request, "freshness.html", run=found, freshness=frame.source.freshness(found))


def _add_errors(app: FastAPI, frame: PageFrame) -> None:
    def shown(request: Request, status: int, words: str) -> Response:
        words = frame.source.as_given(words)
        if request.headers.get("sec-fetch-mode") == "cors" or "data-part" in request.headers:
            return HTMLResponse(words, status)
        return HTMLResponse(frame.text("error.html", page=None, run=None, words=words), status)

    @app.exception_handler(UserError)
    async def not_found(request: Request, error: UserError) -> Response:
        return shown(request, 404, str(error))

    @app.exception_handler(PermissionError)
    async def closed(request: Request, error: PermissionError) -> Response:
        return shown(request, 403, str(not_permitted(error.filename)))

    @app.exception_handler(ConnectionError)
    async def no_driver(request: Request, error: ConnectionError) -> Response:
        return shown(request, 503, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        # Behind its name stands which of several types did not fit: the first one says it.
        found: dict[str, str] = {}
        for one in error.errors():
            found.setdefault(str(one["loc"][1] if len(one["loc"]) > 1 else one["loc"][-1]), one["msg"])
        words = [f"{name}: {message}" for name, message in list(found.items())[:5]]
        return shown(request, 422, "; ".join(words)[:1000])

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return shown(request, error.status_code, str(error.detail))
