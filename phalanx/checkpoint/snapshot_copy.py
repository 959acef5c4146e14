"""Copying what a rank has into the memory of a slot: at once, or beside the forward pass of the next step.

Measured on two cores of a cloud machine, 300 MB of fp32 per process in 144 tensors, into memory touched before, medians
of 15: one process on one thread 0.030 s by ``torch._foreach_copy_``, 0.031 by ``copy_`` one by one, 0.031 to
0.037 by memmove, 0.032 by ``numpy.copyto``, on two threads 0.020 to 0.025; two processes at once on one thread each
0.036 to 0.047 by all of them: memory is the limit, so the plainest way is taken. Untouched memory costs 0.3 to 1.7 s.

There the same copy has no core of its own beside the next forward pass: see `OVERLAP_ON_CPU`. A device copies into
page-locked memory by itself, while threads do something else.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.checkpoint.format.dcp import is_dtensor
from phalanx.checkpoint.format.shard_plan import Piece, ShardPlan
from phalanx.checkpoint.keeper_contract import Slot


class Pinned:
    """Some host memory that may be page-locked for CUDA, and is not to begin with."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._refused = False
        self.is_pinned = False

    def pin(self) -> None:
        """Page-lock it; where the system refuses (a limit of locked memory), it stays as it is, and is slower."""
        if self.is_pinned or self._refused or not self._memory.nbytes:
            return
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = runtime.cudaHostRegister(self._memory.data_ptr(), self._memory.nbytes, 0)
        # Remembered, so that a limit of locked memory is not run into again with every snapshot.
        self._refused = int(error) != 0
        self.is_pinned = not self._refused

    def close(self) -> None:
        """Unlock it; no copy may be under way."""
        if self.is_pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self._memory.data_ptr())
        self.is_pinned = False
        # A view would keep the shared memory mapped.
        self._memory = torch.empty(0)


OVERLAP_ON_CPU = False
"""Where tensors are in host memory, a copy takes a core wherever it is made: beside training on all cores it took twice
as long (0.09 s for 0.04 s, `benchmarks/checkpoint_stall.py --overlap` on a busy machine) and saved nothing."""

_SMALL_BYTES = 1 << 16  # a piece below this is copied at once
_WORTH_BYTES = 1 << 20  # below this in all, nothing is left for later


class _Move(NamedTuple):
    out: Tensor
    source: Tensor


class Copying:
    """One snapshot that is being copied; `Copier.begin` makes it.

    Attributes:
        seconds: from its beginning to its end; 0 while it has not ended.
        kept: copies under way; their sources stay alive until they are made.
        events: on CUDA, the end of the work of each device.
    """

    def __init__(self, done: Callable[[float], None]) -> None:
        self._done = done
        self._began_s = time.perf_counter()
        self._thread: threading.Thread | None = None
        self.events: dict[torch.device, torch.cuda.Event] = {}
        self._error: BaseException | None = None
        self.kept: list[_Move] = []
        self.seconds = 0.0

    @property
    def finished(self) -> bool:
        """Whether all is copied and `done` was called; or failed, which `fence` raises."""
        return self._thread is None or not self._thread.is_alive()

    def fence(self) -> None:
        """After this the sources may be changed by what the calling thread does next.

        On CUDA the present stream waits, not this thread; only a first copy into a slot is waited for.

        Raises:
            RuntimeError: copying failed; the slot holds nothing.
        """
        # No events: a copy on a CPU, or a first one, into memory that is not pinned yet.
        if not self.events:
            self.wait()
        for device, event in self.events.items():
            torch.cuda.current_stream(device).wait_event(event)
        self._raise()

    def wait(self) -> None:
        """Wait until all is copied and `done` was called.

        Raises:
            RuntimeError: as `fence`.
        """
        if self._thread is not None:
            self._thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None and self.finished:
            raise RuntimeError("a snapshot could not be copied") from self._error

    def end(self) -> None:
        """All is there."""
        self.kept.clear()
        self.seconds = time.perf_counter() - self._began_s
        self._done(self.seconds)

    def go_on(self, work: Callable[[], None]) -> None:
        """Do the rest on a thread."""

        def main() -> None:
            try:
                work()
                self.end()
            except BaseException as error:  # raised again by whoever waits
                self._error = error

        self._thread = threading.Thread(target=main, name="snapshot", daemon=True)
        self._thread.start()


@dataclass
class _Places:
    """Where the pieces of a plan lie in the memory of one slot."""

    address: int
    views: dict[str, Tensor]
    pinned: Pinned


@dataclass
class Copier:
    """Copies the tensors of one shard into slots.

    Args:
        tensors: by name, at least those of the plan, on any device, of any strides; DTensors give their local part.
        overlap: whether large tensors are copied while training goes on, until `Copying.fence`; None: on CUDA, and on
            CPUs as `OVERLAP_ON_CPU` says.

    Raises:
        ValueError: a tensor of the plan is not there, or is not of its dtype and size.
    """

    plan: ShardPlan
    tensors: Mapping[str, Tensor]
    overlap: bool | None = None
    _slots: dict[int, _Places] = field(default_factory=dict)
    _streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pieces = [piece for piece in self.plan.pieces if piece.length_bytes]
        self._sources(self.tensors)  # raises for tensors that do not fit

    def begin(self, slot: Slot, done: Callable[[float], None], tensors: Mapping[str, Tensor] | None = None) -> Copying:
        """Copy all into `slot`, or begin to.

        Pieces with the role ``other`` (generators, counters, buffers) and small ones are taken as they are now.
        Parameters and optimizer state may be copied later: nothing may change them before `Copying.fence`.

        Args:
            done: called with the seconds it took once all is there, on whatever thread that ends; not if it fails.
            tensors: the present ones, where they are not always the same objects.

        Raises:
            ValueError: as the constructor.
        """
        if tensors is not None:
            self.tensors = tensors
        whole = torch.frombuffer(slot.memory, dtype=torch.uint8) if len(slot.memory) else torch.empty(0)
        places = self._slots.get(slot.number)
        # After a new lease a slot of the same number is other memory.
        if places is None or places.address != whole.data_ptr():
            if places is not None:
                places.pinned.close()
            views = {
                p.name: whole[p.start_bytes : p.start_bytes + p.length_bytes].view(_dtype(p)).view(p.sizes)
                for p in self._pieces
            }
            places = self._slots[slot.number] = _Places(whole.data_ptr(), views, Pinned(whole))
        pairs = zip(self._pieces, self._sources(self.tensors), strict=True)
        moves = {piece.name: _Move(places.views[piece.name], source) for piece, source in pairs}
        copying = Copying(done)
        devices = {move.source.device for move in moves.values() if move.source.is_cuda}
        if devices:
            self._begin_on_devices(copying, places, moves, devices)
        else:
            self._begin_on_cpu(copying, moves)
        return copying

    def close(self) -> None:
        """Let go of the memory of all slots; nothing may be under way."""
        for places in self._slots.values():
            places.pinned.close()
        self._slots.clear()

    def _sources(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        return [_source(piece, tensors.get(piece.name)) for piece in self._pieces]

    def _begin_on_cpu(self, copying: Copying, moves: Mapping[str, _Move]) -> None:
        late = self._late(moves) if (OVERLAP_ON_CPU if self.overlap is None else self.overlap) else set()
        _copy([move for name, move in moves.items() if name not in late])
        if not late:
            copying.end()
            return
        # Kept until they are copied: training may drop its last reference to a tensor meanwhile.
        copying.kept = [move for name, move in moves.items() if name in late]
        copying.go_on(lambda: _copy_on_one_thread(copying.kept))

    def _begin_on_devices(
        self, copying: Copying, places: _Places, moves: Mapping[str, _Move], devices: set[torch.device]
    ) -> None:
        """Copies on streams of their own; what may change before the fence is first cloned on the device."""
        late = self._late(moves)
        _copy([move for move in moves.values() if not move.source.is_cuda])
        with torch.no_grad():
            # Cloned in the order of the present stream, so the clone has today's values, whatever is enqueued behind
            # it.
            kept = [
                move if name in late else _Move(move.out, move.source.clone())
                for name, move in moves.items()
                if move.source.is_cuda
            ]
        copying.kept = kept
        # The copy streams wait for the work that makes these values, and for none that comes later.
        ready = {device: torch.cuda.current_stream(device).record_event() for device in devices}
        ends: dict[torch.device, torch.cuda.Event] = {}

        def enqueue() -> None:
            for device in devices:
                if device not in self._streams:
                    self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream = self._streams[device]
                stream.wait_event(ready[device])
                with torch.cuda.stream(stream):
                    _copy([move for move in kept if move.source.device == device])
                ends[device] = stream.record_event()

        def finish() -> None:
            for event in ends.values():
                event.synchronize()

        def slowly() -> None:
            # A copy into memory that is not pinned holds up the thread that asks for it, and so does pinning.
            enqueue()
            finish()
            places.pinned.pin()

        # Only waiting for the end needs a thread: enqueueing copies into pinned memory returns at once.
        if places.pinned.is_pinned:
            enqueue()
            copying.events = ends
            copying.go_on(finish)
        else:
            copying.go_on(slowly)
        if self.overlap is False:
            copying.wait()

    def _late(self, moves: Mapping[str, _Move]) -> set[str]:
        """Pieces that only an update changes, and that are worth it."""
        # Generators and counters change at any time, not only in an update, so they are never late.
        large = [p for p in self._pieces if p.role != "other" and p.length_bytes >= _SMALL_BYTES]
        worth = sum(piece.length_bytes for piece in large) >= _WORTH_BYTES
        return {piece.name for piece in large if piece.name in moves} if worth else set()


def _source(piece: Piece, tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ValueError(f"{piece.name} is in the plan of snapshots, but not among the tensors")
    tensor = tensor.detach()
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    if tuple(local.shape) != piece.sizes or local.dtype != _dtype(piece):
        raise ValueError(
            f"{piece.name} is {local.dtype} of shape {tuple(local.shape)}, but the plan of snapshots has "
            f"{piece.dtype} of shape {piece.sizes}"
        )
    return local


def _dtype(piece: Piece) -> torch.dtype:
    dtype = getattr(torch, piece.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


@torch.no_grad()
def _copy(moves: list[_Move]) -> None:
    """All in one call without the GIL, on as many threads as torch has."""
    if moves:
        torch._foreach_copy_([move.out for move in moves], [move.source for move in moves], non_blocking=True)


@torch.no_grad()
def _copy_on_one_thread(moves: list[_Move]) -> None:
    """Beside training: a second team of threads of torch's would fight with the first for its cores."""
    for move in moves:
        # ctypes lets go of the GIL. Of lazily conjugated or negated tensors memory holds other numbers than the tensor
        # has.
        if move.source.is_contiguous() and not move.source.is_conj() and not move.source.is_neg():
            ctypes.memmove(move.out.data_ptr(), move.source.data_ptr(), move.source.nbytes)
        else:
            move.out.copy_(move.source)
