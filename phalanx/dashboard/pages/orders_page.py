"""Orders to the driver of a job: drain, evict or return a host, stop the job; each is confirmed on a page of its own.

Only where the dashboard was started with a driver's URL and its token, which the person who started it gave; the driver
checks that token itself. The guard takes a POST only from a page of the dashboard, with its cookie.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response

from phalanx.core.errors import UserError
from phalanx.dashboard.page_frame import PageFrame, read_form
from phalanx.dashboard.pages.machines_page import PAGE
from phalanx.run.api.api_client import Client

Order = Literal["drain", "evict", "return", "stop"]

CONSEQUENCES: Mapping[Order, str] = {
    "drain": "It leaves the job as soon as another host can take its place; until then its ranks train on. "
    "Training starts over from the newest checkpoint when it leaves.",
    "evict": "It leaves at once and does not come back unless a person returns it. Its ranks are ended, and training "
    "starts over from the newest checkpoint on the hosts that are left, or waits for one.",
    "return": "It may take part again: a drained host stays, an evicted one is checked and becomes a spare.",
    "stop": "All ranks get SIGTERM, write a checkpoint where they can, and the job ends. It does not start again "
    "by itself.",
}

_MOST_WHO = 60


def build_router(frame: PageFrame) -> APIRouter:
    """The page that asks, and what carries an order out."""
    router = APIRouter()

    @router.get("/orders/confirm")
    def confirm(order: Order, run: str = "", host: str = "") -> Response:
        found = frame.source.run(run)
        _require_driver(frame)
        status = frame.source.ask(found, lambda client: client.status(256))
        if order != "stop":
            _require_host(frame, run, host)
        return frame.page(
            PAGE,
            "order.html",
            found,
            freshness=frame.source.freshness(found),
            order=order,
            host=host,
            consequence=CONSEQUENCES[order],
            job=status,
            done="",
            problem="",
        )

    @router.post("/orders")
    async def carry_out(request: Request) -> Response:
        form = await read_form(request)
        return await asyncio.to_thread(_carried_out, frame, form)

    return router


def _carried_out(frame: PageFrame, form: Mapping[str, str]) -> Response:
    found = frame.source.run(form.get("run", ""))
    _require_driver(frame)
    order, host = form.get("order", ""), form.get("host", "")
    who = (form.get("who", "").strip() or "somebody")[:_MOST_WHO] + " by the dashboard"
    if order not in CONSEQUENCES:
        raise UserError("is no order", cure=f"give one of {', '.join(CONSEQUENCES)}", field="order", value=order)
    if form.get("confirmed") != (host if order != "stop" else found.name):
        name = "the host" if order != "stop" else "the job"
        raise UserError(
            "was not confirmed", cure=f"write the name of {name} into the field", field="order", value=order
        )

    async def ask(client: Client) -> str:
        return await (client.stop(who) if order == "stop" else client.order(order, host, who))

    done, problem, status = "", "", 200
    try:
        done = frame.source.ask(found, ask)
    except UserError as error:
        problem, status = str(error), 409
    frame.source.forget()
    return frame.page(
        PAGE,
        "order.html",
        found,
        status=status,
        freshness=frame.source.freshness(found),
        order=order,
        host=host,
        consequence="",
        done=done,
        problem=problem,
    )


def _require_driver(frame: PageFrame) -> None:
    if frame.source.kind != "driver":
        cure = "start it so: phalanx dashboard DRIVER_URL --driver-token JOB/secret/token (job.json has the URL)"
        raise UserError("orders need the URL and the token of the job's driver", cure=cure)


def _require_host(frame: PageFrame, run: str, name: str) -> None:
    hosts = frame.source.ask(frame.source.run(run), lambda client: client.hosts())
    if name not in [host.name for host in hosts]:
        raise UserError("there is no such host in this job", cure="choose one on the page Machines", value=name)
