"""Workers with torch are forked from the process that forks the tiny runs of the trainer's tests, too."""

from __future__ import annotations

import pytest
from train_helpers import Commands


@pytest.fixture(scope="session")
def commands() -> Commands:
    return Commands()
