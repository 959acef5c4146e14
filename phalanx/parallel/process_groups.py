"""torch process groups made for their members alone: the one file of the mesh that uses torch's private parts.

`torch.distributed.new_group` must be called by every rank for every group, in one order, and ends with a barrier of all
ranks where TORCH_DIST_INIT_BARRIER is set (before 2023: always), so that making the groups of a mesh costs O(n^2)
operations on the store. What it wraps does not: a `ProcessGroupGloo` or `ProcessGroupNCCL` that is constructed directly
lets its members meet on a store, and no other rank takes part.
What each function relies on is tested in tests/parallel/test_mesh_backends.py.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, _register_process_group, _unregister_process_group
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

Maker = Callable[[Store, int, int, float, str], Any]
"""Makes the backend of one member: store of the group, index, members, timeout (seconds), name of the group."""


def maker(device: torch.device, *, max_ctas: int = 0, shared: bool = False) -> Maker:
    """The maker of groups on `device`: NCCL on CUDA (`max_ctas`: `nccl_settings`), gloo on a CPU or a shared GPU."""
    if device.type != "cuda":
        return make_gloo
    if shared:
        return lambda *arguments: _ThroughHost(make_gloo(*arguments))
    return lambda store, index, size, timeout_s, name: make_nccl(
        store, index, size, timeout_s, name, device, nccl_settings(name, max_ctas)
    )


@dataclass(frozen=True)
class NcclSettings:
    """NCCL's settings for a group."""

    high_priority: bool  # its kernels go before others that wait for the device
    max_ctas: int = 0  # most thread blocks of a kernel, each of which holds a multiprocessor; 0: NCCL chooses


def nccl_settings(name: str, max_ctas: int = 0) -> NcclSettings:
    """The settings of the group `name` (as of `phalanx.parallel.mesh.meeting_place`).

    What layers and stages wait for (tensor, context, neighbours in a pipeline) goes before what was to be computed
    later. What runs beside a whole pass does not: it takes at most `max_ctas` of the device from that.
    """
    kind, _, what = name.rpartition("/")[0].partition(":")
    waited_for = set(what.split("·")) <= {"tensor", "context"} if kind == "axes" else what.startswith("pipeline")
    return NcclSettings(waited_for, 0 if waited_for else max_ctas)


class _ThroughHost:
    """A `ProcessGroupGloo` that takes tensors of any device: they travel as copies in the host's memory.

    gloo itself knows some collectives of CUDA tensors, and not others. The host waits for every copy.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def name(self) -> str:
        return "through host"

    def rank(self) -> int:
        return int(self._inner.rank())

    def size(self) -> int:
        return int(self._inner.size())

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._inner._set_default_timeout(timeout)

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Arrival:
        hosts = [_on_host(x) for x in tensors]
        return _Arrival(self._inner.allreduce(hosts, options), hosts, tensors)

    def broadcast(self, tensors: list[Tensor], options: Any) -> _Arrival:
        hosts = [_on_host(x) for x in tensors]
        return _Arrival(self._inner.broadcast(hosts, options), hosts, tensors)

    def _allgather_base(self, out: Tensor, x: Tensor) -> _Arrival:
        host = torch.empty(out.shape, dtype=out.dtype)
        return _Arrival(self._inner._allgather_base(host, _on_host(x)), [host], [out])

    def _reduce_scatter_base(self, out: Tensor, x: Tensor) -> _Arrival:
        # By all-to-all, added up here in the order of ranks: gloo's own is an all-reduce of everything.
        blocks = torch.empty(x.shape, dtype=x.dtype)
        work = self._inner.alltoall_base(blocks, _on_host(x), [], [])
        return _Arrival(work, [blocks], [out], lambda: blocks.view(self.size(), *out.shape).sum(0))

    def alltoall_base(self, out: Tensor, x: Tensor, out_rows: list[int], rows: list[int]) -> _Arrival:
        host = torch.empty(out.shape, dtype=out.dtype)
        return _Arrival(self._inner.alltoall_base(host, _on_host(x), out_rows, rows), [host], [out])

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Arrival:
        hosts = [_on_host(x) for x in tensors]
        return _Arrival(self._inner.send(hosts, to, tag), hosts, [])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Arrival:
        hosts = [torch.empty(x.shape, dtype=x.dtype) for x in tensors]
        return _Arrival(self._inner.recv(hosts, source, tag), hosts, tensors)

    def barrier(self) -> Any:
        return self._inner.barrier()


class _Arrival:
    """Copies on their way through the host; `wait` puts what has arrived where it belongs."""

    def __init__(
        self, work: Any, hosts: list[Tensor], targets: list[Tensor], result: Callable[[], Tensor] | None = None
    ) -> None:
        self._work, self._hosts, self._targets, self._result = work, hosts, targets, result

    def wait(self) -> None:
        self._work.wait()
        if self._targets:
            results = self._hosts if self._result is None else [self._result()]
            for target, host in zip(self._targets, results, strict=True):
                target.copy_(host)
            self._targets = []

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def _on_host(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype).copy_(x)


def make_gloo(store: Store, index: int, size: int, timeout_s: float, name: str) -> Any:
    """Meet the other members over TCP; returns when every pair is connected.

    One operation sets this member's address and two read those of all n; without gloo's newer way with stores it would
    be 3 n operations. The bytes are n addresses of 154 + 8 n bytes in either case.

    Raises:
        RuntimeError: not all members came within `timeout_s`.
    """
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    return torch.distributed.ProcessGroupGloo(store, index, size, timedelta(seconds=timeout_s))


def make_nccl(
    store: Store, index: int, size: int, timeout_s: float, name: str, device: torch.device, settings: NcclSettings
) -> Any:
    """Meet the other members through NCCL, whose own network carries all but one key of 128 bytes.

    Raises:
        RuntimeError: NCCL cannot connect the members.
    """
    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.group_name = c10d.GroupName(name)
    options.is_high_priority_stream = settings.high_priority
    if settings.max_ctas:
        options.config.max_ctas = settings.max_ctas
    backend = torch.distributed.ProcessGroupNCCL(store, index, size, options)
    backend.eager_connect_single_device(device)
    return backend


def keeps_order(backend: Any) -> bool:
    """Whether what is started in the group of `backend` is done one at a time, messages too: in all but gloo."""
    return bool(backend.name() != "gloo")


def set_timeout(backend: Any, timeout_s: float) -> None:
    """From now on, operations of `backend` that start may take so long."""
    backend._set_default_timeout(timedelta(seconds=timeout_s))


def let_go(backend: Any, *, is_busy: bool) -> None:
    """Be done with `backend`, of which the caller holds the last reference, without waiting for anyone.

    gloo has no abort: dropping a group waits for what is under way in it, which may be for as long as the timeout when
    a peer is gone. So a busy one is kept for ever, with its threads, for the end of the process to take.
    """
    if backend.name() == "nccl":
        backend.abort() if is_busy else backend.shutdown()
    elif is_busy:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


def register(backend: Any, store: Store, ranks: Sequence[int], name: str, device: torch.device) -> ProcessGroup:
    """A `ProcessGroup` around `backend` that torch finds by `name`, as symmetric memory and functional collectives do.

    No rank but the members need call this, and they do not meet for it. `unregister` undoes it.

    Raises:
        ValueError: this process has a group of that name.
    """
    if any(name == known for known in c10d._world.pg_names.values()):
        raise ValueError(f"name = {name!r}: this process has registered a group of that name")
    inner = PrefixStore("registered", store)
    kind = c10d.Backend.backend_type_map[backend.name()]
    group = ProcessGroup(inner, backend.rank(), backend.size())
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    group._set_group_name(c10d.GroupName(name))
    _register_process_group(c10d.GroupName(name), group)
    c10d._world.pg_map[group] = (backend.name(), inner)
    c10d._world.pg_names[group] = c10d.GroupName(name)
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def unregister(group: ProcessGroup) -> None:
    """Make torch forget a group of `register`."""
    _unregister_process_group(group.group_name)
    for table in (c10d._world.pg_map, c10d._world.pg_names, c10d._world.pg_group_ranks):
        table.pop(group, None)
