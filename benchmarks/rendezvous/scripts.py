"""What each member says while its group is made: recorded from real members."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from support.store_port import port_of

from phalanx.core.layout import Axis, Layout
from phalanx.parallel.mesh import Mesh, meeting_place
from phalanx.parallel.rendezvous import open_store
from rendezvous.proxy import Proxy, Recording
from rendezvous.wire import Kind, Request

_CONNECT = {Kind.VALIDATE, Kind.PING}


@dataclass(frozen=True)
class GroupScript:
    """The requests of every member of one group, with `place` where its keys are."""

    place: bytes
    requests: tuple[tuple[Request, ...], ...]
    connect: tuple[Request, ...]
    extra_connections: int

    def of(self, index: int, place: bytes) -> list[Request]:
        """What member `index` of the group that meets at `place` says."""
        return [request.moved(self.place, place) for request in self.requests[index]]


def group_name(layout: Layout, axes: Sequence[Axis]) -> str:
    """The name that a mesh gives its groups over `axes`."""
    used = [axis for axis in ("pipeline", "replicate", "shard", "context", "tensor") if axis in axes]
    return "axes:" + "·".join(axis for axis in used if layout.size(axis) > 1)


def record(layout: Layout, axes: Sequence[Axis], make: Any) -> GroupScript:
    """Make the group of rank 0 over `axes` once for real: a `Mesh` and a TCPStore client for every member of it."""
    members = layout.members(0, axes)
    host = open_store("127.0.0.1", 0, 0, layout.world_size, is_host=True)
    proxy = Proxy(("127.0.0.1", port_of(host)), len(members))

    def meet(index: int) -> None:
        store = open_store("127.0.0.1", proxy.ports[index], members[index], layout.world_size, is_host=False)
        mesh = Mesh(layout, members[index], store, torch.device("cpu"), 60.0, 60.0, make=make)
        mesh.prepare(mesh.group(*axes))
        kept.append((mesh, store))

    kept: list[Any] = []
    threads = [threading.Thread(target=meet, args=(index,)) for index in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kept) == len(members), "a member failed to meet the others"
    kept.clear()
    proxy.drain()
    place = meeting_place(group_name(layout, axes), members)
    script = _script(place.encode(), proxy.recordings)
    proxy.close()
    return script


def _script(place: bytes, recordings: list[Recording]) -> GroupScript:
    said = [tuple(r for r in recording.requests if r.kind not in _CONNECT) for recording in recordings]
    connect = tuple(r for r in recordings[0].requests if r.kind in _CONNECT)
    assert all(place in key for requests in said for request in requests for key in request.keys)
    return GroupScript(place, tuple(said), connect, max(r.connections for r in recordings) - 1)
