"""The benchmark of judges of monitoring data, with judges whose score is known beforehand."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from calibrate_minder import fit_odds
from detect_machines import confusion_of, judged, main, read_log, results, scenarios, score_of, table_of

from phalanx.detect.detection import Culprit, Detection, JudgeVerdict
from phalanx.detect.monitoring.detection_scores import score
from phalanx.detect.monitoring.metric_table import MetricTable


def first_host(table: MetricTable) -> JudgeVerdict:
    """Blames the first machine, always."""
    host = table.machines[0]
    who = (Culprit("host", host, hosts=(host,)),)
    return JudgeVerdict("first", (Detection("faulty machine", f"{host} differs", who, advice="evict"),))


def test_who_always_blames_the_first_machine_is_mostly_wrong() -> None:
    took_s: list[tuple[int, float]] = []
    cases = itertools.islice(scenarios("develop", 150, 0, 40), 4)
    found = score(judged(first_host, cases, took_s))
    assert len(found.outcomes) == len(took_s) == 4
    assert found.found + found.false_alarms == 4
    assert all(machines <= 40 for machines, _ in took_s)
    assert table_of(found)[-1].startswith("| all | 4 |")
    assert len(confusion_of(found)) == 2 + len({one.fault for one in found.outcomes})


def test_a_log_goes_on_where_it_ended(tmp_path: Path) -> None:
    log, asked = tmp_path / "judged.jsonl", []

    def judge(table: MetricTable) -> JudgeVerdict:
        asked.append(len(table.machines))
        return first_host(table)

    def cases(many: int) -> list[dict[str, object]]:
        few = itertools.islice(scenarios("develop", 150, 0, 40), many)
        return list(results(judge, few, log, is_replayed=False))

    cases(2)
    with log.open("a") as file:
        file.write('{"case": "cut o')
        file.write("\n")
    rows = cases(3)
    assert len(asked) == 3 and len(read_log(log)) == 3
    found = score_of(rows)
    assert len(found.outcomes) == 3 and found == score_of(read_log(log))
    assert all(row["alarms"][0]["hosts"] for row in rows)


def test_odds_that_were_fitted_say_how_often_it_is_right() -> None:
    random = np.random.default_rng(4)
    rows = random.standard_normal((4000, 2))
    right = random.random(4000) < 1 / (1 + np.exp(-(1 + 2 * rows[:, 0])))
    constant, weights = fit_odds(rows, right)
    assert constant == pytest.approx(1, abs=0.2) and weights == pytest.approx([2, 0], abs=0.2)
    all_right = fit_odds(rows, np.ones(4000, bool))
    assert np.isfinite([all_right[0], *all_right[1]]).all()


def test_the_script_prints_and_writes_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    words = ["--quick", "--judge", f"{__name__}:first_host", "--split", "develop", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["detect_machines.py", *words])
    main()
    (figures,) = json.loads(out.read_text())
    assert figures["healthy_alarms"] == round(figures["healthy_hours"]) > 0
    assert figures["faults"] == len(figures["outcomes"]) > 0
    shown = capsys.readouterr().out
    assert "alarms in" in shown and "| all |" in shown
