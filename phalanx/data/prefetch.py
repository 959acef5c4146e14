"""A thread that stays a few items ahead of its consumer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")
_END = object()


class Prefetcher(Generic[T]):
    """Iterates over `items` in a thread, at most `ahead` items before they are asked for.

    An exception of `items` is raised at the place where its item would have come. `close` (or leaving the ``with``
    block) stops and joins the thread; the thread is a daemon, so that an abandoned one cannot keep the process alive.
    """

    def __init__(self, items: Iterator[T], ahead: int) -> None:
        self._items = items
        self._ready: queue.Queue[tuple[object, BaseException | None]] = queue.Queue(maxsize=max(ahead, 1))
        self._stop = threading.Event()
        self._done = False
        self._thread = threading.Thread(target=self._work, name="phalanx-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._done:
            raise StopIteration
        item, error = self._ready.get()
        if item is _END:
            self._done = True
            self._thread.join()
            if error is not None:
                raise error
            raise StopIteration
        return cast(T, item)

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and wait for it; further items are not made."""
        self._done = True
        self._stop.set()
        while self._thread.is_alive():
            self._empty()
            self._thread.join(timeout=0.05)

    def _empty(self) -> None:
        while True:
            try:
                self._ready.get_nowait()
            except queue.Empty:
                return

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._items:
                if self._stop.is_set():
                    return
                self._ready.put((item, None))
        except BaseException as caught:
            error = caught
        self._put_end(error)

    def _put_end(self, error: BaseException | None) -> None:
        last: tuple[Any, BaseException | None] = (_END, error)
        if not self._stop.is_set():
            self._ready.put(last)
