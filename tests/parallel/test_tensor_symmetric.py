"""torch's fused operators: what this project relies on, against plain collectives and products."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ThreadGroups, run_ranks
from torch import Tensor
from torch.distributed import HashStore
from torch.distributed import _symmetric_memory as symmetric_memory

from phalanx.core.errors import UserError
from phalanx.core.layout import Layout
from phalanx.parallel import backends
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.tensor.overlap import Overlap, PlainOverlap
from phalanx.parallel.tensor.spread import make_overlap
from phalanx.parallel.tensor.symmetric import SymmetricOverlap

ROWS, INPUTS, WIDTHS = 8, 16, (24, 32)


def everything(overlap: Overlap, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What each function of a back end gives for inputs that depend on the rank."""
    group = overlap.group
    generator = torch.Generator().manual_seed(group.index)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    rows, tokens = random(ROWS, INPUTS), ROWS * group.size
    matrices = [random(width, INPUTS).t() for width in WIDTHS]
    gathered, products = overlap.gather_products(rows, matrices, [random(WIDTHS[0]), None])
    inputs = [random(tokens, width) for width in WIDTHS]
    backward = [matrix.t() for matrix in matrices]
    one = overlap.products_scatter(inputs[:1], backward[:1]).wait()
    both = overlap.products_scatter(inputs, backward).wait()
    return [overlap.gather(rows).wait(), gathered, *products, one, both]


@pytest.fixture
def unfused_on_cpu() -> Iterator[None]:
    """torch's own statement of what its operators compute, which it has for shapes alone, as their CPU form."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("unfused_on_cpu")
def test_the_fused_operators_stand_for_the_plain_functions() -> None:
    def body(groups: ThreadGroups) -> tuple[list[Tensor], list[Tensor], dict[str, int], dict[str, int]]:
        group = groups.group("tensor")
        name = f"symmetric-{group.index}"
        known = backends.register(group.backend, HashStore(), group.ranks, name, torch.device("cpu"))
        fused, fused_bytes = everything(SymmetricOverlap(group, name)), dict(group.traffic.sent_bytes)
        backends.unregister(known)
        group.traffic.sent_bytes.clear()
        plain = everything(PlainOverlap(group))
        return fused, plain, fused_bytes, group.traffic.sent_bytes

    for fused, plain, fused_bytes, plain_bytes in run_ranks(Layout(tensor=2), body):
        for got, expected in itertools.zip_longest(fused, plain):
            torch.testing.assert_close(got, expected)
        assert fused_bytes == plain_bytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(UserError, match=r"tensor_overlap = 'symmetric': needs GPUs.*no CUDA device.*'chunked'"):
        make_overlap("symmetric", Group(range(2), 0, None), 4, lambda group: "name")


def on_a_gpu(rank: int, folder: str) -> None:
    """One of two GPUs: fused equals plain, in bf16."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store: Any = torch.distributed.FileStore(f"{folder}/store", 2)
    mesh = Mesh(Layout(tensor=2), rank, store, device)
    group = mesh.group("tensor")
    fused = everything(make_overlap("symmetric", group, 4, mesh.registered), "cuda", torch.bfloat16)
    plain = everything(PlainOverlap(group), "cuda", torch.bfloat16)
    chunked = everything(make_overlap("chunked", group, 3), "cuda", torch.bfloat16)
    for got, also, expected in zip(fused, chunked, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(also, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices joined by NVLink")
def test_two_gpus_fused_and_chunked(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(on_a_gpu, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
