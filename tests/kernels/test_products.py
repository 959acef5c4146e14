"""The Triton products that wait and signal, with the memory of several ranks in one process."""

from __future__ import annotations

import importlib
import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compiled_offline import compile_offline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter multiplies no bf16; on a GPU that is what matters
DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]
CALL = 7
SHAPES = {"rows": st.integers(1, 40), "inputs": st.integers(1, 40), "outputs": st.integers(1, 40)}


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    pytest.importorskip("triton", reason="triton is not installed")
    return importlib.import_module("phalanx.kernels.products_triton")


def small(kernels: ModuleType) -> Any:
    """Blocks as small as they may be, so that there are many."""
    return kernels.Blocks(rows=16, columns=16, inputs=16, group=2, warps=4, stages=2)


def numbers(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Few bits, so that products of few are exact in any type."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(DEVICE, dtype)


def came(true: Callable[[], bool], patience_s: float = 20.0) -> bool:
    """Whether it came true in time; of memory that another thread writes nothing tells but looking."""
    never, until = threading.Event(), time.monotonic() + patience_s
    while not true():
        if time.monotonic() > until:
            return False
        never.wait(1e-3)
    return True


def watch(out: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the kernels write to `out`, which can be looked at meanwhile."""
    make = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda like, *size, **how: make(like, *size, **how) if how else out)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15, deadline=None)
@given(**SHAPES, size=st.integers(2, 4), chunk_rows=st.integers(1, 40), programs=st.integers(1, 5), data=st.data())
def test_a_product_of_rows_that_have_come(
    kernels: ModuleType, dtype: torch.dtype, rows: int, inputs: int, outputs: int, size: int, chunk_rows: int,
    programs: int, data: st.DataObject,
) -> None:  # fmt: skip
    own, turned, biased = data.draw(st.integers(0, size - 1)), data.draw(st.booleans()), data.draw(st.booleans())
    x = numbers(size * rows, inputs, seed=rows, dtype=dtype)
    matrix = (
        numbers(outputs, inputs, seed=1, dtype=dtype).t() if turned else numbers(inputs, outputs, seed=1, dtype=dtype)
    )
    bias = numbers(outputs, seed=2, dtype=dtype) if biased else None
    signals = torch.full((size, -(-rows // chunk_rows)), CALL, dtype=torch.int32, device=DEVICE)
    signals[own] = 0  # own rows are waited for by nobody
    arrivals = kernels.Arrivals(signals, chunk_rows, CALL)
    got = kernels.product_of_arriving(x, matrix, bias, arrivals, own, size, programs, small(kernels))
    want = x.double() @ matrix.double() + (0 if bias is None else bias.double())
    assert got.dtype == dtype and torch.equal(got.double(), want)


@pytest.mark.skipif(DEVICE == "cuda", reason="looks at memory while a kernel runs, as the interpreter lets it")
@pytest.mark.parametrize("own", [0, 1, 2])
def test_own_rows_come_first_and_each_tile_waits_for_its_rows(
    kernels: ModuleType, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are brought one chunk at a time, each only when all that can be made without it has been made."""
    size, rows, chunk_rows, outputs = 3, 40, 20, 24
    whole = numbers(size * rows, 16, seed=0, dtype=torch.float32)
    matrix = numbers(16, outputs, seed=1, dtype=torch.float32)
    x, out = torch.full_like(whole, torch.nan), torch.full((size * rows, outputs), torch.nan)
    mine = slice(own * rows, (own + 1) * rows)
    x[mine] = whole[mine]
    signals = torch.zeros(size, 2, dtype=torch.int32)
    watch(out, monkeypatch)
    problems: list[str] = []

    def is_made(wanted: list[int]) -> bool:
        return not out[wanted].isnan().any()

    def bring() -> None:
        made = list(range(mine.start, mine.stop))
        for member, chunk in itertools.product(((own + step) % size for step in range(1, size)), range(2)):
            if not came(partial(is_made, made)):
                problems.append(f"what needs no chunk {chunk} of rank {member} was not made before it came")
            if not out[[row for row in range(size * rows) if row not in made]].isnan().all():
                problems.append(f"chunk {chunk} of rank {member} was not waited for")
            rows_come = slice(member * rows + chunk * chunk_rows, member * rows + (chunk + 1) * chunk_rows)
            x[rows_come] = whole[rows_come]
            signals[member, chunk] = CALL
            # tiles have 16 rows: the first chunk of 20 makes one of them possible, the second the other two
            made += range(member * rows + 16 * chunk, member * rows + (16, rows)[chunk])

    bringer = threading.Thread(target=bring, daemon=True)
    bringer.start()
    blocks = small(kernels)._replace(group=1)  # one row of tiles after the other
    arrivals = kernels.Arrivals(signals, chunk_rows, CALL)
    kernels.product_of_arriving(x, matrix, None, arrivals, own, size, 1, blocks)
    bringer.join(10)
    assert not problems and not bringer.is_alive()
    assert torch.equal(out, whole @ matrix)


class Memory:
    """What every rank lends the others: blocks for their sums, and signals."""

    def __init__(self, kernels: ModuleType, size: int, rows: int, outputs: int, dtype: torch.dtype) -> None:
        tiles = kernels.tiles_of(rows, outputs, small(kernels))
        self.slots = [torch.full((size, rows, outputs), torch.nan, dtype=dtype, device=DEVICE) for _ in range(size)]
        self.signals = [torch.zeros(size, tiles, dtype=torch.int32, device=DEVICE) for _ in range(size)]

    def owners(self, kernels: ModuleType, call: int) -> Any:
        return kernels.Owners(addresses(self.slots), addresses(self.signals), call)


def addresses(tensors: list[Tensor]) -> Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15, deadline=None)
@given(**SHAPES, size=st.integers(2, 4), programs=st.integers(1, 5), turned=st.booleans())
def test_a_product_goes_to_its_owners_who_add(
    kernels: ModuleType, dtype: torch.dtype, rows: int, inputs: int, outputs: int, size: int, programs: int,
    turned: bool,
) -> None:  # fmt: skip
    memory = Memory(kernels, size, rows, outputs, dtype)
    for call in (CALL, CALL + 1):  # memory is used again, with the signals of before in it
        xs = [numbers(size * rows, inputs, seed=call + rank, dtype=dtype) for rank in range(size)]
        matrices = [numbers(inputs, outputs, seed=rank, dtype=dtype) for rank in range(size)]
        if turned:
            matrices = [matrix.t().contiguous().t() for matrix in matrices]
        for rank, (x, matrix) in enumerate(zip(xs, matrices, strict=True)):
            owners = memory.owners(kernels, call)
            kernels.product_to_owners(x, matrix, owners, rank, size, programs, small(kernels))
        want = torch.stack([x.double() @ m.double() for x, m in zip(xs, matrices, strict=True)]).sum(0)
        for rank in range(size):
            assert (memory.signals[rank] == call).all()
            got = kernels.sum_of_tiles(memory.slots[rank], memory.signals[rank], call, programs, small(kernels))
            assert got.dtype == dtype and torch.equal(got.double(), want[rank * rows : (rank + 1) * rows])


def test_sums_are_added_in_the_order_of_ranks_in_fp32(kernels: ModuleType) -> None:
    """In another order the small one would be lost."""
    slots = torch.tensor([2.0**30, -(2.0**30), 1.0], device=DEVICE).view(3, 1, 1)
    signals = torch.full((3, 1), CALL, dtype=torch.int32, device=DEVICE)
    assert kernels.sum_of_tiles(slots, signals, CALL, 1, small(kernels)).item() == 1.0
    assert kernels.sum_of_tiles(slots.flip(0), signals, CALL, 1, small(kernels)).item() == 0.0


@pytest.mark.skipif(DEVICE == "cuda", reason="changes memory while a kernel runs, as the interpreter lets it")
def test_a_sum_waits_for_every_tile_of_every_rank(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    size, rows, outputs = 3, 20, 20
    slots, out = torch.full((size, rows, outputs), torch.nan), torch.full((rows, outputs), torch.nan)
    signals = torch.zeros(size, 4, dtype=torch.int32)
    watch(out, monkeypatch)
    problems: list[str] = []

    def bring() -> None:
        for tile in range(4):
            m, n = slice(tile // 2 * 16, tile // 2 * 16 + 16), slice(tile % 2 * 16, tile % 2 * 16 + 16)
            for source in reversed(range(size)):
                if not out[m, n].isnan().all():
                    problems.append(f"tile {tile} of rank {source} was not waited for")
                slots[source, m, n] = source + 1.0
                signals[source, tile] = CALL

    bringer = threading.Thread(target=bring, daemon=True)
    bringer.start()
    kernels.sum_of_tiles(slots, signals, CALL, 1, small(kernels))
    bringer.join(10)
    assert not problems and torch.equal(out, torch.full_like(out, 6.0))


_PROGRAM = """
from phalanx.kernels import products_triton as kernels

numbers = "call own size rows columns inputs x_stride in_stride out_stride chunk_rows chunks".split()
for kernel in (kernels._product_of_arriving, kernels._product_to_owners, kernels._sum_of_tiles):
    for dtype in ("bf16", "fp32"):
        blocks = kernels.Blocks(inputs=64 if dtype == "bf16" else 32)
        fixed = {"ROWS": blocks.rows, "COLUMNS": blocks.columns, "INPUTS": blocks.inputs, "GROUP": blocks.group,
                 "HAS_BIAS": True, "PRECISION": "ieee"}
        kinds = dict.fromkeys(numbers, "i32") | {"signals": "*i32"}
        if kernel is kernels._product_to_owners:
            kinds |= {"slots": "*i64", "signals": "*i64"}
        options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
        for capability, made in compiled(kernel, kinds, fixed, "*" + dtype, **options):
            most = (163 if capability == 80 else 227) << 10
            assert made.metadata.shared <= most, (kernel, capability, made.metadata.shared)
            ptx = made.asm["ptx"]
            if kernel is kernels._product_to_owners:  # in the order of memory that is meant
                released = ptx.index("sys.release")
                assert "bar.sync" in ptx[ptx.rindex("st.global", 0, released) : released]
            else:
                assert "sys.acquire" in ptx
            assert "ld.global.nc" not in ptx  # what others write while it runs is not constant
"""


@pytest.mark.slow
def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    assert compile_offline(_PROGRAM, tmp_path) == 12
