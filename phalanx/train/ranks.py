"""The processes of a run, as one of them sees them: who it is, how it talks to the others, and how the model is spread.

The ranks meet twice. First in a tree of connections, to speak of plain things (who prepares the text, whether all
agree); then, when the layout is known, in the groups of its axes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from phalanx.core.errors import UserError
from phalanx.core.peers import ALONE, Peers
from phalanx.core.phases import Phases
from phalanx.ipc.tree_peers import TreePeers
from phalanx.launch.environment import Worker
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.group import Waits
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.process_groups import maker
from phalanx.parallel.rendezvous import Abort, open_store
from phalanx.train.heartbeat import NO_PULSE, START_S, Pulse, open_page


@dataclass
class Ranks:
    """One rank among those of its run; made by `meet`.

    Attributes:
        peers: all ranks, for small values.
        worker: what this process was told by whoever started it; None where it is the only one.
        phases: seconds that each phase of starting up took.
        mesh: the groups of the layout, once `join` was called; None with one rank.
        at_end: what is to be closed with this.
        waits: how long this rank has waited for others.
        pulse: how far it is, for whoever supervises it.
        abort: what the first rank to give up says to all.
    """

    peers: Peers = ALONE
    worker: Worker | None = None
    phases: Phases = field(default_factory=Phases)
    mesh: Mesh | None = None
    at_end: ExitStack = field(default_factory=ExitStack)
    waits: Waits = field(default_factory=Waits)
    pulse: Pulse = NO_PULSE
    abort: Abort = field(default_factory=lambda: Abort(None))
    _is_under_way: bool = False
    _store: Store | None = None
    _tree: TreePeers | None = None
    _later_timeout_s: float = 0.0

    @property
    def rank(self) -> int:
        """This rank."""
        return self.peers.rank

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.peers.size

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all: shows figures, writes the run folder."""
        return self.rank == 0

    @property
    def is_first_of_host(self) -> bool:
        """Whether this rank does what one process of every host must do."""
        return self.worker is None or self.worker.local_rank == 0

    @property
    def is_under_way(self) -> bool:
        """Whether the first step is done."""
        return self._is_under_way

    def decide(self, choose: Callable[[], Any]) -> Any:
        """What rank 0 chooses, on every rank: each would choose by what it has itself, and they must not differ.

        Args:
            choose: called on rank 0 alone; returns what JSON can hold.

        Raises:
            UserError: `choose` raised it; all ranks raise the same.
        """
        choice: list[Any] = [None]
        if self.is_first:
            try:
                choice = [choose()]
            except UserError as error:
                choice = [str(error).removesuffix(f"; {error.cure}"), error.cure]
        told = self.peers.broadcast(choice)
        if len(told) > 1:
            raise UserError(told[0], cure=told[1])
        return told[0]

    def join(self, config: ParallelConfig, device: torch.device) -> None:
        """Open the groups of a layout; each is made when it is first needed.

        Args:
            config: with every axis given.
        """
        if device.type != "cpu":
            self.pulse.without_own_time()
        if self._store is not None:
            times = config.timeout_s, config.first_timeout_s
            make = maker(device, max_ctas=config.nccl_max_ctas, shared=config.share_device)
            self.mesh = Mesh(
                config.layout, self.rank, self._store, device, *times, make=make, phases=self.phases, waits=self.waits
            )

    def after_step(self) -> None:
        """After the first step, other ranks are waited for less long."""
        if not self._is_under_way:
            self._is_under_way = True
            if self.mesh is not None:
                self.mesh.after_first_step()
            if self._tree is not None:
                self._tree.timeout_s = self._later_timeout_s

    def close(self) -> None:
        """End what was started, and let go of all groups, without waiting for anyone."""
        self.at_end.close()
        if self.mesh is not None:
            self.mesh.close()
        if self._tree is not None:
            self._tree.close()
        self.abort.linger()


def meet(worker: Worker | None, config: ParallelConfig) -> Ranks:
    """Meet the other ranks.

    Raises:
        UserError: the store cannot be reached.
        PeerError: the rank that this one is connected to has not come.
    """
    if worker is None:
        return Ranks()
    phases, waits = Phases(), Waits()
    pulse = Pulse(open_page(os.environ), lambda: waits.waited_ns)
    pulse.enter("start", START_S)
    for name, seconds in worker.phases_s.items():
        phases.add(name, seconds)
    with phases.phase("store"):
        store = open_store(
            worker.host,
            worker.port,
            worker.rank,
            worker.world_size,
            is_host=worker.hosts_store,
            listen_fd=worker.listen_fd,
            timeout_s=config.first_timeout_s,
            attempt=worker.attempt,
        )
    abort = Abort(store, worker.rank, worker.world_size, serves=worker.hosts_store)
    if worker.world_size == 1:
        return Ranks(worker=worker, phases=phases, waits=waits, pulse=pulse, abort=abort, _store=store)
    with phases.phase("peers"):
        tree = TreePeers(
            store,
            worker.rank,
            worker.world_size,
            host=worker.host,
            name=socket.gethostname(),
            timeout_s=config.first_timeout_s,
            counted=waits.counted,
        )
    return Ranks(
        tree,
        worker,
        phases,
        waits=waits,
        pulse=pulse,
        abort=abort,
        _store=store,
        _tree=tree,
        _later_timeout_s=config.timeout_s,
    )
