"""Runs whose folders have odd names: they cost nobody else the table, and no order of theirs reaches a terminal."""

from __future__ import annotations

import os
import shutil
import urllib.parse
from pathlib import Path

import pytest
from click.testing import CliRunner
from dashboard_helpers import client_of, make_run

from phalanx.cli.main import group

LONG = "L" * 100 + "M" * 50 + "N" * 100
NAMES = (b"bad\xff\xfeutf", b"esc\x1b[31mred", b"new\nline", LONG.encode())


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    made = make_run(tmp_path / "made")
    for name in NAMES:
        shutil.copytree(made, os.fsdecode(os.fsencode(tmp_path / "runs") + b"/" + name))
    return tmp_path / "runs"


def ask(*arguments: str | Path) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(group, list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.output


@pytest.mark.parametrize("command", ["runs", "status"])
def test_each_run_is_one_line_of_bounded_width(runs: Path, command: str) -> None:
    lines = ask(command, runs).splitlines()
    assert len(lines) == 1 + len(NAMES) and "\x1b" not in "".join(lines)
    starts = {line.split("  ")[0] for line in lines[1:]}
    assert {r"bad\xff\xfeutf", r"esc\x1b[31mred", r"new\nline"} < starts
    (short,) = (start for start in starts if start.startswith("L"))
    assert len(short) == 64 and "…" in short and short.endswith("N")


def test_status_of_one_run_gives_the_terminal_no_orders(runs: Path) -> None:
    said = ask("status", runs / "esc\x1b[31mred")
    assert said.startswith(r"esc\x1b[31mred  finished") and "\x1b" not in said


def test_the_dashboard_shows_and_links_a_name_that_is_not_utf8(runs: Path) -> None:
    client = client_of(runs)
    page = client.get("/")
    assert page.status_code == 200 and r"bad\xff\xfeutf" in page.text
    link = "/run?" + urllib.parse.urlencode({"run": r"bad\xff\xfeutf"})
    assert link in page.text
    shown = client.get(link)
    assert shown.status_code == 200 and r"bad\xff\xfeutf" in shown.text


def test_questions_to_spans_say_what_to_do(runs: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(runs) + b"/" + NAMES[0]))
    (folder / "telemetry" / "steps").mkdir(parents=True)
    result = CliRunner().invoke(group, ["trace", "summary", str(folder)])
    assert "is not UTF-8" in str(result.exception) and "rename the folder" in str(result.exception)
