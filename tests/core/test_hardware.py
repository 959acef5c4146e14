"""The best rate that a host has shown, which counts more than what is measured beside other work."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from phalanx.core.hardware import Peak, best_peak


def test_a_rate_that_is_measured_under_load_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert best_peak(Peak(5e11, "measured"), "cpu, fp32", environ) == Peak(5e11, "measured")
    low = best_peak(Peak(3e10, "measured"), "cpu, fp32", environ)
    assert low.flops_per_s == 5e11 and "the best that this host has shown (6% of it now" in low.source
    assert best_peak(Peak(4.9e11, "measured"), "cpu, fp32", environ).source.endswith("this host has shown")
    assert best_peak(Peak(6e11, "measured"), "cpu, fp32", environ).flops_per_s == 6e11
    assert best_peak(Peak(1.0, "measured"), "cpu, fp32", environ).flops_per_s == 6e11
    assert best_peak(Peak(3e10, "measured"), "cpu, bf16", environ).flops_per_s == 3e10  # another one
    (kept,) = (tmp_path / "phalanx" / "peaks").glob("*.json")
    assert json.loads(kept.read_text()) == {"cpu, fp32": 6e11, "cpu, bf16": 3e10}
    kept.write_text("[broken")
    assert best_peak(Peak(2.0, "measured"), "cpu, fp32", environ).flops_per_s == 2.0


def test_a_first_rate_under_load_is_doubtful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 0.0, 0.0))
    (tmp_path / "file").touch()
    for environ in ({"XDG_CACHE_HOME": str(tmp_path)}, {"XDG_CACHE_HOME": str(tmp_path / "file")}, {}):
        found = best_peak(Peak(3e10, "measured"), "cpu", environ)
        assert found.flops_per_s == 3e10 and "doubtful" in found.source
