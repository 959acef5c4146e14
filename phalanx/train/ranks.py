"""The processes of a run, as one of them sees them: its place, its connections to the others, and the model's spread.

The ranks meet twice. First in a tree of connections, for plain values (which one prepares the text, whether all agree);
then, when the layout is known, in the groups of its axes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from phalanx.core.errors import UserError
from phalanx.core.files import atomic_writer
from phalanx.core.peers import ALONE, PeerError, Peers
from phalanx.core.phases import Phases
from phalanx.ipc.tree_peers import TreePeers
from phalanx.launch.cores import allowed_cpus
from phalanx.launch.environment import Worker
from phalanx.launch.rank_failures import speaks_of_a_peer
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.group import Waits
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.process_groups import maker
from phalanx.parallel.rendezvous import Abort, open_store
from phalanx.telemetry.config import TelemetryConfig
from phalanx.telemetry.cuda_spans import CudaSpans
from phalanx.telemetry.recording import Recording, open_recording
from phalanx.telemetry.spans import NONE, Recorder, SpanType
from phalanx.telemetry.writer_place import WriterSettings
from phalanx.train.heartbeat import NO_PULSE, START_S, Pulse, open_page
from phalanx.train.step_spans import StepSpans

_ATTEMPT = "attempt"


@dataclass
class Ranks:
    """One rank among those of its run; made by `meet`."""

    peers: Peers = ALONE  # all ranks, for small values
    worker: Worker | None = None  # its place among the ranks, from its launcher; None where it is the only one
    phases: Phases = field(default_factory=Phases)  # seconds that each phase of starting up took
    mesh: Mesh | None = None  # the groups of the layout, once `join` was called; None with one rank
    at_end: ExitStack = field(default_factory=ExitStack)  # what is to be closed with this
    waits: Waits = field(default_factory=Waits)  # how long this rank has waited for others
    pulse: Pulse = NO_PULSE  # how far it is, for its supervisor
    spans: StepSpans = field(default_factory=StepSpans)  # what it did, for people; nothing before `record_spans`
    recording: Recording | None = None
    say: Callable[[str], None] = lambda _: None  # shows a line to a person
    abort: Abort = field(default_factory=lambda: Abort(None))  # why the first rank to give up did so, for all
    is_under_way: bool = False  # the first step is done
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

    def decide(self, choose: Callable[[], Any]) -> Any:
        """What `choose` returns on rank 0 (JSON), on every rank: each has other memory, and they must not differ.

        Raises:
            UserError: `choose` raised it; all ranks raise the same.
        """
        choice: list[Any] = [None]
        if self.is_first:
            try:
                choice = [choose()]
            except UserError as error:
                choice = [str(error).removesuffix(f"; {error.cure}"), error.cure]
        chosen = self.peers.broadcast(choice)
        if len(chosen) > 1:
            raise UserError(chosen[0], cure=chosen[1])
        return chosen[0]

    def why_ended(self, error: BaseException) -> str:
        """What to keep of the end of this start: `error`, or that of the rank whose failure it only follows from.

        Every rank that fails calls this before it closes its connections: the others see that only then.
        """
        kind = "" if isinstance(error, UserError) else type(error).__name__
        own = ": ".join(filter(None, (kind, *str(error).splitlines()[:1])))
        if not isinstance(error, Exception):  # it was interrupted
            return own
        first = self.abort.cause("" if speaks_of_a_peer(error) else own)
        if first is None or first[0] == self.rank or first[1] == own:  # what all refuse alike is nobody's
            return own
        return f"rank {first[0]}: {first[1]}"

    def record_spans(self, run: Path, config: TelemetryConfig, say: Callable[[str], None]) -> None:
        """Begin to record what this rank does, if the config says so; all ranks call it.

        Training does without where this host has no memory for it.
        """
        self.say = say
        if not config.spans:
            return
        attempt = self.decide(lambda: _next_attempt(run / "telemetry"))
        settings = WriterSettings(
            detail_s=config.keep_spans_s, around_s=config.around_incidents_s, most_bytes=config.most_span_bytes
        )
        # The writer may use any core of this run, not those of the host's first rank alone.
        cores = os.sched_getaffinity(os.getppid()) if self.worker is not None else allowed_cpus()
        worker = self.worker
        try:
            self.recording = open_recording(
                run,
                rank=self.rank,
                attempt=attempt,
                is_first_of_host=self.is_first_of_host,
                settings=settings,
                store_host=None if worker is None or worker.local_world_size == worker.world_size else worker.host,
                cores=cores,
                upload=config.upload,
            )
        except OSError as error:
            say(f"no spans are recorded on {socket.gethostname()} ({error}); training goes on without")
            return
        recorder = self.recording.recorder
        recorder.step = NONE  # none is under way
        self.spans.recorder = recorder
        self._record_agreeing(recorder, recorder.type("wait", "agree", group="all"))

    def _record_agreeing(self, recorder: Recorder, agreeing: SpanType) -> None:
        self.waits.begun = lambda begin_ns: recorder.enter(agreeing, begin_ns)
        self.waits.recorded = lambda begin_ns, end_ns: recorder.record(agreeing, begin_ns, end_ns)

    def end_recording(self, *, waits: bool) -> None:
        """Record no more; `waits` some seconds at most until all of it is written."""
        if self.recording is not None:
            if self.recording.recorder.device is not None:
                self.recording.recorder.device.close()
            self.waits.begun = self.waits.recorded = self.spans.recorder = None
            self.recording.close(waits=waits)
            self.recording = None

    def join(self, config: ParallelConfig, device: torch.device) -> None:
        """Open the groups of a layout, of which every axis is given; each is made when it is first needed."""
        if device.type != "cpu":
            self.pulse.without_own_time()
        recorder = self.spans.recorder
        if device.type == "cuda" and recorder is not None:
            recorder.device = CudaSpans(recorder, torch.cuda)
            # The host waits for others while the device computes: that is no part of the device's step.
            self._record_agreeing(recorder, recorder.type("user", "agree", group="all"))
        if self._store is not None:
            times = config.timeout_s, config.first_timeout_s
            make = maker(device, max_ctas=config.nccl_max_ctas, shared=config.share_device)
            self.mesh = Mesh(
                config.layout,
                self.rank,
                self._store,
                device,
                *times,
                make=make,
                phases=self.phases,
                waits=self.waits,
                recorder=self.spans.recorder,
            )

    def after_step(self) -> None:
        """After the first step, other ranks are waited for less long; after any, see to what writes spans."""
        if self.recording is not None and (trouble := self.recording.look_after_writer()):
            self.say(trouble)
        if not self.is_under_way:
            self.is_under_way = True
            if self.mesh is not None:
                self.mesh.after_first_step()
            if self._tree is not None:
                self._tree.timeout_s = self._later_timeout_s

    def close(self) -> None:
        """End what was started, and close all groups, without waiting for other ranks."""
        self.at_end.close()
        if self.mesh is not None:
            self.mesh.close()
        if self._tree is not None:
            self._tree.close()
        self.abort.linger()


def meet(worker: Worker | None, config: ParallelConfig) -> Ranks:
    """Meet the other ranks.

    Raises:
        UserError: the store cannot be reached, or another rank has given up already and said why.
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
    if worker.launcher != "phalanx":
        # The store of another launcher outlives this run: a second one of the same processes has names of its own.
        meetings = store.add(f"meetings/{worker.rank}", 1)
        if meetings > 1:
            store = PrefixStore(f"meeting{meetings}", store)
    abort = Abort(store, worker.rank, worker.world_size, serves=worker.hosts_store)
    if worker.world_size == 1:
        return Ranks(worker=worker, phases=phases, waits=waits, pulse=pulse, abort=abort, _store=store)
    try:
        with phases.phase("peers"):
            tree = TreePeers(
                store,
                worker.rank,
                worker.world_size,
                host=worker.host,
                name=socket.gethostname(),
                timeout_s=config.first_timeout_s,
                counted=waits.counted_and_recorded,
            )
    except PeerError as error:
        # It may have been refused before this one came: its settings, say.
        why = abort.announced()
        if why is None:
            raise
        raise why from error
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


def _next_attempt(telemetry: Path) -> int:
    """How often this run was started before: what a later start does again counts, and what it was done by does not."""
    try:
        telemetry.mkdir(parents=True, exist_ok=True)
        kept = telemetry / _ATTEMPT
        attempt = int(kept.read_text()) + 1 if kept.exists() else 0
        with atomic_writer(kept) as file:
            file.write(str(attempt).encode())
    except (OSError, ValueError):  # the disk is full; spans say so when they are written
        return 0
    return attempt
