"""Atomic writes, readable numbers and the table of peaks."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.core.files import atomic_writer, write_json
from phalanx.core.hardware import table_peak


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(RuntimeError, match="half way"), atomic_writer(path) as file:
        file.write(b"half")
        raise RuntimeError("half way")
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_the_new_file_has_ordinary_permissions(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", 1)
    (tmp_path / "plain").touch()
    assert stat.S_IMODE((tmp_path / "x.json").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (999, "999"), (1234, "1.23k"), (124_439_808, "124M"), (8.03e9, "8.03B"), (0.5, "0.5")]
)
def test_counts(value: float, text: str) -> None:
    assert units.count(value) == text


@pytest.mark.parametrize(("value", "text"), [(512, "512 B"), (1536, "1.50 KiB"), (3 * 2**40, "3.00 TiB")])
def test_sizes(value: int, text: str) -> None:
    assert units.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.012, "12ms"), (5.25, "5.2s"), (75, "1m15s"), (119.6, "2m00s"), (4000, "1h06m"), (90_000, "1d01h")],
)
def test_durations(value: float, text: str) -> None:
    assert units.duration(value) == text


def test_user_errors_are_one_line_with_field_value_and_cure() -> None:
    assert str(UserError("is bad", cure="mend it", field="a.b", value=3)) == "a.b = 3: is bad; mend it"
    assert str(UserError("is bad", cure="mend it")) == "is bad; mend it"
    assert str(UserError("is bad", cure="mend it", value="x")) == "'x': is bad; mend it"


def test_known_and_unknown_devices() -> None:
    h100 = table_peak("NVIDIA H100 80GB HBM3", bf16=True)
    assert h100 is not None
    assert h100.flops_per_s == 989e12
    pcie = table_peak("NVIDIA H100 PCIe", bf16=True)
    assert pcie is not None
    assert pcie.flops_per_s == 756e12
    assert table_peak("NVIDIA Z9000", bf16=True) is None
