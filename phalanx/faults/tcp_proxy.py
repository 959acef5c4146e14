"""A TCP link between two programs that can be cut, silenced and delayed.

    executor ──► Link (127.0.0.1:port) ──► driver

A silenced link holds what is said and passes it on later, as TCP does over a network that loses all for a while; a cut
one resets its connections and refuses new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_RESET = struct.pack("ii", 1, 0)  # linger for 0 s: a close resets the connection

_READ_BYTES = 1 << 16
_ANSWER_S = 30.0
_HELD = 256  # pieces per direction; beyond that whoever speaks is held up, as by a full socket


class Link:
    """Listens on a loopback port and passes on to `host`:`port`, in a thread of its own. Use it in a ``with``.

    Attributes:
        port: to connect to.
        passed_bytes: in both directions.
    """

    def __init__(self, host: str, port: int) -> None:
        self.port = 0
        self.passed_bytes = 0
        self._target = host, port
        self._delay_s = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._open = asyncio.Event()

    def __enter__(self) -> Link:
        self._thread.start()
        self._do(self._listen())
        self._open.set()
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._hang_up())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Meanwhile there are no connections, and new ones are refused."""
        self._do(self._hang_up())
        try:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 5):
                raise RuntimeError(f"port {self.port} still accepts connections")
            yield
        finally:
            self._do(self._listen())

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Meanwhile nothing arrives; afterwards all does."""
        self._soon(self._open.clear)
        try:
            yield
        finally:
            self._soon(self._open.set)

    @contextmanager
    def delayed(self, seconds: float) -> Iterator[None]:
        """What is said meanwhile arrives that much later."""
        self._delay_s = seconds
        try:
            yield
        finally:
            self._delay_s = 0.0

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def _hang_up(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()
        while self._writers:
            await asyncio.sleep(0.001)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        far: asyncio.StreamWriter | None = None
        try:
            far_reader, far = await asyncio.open_connection(*self._target)
            self._writers.add(far)
            if self._server is not None:
                await _until_first_error(self._carry(reader, far), self._carry(far_reader, writer))
        except OSError:
            pass
        finally:
            for end in (writer, far):
                if end is not None:
                    end.transport.abort()
                    self._writers.discard(end)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """From one to the other, until the one hangs up, and the end of it too."""
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_HELD)

        async def listen() -> None:
            data = b"-"
            while data:
                data = await reader.read(_READ_BYTES)
                await held.put((self._loop.time() + self._delay_s, data))

        async def speak() -> None:
            while True:
                due_s, data = await held.get()
                await asyncio.sleep(due_s - self._loop.time())
                await self._open.wait()
                if not data:
                    writer.write_eof()
                    return
                writer.write(data)
                await writer.drain()
                self.passed_bytes += len(data)

        await _until_first_error(listen(), speak())

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_ANSWER_S)

    def _soon(self, act: Callable[[], None]) -> None:
        async def work() -> None:
            act()

        self._do(work())


async def _until_first_error(*works: Coroutine[Any, Any, None]) -> None:
    """Until all are done, or one fails: then the others are cancelled, and its error is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
