"""Spans of a training loop of your own: each rank records, one process of the host writes.

    from phalanx.telemetry import record_spans

    spans = record_spans("runs/mine")              # in every rank; RANK and LOCAL_RANK as torchrun sets them
    spans.attach(model)                            # forward and backward of any module
    for step, batch in enumerate(batches, 1):
        with spans.step(step):
            with spans.span("loss", kind="forward"):
                ...
            with spans.span("all-reduce", group=dist.group.WORLD):
                dist.all_reduce(gradients)
    spans.close()

Then `phalanx trace summary runs/mine` and the rest. Times are the host's until a module on a CUDA device is attached;
then what is computed is recorded by the device's (`phalanx.telemetry.cuda_spans`). `phalanx train` records by itself,
through `open_recording`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from phalanx.core.errors import UserError
from phalanx.telemetry.collective_spans import CollectiveSpan, described, types_of
from phalanx.telemetry.cuda_spans import CudaSpan, CudaSpans
from phalanx.telemetry.current_recording import CURRENT
from phalanx.telemetry.spans import (
    KINDS,
    MOST_BYTES,
    MOST_RANK,
    MOST_STEP,
    NONE,
    Kind,
    NotRecorded,
    Recorder,
    RingReader,
    Span,
    require_number,
)
from phalanx.telemetry.writer_place import LOG, WriterPlace, WriterSettings

_CLOSE_S, _PATIENCE_S, _POLL_S = 20.0, 3.0, 0.01
_OF_HOST: tuple[Kind, ...] = ("persist", "evaluation", "startup", "user")
"""Kinds of which a device has no time of its own."""

_LOOK_S, _FIRST_LOOK_S = 10.0, 60.0  # a busy host may take long to start a process


class Recording:
    """A rank that records; made by `record_spans`."""

    def __init__(
        self,
        recorder: Recorder,
        ring: Path,
        place: WriterPlace,
        settings: WriterSettings,
        *,
        starts_writer: bool,
    ) -> None:
        self.recorder, self._ring, self._place = recorder, ring, place
        self._settings, self._starts_writer = settings, starts_writer
        self._hooks: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()  # by attached module
        self._looks_at_s = time.monotonic() + _FIRST_LOOK_S
        self._restarts_left, self._is_said = 1, False
        self._before = CURRENT.set(self)

    def span(
        self,
        name: str,
        *,
        kind: Kind | None = None,
        group: Any = None,
        ranks: Sequence[int] = (),
        peer: int = NONE,
        bytes: int = 0,
        chunk: int = NONE,
        micro_batch: int = NONE,
    ) -> Span | CudaSpan | NotRecorded | CollectiveSpan:
        """Record the block of a `with`.

        With a group it is a collective and the wait for it, for a call that returns when it is done; of one that was
        started before, `kind="wait"` records the wait alone. All members give the same name and group.

        Args:
            name: of what is done: ``all-reduce``; a message is ``send …`` on one side and ``receive …`` on the other.
            kind: one of `phalanx.telemetry.spans.KINDS`, by which queries add up; None: `name`, where that is one, else
                ``collective`` with a group and ``user`` without.
            group: where it goes on: a process group of torch (``dist.group.WORLD``), a device mesh of one dimension, a
                name that all members give (``data``, ``tensor``), or the members.
            ranks: its members, numbered as in the whole job, where `group` is a name; empty: not known.
            peer: the other rank of a message.
            bytes: that leave this rank.
            chunk, micro_batch: of the model and of the batch; -1: none.

        Raises:
            UserError: there is no such kind or group, or it is of a kind that has none; a number is none that a span
                can hold.
        """
        if not isinstance(name, str):
            raise UserError("is not the name of a span", cure="give a text", field="name", value=repr(name)[:80])
        require_number("bytes", bytes, MOST_BYTES, least=0)
        require_number("peer", peer, MOST_RANK)
        has_group = group is not None or len(ranks) > 0
        if kind is None:
            kind = name if name in KINDS else "collective" if has_group else "user"
        elif kind not in KINDS:
            raise UserError("is not a kind of span", cure=f"give one of {', '.join(KINDS)}", field="kind", value=kind)
        if has_group:
            return self._in_group(name, kind, described(group, ranks), peer, bytes, micro_batch)
        type_ = self.recorder.type(kind, name, chunk=chunk)
        if kind in _OF_HOST:
            return self.recorder.span(type_, micro_batch=micro_batch, peer=peer, num_bytes=bytes)
        return self.recorder.begin(type_, micro_batch=micro_batch, peer=peer, num_bytes=bytes)

    def _in_group(
        self, name: str, kind: Kind, group: tuple[str, tuple[int, ...]], peer: int, num_bytes: int, micro_batch: int
    ) -> Span | CudaSpan | NotRecorded | CollectiveSpan:
        require_number("micro_batch", micro_batch)
        types = types_of(self.recorder, name, *group)
        if kind == "collective":
            return CollectiveSpan(self.recorder, types, num_bytes, peer, micro_batch)
        if kind == "wait":
            return self.recorder.begin(types[1], micro_batch=micro_batch, peer=peer)
        cure = 'leave the group out, or give kind="collective" or "wait"'
        raise UserError("is a kind of span without a group", cure=cure, field="kind", value=kind)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record one optimizer step; spans within it are noted under its number, all others under no step.

        Raises:
            UserError: the step is not a whole number from 0 on.
        """
        require_number("step", step, MOST_STEP, least=0)
        self.recorder.step = step
        try:
            with self.recorder.begin(self.recorder.type("step")):
                yield
        finally:
            self.recorder.step = NONE  # what an evaluation between two steps computes is no part of either
        if self.recorder.device is not None:
            self.recorder.device.resolve()

    def attach(self, model: Any, name: str = "model", chunk: int = NONE) -> None:
        """Record every forward and backward pass of a torch module.

        A backward pass begins when the gradient of the module's output is there, and ends when that of its inputs is;
        where no input needs a gradient, as with token ids, it ends when the last of its parameters has one. From the
        first module on that lies on a CUDA device, what is computed is recorded by the device's time. A module that is
        attached again is recorded once, under what was given last.
        """
        self._detach(model)
        if self.recorder.device is None and any(one.is_cuda for one in model.parameters()):
            self.recorder.device = CudaSpans(self.recorder, import_module("torch").cuda)
        passes: tuple[Kind, ...] = ("forward", "backward")
        types = {kind: self.recorder.type(kind, name, chunk=chunk) for kind in passes}
        begun: dict[str, Any] = {}

        def begin(kind: Kind) -> None:
            begun[kind] = self.recorder.begin(types[kind])

        def end(kind: Kind) -> None:
            if kind in begun:
                begun.pop(kind).end()

        left = 0
        parameters = [one for one in model.parameters() if one.requires_grad]

        def begin_backward(_: Any) -> None:
            nonlocal left
            if "backward" not in begun:  # of several outputs one has its gradient first
                left = len(parameters)
                begin("backward")

        def end_forward(_module: Any, _inputs: Any, outputs: Any) -> None:
            end("forward")
            # Hooks of the module's backward pass would make torch warn of inputs that need no gradient, as token ids.
            for one in import_module("torch.utils._pytree").tree_leaves(outputs):
                if getattr(one, "requires_grad", False):
                    one.register_hook(begin_backward)

        def accumulated(*_: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                end("backward")

        self._hooks[model] = [
            model.register_forward_pre_hook(lambda *_: begin("forward")),
            model.register_forward_hook(end_forward),
            *(one.register_post_accumulate_grad_hook(accumulated) for one in parameters),
        ]

    def _detach(self, model: Any) -> None:
        for hook in self._hooks.pop(model, ()):
            hook.remove()

    def look_after_writer(self) -> str:
        """See now and then whether this host's spans are written; one that is gone is started again, once.

        Returns:
            What went wrong, in one line, the first time that something did; else an empty text.
        """
        now_s = time.monotonic()
        if not self._starts_writer or now_s < self._looks_at_s:
            return ""
        self._looks_at_s = now_s + _LOOK_S
        problem = str(self._place.state().get("problem", ""))
        if not self._place.is_written:
            problem = f"the process that writes spans has ended, see {self._place.rings / LOG}"
            if self._restarts_left:
                self._restarts_left -= 1
                self._start_writer()
        if not problem or self._is_said:
            return ""
        self._is_said = True
        return f"{problem}; training goes on, and spans may be missing in {self._place.folder}"

    def close(self, *, waits: bool = True) -> None:
        """Record no more.

        Args:
            waits: some seconds at most, until the host's writer has written what was recorded.
        """
        # Closed twice, or in another context than it was opened in: that one keeps what it has.
        with suppress(ValueError, RuntimeError):
            CURRENT.reset(self._before)
        for model in list(self._hooks):
            self._detach(model)
        if self.recorder.device is not None:
            self.recorder.device.close()
        self.recorder.close()
        if not waits:
            return
        # The ring goes when the writer has all of it, which may be one that an earlier start left. Then it ends, and
        # has turned the last spans into Parquet.
        began_s, is_started = time.monotonic(), False
        while (took_s := time.monotonic() - began_s) < _CLOSE_S and (self._ring.exists() or self._is_last_of_host()):
            time.sleep(_POLL_S)
            if took_s > _PATIENCE_S and not is_started and not self._place.is_written:
                is_started = True  # it was killed, or had ended with another rank before this one began
                self._start_writer()

    def _start_writer(self) -> None:
        with suppress(OSError):
            self._place.start_writer(self._settings)

    def _is_last_of_host(self) -> bool:
        """Whether this rank waits for the end of the writer, too: it is the first of the host, and no other records."""
        with suppress(OSError):  # the writer removes the folder at its end
            others = any(self._place.rings.glob("*.ring"))
            return self._starts_writer and not others and self._place.is_written
        return False


def open_recording(
    run: str | Path,
    *,
    rank: int,
    attempt: int,
    is_first_of_host: bool,
    settings: WriterSettings | None = None,
    store_host: str | None = None,
    cores: Collection[int] | None = None,
    upload: str = "",
) -> Recording:
    """Begin to record a rank's spans; that of the first of a host starts the process that writes for all of them.

    Args:
        run: its folder or URL; telemetry goes into ``telemetry`` in it.
        attempt: what a later one does again counts once.
        store_host: where the store of a job of several hosts is, as this one reaches it; None: the job has one host.
        cores: that the process which writes may use; None: those of this process.
        upload: URL of the run in object storage, where finished files are sent, too; empty: nowhere.

    Raises:
        UserError: the URL is of a kind that is not known here.
        OSError: the memory of this host or the folder cannot be written, or no process be started.
    """
    place = WriterPlace.of(run, store_host, cores, upload)
    # A name of its own for each process: the writer may not have done yet with what an earlier one has left.
    ring = place.rings / f"{rank}-{attempt}-{os.getpid()}.ring"
    recorder = Recorder.open(ring, rank=rank, attempt=attempt)
    settings = settings or WriterSettings()
    if is_first_of_host:
        place.start_writer(settings)
    return Recording(recorder, ring, place, settings, starts_writer=is_first_of_host)


def record_spans(
    run: str | Path, *, environ: Mapping[str, str] | None = None, settings: WriterSettings | None = None
) -> Recording:
    """Begin to record the spans of this rank.

    Args:
        run: folder of the run, the same on all ranks, or its URL, such as ``s3://bucket/run``; telemetry goes into
            ``telemetry`` in it.
        environ: where RANK, LOCAL_RANK and TORCHELASTIC_RESTART_COUNT are; None: this process's. Without them it is
            the only rank.

    Raises:
        UserError: the memory of this host or the folder cannot be written, or another process records as this rank.
    """
    environ = os.environ if environ is None else environ
    rank, local_rank = int(environ.get("RANK", "0")), int(environ.get("LOCAL_RANK", "0"))
    attempt = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    world_size = environ.get("WORLD_SIZE", "1")
    has_other_hosts = environ.get("LOCAL_WORLD_SIZE", world_size) != world_size
    _refuse_second(run, rank, attempt)
    try:
        recording = open_recording(
            run,
            rank=rank,
            attempt=attempt,
            is_first_of_host=local_rank == 0,
            settings=settings,
            store_host=environ.get("MASTER_ADDR") if has_other_hosts else None,
        )
    except OSError as error:
        cure = "make room in the memory of this host (/dev/shm), and the folder of the run writable"
        raise UserError(f"spans cannot be recorded ({error})", cure=cure, field="run", value=str(run)) from error
    recording.recorder.step = NONE
    return recording


def _refuse_second(run: str | Path, rank: int, attempt: int) -> None:
    """Two loops in one folder, each of which is rank 0, would look like one whose steps take their mean.

    Raises:
        UserError: a process that lives records as this rank of this attempt.
    """
    rings: Iterable[Path] = ()
    with suppress(OSError):  # said when the ring is opened
        rings = sorted(WriterPlace.of(run).rings.glob(f"{rank}-{attempt}-*.ring"))
    for path in rings:
        is_recording = False
        with suppress(OSError, ValueError):  # gone meanwhile, or of another version
            reader = RingReader(path)
            is_recording = reader.pid != os.getpid() and not reader.is_orphan and not reader.is_closed
            reader.close()
        if is_recording:
            problem = f"process {reader.pid} records rank {rank} of this run already"
            cure = "give each loop a folder of its own, and each rank its RANK"
            raise UserError(problem, cure=cure, field="run", value=str(run))
