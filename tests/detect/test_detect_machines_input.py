"""Bad input of `phalanx detect machines` and `generate` is refused in one line, before memory or time is spent."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx.cli.detect_command import command
from phalanx.core.errors import UserError
from phalanx.detect.monitoring.table_files import read_table


def csv(path: Path, rows: list[str], head: str = "time,machine,gpu_power_draw,cpu_usage") -> Path:
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


ROWS = [f"{1_790_000_000 + at},h{host},{300 + host},0.{at % 9 + 1}" for at in range(40) for host in range(5)]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("0,h1,300,0.5", "has the time 0 s in row 4"),
        ("1e15,h1,300,0.5", "in row 4"),
        ("1790000000,,300,0.5", "names no machine in row 4"),
        ("1790000000,h1,lots,0.5", "column gpu_power_draw holds 'lots' in row 4"),
    ],
)
def test_the_row_that_is_odd_is_named(tmp_path: Path, row: str, words: str) -> None:
    path = csv(tmp_path / "a.csv", [*ROWS[:3], row, *ROWS[3:]])
    with pytest.raises(UserError) as told:
        read_table(path)
    assert words in str(told.value)


def test_cells_that_stand_for_no_value_are_missing(tmp_path: Path) -> None:
    rows = [*ROWS[:3], "1790000000,h3,N/A,n/a", *ROWS[4:]]
    table = read_table(csv(tmp_path / "a.csv", rows))
    assert set(table.metrics) == {"gpu_power_draw", "cpu_usage"}


def test_a_header_alone_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no rows below it"):
        read_table(csv(tmp_path / "a.csv", []))


def test_rows_that_are_written_twice_count_once(tmp_path: Path) -> None:
    table = read_table(csv(tmp_path / "a.csv", [*ROWS, *ROWS]))
    assert table.period_s == 1 and table.samples == 40
    once = read_table(csv(tmp_path / "b.csv", ROWS))
    assert (table.values == once.values).all() and table.metrics == once.metrics


def test_rows_of_one_moment_that_hold_a_metric_each_are_one_sample(tmp_path: Path) -> None:
    rows = [part for row in ROWS for part in (row.rsplit(",", 1)[0] + ",", ",".join(row.split(",")[:2]) + ",,0.5")]
    table = read_table(csv(tmp_path / "a.csv", rows))
    assert table.samples == 40 and (table.of("cpu_usage") == 0.5).all() and table.of("gpu_power_draw")[3, 0] == 303


@pytest.mark.parametrize("apart_s", [0.01, 0.15])
def test_two_servers_that_scrape_the_same_hosts_are_read_by_seconds(tmp_path: Path, apart_s: float) -> None:
    later = [row.replace(row.split(",")[0], f"{float(row.split(',')[0]) + apart_s:.2f}", 1) for row in ROWS]
    table = read_table(csv(tmp_path / "a.csv", [*ROWS, *later]))
    assert table.period_s == 1 and table.samples == 40


def test_samples_of_tenths_of_a_second_stay(tmp_path: Path) -> None:
    rows = [
        f"{1_790_000_000 + at / 10:.1f},h{host},{300 + host},0.{at % 9 + 1}" for at in range(40) for host in range(5)
    ]
    assert read_table(csv(tmp_path / "a.csv", [*rows, rows[3]])).period_s == pytest.approx(0.1)


def test_a_table_that_would_be_nearly_empty_is_refused_with_its_size(tmp_path: Path) -> None:
    rows = [f"{1_790_000_000 + at / 1000:.3f},h{host},300,0.5" for at in range(9) for host in range(5)]
    rows += [f"{1_790_020_000 + at / 1000:.3f},h{host},300,0.5" for at in range(9) for host in range(5)]
    with pytest.raises(UserError, match=r"would be a table of .* cells, one every 0\.001 s"):
        read_table(csv(tmp_path / "a.csv", rows))


def test_hosts_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    path = csv(tmp_path / "a.csv", ROWS)
    shown = CliRunner().invoke(command, ["machines", str(path), "--hosts", "h0,h1,h2,hX"])
    assert isinstance(shown.exception, UserError) and "hX" in str(shown.exception)


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "x", "--minutes", "nan"],
        ["generate", "x", "--first", "9" * 23],
        ["machines", "x", "--minutes", "nan"],
    ],
)
def test_numbers_that_are_none_are_refused(words: list[str]) -> None:
    assert CliRunner().invoke(command, words).exit_code == 2


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    shown = CliRunner().invoke(command, ["generate", str(tmp_path / "file" / "below")])
    assert isinstance(shown.exception, UserError) and "cannot be made" in str(shown.exception)
