"""Training on a GPU as far as a machine without one can tell: nothing mixes devices, or waits to read a value back."""

from __future__ import annotations

import shutil
from pathlib import Path

import fake_cuda
import pytest
import torch


@pytest.fixture(scope="module", name="problems")
def problems_fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong, by case; one process for all that are run, since it begins with importing torch."""
    compiler, has_cuda = shutil.which("c++") or shutil.which("g++"), torch.version.cuda is not None
    if compiler is None and not has_cuda:
        pytest.skip("needs a C++ compiler, or torch built for CUDA")
    folder = tmp_path_factory.mktemp("fake-cuda")
    cases = [item.callspec.params["case"] for item in request.session.items if item.parent is request.node]
    return fake_cuda.start(folder, compiler or "", Path(torch.__file__).parent, cases, has_cuda=has_cuda)


# Others are like one of these, with more layers compiled, another kernel or another axis.
HERE = (
    "adamw, dropout, documents",
    "adamw, states of 8 bits",
    "lamb, learned positions",
    "came, windows, documents",
    "muon, dropped attention",
    "selective recompute",
    "offload, full recompute",
    "compiled, learned positions, recompute",
    "cudnn, selective recompute",
    "flash, learned positions",
    "flex where all is plain",
    "efficient",
    "ring of blocks",
    "decoding",
    "engine",
    "products in 8 bits, biases",
    "counters",
    "zero 3, replicate",
    "tensor, chunked, parallel block",
    "zbv, zero 3",
    "ring",
)


@pytest.mark.campaign(but=HERE)
@pytest.mark.slow
@pytest.mark.parametrize("case", fake_cuda.CASES)
def test_nothing_mixes_devices(problems: dict[str, str], case: str) -> None:
    assert problems[case] == ""
