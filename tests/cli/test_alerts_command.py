"""`phalanx alerts`, as a person gives it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from phalanx.cli.main import group
from phalanx.telemetry.alerts.alert_episodes import AlertLog, Subject
from phalanx.telemetry.alerts.alert_rules import Verdict

CONFIG = '[train]\nsteps = 1\n[[data.sources]]\nkind = "text"\npath = "x"\n'


def run(*words: str) -> Result:
    return CliRunner().invoke(group, ["alerts", *words], env={"COLUMNS": "200"})


@pytest.fixture(name="config")
def config_fixture(tmp_path: Path) -> Path:
    path = tmp_path / "night.toml"
    path.write_text(CONFIG)
    return path


def test_a_test_message_reaches_who_is_named(config: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    done = run("test", str(config), f'alerts.command=["tee", "{kept}"]')
    assert done.exit_code == 0, done.output
    assert done.output == "command tee: delivered\n"
    sent = json.loads(kept.read_text())
    assert sent["run"] == "night"
    assert "test" in sent["title"]
    assert not (tmp_path / "runs").exists()


def test_who_does_not_take_it_is_named_without_secrets(config: Path) -> None:
    done = run("test", str(config), "alerts.webhook=http://127.0.0.1:9/SECRET", 'alerts.command=["false"]')
    assert "command false: exit status 1" in done.output
    assert "http://127.0.0.1/*****: " in done.output
    assert "SECRET" not in done.output


def test_a_config_without_receivers_is_refused(config: Path) -> None:
    done = run("test", str(config))
    assert done.exit_code != 0
    assert "names nobody" in str(done.exception)


def test_alerts_of_a_run_are_listed(tmp_path: Path) -> None:
    log = AlertLog(tmp_path)
    verdict = Verdict("firing", "the loss is nan at step 1200", {"step": 1200})
    alert = Subject("night", tmp_path, "node7").alert(1, "not_finite", verdict, 1.8e9)
    log.raised(alert)
    log.delivered(alert.to_json(), "command tee", "")
    log.delivered(alert.to_json(), "http://x/*****", "status 500")
    with (tmp_path / "alerts" / "alerts.jsonl").open("a") as file:
        file.write('{"event": "delivered", "number": 9}\n{"torn')
    output = run("list", str(tmp_path)).output
    for part in ("not_finite", "1,200", "the loss is nan at step 1200", "command tee", "(status 500)"):
        assert part in output
    (found,) = json.loads(run("list", str(tmp_path), "--json").output)
    assert found["evidence"] == {"step": 1200}
    assert [each.get("problem") for each in found["sent"]] == [None, "status 500"]


def test_a_run_without_alerts_and_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert run("list", str(tmp_path)).output == "nothing was reported\n"
    assert "is no folder" in str(run("list", str(tmp_path / "none")).exception)


def test_rules_and_board_are_printed_whole() -> None:
    assert yaml.safe_load(run("rules").output)["groups"][0]["name"] == "phalanx"
    assert json.loads(run("board").output)["uid"] == "phalanx"
