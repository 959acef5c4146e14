"""Fixtures of the trainer's tests."""

from __future__ import annotations

import pytest
from train_helpers import Commands


@pytest.fixture(scope="session")
def commands() -> Commands:
    return Commands()


@pytest.fixture
def no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process do not measure the device, which takes a quarter of a second each."""
    monkeypatch.setattr("phalanx.train.assemble.measure_peak", lambda _device: None)
