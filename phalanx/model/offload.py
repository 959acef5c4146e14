"""Activations of a decoder's first layers in pinned host memory, between their forward and their backward pass.

What autograd saves of a layer is copied to the host on a stream of its own while the next layers compute, and back
while the layer behind it is in its backward pass. The host never waits: streams wait for events of each other.

- The device's memory of a layer is let go of two layers later, when the layer's copies are done on the device's own
  clock: the compute stream waits for them, so what is held does not depend on how fast they are.
- Pinning memory is slow, so buffers are kept and used again; the next copy into one waits for the last one out of it.
- A storage is copied once, however many views of it are saved.
- Weights, their casts and what all layers share (tables of rotary positions) stay where they are, as do small tensors.

Where a layer is computed again eagerly, what goes to the host is its input alone: what selective recompute keeps is
held by torch's checkpoint and passes no hook. Gradients are the same bits: nothing but copies is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Smaller tensors stay: a copy of its own costs more than their memory is worth.
_LEAST_BYTES = 1 << 20

# Layers whose copies may be under way while another computes.
_AHEAD = 2

# What lies between a weight and its casts and views, in autograd's graph.
_SAME_NUMBERS = frozenset(
    ("ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "Slice", "Split", "SplitWithSizes", "Expand", "Alias")
)


class Lanes:
    """Streams that carry copies, as far as offloading sees them; here none, as on a CPU: one copy after the other."""

    def compute_waits(self, event: Any) -> None:
        """Whatever is computed from now on comes after `event`, which `record` gave."""

    def out(self) -> AbstractContextManager[object]:
        """Copies to the host: after what has been computed so far."""
        return nullcontext()

    def back(self) -> AbstractContextManager[object]:
        """Copies to the device: after what has been computed so far, whose memory they may be given."""
        return nullcontext()

    def record(self) -> Any:
        """An event in the stream that is current."""
        return None

    def wait(self, event: Any) -> None:
        """The stream that is current waits for `event`."""

    def host(self, num_bytes: int) -> Tensor:
        """New memory on the host, bytes."""
        return torch.empty(num_bytes, dtype=torch.uint8)


class _CudaLanes(Lanes):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def compute_waits(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def out(self) -> AbstractContextManager[object]:
        return self._behind_compute(self._out)

    def back(self) -> AbstractContextManager[object]:
        return self._behind_compute(self._back)

    def record(self) -> Any:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def host(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def _behind_compute(self, stream: Any) -> Iterator[None]:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield


class Offload:
    """Decides which of a part's layers go to the host (a share, from the first), and keeps the memory for it."""

    def __init__(self, share: float, lanes: Lanes, least_bytes: int = _LEAST_BYTES) -> None:
        self.share, self.lanes, self.least_bytes = share, lanes, least_bytes
        self.host_bytes = 0  # memory on the host that was ever taken
        self._free: dict[int, list[tuple[Tensor, Any]]] = {}

    def forward_pass(self, layers: int, shared: Sequence[Tensor]) -> _ForwardPass:
        """A forward pass over so many layers, to which `shared` tensors belong that are no layer's own."""
        return _ForwardPass(self, math.ceil(self.share * layers), shared)

    def take(self, num_bytes: int) -> tuple[Tensor, Any]:
        """Memory on the host, and the event after which it may be written; None: at once."""
        free = self._free.get(num_bytes)
        if free:
            return free.pop(0)  # the one that was used longest ago
        self.host_bytes += num_bytes
        return self.lanes.host(num_bytes), None

    def give(self, host: Tensor, event: Any) -> None:
        """Memory back, which may be written after `event`."""
        self._free.setdefault(host.numel(), []).append((host, event))


class _ForwardPass:
    def __init__(self, offload: Offload, count: int, shared: Sequence[Tensor]) -> None:
        self.offload, self.count = offload, count
        self._shared = {_key(tensor) for tensor in shared}
        self._layers: list[_Layer] = []

    @contextmanager
    def layer(self, index: int, block: nn.Module) -> Iterator[None]:
        if index >= _AHEAD and index - _AHEAD < len(self._layers):
            self._layers[index - _AHEAD].let_go()
        if index >= self.count:
            yield
            return
        before = self._layers[-1] if self._layers else None
        layer = _Layer(self.offload, before, block, self._shared)
        self._layers.append(layer)
        with torch.autograd.graph.saved_tensors_hooks(layer.pack, _unpack):
            yield

    def end(self) -> None:
        for layer in self._layers:
            layer.let_go()
        self._layers.clear()


class _Layer:
    def __init__(self, offload: Offload, before: _Layer | None, block: nn.Module, shared: set[int]) -> None:
        self._offload, self._before, self._shared = offload, before, shared
        shapes = {tuple(p.shape) for p in block.parameters()}
        self._weights = shapes | {shape[::-1] for shape in shapes}
        self._copies: dict[int, _Copy] = {}
        self._held: list[Tensor] = []
        self._events: list[Any] = []
        self._is_back = False

    def pack(self, tensor: Tensor) -> Any:
        key, storage = _key(tensor), tensor.untyped_storage()
        stays = storage.nbytes() < self._offload.least_bytes or key in self._shared
        if stays or tensor.layout != torch.strided or self._is_weight(tensor):
            return tensor
        if key not in self._copies:
            self._copies[key] = self._out(tensor)
        where = int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
        return _Packed(self, self._copies[key], tensor.dtype, *where)

    def let_go(self) -> None:
        """The device's memory may be used for something else once the copies are done."""
        for event in self._events:
            self._offload.lanes.compute_waits(event)
        self._events.clear()
        self._held.clear()

    def bring_back(self) -> None:
        if self._is_back:
            return
        self._is_back = True
        for copy in self._copies.values():
            copy.bring_back()
        self._copies = {}  # what still needs one holds it itself

    def prefetch(self) -> None:
        """The backward pass of this layer begins: the one before comes next."""
        self.bring_back()
        if self._before is not None:
            self._before.bring_back()
            self._before = None

    def _is_weight(self, tensor: Tensor) -> bool:
        """Whether it is a weight, a view or a cast of one. What a compiled layer saves knows only its shape."""
        if tensor.is_leaf and tensor.requires_grad:
            return True
        if tensor.grad_fn is None:
            return tuple(tensor.shape) in self._weights
        function: Any = tensor.grad_fn
        while function is not None and function.name().removesuffix("Backward0") in _SAME_NUMBERS:
            function = function.next_functions[0][0]
        return hasattr(function, "variable")

    def _out(self, tensor: Tensor) -> _Copy:
        lanes, storage = self._offload.lanes, tensor.untyped_storage()
        # All of the storage, however many views of it are saved.
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
        host, free = self._offload.take(source.numel())
        with lanes.out():
            if free is not None:
                lanes.wait(free)
            host.copy_(source, non_blocking=True)
            event = lanes.record()
        self._held.append(source)  # and not the tensor, whose graph would hold it in turn
        self._events.append(event)
        return _Copy(self._offload, host, event, tensor.device)


class _Copy:
    def __init__(self, offload: Offload, host: Tensor, event: Any, device: torch.device) -> None:
        self._offload, self._device = offload, device
        self._host: Tensor | None = host
        self._event = event
        self._back: Tensor | None = None

    def bring_back(self) -> None:
        if self._host is None:
            return
        lanes, host = self._offload.lanes, self._host
        # Made in the stream that computes, which uses it last.
        self._back = torch.empty(host.numel(), dtype=torch.uint8, device=self._device)
        with lanes.back():
            if self._event is not None:
                lanes.wait(self._event)
            self._back.copy_(host, non_blocking=True)
            self._event = lanes.record()
        self._host = None
        self._offload.give(host, self._event)

    def on_device(self) -> Tensor:
        """Its bytes, which whatever is computed from now on may read."""
        self.bring_back()
        if self._event is not None:
            self._offload.lanes.compute_waits(self._event)
            self._event = None
        assert self._back is not None
        return self._back

    def __del__(self) -> None:
        if self._host is not None:  # a graph that was let go of without a backward pass
            self._offload.give(self._host, self._event)


class _Packed(NamedTuple):
    """What autograd's graph holds in place of a tensor: a copy of its storage, and where in that the tensor lies."""

    layer: _Layer
    copy: _Copy
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _unpack(packed: Any) -> Tensor:
    if not isinstance(packed, _Packed):
        tensor: Tensor = packed
        return tensor
    packed.layer.prefetch()
    back = packed.copy.on_device()
    out = torch.empty(0, dtype=packed.dtype, device=back.device)
    return out.set_(back.untyped_storage(), packed.offset, packed.shape, packed.stride)


def _key(tensor: Tensor) -> int:
    # Tells storages apart, as long as they live.
    key: int = tensor.untyped_storage()._cdata
    return key


def make_offload(share: float, device: torch.device) -> Offload | None:
    """The offload of a part of a model on `device`; None: nothing goes to the host."""
    return Offload(share, _CudaLanes(device) if device.type == "cuda" else Lanes()) if share else None
