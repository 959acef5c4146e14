"""Atomic writes, readable numbers and the table of peaks."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from support.odd_files import ODD_FILES

from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.core.files import OddFileError, atomic_writer, open_regular, read_regular, write_json
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
    for value, shown in (
        (Path("a/b.toml"), "'a/b.toml'"),
        (np.float64(1.5), "1.5"),
        ([Path("a"), np.int64(3)], "['a', 3]"),
        ({"x": (np.float32(0.5),)}, "{'x': (0.5,)}"),
    ):
        assert str(UserError("is bad", cure="mend it", value=value)) == f"{shown}: is bad; mend it"


def test_known_and_unknown_devices() -> None:
    h100 = table_peak("NVIDIA H100 80GB HBM3", bf16=True)
    assert h100 is not None
    assert h100.flops_per_s == 989e12
    pcie = table_peak("NVIDIA H100 PCIe", bf16=True)
    assert pcie is not None
    assert pcie.flops_per_s == 756e12
    assert table_peak("NVIDIA Z9000", bf16=True) is None


@pytest.mark.parametrize("kind", ODD_FILES)
@pytest.mark.timeout(30)
def test_what_is_no_file_or_too_large_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    make, words = ODD_FILES[kind]
    make(tmp_path / "x")
    with pytest.raises(OddFileError, match=words) as refused:
        read_regular(tmp_path / "x", 1 << 20)
    assert refused.value.filename == str(tmp_path / "x")
    if kind != "40 GB":
        with pytest.raises(OddFileError, match=words):
            open_regular(tmp_path / "x")


def test_a_regular_file_is_read_through_links_too(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("x")
    assert read_regular(tmp_path / "link", 5) == b"12345"
    with pytest.raises(OddFileError, match="5 bytes, more than the 4 "):
        read_regular(tmp_path / "x", 4)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "y", 5)
    with open_regular(tmp_path / "x") as file:
        file.seek(3)
        assert file.read() == b"45" and os.get_blocking(file.fileno())


def test_a_file_that_comes_while_it_is_asked_for_was_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As results of other ranks do, which are published by a rename."""

    def open_early(path: Path, *_: object) -> int:
        path.write_bytes(b"1")
        raise FileNotFoundError(errno.ENOENT, "nothing", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("phalanx.core.files.os.open", open_early)
        with pytest.raises(FileNotFoundError) as missed:
            open_regular(tmp_path / "x")
    assert not isinstance(missed.value, OddFileError)
    assert read_regular(tmp_path / "x", 1) == b"1"
