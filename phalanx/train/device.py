"""Which device a run uses, in which precision, how fast that device could be, and how much memory is in use."""

from __future__ import annotations

import gc
import os
import platform
import resource
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from phalanx.core.errors import UserError
from phalanx.core.hardware import Peak, best_peak, table_peak
from phalanx.core.host import cpu_line
from phalanx.data.batch import Batch
from phalanx.kernels.fp8 import LEAST_CAPABILITY
from phalanx.kernels.host_memory import keep_freed_memory, use_huge_pages
from phalanx.kernels.linear import cpu_has_fast_bf16
from phalanx.launch.cores import wanted_threads
from phalanx.launch.environment import Worker, device_index
from phalanx.train.config import TrainConfig
from phalanx.train.derived.memory_needs import host_available_bytes

# Of address space, not of memory: room for the tensors of a step of the sizes that train on a CPU.
_HUGE_PAGE_HEAP_BYTES = 2 << 30
# Of a GPU's memory: more than contexts and libraries of one program take.
_LITTLE = 0.06


@dataclass(frozen=True)
class Device:
    """A device and what is known of it."""

    torch_device: torch.device
    name: str  # as its driver or the kernel reports it
    compute_dtype: torch.dtype  # type of the matrix products; master weights are fp32 whatever it is
    threads: int  # CPU threads used for arithmetic

    @property
    def precision(self) -> Literal["bf16", "fp32"]:
        """`compute_dtype` as the planner has it."""
        return "bf16" if self.compute_dtype == torch.bfloat16 else "fp32"

    def memory_in_use_bytes(self) -> int:
        """Memory of this process: allocated on the GPU, or resident on the host."""
        if self.torch_device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.torch_device)
        return resident_bytes()

    def memory_bytes(self) -> int:
        """Memory of the GPU that this run may have: all of it, or what other programs leave where they hold much."""
        # What little contexts and libraries take counts as free: the same run must choose the same every time.
        free, total = torch.cuda.mem_get_info(self.torch_device)
        others = total - free - torch.cuda.memory_reserved(self.torch_device)
        return total - others if others > _LITTLE * total else total

    def release_unused(self) -> None:
        """Give back what the allocator holds for later, and begin to look for the most that is in use anew."""
        if self.torch_device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.torch_device)

    def available_bytes(self) -> int | None:
        """Memory that could still be had, or None where that is unknown."""
        if self.torch_device.type == "cuda":
            return torch.cuda.mem_get_info(self.torch_device)[0]
        return host_available_bytes()


def choose_device(config: TrainConfig, worker: Worker | None = None, *, shared: bool = False) -> Device:
    """Pick device, precision and threads, and set torch's thread count and determinism accordingly.

    On a CPU the process also keeps the memory that it frees, and has it in huge pages.

    Args:
        worker: this rank among those of the host, which have a GPU each, unless they are `shared`; None: the only one.

    Raises:
        UserError: a CUDA device or a precision was asked for that is not there.
    """
    kind = config.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is visible", cure="use cpu or auto", field="train.device", value="cuda")
    # Of several ranks on a host, each was given its number of threads when it was started.
    here = wanted_threads(os.environ) or len(os.sched_getaffinity(0))
    threads = config.threads or (here if worker is None else torch.get_num_threads())
    torch.set_num_threads(threads)
    set_determinism(config.deterministic)
    if kind == "cuda" and worker is not None:
        torch.cuda.set_device(device_index(worker, torch.cuda.device_count(), shared=shared))
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    if kind == "cpu" and keep_freed_memory():
        use_huge_pages(_HUGE_PAGE_HEAP_BYTES)
    if kind == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = cpu_line("model name") or platform.processor() or platform.machine()
    return Device(device, name, _compute_dtype(config, device), threads)


def set_determinism(wanted: bool) -> None:
    """Make torch refuse operations whose result may differ between runs, or allow them again."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when its first handle is made
    torch.use_deterministic_algorithms(wanted)
    torch.backends.cudnn.benchmark = False


def measure_peak(device: Device, seconds: float = 0.25) -> Peak | None:
    """The device's peak rate of dense matrix work in its compute type, in FLOP/s.

    A GPU's comes from the table of data sheets; None where it is not in it. A CPU's is measured here: the best of
    several square products at the run's thread count, since clocks and cores differ from host to host, or the best of
    an earlier run on this host.
    """
    if device.torch_device.type == "cuda":
        return table_peak(device.name, bf16=device.compute_dtype == torch.bfloat16)
    size = 1024
    left = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).to(device.compute_dtype)
    right = left.t().contiguous()
    fastest_s = float("inf")
    deadline_s = time.perf_counter() + seconds
    for attempt in range(1000):
        start_s = time.perf_counter()
        torch.mm(left, right)
        end_s = time.perf_counter()
        fastest_s = min(fastest_s, end_s - start_s) if attempt else fastest_s
        if end_s > deadline_s and attempt >= 3:
            break
    measured = Peak(2 * size**3 / fastest_s, f"measured {size}x{size} product on {device.threads} thread(s)")
    key = f"{device.name}, {device.compute_dtype}, {device.threads} threads, {size}, torch {torch.__version__}"
    return best_peak(measured, key, os.environ)


def on_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """`batches` on `device`, copied on a stream of their own: beside what the GPU still computes for the step before.

    Nothing waits but the GPU, for the copy; on a CPU batches are passed on as they are.
    """
    if device.type != "cuda":
        yield from batches
        return
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    for batch in batches:
        with torch.cuda.stream(copies):
            copied = batch.to(device)
        here = torch.cuda.current_stream(device)
        here.wait_stream(copies)
        for tensor in copied.tensors():
            tensor.record_stream(here)  # or its memory would be given to the next copy while it is computed with
        yield copied


def resident_bytes() -> int:
    """Resident memory of this process now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class GarbageCollection:
    """Collects Python's garbage at fixed steps only: an irregular pause on one rank stalls all (MegaScale, 6.3).

    What lives at the first step lives to the end, so collections need not walk it. Where something is frozen already,
    as in a rank forked from a template, whoever did that says when it is over: nothing more is frozen then.
    """

    def __init__(self, every_steps: int) -> None:
        self.every_steps = every_steps

    def __enter__(self) -> GarbageCollection:
        self._was_enabled, self._freezes = gc.isenabled(), not gc.get_freeze_count()
        if self.every_steps:
            gc.collect()
            if self._freezes:
                gc.freeze()
            gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        if self.every_steps:
            if self._freezes:
                gc.unfreeze()
            if self._was_enabled:
                gc.enable()

    def after_step(self, step: int) -> None:
        """Collect when it is time."""
        if self.every_steps and step % self.every_steps == 0:
            gc.collect(1)


def _compute_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else cpu_has_fast_bf16()
    if config.precision == "auto":
        return torch.bfloat16 if fast else torch.float32
    if config.precision == "fp8" and device.type == "cuda":
        _require_fp8(torch.cuda.get_device_capability(device))
    if config.precision == "bf16" and device.type == "cuda" and not fast:
        raise UserError(
            "this GPU has no bf16 arithmetic", cure="use fp32 or auto", field="train.precision", value=config.precision
        )
    return torch.float32 if config.precision == "fp32" else torch.bfloat16


def _require_fp8(capability: tuple[int, int]) -> None:
    if capability < LEAST_CAPABILITY:
        needed, found = (".".join(map(str, each)) for each in (LEAST_CAPABILITY, capability))
        raise UserError(
            f"this GPU does not multiply in 8 bits (compute capability {found}; {needed} is needed: Ada, Hopper)",
            cure="use bf16 or auto",
            field="train.precision",
            value="fp8",
        )
