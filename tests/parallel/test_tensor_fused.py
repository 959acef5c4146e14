"""Fused collectives and products: torch's operators against plain ones, with gradients, and when they are chosen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ThreadGroups, run_ranks
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.distributed import _symmetric_memory as symmetric_memory

from phalanx.core.errors import UserError
from phalanx.core.layout import Layout
from phalanx.ipc.tree_peers import TreePeers
from phalanx.launch.environment import Worker
from phalanx.launch.local_ranks import launch_local
from phalanx.parallel import process_groups
from phalanx.parallel.config import ParallelConfig, TensorOverlap
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.tensor.fused import (
    SHARED_DEVICE,
    FusedOverlap,
    Reach,
    Seat,
    choose_overlap,
    chosen,
    obstacle_to_sharing,
)
from phalanx.parallel.tensor.overlap import Overlap
from phalanx.parallel.tensor.parallel_linear import Spread, gather_products, products_scatter
from phalanx.parallel.tensor.tensor_parallel import make_overlap
from phalanx.parallel.tensor.tiles import TilesOverlap

ROWS, INPUTS, WIDTHS = 40, 16, (24, 32)


def random_of(rank: int, device: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Makes tensors whose numbers depend on the rank and not on the device: few bits, so that bf16 holds them."""
    generator = torch.Generator().manual_seed(rank)

    def random(*shape: int) -> Tensor:
        return torch.randint(-8, 9, shape, generator=generator).div(8).to(device, dtype)

    return random


def functions(overlap: Overlap, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What each function of a back end gives."""
    random = random_of(overlap.group.index, device, dtype)
    rows, tokens = random(ROWS, INPUTS), ROWS * overlap.group.size
    matrices = [random(width, INPUTS).t() for width in WIDTHS]
    gathered, products = overlap.gather_products(rows, matrices, [random(WIDTHS[0]), None])
    inputs = [random(tokens, width) for width in WIDTHS]
    backward = [matrix.t() for matrix in matrices]
    one = overlap.products_scatter(inputs[:1], backward[:1]).wait()
    both = overlap.products_scatter(inputs, backward).wait()
    return [overlap.gather(rows).wait(), gathered, *products, one, both]


def gradients(overlap: Overlap, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What projections give, and their gradients: two of one gather, and two of one scatter."""
    random = random_of(overlap.group.index + 10, device, dtype)
    spread = Spread(overlap, dtype)
    x = random(INPUTS, ROWS).t().requires_grad_()  # rows that do not lie one after the other
    into = [nn.Parameter(random(width, INPUTS)) for width in WIDTHS]
    out = [nn.Parameter(random(width, INPUTS)) for width in WIDTHS]
    biases = [nn.Parameter(random(WIDTHS[0])), None]
    inner = gather_products(spread, x, into, biases)
    result = products_scatter(spread, inner, out)
    grads = torch.autograd.grad((result * random(ROWS, INPUTS)).sum(), [x, *into, *out, biases[0]])  # type: ignore[list-item]
    return [result.detach(), *(each.detach() for each in inner), *grads]


@pytest.fixture
def unfused_on_cpu() -> Iterator[None]:
    """torch's own statement of what its operators compute, which it has for shapes alone, as their CPU form."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("unfused_on_cpu")
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("computed", [functions, gradients])
def test_the_fused_operators_stand_for_the_plain_functions(
    size: int, computed: Callable[[Overlap], list[Tensor]]
) -> None:
    def body(groups: ThreadGroups) -> tuple[list[Tensor], list[Tensor], dict[str, int], dict[str, int]]:
        group = groups.group("tensor")
        name = f"fused-{group.index}"
        known = process_groups.register(group.backend, HashStore(), group.ranks, name, torch.device("cpu"))
        fused, fused_bytes = computed(FusedOverlap(group, name)), dict(group.traffic.sent_bytes)
        process_groups.unregister(known)
        group.traffic.sent_bytes.clear()
        plain = computed(Overlap(group))
        return fused, plain, fused_bytes, group.traffic.sent_bytes

    for fused, plain, fused_bytes, plain_bytes in run_ranks(Layout(tensor=size), body, process_groups.make_gloo):
        for got, expected in itertools.zip_longest(fused, plain):
            torch.testing.assert_close(got, expected)
        assert fused_bytes == plain_bytes


def test_the_operators_of_torch_have_the_shapes_that_are_relied_on() -> None:
    """Another torch may change what is private to it; this says so where there is no GPU."""
    gather = str(torch.ops.symm_mem.fused_all_gather_matmul.default._schema)
    scatter = str(torch.ops.symm_mem.fused_matmul_reduce_scatter.default._schema)
    assert "(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A=True)" in gather
    assert gather.endswith("-> (Tensor?, Tensor[])")
    assert "(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name) -> Tensor" in scatter


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("kind", ["fused", "tiles"])
def test_without_a_gpu_it_is_refused(kind: TensorOverlap) -> None:
    with pytest.raises(UserError, match=rf"tensor_overlap = '{kind}': needs GPUs.*no CUDA device.*'chunked'"):
        make_overlap(kind, Group(range(2), 0, None), 4, lambda group: "name")


def test_what_is_not_decided_is_refused() -> None:
    with pytest.raises(UserError, match=r"tensor_overlap = 'auto': is not decided.*choose_overlap"):
        make_overlap("auto", Group(range(2), 0, None), 4)


def test_the_former_name_is_understood() -> None:
    assert ParallelConfig.model_validate({"tensor_overlap": "symmetric"}).tensor_overlap == "fused"


HERE, THERE = [[Seat(host, f"{host}-{index}") for index in range(4)] for host in ("here", "there")]
ALL = Reach({f"here-{index}": index for index in range(4)}, lambda one, other: True)


@pytest.mark.parametrize(
    ("seats", "reach", "obstacle"),
    [
        (HERE, ALL, ""),
        ([Seat("here", "")] * 4, ALL, "it computes on a CPU"),
        ([*HERE[:3], THERE[3]], ALL, "ranks 1 and 3 are on different hosts"),
        ([HERE[0], HERE[1], HERE[1], HERE[3]], ALL, "ranks 1 and 2 share a GPU"),
        ([HERE[0], HERE[1], HERE[1], HERE[3]], ALL._replace(may_share=True), ""),
        (HERE, ALL._replace(visible={"here-1": 0}), r"rank 1 does not see the GPU of rank 0 (CUDA_VISIBLE_DEVICES)"),
        (HERE, ALL._replace(can_access=lambda one, other: (one, other) != (1, 2)),
         "the GPU of rank 1 cannot reach the memory of that of rank 2"),
    ],
)  # fmt: skip
def test_what_is_in_the_way_of_memory_that_is_shared(seats: list[Seat], reach: Reach, obstacle: str) -> None:
    assert obstacle_to_sharing(seats, range(4), 1, reach) == obstacle
    assert obstacle_to_sharing(seats, [1], 1, reach) == ("it computes on a CPU" if not seats[1].gpu else "")


def test_one_rank_that_cannot_decides_for_all() -> None:
    assert chosen("").kind == "fused"
    kind, why = chosen("ranks 1 and 3 are on different hosts")
    assert kind == "chunked" and why.endswith("'auto' is 'chunked': ranks 1 and 3 are on different hosts")


def test_auto_on_a_cpu_is_chunked() -> None:
    def body(groups: ThreadGroups) -> tuple[str, str]:
        peers = TreePeers(groups.store, groups.rank, 2, host="127.0.0.1", name="here", timeout_s=20.0)
        try:
            return choose_overlap(groups.layout, peers, torch.device("cpu"))
        finally:
            peers.close()

    for kind, why in run_ranks(Layout(tensor=2), body):
        assert kind == "chunked" and why.endswith("it computes on a CPU")


class FileMemory:
    """Memory of several processes: files that all of them map."""

    def __init__(self, group: Group, path: str) -> None:
        self._group, self._path, self._bytes = group, path, 0
        self._of: list[Tensor] = []
        self.addresses = torch.empty(0, dtype=torch.int64)

    def reserve(self, size_bytes: int) -> None:
        if size_bytes <= self._bytes:
            return
        self._bytes = size_bytes
        paths = [f"{self._path}-{rank}-{size_bytes}" for rank in range(self._group.size)]
        Path(paths[self._group.index]).write_bytes(bytes(size_bytes))
        self._group.barrier()
        self._of = [torch.from_file(path, shared=True, size=size_bytes, dtype=torch.uint8) for path in paths]
        self.addresses = torch.tensor([memory.data_ptr() for memory in self._of])

    def meet(self, channel: int) -> None:
        self._group.barrier()

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size_bytes = math.prod(shape) * dtype.itemsize
        return self._of[rank][:size_bytes].view(dtype).view(*shape)


class NoLane:
    """Copies run at once."""

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def signal(self, signals: Tensor, index: int, call: int) -> None:
        signals.view(torch.int32)[index] = call

    def join(self) -> None:
        pass


def in_processes(worker: Worker, size: int, folder: str) -> None:
    """One of several processes whose kernels, interpreted, wait for each other's memory."""
    from phalanx.kernels.products_triton import Blocks

    torch.set_num_threads(1)
    device = torch.device("cpu")
    mesh = open_mesh(worker.rank, size, folder, device)
    group = mesh.group("tensor")
    rows, signals = (FileMemory(group, f"{folder}/{name}") for name in ("rows", "signals"))
    blocks = Blocks(rows=16, columns=32, inputs=32, group=2)
    tiles = TilesOverlap(group, "", rows, signals, NoLane(), device, 3, blocks)
    for computed in (functions, gradients):  # memory grows, and is used again
        group.traffic.sent_bytes.clear()
        found, sent_bytes = computed(tiles), sum(group.traffic.sent_bytes.values())
        group.traffic.sent_bytes.clear()
        for got, expected in itertools.zip_longest(found, computed(Overlap(group))):
            torch.testing.assert_close(got, expected)
        assert sent_bytes == sum(group.traffic.sent_bytes.values())
    group.barrier()
    mesh.close()  # threads of gloo that outlive the interpreter abort the process


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_tile_by_tile_between_processes(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    assert launch_local(3, f"{__name__}:in_processes", (3, str(tmp_path)), preload=[__name__], threads=1) == 0


def check_on_gpu(fused: Overlap, plain: Overlap, dtype: torch.dtype) -> None:
    """Fused on the GPU against plain on the CPU, from the same numbers; twice, since buffers are used again."""
    for computed in (functions, gradients, functions, gradients):
        for got, expected in itertools.zip_longest(computed(fused, "cuda", dtype), computed(plain, "cpu", dtype)):
            assert got.is_cuda and got.dtype == dtype
            torch.testing.assert_close(got.cpu(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


def open_mesh(rank: int, size: int, folder: str, device: torch.device, **how: Any) -> Mesh:
    store: Any = torch.distributed.FileStore(f"{folder}/store", size)
    return Mesh(Layout(tensor=size), rank, store, device, **how)


def on_one_gpu(rank: int, size: int, folder: str) -> None:
    """One of several ranks on one device, which NCCL refuses: gloo between them."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    mesh = open_mesh(rank, size, folder, device, make=process_groups.make_gloo)
    group = mesh.group("tensor")
    store = torch.distributed.FileStore(f"{folder}/peers", size)
    peers = TreePeers(store, rank, size, host="127.0.0.1", name="here", timeout_s=60.0)
    assert choose_overlap(mesh.layout, peers, device).kind == "fused"
    peers.close()
    for kind in ("fused", "tiles"):
        overlap = make_overlap(kind, group, 4, mesh.registered)  # type: ignore[arg-type]
        for dtype in (torch.bfloat16, torch.float32):
            check_on_gpu(overlap, Overlap(group), dtype)
    torch.cuda.synchronize()
    group.barrier()  # nobody's memory goes before all have read it


def on_a_gpu_each(rank: int, size: int, folder: str) -> None:
    """Fused either way, chunked and plain by NCCL."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    mesh = open_mesh(rank, size, folder, device)
    group = mesh.group("tensor")
    plain = functions(Overlap(group), "cuda", torch.bfloat16)
    for kind in ("fused", "tiles", "chunked"):
        overlap = make_overlap(kind, group, 3, mesh.registered)  # type: ignore[arg-type]
        for got, expected in zip(functions(overlap, "cuda", torch.bfloat16), plain, strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
    torch.cuda.synchronize()
    group.barrier()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setenv(SHARED_DEVICE, "1")
    torch.multiprocessing.spawn(on_one_gpu, (size, str(tmp_path)), nprocs=size)  # type: ignore[no-untyped-call]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices joined by NVLink")
def test_two_gpus_fused_and_chunked(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(on_a_gpu_each, (2, str(tmp_path)), nprocs=2)  # type: ignore[no-untyped-call]
