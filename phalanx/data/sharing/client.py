"""A rank's side of the loader process of its host.

Shape letters: B samples, S positions, L = S + 1 tokens.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.data.batch import Batch
from phalanx.data.loader import LoaderState
from phalanx.data.sharing import server
from phalanx.data.sharing.server import Failed, Hello, HostLoaderError, Ready, Wanted, Welcome
from phalanx.data.sharing.slots import ReaderSlot, fields_of
from phalanx.ipc import local_socket


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
        self._connection: socket.socket | None = server.connect(address)
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
                self._meet()
            batch = self._copy(self._await_step())
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
        """Ask for the next step, and by that let go of the one whose slot it will have."""
        if self._end is not None:
            return
        try:
            count = next(self._counts)
            _check(count, self._hello.ranks)
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
        except OSError:  # it is gone; what it has said before is worth more than this, and `receive` comes to its end
            return

    def _meet(self) -> None:
        message, descriptors = self._hear()
        if not isinstance(message, Welcome):
            raise HostLoaderError(f"{self._who} said {message} for a welcome")
        self._who = self._who.replace("(at", f"(process {message.pid}, at")
        self._slots = [ReaderSlot(descriptor) for descriptor in descriptors]

    def _await_step(self) -> Ready:
        message, _ = self._hear()
        step, _ = self._on_the_way[0]
        if not isinstance(message, Ready) or message.step != step:
            raise HostLoaderError(f"{self._who} said {message} while step {step} was awaited")
        return message

    def _hear(self) -> tuple[server.Message, list[int]]:
        assert self._connection is not None
        message, descriptors = server.receive(self._connection)
        if message is None:
            why = "it was killed, for instance for want of memory, or the rank that started it has ended"
            # the cause tells whoever looks for the culprit of a job's end that this only followed from another's
            raise HostLoaderError(f"{self._who} is gone: {why}") from ConnectionResetError("the loader hung up")
        if isinstance(message, Failed):
            raise server.error_of(message, self._who)
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


def _check(count: int, ranks: int) -> None:
    if count % ranks:
        raise ValueError(f"{count} samples a step cannot be shared by {ranks} ranks: make it a multiple")
