from __future__ import annotations

from collections.abc import Iterator

import pytest
from checkpoint_helpers import make_tensors
from foreign_forks import Forks
from torch import Tensor


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return make_tensors()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()
