"""The page Findings: what judges say, asked beside, bounded in time, and kept until the run's files change."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from dashboard_helpers import client_of, make_run

import phalanx.dashboard.run_findings
from phalanx.dashboard.pages.findings_page import shown
from phalanx.dashboard.run_findings import Findings, RunFindings
from phalanx.detect.detection import Culprit, Detection, JudgeVerdict, Onset
from phalanx.detect.judges import Judge

SLOW = JudgeVerdict(
    "slow",
    (
        Detection("odd line", "rank 2 said <b>no</b> first", (Culprit("rank", "2", (2,)),), confidence=0.9),
        Detection(
            "slow host",
            "host h3 computes 36 % longer",
            (Culprit("host", "h3", (6, 7), ("h3",)),),
            Onset(1.8e9, 40),
            0.8,
            ("0.30 s against 0.22 s",),
            ("run `phalanx check --full` there",),
            "check",
            {"excess": 0.36},
        ),
    ),
    ("rank 9 has no spans; record them",),
    "44 steps of 16 ranks",
)
_SAYS = """
import os, sys
run = sys.argv[-1]
with open(os.path.join(run, "asked"), "a") as file:
    file.write("once\\n")
print({line!r}, flush=True)
{then}
"""


@pytest.fixture(autouse=True)
def two_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    found = (Judge("slow", "Who is slow?", "x"), Judge("mute", "Who is silent?", "y"))
    monkeypatch.setattr(phalanx.dashboard.run_findings, "JUDGES", found)
    monkeypatch.setattr("phalanx.dashboard.pages.findings_page.JUDGES", found)


def says(then: str = "", verdict: JudgeVerdict = SLOW) -> Sequence[str]:
    """A process that says one judge's verdict, and then does something."""
    return sys.executable, "-c", _SAYS.format(line=json.dumps(verdict.as_json()), then=then)


def until(ask: Callable[[], Findings], is_so: Callable[[Findings], Any]) -> Findings:
    deadline_s = time.monotonic() + 60
    while not is_so(found := ask()):
        assert time.monotonic() < deadline_s, found
        time.sleep(0.01)
    return found


def test_judges_are_asked_once_while_files_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = RunFindings(lambda: 5.0, says())
    assert findings.known(tmp_path).made_unix_s is None
    first = findings.asked(tmp_path, "one")
    assert first.is_judging and [judge.name for judge in first.pending] == ["slow", "mute"]
    done = until(lambda: findings.asked(tmp_path, "one"), lambda found: not found.is_judging)
    assert done.made_unix_s == 5.0 and not done.pending
    assert [(one["judge"], one["what"]) for one in done.wrong] == [("slow", "slow host"), ("slow", "odd line")]
    assert "ask it alone: phalanx detect mute" in done.verdicts["mute"]["abstains"][0]
    assert [one["what"] for one in done.of_host("h3", [])] == ["slow host"]
    assert [one["what"] for one in done.of_host("h1", [2, 3])] == ["odd line"]
    # Files change: it rests first, and then looks again; what is known stays meanwhile.
    assert not findings.asked(tmp_path, "two").is_judging
    monkeypatch.setattr(phalanx.dashboard.run_findings, "_REST_S", 0.0)
    again = until(lambda: findings.asked(tmp_path, "two"), lambda found: found.is_judging)
    assert again.wrong and not again.pending
    until(lambda: findings.asked(tmp_path, "two"), lambda found: not found.is_judging)
    assert (tmp_path / "asked").read_text() == "once\nonce\n"


@pytest.mark.parametrize("then", ["import time; time.sleep(600)", "print('no json')", "os._exit(3)"])
def test_judges_that_hang_or_fail_keep_nobody_waiting(tmp_path: Path, then: str) -> None:
    findings = RunFindings(command=says(then), bound_s=5.0)
    done = until(lambda: findings.asked(tmp_path, 1), lambda found: not found.is_judging)
    assert done.wrong and not done.pending
    (why,) = done.verdicts["mute"]["abstains"]
    assert why.endswith(f"phalanx detect mute {tmp_path}")
    assert ("took longer" in why) == ("sleep" in then)
    gone = RunFindings(command=["/nowhere/python"])
    done = until(lambda: gone.asked(tmp_path, 1), lambda found: not found.is_judging)
    assert "could not be asked" in done.verdicts["slow"]["abstains"][0]


def test_what_is_shown_of_a_detection() -> None:
    found = shown({**SLOW.as_json()["detections"][1], "judge": "slow"})
    assert (found["look"], found["ranks"], found["steps"]) == ("bad", "6,7", "38:42")
    assert found["when"] == "step 40 (2027-01-15 08:00:00 UTC)" and found["advised"] == "check the hosts"
    assert shown({**SLOW.as_json()["detections"][0], "judge": "slow"})["look"] == "warn"


def test_the_page_says_who_what_why_and_who_abstains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.dashboard.page_frame.RunFindings", lambda unix_s: RunFindings(unix_s, says()))
    make_run(tmp_path / "runs" / "a")
    client = client_of(tmp_path / "runs")
    assert "2 of 2 judges have not answered yet" in client.get("/findings?run=a").text
    deadline_s = time.monotonic() + 60
    while "ask it alone" not in (text := client.get("/findings/list?run=a").text):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    for part in (
        'class="verdict bad"',
        "Host h3 computes 36 % longer, and 1 more below",
        "step 40 (2027-01-15 08:00:00 UTC)",
        '<a href="/machines/host?run=a&amp;host=h3">its page</a>',
        '<a href="/machines/host?run=a&amp;rank=2">rank 2</a>',
        '<a href="/timeline?run=a&amp;ranks=6%2C7&amp;steps=38%3A42">',
        "run <code>phalanx check --full</code> there",
        "&lt;b&gt;no&lt;/b&gt;",
        "80 %",
        "2 found",
        "rank 9 has no spans; record them",
        "abstains",
        "44 steps of 16 ranks",
    ):
        assert part in text, part
    assert "<b>no</b>" not in text


def test_a_run_that_few_could_judge_is_given_no_all_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    well = says(verdict=JudgeVerdict("slow", looked_at="44 steps"))
    monkeypatch.setattr("phalanx.dashboard.page_frame.RunFindings", lambda unix_s: RunFindings(unix_s, well))
    make_run(tmp_path / "runs" / "a")
    client = client_of(tmp_path / "runs")
    deadline_s = time.monotonic() + 60
    while "ask it alone" not in (text := client.get("/findings/list?run=a").text):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    summary = text[: text.index("</p>")]
    assert "1 of 2 judges found nothing wrong; not judged, for want of evidence: mute" in summary
    assert "✓" not in summary
