"""The web pages: a login that takes the token, the job, and its incidents. Torch-free."""

from __future__ import annotations

import asyncio
import hmac
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import FastAPI, Path, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from phalanx.run.api.guard import Sessions
from phalanx.run.api.job import Job
from phalanx.run.incidents.store import listed, load
from phalanx.run.people.html import incident_page, page
from phalanx.run.people.source import SHOWN_HOSTS
from phalanx.run.secrets import Token

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
