"""`phalanx plan validate`: every row of every table, its error, the null model beside it, and what was assumed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from phalanx.cli.plan import command as plan
from phalanx.core.errors import UserError
from phalanx.plan.validate.rows import TABLES, read_table


def _validate(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(plan, ["validate", *arguments])


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Two of the tables, one of them long."""
    folder = tmp_path / "tables"
    folder.mkdir()
    for name in ("korthikanti_table5", "vtrain_multi_node"):
        shutil.copy(TABLES / f"{name}.csv", folder)
    return folder


def test_every_row_is_there_and_means_are_means(tables: Path) -> None:
    told = json.loads(_validate("--tables", str(tables), "--no-spread", "--json").output)
    assert [table["table"] for table in told["tables"]] == ["korthikanti_table5", "vtrain_multi_node"]
    for table in told["tables"]:
        rows = read_table(tables / f"{table['table']}.csv")
        assert [(row["row_id"], row["measured_s"]) for row in table["rows"]] == [(r.row_id, r.step_s) for r in rows]
        errors = [row["predicted_s"] / row["measured_s"] - 1 for row in table["rows"]]
        assert table["mean_error_ratio"] == pytest.approx(sum(map(abs, errors)) / len(errors))
        assert table["max_error_ratio"] == pytest.approx(max(map(abs, errors)))


def test_of_long_tables_the_worst_rows_are_shown(tables: Path) -> None:
    short, whole = _validate("--tables", str(tables)), _validate("--tables", str(tables), "--rows", "--no-spread")
    shown = re.findall(r"^vtrain-multi-\d+ .*? ([+-][\d.]+) % ", short.output, flags=re.MULTILINE)
    every = re.findall(r"^vtrain-multi-\d+ .*? ([+-][\d.]+) % ", whole.output, flags=re.MULTILINE)
    assert len(every) == len(read_table(tables / "vtrain_multi_node.csv")) > len(shown) == 12
    left_out = sorted(map(abs, map(float, every)))[:-12]
    assert min(abs(float(error)) for error in shown) >= left_out[-1]
    assert "with other choices: sequence_parallel = True: " in short.output
    assert "with other choices" not in whole.output


def test_a_page_has_a_table_that_opens_for_each_of_them(tables: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert _validate("--tables", str(tables), "--html", str(file)).exit_code == 0
    page = file.read_text()
    assert re.findall(r"<summary>([^:<]*): mean", page) == ["Korthikanti et al., table 5", "vTrain, several hosts"]
    opened = page.partition("<details>")[2]
    assert [opened.count(f">{row.row_id}<") for row in read_table(tables / "korthikanti_table5.csv")] == [1] * 9
    assert len(re.findall(r">vtrain-multi-\d+<", opened)) == 12
    figures = json.loads(re.findall(r"^const figures = (.*);$", page, flags=re.MULTILINE)[0])
    points = {trace["name"]: len(trace["x"]) for trace in figures["errors"]["data"]}
    assert points == {"Korthikanti et al., table 5": 9, "vTrain, several hosts": 54}


@pytest.mark.slow
def test_all_tables_and_the_ablation_are_told_and_written(tmp_path: Path) -> None:
    done = _validate("--no-spread", "--html", str(tmp_path / "page.html"))
    assert done.exit_code == 0
    assert re.search(r"^MegaScale, table 2: Megatron-LM +8 +[\d.]+ % ", done.output, flags=re.MULTILINE)
    assert re.search(r"^LAMB, batch of 768 +[\d.]+ +[+-][\d.]+ +65\.3 +\+3\.0$", done.output, flags=re.MULTILINE)
    assert 'id="errors"' in (tmp_path / "page.html").read_text()


def test_a_folder_without_tables_is_refused(tmp_path: Path) -> None:
    error = _validate("--tables", str(tmp_path)).exception
    assert isinstance(error, UserError) and "no table in it has known settings" in str(error)
