"""Incidents: what went wrong and when, what each recovery cost, and how much of the time trained, with the evidence."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from phalanx.core.errors import UserError
from phalanx.dashboard.data_source import Run
from phalanx.dashboard.job_history import History, attempts_of, history_of, reports_of, stalls_of
from phalanx.dashboard.page_frame import Page, PageFrame, tag_of
from phalanx.dashboard.pages.findings_page import detected_of
from phalanx.dashboard.run_telemetry import RunTelemetry, found_telemetry
from phalanx.figures.recovery_history import effective_time, recovery_history
from phalanx.figures.style import Figure, empty
from phalanx.run.incidents.incident_pages import beside, load, to_html
from phalanx.run.incidents.report import Incident, Seen

PAGE = Page("incidents", "Incidents", "/incidents")

_MOST_ROWS = 200
_MOST_EVIDENCE_BYTES = 1 << 20
_MOST_REPORTS = 200
_AGE_S = 2.0


def build_router(frame: PageFrame) -> APIRouter:
    """The page, its figures, and a page for each report of a job."""
    router = APIRouter()
    _add_page(router, frame)
    _add_figures(router, frame)
    _add_reports(router, frame)
    return router


def _add_page(router: APIRouter, frame: PageFrame) -> None:
    @router.get(PAGE.path)
    def page(run: str = "") -> Response:
        found = frame.source.run(run)
        values = _values_of(frame, found)
        has_driver = _times_of_driver(frame, found)[0] is not None
        return frame.page(
            PAGE,
            "incidents.html",
            found,
            freshness=frame.source.freshness(found),
            is_measured=has_driver or bool(values["reports"]),
            has_times=has_driver or bool(values["reports"]) or found_telemetry(frame, found)[0] is not None,
            **values,
        )

    @router.get("/incidents/list")
    def incident_list(request: Request, run: str = "") -> Response:
        found = frame.source.run(run)
        return frame.part(request, "incident_list.html", run=found, **_values_of(frame, found))


def _add_figures(router: APIRouter, frame: PageFrame) -> None:
    @router.get("/incidents/recovery")
    def recovery(request: Request, run: str = "") -> Response:
        found = frame.source.run(run)

        def make() -> Figure:
            told = _history(frame, found)
            if not told.attempts:
                return empty("Recoveries", "attempts are known from the spans of their steps, and none were recorded")
            return recovery_history(told.attempts, told.incidents)

        return frame.figure(request, _made_from(frame, found), make)

    @router.get("/incidents/time")
    def time_by_cause(request: Request, run: str = "") -> Response:
        found = frame.source.run(run)
        return frame.figure(request, _made_from(frame, found), lambda: effective_time(_history(frame, found).parts))


def _add_reports(router: APIRouter, frame: PageFrame) -> None:
    @router.get("/incidents/report")
    def report(number: int, run: str = "") -> Response:
        found = frame.source.run(run)
        incident = _report(frame, found, number)
        return frame.page(
            PAGE,
            "incident_report.html",
            found,
            freshness=frame.source.freshness(found),
            incident=incident,
            article=to_html(incident),
            line=_line(incident, found_telemetry(frame, found)[0]),
            evidence=incident.evidence if found.folder is not None else [],
            detected=detected_of(frame, found, number),
        )

    @router.get("/incidents/evidence")
    def evidence(number: int, name: str, run: str = "") -> Response:
        """A file beside a report, as plain text; only those that the report names."""
        found = frame.source.run(run)
        incident = _report(frame, found, number)
        if found.folder is None or name not in incident.evidence or "/" in name or name.startswith("."):
            raise UserError("there is no such evidence", cure="choose one on the page of the incident", value=name)
        try:
            with (beside(found.folder, number) / name).open("rb") as file:
                text = file.read(_MOST_EVIDENCE_BYTES).decode(errors="replace")
        except OSError as error:
            raise UserError(f"cannot be read ({error.strerror})", cure="", value=name) from None
        return PlainTextResponse(text)


def _values_of(frame: PageFrame, run: Run) -> dict[str, Any]:
    (telemetry, _), (reports, problem) = found_telemetry(frame, run), _reports_of(frame, run)
    noted = telemetry.incidents() if telemetry is not None else []
    return {
        "reports": [_line(one, telemetry) for one in reversed(reports)],
        "noted": [one | {"said": _said(one["says"])} for one in noted[:_MOST_ROWS]],
        "noted_count": len(noted),
        "driver_problem": problem,
        "detected": detected_of(frame, run),
    }


def _history(frame: PageFrame, run: Run) -> History:
    (telemetry, _), (reports, _) = found_telemetry(frame, run), _reports_of(frame, run)
    attempts, stalls, noted = [], [], []
    if telemetry is not None:
        trace = telemetry.trace
        attempts = telemetry.remember(("attempts", telemetry.stamp()), lambda: attempts_of(trace))
        stalls = telemetry.remember(("stalls", telemetry.stamp()), lambda: stalls_of(trace)) if not reports else []
        noted = telemetry.incidents()[::-1]
    step_s = telemetry.state().step_s if telemetry is not None else None
    trained_s, whole_s = _times_of_driver(frame, run)
    return history_of(
        run.name, attempts, reports, step_s, stalls=stalls, noted=noted, trained_s=trained_s, whole_s=whole_s
    )


def _made_from(frame: PageFrame, run: Run) -> tuple[object, ...]:
    telemetry, _ = found_telemetry(frame, run)
    told = [(one.number, len(one.facts)) for one in _reports_of(frame, run)[0]]
    age = int(frame.unix_s() / _AGE_S) if run.is_live else 0
    return (*(telemetry.stamp() if telemetry is not None else ()), tag_of(told), age)


def _reports_of(frame: PageFrame, run: Run) -> tuple[list[Incident], str]:
    """Reports of the job, the oldest first; why there are none, where its driver does not answer."""
    key = ("reports", run.id, int(frame.unix_s() / _AGE_S))
    return frame.remembered.get(key, lambda: _reports(frame, run))


def _reports(frame: PageFrame, run: Run) -> tuple[list[Incident], str]:
    if run.folder is not None:
        return reports_of(run.folder), ""
    try:
        lines = frame.source.ask(run, lambda client: client.incidents())
        return [_report(frame, run, line.number) for line in lines[-_MOST_REPORTS:]], ""
    except (ConnectionError, UserError) as error:
        return [], f"the driver does not answer: {error}"


def _report(frame: PageFrame, run: Run, number: int) -> Incident:
    if run.folder is not None:
        return load(run.folder, number)
    return frame.source.ask(run, lambda client: client.incident(number))


def _times_of_driver(frame: PageFrame, run: Run) -> tuple[float | None, float | None]:
    """How long attempts made steps, and since the job began; None: no driver says."""
    if frame.source.kind != "driver" and (run.card is None or run.card.status is not None):
        return None, None
    try:
        status = frame.source.ask(run, lambda client: client.status(0))
    except (ConnectionError, UserError):
        return None, None
    return status.training_s, status.age_s


def _line(incident: Incident, telemetry: RunTelemetry | None) -> dict[str, Any]:
    """One row of the list of reports, and where to look at it."""
    own = [fact for fact in incident.seen if isinstance(fact, Seen)]
    ranks = sorted({fact.rank for fact in own if fact.rank >= 0})
    steps = [fact.step for fact in own if fact.step >= 0]
    step = max(steps) if steps else None
    if telemetry is not None and step is None and incident.facts:
        step = telemetry.step_at(int(incident.began_unix_s * 1e9))
    return {
        "number": incident.number,
        "at_s": incident.began_unix_s,
        "attempt": incident.attempt,
        "title": incident.title,
        "result": incident.outcome.result if incident.outcome else "open",
        "seconds": incident.seconds,
        "lost_steps": incident.lost_steps,
        "evidence": len(incident.evidence),
        "ranks": ",".join(map(str, ranks[:8])),
        "hosts": sorted({fact.host for fact in own if fact.host})[:4],
        "step": step if telemetry is not None else None,
    }


def _said(says: dict[str, Any]) -> str:
    """What an incident says besides when, what and where."""
    left = {name: value for name, value in says.items() if name not in ("rank", "host", "step")}
    parts = []
    for name, value in left.items():
        shown = value if isinstance(value, str) else json.dumps(value)
        parts.append(f"{name.replace('_', ' ')} {shown}")
    return "; ".join(parts)[:400]
