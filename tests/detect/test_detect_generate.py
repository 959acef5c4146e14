"""`phalanx detect generate`: files that other judges can be tried on."""

from __future__ import annotations

import json
from pathlib import Path

import doc_outputs
from click.testing import CliRunner

from phalanx.cli.detect_command import command
from phalanx.core.errors import UserError
from phalanx.detect.monitoring.job_scenarios import drawn_classes
from phalanx.detect.monitoring.metric_catalogue import CATALOGUE, DETECTED
from phalanx.detect.monitoring.metric_sources import read_metrics


def test_tables_and_labels_of_the_same_cases(tmp_path: Path) -> None:
    out = tmp_path / "cases"
    words = ["generate", str(out), "--cases", "2", "--machines", "8", "--minutes", "2", "--metrics", "all"]
    shown = CliRunner().invoke(command, words)
    assert shown.exit_code == 0, shown.output
    cases = json.loads((out / "labels.json").read_text())["cases"]
    assert len(cases) == 2 and len(shown.output.splitlines()) == 2
    assert [case["faults"][0]["fault"] for case in cases] == drawn_classes("develop", 2)
    for case in cases:
        table = read_metrics(str(out / f"{case['case']}.parquet"))
        assert table.metrics == tuple(CATALOGUE) and len(table.machines) == 8 and table.samples == 120
        assert set(case["faults"][0]["machines"]) <= set(table.machines)
        assert table.start_s <= case["faults"][0]["start_unix_s"] <= table.start_s + 120


def test_the_page_shows_what_the_command_prints(tmp_path: Path) -> None:
    text = (doc_outputs.ROOT / "docs" / "detect_data.md").read_text()
    now = doc_outputs.written(text, tmp_path)
    assert now == text, "write it again: in a new folder, run the command of the page"


def test_healthy_ones_and_backfills_on_request(tmp_path: Path) -> None:
    out = tmp_path / "cases"
    words = ["generate", str(out), "--fault", "none", "--machines", "4", "--minutes", "1", "--openmetrics", "--json"]
    shown = CliRunner().invoke(command, words)
    assert shown.exit_code == 0, shown.output
    (case,) = json.loads(shown.output)["cases"]
    assert case["faults"] == []
    text = (out / f"{case['case']}.om").read_text()
    assert text.endswith("# EOF\n") and 'DCGM_FI_DEV_GPU_UTIL{instance="host-0003:9100",job="simulated"}' in text
    assert read_metrics(str(out / f"{case['case']}.parquet")).metrics == tuple(
        name for name in CATALOGUE if name in DETECTED
    )


def test_what_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    out = [str(tmp_path / name) for name in ("full", "a", "b")]
    wrong = ([out[0]], [out[1], "--fault", "rust"], [out[2], "--metrics", "x"])
    for words in wrong:
        shown = CliRunner().invoke(command, ["generate", *words])
        assert isinstance(shown.exception, UserError), words
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()
