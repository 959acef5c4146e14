"""Findings: what every judge says of a run: who, what, since when, how sure, why, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from phalanx.core.errors import UserError
from phalanx.dashboard.data_source import Run
from phalanx.dashboard.page_frame import Page, PageFrame, stamp
from phalanx.dashboard.run_findings import Findings
from phalanx.dashboard.run_telemetry import open_telemetry
from phalanx.detect.detection import MACHINE_ADVICE, Onset, named
from phalanx.detect.judges import JUDGES
from phalanx.run.decide.actions import KeepDetection
from phalanx.run.incidents.detections_file import read_detections

PAGE = Page("findings", "Findings", "/findings")

_FILES = ("metrics.jsonl", "ended.json", "logs", "telemetry/digests.jsonl", "telemetry/incidents.jsonl")
_AROUND = 2
_MOST_RANKS = 8
_MOST_HOSTS = 4
_MOST_DETECTED = 100

ADVICE: Mapping[str, str] = {
    "none": "nothing need be done",
    "watch": "look again later",
    "check": "check the hosts",
    "exclude": "leave the hosts out of later jobs",
    "evict": "take the hosts out of the job",
    "program": "no machine is at fault: change the program, its data or its layout",
}


def build_router(frame: PageFrame) -> APIRouter:
    """The page, and its part that is renewed while judges look."""
    router = APIRouter()

    @router.get(PAGE.path)
    def page(run: str = "") -> Response:
        found = frame.source.run(run)
        return frame.page(
            PAGE, "findings.html", found, freshness=frame.source.freshness(found), **values_of(frame, found)
        )

    @router.get("/findings/list")
    def listed(request: Request, run: str = "") -> Response:
        found = frame.source.run(run)
        return frame.part(request, "findings_list.html", run=found, **values_of(frame, found))

    return router


def values_of(frame: PageFrame, run: Run) -> dict[str, Any]:
    """What the page shows."""
    if run.folder is None:
        return {"findings": None, "detections": [], "rows": [], "detected": detected_of(frame, run)}
    findings = frame.findings.asked(run.folder, _stamp(frame, run))
    return {
        "findings": findings,
        "detections": [shown(one) for one in findings.wrong],
        "rows": _rows(findings),
        "detected": detected_of(frame, run),
    }


def detected_of(frame: PageFrame, run: Run, incident: int | None = None) -> list[dict[str, Any]]:
    """Rows of what judges told the driver while the job ran, the newest first; of one incident, or of all."""
    kept: Sequence[KeepDetection] = []
    if run.folder is not None:
        kept = read_detections(run.folder)
    else:
        with suppress(ConnectionError, UserError):  # it does not answer, which other parts of the page say
            kept = frame.source.ask(run, lambda client: client.status(0)).detections
    rows = []
    for one in reversed([one for one in kept if incident in (None, one.incident)][-_MOST_DETECTED:]):
        found = one.found
        hosts = named(found, "hosts")
        rows.append(
            {
                "at_s": one.unix_s,
                "judge": one.judge,
                "incident": one.incident,
                "sentence": found.sentence,
                "begins_with_name": any(found.sentence.startswith(host) for host in hosts),
                "why": found.why,
                "then": found.then,
                "confidence": found.confidence,
                "advised": ADVICE[found.advice],
                "look": "bad" if found.advice in MACHINE_ADVICE else "",
                "hosts": hosts[:_MOST_HOSTS],
            }
        )
    return rows


def shown(found: Mapping[str, Any]) -> dict[str, Any]:
    """A detection with what its links need, and how grave it looks: ``bad`` where a machine is to blame."""
    ranks = sorted({rank for who in found["who"] for rank in who["ranks"]})
    step = found["since"]["step"]
    return {
        **found,
        "look": "bad" if found["advice"] in MACHINE_ADVICE else "warn",
        "ranks": ",".join(map(str, ranks[:_MOST_RANKS])),
        "steps": "" if step is None else f"{max(0, step - _AROUND)}:{step + _AROUND}",
        "when": str(Onset(**found["since"])),
        "advised": ADVICE[found["advice"]],
    }


def _rows(findings: Findings) -> list[dict[str, Any]]:
    """One for each judge: its question, and how it answered."""
    rows = []
    for judge in JUDGES:
        verdict = findings.verdicts.get(judge.name)
        state = "asked" if verdict is None else "wrong" if verdict["detections"] else "well"
        if verdict is not None and not verdict["detections"] and verdict["abstains"]:
            state = "abstains"
        rows.append({"judge": judge, "verdict": verdict, "state": state})
    return rows


def _stamp(frame: PageFrame, run: Run) -> tuple[object, ...]:
    """Equal while nothing that a judge reads was written."""
    assert run.folder is not None, "asked for only where there is a folder"
    found: tuple[object, ...] = (run.is_live, *stamp(*(run.folder / name for name in _FILES)))
    try:
        return (*found, *open_telemetry(frame, run).stamp())
    except UserError:
        return found
