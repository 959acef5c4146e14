"""`phalanx faults run`: cases from manifests, judged, with a table and an exit status."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx.cli.faults_command import command
from phalanx.core.errors import UserError
from phalanx.faults.campaign import generate
from phalanx.faults.case_manifest import Cluster, Expected, Incident, Manifest, Place, Response, When, save
from phalanx.faults.referee import Result, Results, Score
from phalanx.run.campaign import case_run

EXCEPTION = Incident(kind="exception", place=Place(what="ranks", numbers=(0,)), when=When(step=7))
RESTARTED = Expected(responses=(Response(action="restart"),), blame_ranks=(0,))
CASE = Manifest(
    id="001-exception--rank-0",
    seed=7,
    cluster=Cluster(hosts=1, workers_per_host=2, spares=0),
    steps=20,
    incidents=(EXCEPTION,),
    expected=RESTARTED,
)


def score_of(case: Manifest, problems: list[str]) -> Score:
    outcome = "wrong" if problems else "right"
    return Score(case.id, case.digest(), outcome, problems, 1.0, 2.0, 3.0, 4, 0, [], [], True, 0)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of cases that were run; that of two hosts goes wrong."""
    ids: list[str] = []

    def run_case(case: Manifest, folder: Path, *, guard_s: float, keep: bool) -> Score:
        ids.append(case.id)
        score = score_of(case, ["did nothing; right is evict h0 h3"] if "two-hosts" in case.id else [])
        Results(folder).keep(Result(score, []))
        return score

    monkeypatch.setattr(case_run, "run_case", run_case)
    return ids


def manifests(folder: Path, *families: str) -> list[str]:
    cases = [case for case in generate(7) if case.id.split("-", 1)[1] in families]
    for case in cases:
        save(case, folder / f"{case.id}.json")
    return [str(folder / f"{case.id}.json") for case in cases]


def test_all_right_is_status_0(tmp_path: Path, ran: list[str]) -> None:
    paths = manifests(tmp_path, "sigkill--rank-1", "exit--rank-0")
    result = CliRunner().invoke(command, ["run", *paths, "--folder", str(tmp_path / "results")])
    assert result.exit_code == 0, result.output
    assert [f"{name}.json" for name in ran] == [Path(path).name for path in paths]
    assert f"[2/2] {ran[1]}: right in" in result.output
    assert "fault campaign" in result.output and "sigkill" in result.output


def test_a_miss_is_status_1_and_says_what_is_wrong(tmp_path: Path, ran: list[str]) -> None:
    paths = manifests(tmp_path, "sigkill--rank-1", "two-hosts--wait")
    arguments = ["run", *paths, "--folder", str(tmp_path / "results")]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 1
    assert "wrong in" in result.output and "did nothing; right is evict h0 h3" in result.output
    again = CliRunner().invoke(command, [*arguments, "--resume"])
    assert again.exit_code == 1 and len(ran) == 2, "both have a result"


def test_a_manifest_that_is_wrong_is_refused_before_anything_runs(tmp_path: Path, ran: list[str]) -> None:
    (tmp_path / "bad.json").write_text("{}")
    [good] = manifests(tmp_path, "sigkill--rank-1")
    result = CliRunner().invoke(command, ["run", good, str(tmp_path / "bad.json")])
    assert result.exit_code != 0 and ran == []


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_case_is_really_run(tmp_path: Path) -> None:
    save(CASE, tmp_path / "case.json")
    result = CliRunner().invoke(command, ["run", str(tmp_path / "case.json"), "--folder", str(tmp_path / "results")])
    assert result.exit_code == 0, result.output
    found = Results(tmp_path / "results").find(CASE)
    assert found is not None and found.score.outcome == "right" and found.score.losses_equal


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--guard", "0"], "--guard"),
        (["--guard", "nan"], "--guard"),
        (["--folder", "FILE"], "--folder"),
        (["AGAIN"], "id"),
    ],
)
def test_what_cannot_be_right_is_refused_before_anything_runs(
    tmp_path: Path, ran: list[str], options: list[str], field: str
) -> None:
    [good] = manifests(tmp_path, "sigkill--rank-1")
    words = {"FILE": good, "AGAIN": good}
    result = CliRunner().invoke(command, ["run", good, *(words.get(word, word) for word in options)])
    assert isinstance(result.exception, UserError) and result.exception.field == field and ran == []


def test_the_manifest_that_is_wrong_is_named(tmp_path: Path, ran: list[str]) -> None:
    (tmp_path / "bad.json").write_text("{}")
    result = CliRunner().invoke(command, ["run", *manifests(tmp_path, "sigkill--rank-1"), str(tmp_path / "bad.json")])
    assert "bad.json" in str(result.exception)
