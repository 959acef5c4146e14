"""`phalanx trace` in a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from phalanx.cli.main import group
from phalanx.core.errors import UserError
from phalanx.telemetry.lost_telemetry import note_dropped
from phalanx.telemetry.span_writer import note_incident
from tests.telemetry.trace_runs import GROUPS, four_ranks, write_run


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(group, ["trace", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    write_run(folder, four_ranks(slow={3: 1.5}), GROUPS)
    return folder


def test_summary_says_where_a_step_went(folder: Path) -> None:
    told = run("summary", folder)
    assert told.exit_code == 0, told.output
    for words in ("steps 0 to 5 (6), 4 ranks on 2 hosts", "exposed communication", "bubble", "launch skew", "rank 3"):
        assert words in told.output
    found = json.loads(run("summary", folder, "--steps", "2:3", "--json").output)
    assert (found["first_step"], found["last_step"], found["ranks"]) == (2, 3, 4)


def test_slow_abstains_or_names_the_rank(folder: Path) -> None:
    told = run("slow", folder, "--most", "2")
    assert told.output.startswith("no verdict: stage 0 has 2 ranks") and told.output.count("\n") >= 4
    assert json.loads(run("slow", folder, "--json").output)["ranks"][0]["rank"] == 3


def test_compare_shows_both(folder: Path, tmp_path: Path) -> None:
    write_run(tmp_path, four_ranks(), GROUPS)
    told = run("compare", folder, tmp_path)
    assert "step (slowest rank)" in told.output and "waiting: pipeline" in told.output
    assert json.loads(run("compare", folder, tmp_path, "--json").output)["step_s"]["steps"] == [6, 6]


def test_export_writes_one_file_or_one_for_each_rank(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    told = run("export", folder, path, "--steps", "1", "--ranks", "0-1,3", "--groups", "pipeline")
    assert told.output == f"{3 * 7} spans: {path}\n" and len(json.loads(path.read_text())["traceEvents"]) > 20
    assert run("export", folder, tmp_path / "ranks", "--per-rank").output.startswith("4 ranks")
    assert run("import", tmp_path / "ranks", tmp_path / "again").output.startswith("kineto: ")
    with pytest.raises(UserError, match="telemetry already"):
        run("import", tmp_path / "ranks", tmp_path / "again")


def test_sql_prints_rows(folder: Path) -> None:
    told = run("sql", folder, "select kind, count(*) as n from spans group by kind order by kind", "--most", "3")
    assert told.output.splitlines()[0].split() == ["kind", "n"] and "more rows" in told.output
    assert json.loads(run("sql", folder, "select 1 as one", "--json").output)["rows"] == [{"one": 1}]
    with pytest.raises(UserError, match="tables: spans"):
        run("sql", folder, "select * from nothing")


def test_names_give_no_orders_to_the_terminal(tmp_path: Path) -> None:
    write_run(tmp_path, [one | {"name": "\x1b[31mred\x07"} for one in four_ranks(1)])
    told = run("sql", tmp_path, "select distinct name, 'a\nb' as \"\x1b[0m\" from spans")
    assert "\x1b" not in told.output and "\x07" not in told.output
    assert "\\x1b[31mred\\x07" in told.output
    note_incident(tmp_path / "telemetry", "\x1b[2Jgone", 5)
    assert "\x1b" not in (summary := run("summary", tmp_path).output) and "\\x1b[2Jgone" in summary


def test_what_is_lost_is_said_beside_every_answer(tmp_path: Path) -> None:
    write_run(tmp_path, four_ranks(), GROUPS)
    telemetry = tmp_path / "telemetry"
    damaged = next((telemetry / "spans/host0").glob("*.parquet"))
    damaged.write_bytes(damaged.read_bytes()[:-30])
    note_dropped(telemetry, "host1", 934_474)
    for arguments in (
        ("summary", tmp_path),
        ("slow", tmp_path),
        ("sql", tmp_path, "select 1"),
        ("compare", *2 * [tmp_path]),
    ):
        told = run(*arguments)
        assert told.exit_code == 0 and "934,474 spans" in told.output and str(damaged) in told.output, told.output
    for name in ("summary", "slow"):
        found = json.loads(run(name, tmp_path, "--json").output)
        assert found["damaged_files"] == [str(damaged)] and found["spans_dropped"] == {"host1": 934_474}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["summary", "{}", "--steps", "a:b"], "no range of steps"),
        (["summary", "{}", "--steps", "9:3"], "ends before it begins"),
        (["export", "{}", "t.json", "--ranks", "x"], "no ranks"),
        (["export", "{}", "/no/such/t.json"], "cannot be written"),
    ],
)
def test_bad_options_are_refused(folder: Path, arguments: list[str], problem: str) -> None:
    told = run(*(one.replace("{}", str(folder)) for one in arguments))
    assert told.exit_code == 2 and problem in told.output
