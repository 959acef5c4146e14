"""All judges on one run: each answers by itself, and one that cannot, or that fails, keeps none from answering."""

from __future__ import annotations

import json
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
from click.testing import CliRunner

import phalanx.detect.judges
from phalanx.cli.detect_all import command
from phalanx.core.errors import UserError
from phalanx.detect.detection import Detection, JudgeVerdict
from phalanx.detect.judges import JUDGES, Judge, judge_all


def judge_run(run: Path, policy: None = None) -> JudgeVerdict:
    """A judge for these tests: what the folder says."""
    said = (run / "said").read_text()
    if said == "wrong":
        return JudgeVerdict("slow", (Detection("slow host", "host h3 is slow", advice="check"),), looked_at="44 steps")
    if said == "refuses":
        raise UserError("no spans", cure="record some", value=str(run))
    if said == "fails":
        raise ZeroDivisionError("division by\nzero")
    return JudgeVerdict("slow", looked_at="44 steps")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(phalanx.detect.judges, "JUDGES", (Judge("slow", "Who?", __name__),))
    return tmp_path


def test_every_judge_has_a_command_of_its_name_and_takes_a_run() -> None:
    from phalanx.cli.detect_command import SUBCOMMANDS

    for judge in JUDGES:
        assert judge.name in SUBCOMMANDS, judge
        assert judge.asks.endswith("?")
        names = list(signature(import_module(judge.module).judge_run).parameters)
        assert names[:2] == ["run", "policy"]


@pytest.mark.parametrize(
    ("said", "status", "line"),
    [
        ("well", 0, "slow       well    Nothing wrong was found (44 steps)."),
        ("wrong", 1, "slow       WRONG   Host h3 is slow."),
        ("refuses", 3, "slow       unknown No verdict: no spans; record some."),
        ("fails", 3, "slow       unknown No verdict: the judge failed (ZeroDivisionError: division by)"),
    ],
)
def test_a_line_for_each_judge_and_one_status_for_all(run: Path, said: str, status: int, line: str) -> None:
    (run / "said").write_text(said)
    found = CliRunner().invoke(command, [str(run)])
    assert found.exit_code == status, found.output
    assert ("not judged, for want of evidence: slow (1 of 1 judges)" in found.output) == (status == 3)
    assert found.output.startswith(line)
    assert ("why, and what to do: phalanx detect slow" in found.output) == (status == 1)
    as_json = CliRunner().invoke(command, [str(run), "--json"])
    (verdict,) = map(json.loads, as_json.output.splitlines())
    assert (as_json.exit_code, verdict["judge"], len(verdict["detections"])) == (status, "slow", int(status == 1))


def test_what_is_no_judge_and_what_is_no_run_is_said_at_once(run: Path) -> None:
    with pytest.raises(UserError, match=r"'absent': is no judge; give one of slow"):
        judge_all(run, ["absent"])
    with pytest.raises(UserError, match="is no run"):
        judge_all(run / "nowhere")
