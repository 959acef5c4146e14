"""One loader per host: a process that reads and packs batches into shared memory, from which the host's ranks copy.

MegaScale (arXiv 2402.15627) 3.4: the ranks of a tensor-parallel group need identical input, so a loader in each of them
reads the same again and again. Here one process per host reads; ranks of one data-parallel index (those that differ
only along tensor, context and pipeline) copy from the same slots of shared memory.

    # on the first rank of a host, as early as possible: while it has one thread, a fork takes milliseconds
    loader = start_host_loader(prepared, config.data, indices=[0, 0, 1, 1])   # data-parallel index of its four ranks
    address = loader.address                                                  # a string: send it to the other three

    # on each rank, with its data-parallel index; from here on as with `Loader.stream`
    client = HostLoaderClient(address, rank=1, ranks=8)
    with client.stream(state, counts=1024, ahead=2) as stream:
        for batch, state in stream: ...

    loader.close()                                                            # or ``with start_host_loader(…) as …``

The batches are those of `Loader.stream(state, counts=…, rank=…, ranks=…)`, bit for bit, as private copies: the slot is
free at once. What happens when ranks disagree, or when something dies: docs/data.md, "One loader per host".
Held-out batches are few and not shared: take them from `Loader.validation_batches`.

Shape letters: B samples, S positions, L = S + 1 tokens.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.data.batch import Batch
from phalanx.data.config import DataConfig, Split
from phalanx.data.loader import LoaderState, share_of
from phalanx.data.samples import PackedSplit
from phalanx.data.sharing import loader_server
from phalanx.data.sharing.loader_process import LoaderTask, Method, fork_is_safe, start
from phalanx.data.sharing.loader_server import Failed, Hello, HostLoaderError, Ready, Wanted, Welcome
from phalanx.data.sharing.slots import ReaderSlot, fields_of
from phalanx.data.tokens.prepared_corpus import Prepared
from phalanx.ipc import local_socket

__all__ = ["HostLoader", "HostLoaderClient", "HostLoaderError", "start_host_loader", "why_no_host_loader"]


def why_no_host_loader() -> str | None:
    """Why this system cannot have a loader process, or None where it can."""
    missing = sys.platform != "linux" or not hasattr(os, "memfd_create") or not os.path.isdir("/proc/self/fd")  # noqa: PTH112
    return "it needs Linux with /proc: memory and sockets that have no name" if missing else None


def start_host_loader(
    prepared: Prepared,
    config: DataConfig,
    *,
    indices: Sequence[int],
    split: Split = "train",
    seed: int | None = None,
    cores: Iterable[int] | None = None,
    method: Method | None = None,
) -> HostLoader:
    """Start this host's loader process; to be called by one process of the host, which the loader does not outlive.

    Args:
        prepared, config, split, seed: as for `Loader`.
        indices: the data-parallel index of every rank of this host, in any order.
        cores: the processor numbers that the loader may run on; None: those of this process, which is bad for a rank
            that is bound to its share of them and computes there: give those of all ranks of the host.
        method: ``fork`` or ``exec`` (a new Python, about half a second of one core, while this process goes on); None:
            a fork where this process has one thread and no device in use, else exec.

    Raises:
        UserError: the split has no tokens, or too few for one sample; nothing was started.
        HostLoaderError: this system cannot have one.
    """
    if (why := why_no_host_loader()) is not None:
        raise HostLoaderError(f"no loader process here: {why}")
    parts = prepared.split(split)
    PackedSplit(parts, config, split=split, seed=seed)  # raises what is wrong with the settings here and now
    task = LoaderTask(parts, config, split, seed, dict(Counter(indices)), None if cores is None else tuple(cores))
    return HostLoader(task, method or ("fork" if fork_is_safe() else "exec"))


class HostLoader:
    """A loader process that this process has started with `start_host_loader`; readers connect to `address`, which is
    valid in all processes of this host's network namespace."""

    def __init__(self, task: LoaderTask, method: Method) -> None:
        self.method = method
        self.address, listener = loader_server.listen()
        with listener:
            self._wait, self.pid, self._hold = start(task, listener, method)
        self._exit_code: int | None = None

    def __enter__(self) -> HostLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(grace_s=1.0 if error is None else 0.0)

    def close(self, grace_s: float = 1.0) -> int:
        """End the process and wait for it; returns its exit status, negative for a signal.

        Args:
            grace_s: for so long ranks that still read may read on; new streams are refused.
        """
        if self._exit_code is not None:
            return self._exit_code
        os.close(self._hold)
        try:
            self._exit_code = self._wait(grace_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._exit_code = self._wait(None)
        return self._exit_code


class HostLoaderClient:
    """The streams of one rank, of data-parallel index `rank` of `ranks`, from the loader process at `address`."""

    def __init__(self, address: str, *, rank: int = 0, ranks: int = 1) -> None:
        self._address = address
        self._rank = rank
        self._ranks = ranks
        self._streams = 0

    def stream(
        self,
        state: LoaderState | None = None,
        *,
        counts: int | Iterable[int],
        ahead: int = 2,
        pin_memory: bool = False,
    ) -> SharedStream:
        """Batches from `state` on; args, and what is returned, as of `Loader.stream`. `ahead` is 1 to 128, and as many
        batches lie in shared memory.

        Raises:
            HostLoaderError: the loader cannot be reached.
            ValueError: `ahead` is out of bounds.
        """
        if not 1 <= ahead <= loader_server.MAX_AHEAD:
            raise ValueError(f"ahead = {ahead}: must be 1 to {loader_server.MAX_AHEAD}")
        steps = repeat(counts) if isinstance(counts, int) else iter(counts)
        hello = loader_server.Hello(loader_server.VERSION, self._rank, self._ranks, ahead, self._streams)
        self._streams += 1
        return SharedStream(self._address, hello, state or LoaderState(), steps, pin_memory=pin_memory)


class SharedStream:
    """Iterates over (batch, state after it), each batch a copy of what the loader process put into shared memory.

    Up to `ahead` steps are asked for before they are needed. An exception, of the counts or of the loader, is raised at
    the place where its batch would have come.
    """

    def __init__(
        self, address: str, hello: Hello, state: LoaderState, counts: Iterator[int], *, pin_memory: bool
    ) -> None:
        self._hello = hello
        self._who = f"the loader process of this host (at {address}, for data-parallel index {hello.index})"
        self._counts = counts
        self._samples = state.samples
        self._pin_memory = pin_memory
        self._slots: list[ReaderSlot] = []
        self._on_the_way: deque[tuple[int, LoaderState]] = deque()
        self._asked = 0
        self._end: Exception | None = None
        self._connection: socket.socket | None = loader_server.connect(address)
        self._say(hello)
        for _ in range(hello.ahead):
            self._ask()

    def __iter__(self) -> Iterator[tuple[Batch, LoaderState]]:
        return self

    def __next__(self) -> tuple[Batch, LoaderState]:
        if self._connection is None:
            raise StopIteration
        if not self._on_the_way:
            end = self._end or StopIteration()
            self.close()
            raise end
        try:
            if not self._slots:
                message, descriptors = self._receive()
                if not isinstance(message, Welcome):
                    raise HostLoaderError(f"{self._who} said {message} for a welcome")
                self._who = self._who.replace("(at", f"(process {message.pid}, at")
                self._slots = [ReaderSlot(descriptor) for descriptor in descriptors]
            message, _ = self._receive()
            step, _ = self._on_the_way[0]
            if not isinstance(message, Ready) or message.step != step:
                raise HostLoaderError(f"{self._who} said {message} while step {step} was awaited")
            batch = self._copy(message)
        except BaseException:
            self.close()
            raise
        _, state = self._on_the_way.popleft()
        self._ask()
        return batch, state

    def __enter__(self) -> SharedStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave; the ranks that share the batches go on without this one. Batches that were handed out stay valid."""
        if self._connection is None:
            return
        self._connection.close()
        self._connection = None
        for slot in self._slots:
            slot.close()

    def _ask(self) -> None:
        """Ask for the next step, and by that release the one whose slot it will have."""
        if self._end is not None:
            return
        try:
            count = next(self._counts)
            share_of(count, self._hello.ranks)
        except Exception as error:  # StopIteration too
            self._end = error
            return
        self._say(Wanted(self._asked, self._samples, count))
        self._samples += count
        self._on_the_way.append((self._asked, LoaderState(self._samples)))
        self._asked += 1

    def _say(self, message: Hello | Wanted) -> None:
        assert self._connection is not None
        try:
            local_socket.send(self._connection, message)
        except OSError:  # it is gone; what it sent before is worth more than this, and `receive` comes to its end
            return

    def _receive(self) -> tuple[loader_server.Message, list[int]]:
        assert self._connection is not None
        message, descriptors = loader_server.receive(self._connection)
        if message is None:
            why = "it was killed, for instance for want of memory, or the rank that started it has ended"
            # By the cause, the search for the culprit of a job's end sees that this only followed from another's.
            raise HostLoaderError(f"{self._who} is gone: {why}") from ConnectionResetError("the loader hung up")
        if isinstance(message, Failed):
            raise loader_server.error_of(message, self._who)
        return message, descriptors

    def _copy(self, ready: Ready) -> Batch:
        fields, size_bytes = fields_of(ready.rows, ready.length, documents=ready.documents)
        arrays = self._slots[ready.step % self._hello.ahead].view(fields, size_bytes)
        documents_BS = arrays.documents_BS
        return Batch(
            self._own(arrays.tokens_BL[:, :-1], torch.int64),
            self._own(arrays.tokens_BL[:, 1:], torch.int64),
            self._own(arrays.weights_BS, torch.float32),
            None if documents_BS is None else self._own(documents_BS, torch.int32),
            self._own(np.arange(ready.first, ready.first + ready.rows), torch.int64),
        )

    def _own(self, array: NDArray[Any], dtype: torch.dtype) -> Tensor:
        """A copy; in page-locked memory straight away, where that is wanted."""
        tensor = torch.empty(array.shape, dtype=dtype, pin_memory=self._pin_memory)
        np.copyto(tensor.numpy(), array, casting="no")
        return tensor
