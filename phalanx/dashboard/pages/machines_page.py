"""Machines: which host is dead, cut off or slow, seen at a glance; the heat map of phases, and each host by itself."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response

from phalanx.core.errors import UserError
from phalanx.dashboard.data_source import Run
from phalanx.dashboard.machine_states import HostNow
from phalanx.dashboard.machines_now import driver_of, now_of
from phalanx.dashboard.page_frame import Page, PageFrame
from phalanx.dashboard.run_telemetry import RunTelemetry, found_telemetry, open_telemetry, ranks_text
from phalanx.detect.detection import MACHINE_ADVICE
from phalanx.figures.host_figures import host_counters, host_step_times
from phalanx.figures.rank_heatmap import rank_heatmap

PAGE = Page("machines", "Machines", "/machines")

_MOST_ROWS = 40

By = Literal["rank", "host"]


def build_router(frame: PageFrame) -> APIRouter:
    """The page, its parts, and a page for each host."""
    router = APIRouter()
    _add_page(router, frame)
    _add_host(router, frame)
    return router


def _add_page(router: APIRouter, frame: PageFrame) -> None:
    @router.get(PAGE.path)
    def page(run: str = "", steps: str = "", by: By = "rank", alike: Literal["stage", "all"] = "stage") -> Response:
        found = frame.source.run(run)
        telemetry, problem = found_telemetry(frame, found)
        window = telemetry.window(steps) if telemetry is not None else None
        return frame.page(
            PAGE,
            "machines.html",
            found,
            freshness=frame.source.freshness(found),
            now_is=now_of(frame, found),
            window=window,
            problem=problem,
            steps=steps,
            by=by,
            alike=alike,
            rows=window.slow.ranked[:_MOST_ROWS] if window is not None else [],
        )

    @router.get("/machines/now")
    def now(request: Request, run: str = "") -> Response:
        found = frame.source.run(run)
        return frame.part(request, "machines_now.html", run=found, now_is=now_of(frame, found))

    @router.get("/machines/heatmap")
    def heatmap(
        request: Request,
        run: str = "",
        steps: str = "",
        by: By = "rank",
        alike: Literal["stage", "all"] = "stage",
    ) -> Response:
        telemetry = open_telemetry(frame, frame.source.run(run))

        def make() -> dict[str, Any]:
            window = telemetry.window(steps)
            sets = window.stages if alike == "stage" and len(set(window.stages)) > 1 else None
            if alike == "all":
                return rank_heatmap(window.averages, by=by, alike=sets)
            slow = [one[by] for one in window.slow.slow]
            return rank_heatmap(window.averages, by=by, alike=sets, slow=slow, doubt=window.slow.doubt)

        return frame.figure(request, telemetry.stamp(), make)


def _add_host(router: APIRouter, frame: PageFrame) -> None:
    @router.get("/machines/host")
    def host_page(run: str = "", host: str = "", rank: int | None = None, steps: str = "") -> Response:
        found = frame.source.run(run)
        telemetry, problem = found_telemetry(frame, found)
        state = now_of(frame, found)
        this = _chosen(state["hosts"], host, rank)
        values: dict[str, Any] = {"rows": [], "incidents": [], "window": None}
        if telemetry is not None:
            window = telemetry.window(steps)
            standing = {one.rank: one for one in (state["job"].ranks if state["job"] else ())}
            values["rows"] = [
                row | {"now": standing.get(row["rank"])} for row in window.slow.ranked if row["rank"] in this.ranks
            ]
            values["rows"].sort(key=lambda row: row["rank"])
            values["window"] = window
            values["incidents"] = _incidents_of(telemetry, this)
        return frame.page(
            PAGE,
            "host.html",
            found,
            freshness=frame.source.freshness(found),
            host=this,
            state=state,
            body=next((one for one in driver_of(frame, found)[1] if one.name == this.name), None),
            problem=problem,
            steps=steps,
            ranks=ranks_text(sorted(this.ranks)),
            found_by_judges=_found(frame, found, this),
            **values,
        )

    @router.get("/machines/host/counters")
    def counters(request: Request, run: str = "", host: str = "", rank: int | None = None) -> Response:
        found = frame.source.run(run)
        telemetry = open_telemetry(frame, found)
        this = _chosen(now_of(frame, found)["hosts"], host, rank)
        own = _host_of_spans(telemetry, this)
        return frame.figure(request, telemetry.stamp(), lambda: host_counters(_counters(telemetry, own), this.name))

    @router.get("/machines/host/steps")
    def step_times(
        request: Request, run: str = "", host: str = "", rank: int | None = None, steps: str = ""
    ) -> Response:
        found = frame.source.run(run)
        telemetry = open_telemetry(frame, found)
        this = _chosen(now_of(frame, found)["hosts"], host, rank)

        def make() -> dict[str, Any]:
            first, last = telemetry.steps_of(steps)
            ranks = sorted(this.ranks)
            return host_step_times(telemetry.own_times(first, last, ranks), ranks, this.name)

        return frame.figure(request, telemetry.stamp(), make)


def _found(frame: PageFrame, run: Run, host: HostNow) -> list[dict[str, Any]]:
    """What judges found of a host, as far as they were asked."""
    if run.folder is None:
        return []
    found = frame.findings.known(run.folder).of_host(host.name, host.ranks)
    return [{**one, "look": "bad" if one["advice"] in MACHINE_ADVICE else "warn"} for one in found]


def _chosen(hosts: list[HostNow], name: str, rank: int | None) -> HostNow:
    for host in hosts:
        if host.name == name or (not name and rank is not None and rank in host.ranks):
            return host
    raise UserError(
        "there is no such host in this run",
        cure="choose one on the page Machines",
        value=name or (None if rank is None else f"rank {rank}"),
    )


def _host_of_spans(telemetry: RunTelemetry, host: HostNow) -> str:
    """Its name in the telemetry, where the driver may call it otherwise."""
    found = telemetry.hosts_of(host.ranks)
    return found[0] if found and host.name not in telemetry.trace.hosts else host.name


def _counters(telemetry: RunTelemetry, host: str) -> Any:
    connection = telemetry.trace.connect(hosts=[host])
    return connection.sql(
        "select end_ns, gpu, name, value from counters where host = $host order by name, gpu, end_ns",
        params={"host": host},
    ).to_arrow_table()


def _incidents_of(telemetry: RunTelemetry, host: HostNow) -> list[dict[str, Any]]:
    return [one for one in telemetry.incidents() if one["host"] == host.name or one["rank"] in host.ranks]
