"""Fixtures of the trainer's tests."""

from __future__ import annotations

import pytest
from train_helpers import Commands


@pytest.fixture(scope="session")
def commands() -> Commands:
    return Commands()
