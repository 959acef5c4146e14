"""Published rows: errors do not grow, and the null model is what others found it to be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from frontier_study import in_order, shares

from phalanx.core.errors import UserError
from phalanx.plan.validate.assumptions import SETTINGS, Setting
from phalanx.plan.validate.compare import TableResult, ablation, compare
from phalanx.plan.validate.published import TABLES, read_table

LIMITS = {
    # Mean and largest absolute error; a change that makes either larger has to say why.
    "megascale_table2_megatron": (0.035, 0.085),
    "megascale_table2_megascale": (0.045, 0.085),
    "megascale_figure9_megatron": (0.08, 0.085),
    "megascale_figure9_megascale": (0.125, 0.135),
    "korthikanti_table5": (0.033, 0.06),
    "narayanan_table1": (0.040, 0.085),
    "vtrain_multi_node": (0.095, 0.55),
    "vtrain_single_node": (0.080, 0.40),
}
BY_TABLE = {setting.table: setting for setting in SETTINGS}


@pytest.fixture(scope="module")
def results() -> dict[str, TableResult]:
    return {setting.table: compare(setting, with_spread=False) for setting in SETTINGS}


@pytest.mark.parametrize("table", LIMITS)
def test_errors_do_not_grow(results: dict[str, TableResult], table: str) -> None:
    mean, largest = LIMITS[table]
    assert results[table].mean_error < mean
    assert np.abs(results[table].errors).max() < largest


def test_every_table_has_limits() -> None:
    assert set(LIMITS) == set(BY_TABLE)


def test_the_largest_run_of_megatron_lm(results: dict[str, TableResult]) -> None:
    found = {one.row.devices: one.error for one in results["megascale_table2_megatron"].compared}
    assert abs(found[12288]) < 0.05


def test_parts_of_every_published_row_sum(results: dict[str, TableResult]) -> None:
    for result in results.values():
        for one in result.compared:
            assert sum(part.seconds for part in one.prediction.parts) == pytest.approx(one.prediction.step_s)


@pytest.mark.parametrize(
    ("table", "mean", "largest"),
    [("megascale_table2_megatron", 0.0247, 0.049), ("megascale_table2_megascale", 0.0448, 0.071)],
)
def test_the_null_model_errs_as_published(
    results: dict[str, TableResult], table: str, mean: float, largest: float
) -> None:
    errors = np.abs(results[table].null_errors)
    assert errors.mean() == pytest.approx(mean, abs=0.0001)
    assert errors.max() == pytest.approx(largest, abs=0.0005)


def test_few_rows_have_no_null_model(tmp_path: Path) -> None:
    setting = BY_TABLE["korthikanti_table5"]
    lines = (TABLES / "korthikanti_table5.csv").read_text().splitlines()
    (tmp_path / "korthikanti_table5.csv").write_text("\n".join(lines[:4]))
    assert len(compare(setting, tmp_path, with_spread=False).null_errors) == 0


def test_each_gain_of_megascale_has_its_sign() -> None:
    for change in ablation()[1:]:
        assert change.gain >= 0, change.name


def test_open_choices_are_spread_over() -> None:
    setting = BY_TABLE["megascale_table2_megascale"]
    found = compare(setting)
    expected = sum(len(values) for values in setting.alternatives.values())
    assert len(found.spread) == expected
    assert len(set(found.spread.values())) > 1


def test_rows_that_set_a_number_judge_nothing() -> None:
    calibration = {row.row_id for row in read_table(TABLES / "vtrain_host_calibration.csv")}
    judged = {row.row_id for setting in SETTINGS for row in read_table(TABLES / f"{setting.table}.csv")}
    assert len(calibration) == 23
    assert not calibration & judged


def test_the_hosts_time_per_kernel_is_what_those_rows_say() -> None:
    single: Setting = replace(BY_TABLE["vtrain_single_node"], table="vtrain_host_calibration")
    errors = compare(single, with_spread=False).errors
    assert abs(errors.mean()) < 0.01
    assert np.abs(errors).max() < 0.06


def test_a_bad_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    with pytest.raises(UserError, match="no such table"):
        read_table(path)
    path.write_text("row_id,layers\nx,1\n")
    with pytest.raises(UserError, match="no column"):
        read_table(path)
    good = (TABLES / "korthikanti_table5.csv").read_text().replace("6144", "wide", 1)
    path.write_text(good)
    with pytest.raises(UserError, match="row kor-t5-22B-full: hidden = 'wide': is no such number"):
        read_table(path)


def test_frontiers_three_models_come_in_the_right_order() -> None:
    found = shares()
    assert in_order(found)
    assert not in_order([*found[:2], replace(found[2], predicted=100.0)])
