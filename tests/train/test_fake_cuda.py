"""Training on a GPU as far as a machine without one can tell: nothing mixes devices, or waits to read a value back."""

from __future__ import annotations

import shutil
from pathlib import Path

import fake_cuda
import pytest
import torch


@pytest.fixture(scope="module", name="problems")
def problems_fixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong, by case; one process for all, since it begins with importing torch."""
    compiler, has_cuda = shutil.which("c++") or shutil.which("g++"), torch.version.cuda is not None
    if compiler is None and not has_cuda:
        pytest.skip("needs a C++ compiler, or torch built for CUDA")
    folder = tmp_path_factory.mktemp("fake-cuda")
    return fake_cuda.start(folder, compiler or "", Path(torch.__file__).parent, has_cuda=has_cuda)


@pytest.mark.slow
@pytest.mark.parametrize("case", fake_cuda.CASES)
def test_nothing_mixes_devices(problems: dict[str, str], case: str) -> None:
    assert problems[case] == ""
