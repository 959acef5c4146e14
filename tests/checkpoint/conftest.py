from __future__ import annotations

import pytest
from checkpoint_helpers import make_tensors
from torch import Tensor


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return make_tensors()
