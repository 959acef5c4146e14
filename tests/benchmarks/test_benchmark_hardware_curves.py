"""The script that makes the curves of GPUs finds known constants again, and the files hold what it finds."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.tile_fit import Chip, Products, corrected, errors, fitted, model

from phalanx.plan.hardware import load_device

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data" / "hardware" / "aiconfigurator"
CHIP = Chip("made up", 64, 100e12, 1e12)


def _products(gemm_s: object, count: int) -> Products:
    random = np.random.default_rng(3)
    m, n, k = (np.round(2 ** random.uniform(7, 13, count)) for _ in range(3))
    return Products(m, n, k, gemm_s(m, n, k, alone=True))  # type: ignore[operator]


def test_constants_that_made_the_times_are_found_again() -> None:
    known = model(CHIP, (0.9, 0.8, 0.7, 0.6, 0.5, 150, 0.4, 2e-6, 0.8, 5, 1, 0.1))
    found = fitted(CHIP, _products(known.seconds, 1500), rounds=10)
    held = _products(known.seconds, 400)
    assert np.abs(errors(found, held)).mean() < 0.015
    assert abs(errors(found, held).mean()) < 0.005


def test_a_correction_takes_a_smooth_bias_away() -> None:
    known = model(CHIP, (0.9, 0.8, 0.7, 0.6, 0.5, 150, 0.4, 2e-6, 0.8, 5, 1, 0.1))

    def slower(m: np.ndarray, n: np.ndarray, k: np.ndarray, alone: bool) -> np.ndarray:
        return known.seconds(m, n, k, alone=alone) * (k / 1000) ** 0.1

    products, held = _products(slower, 3000), _products(slower, 500)
    assert np.abs(errors(known, held)).mean() > 0.05
    assert np.abs(errors(corrected(known, products), held)).mean() < 0.01


@pytest.mark.skipif(not DATA.exists(), reason=f"the measured kernels are not at {DATA}")
def test_errors_are_stated_for_products_that_were_held_out() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "hardware_curves.py"), "--quick", "--data", str(DATA)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    rows = [line for line in shown.splitlines() if "all from 1 GFLOP on" in line]
    assert len(rows) == 2  # a random third, and six widths
    for row in rows:
        mean = float(row.split("%")[2])
        assert 2 < mean < 7
    assert "all_reduce, 8 ranks" in shown


@pytest.mark.skipif(not DATA.exists(), reason=f"the measured kernels are not at {DATA}")
@pytest.mark.parametrize(("device", "most"), [("a100_sxm", 0.05), ("h100_sxm", 0.07), ("h200_sxm", 0.07)])
def test_files_as_they_are_agree_with_all_measured_products(device: str, most: float) -> None:
    from hardware_curves import CHIPS, read_products

    gemm = load_device(CHIPS[device].name).gemms["half"]
    products = read_products(DATA / f"{device}_gemm.parquet")
    error = errors(gemm, products)[products.counted]  # type: ignore[arg-type]
    assert np.abs(error).mean() < most
    assert abs(error.mean()) < 0.015


def test_without_data_it_says_where_to_give_it(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "hardware_curves.py"), "--data", str(tmp_path / "absent")]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert shown.returncode
    assert "give the folder of the Parquet files with --data" in shown.stderr
