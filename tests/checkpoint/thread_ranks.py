"""Several ranks as threads, which exchange values as `phalanx.core.peers.Peers`; values go through JSON as in a run."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE_S = 120.0


class Exchange:
    """What the threads share."""

    def __init__(self, size: int) -> None:
        self.values: list[str] = [""] * size
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self.longest = 0


class ThreadPeers:
    """One rank of them."""

    def __init__(self, rank: int, size: int, exchange: Exchange) -> None:
        self.rank, self.size, self._exchange = rank, size, exchange

    def gather(self, value: Any) -> list[Any]:
        text = json.dumps(value)
        self._exchange.longest = max(self._exchange.longest, len(text))
        self._exchange.values[self.rank] = text
        self.barrier()
        texts = list(self._exchange.values)
        self.barrier()
        return [json.loads(text) for text in texts]

    def broadcast(self, value: Any) -> Any:
        return self.gather(value if self.rank == 0 else None)[0]

    def collect(self, value: Any) -> list[Any] | None:
        values = self.gather(value)
        return None if self.rank else values

    def lowest(self, value: Any) -> Any:
        return min((one for one in self.gather(value) if one is not None), default=None)

    def ask_highest(self, value: int) -> Callable[[], int]:
        highest = max(self.gather(value))
        return lambda: highest

    def barrier(self) -> None:
        self._exchange.barrier.wait()

    def die(self) -> None:
        """Leave without a word, as a killed process does: whoever waits for this rank is told by the connection."""
        self._exchange.barrier.abort()
        raise Died


class Died(BaseException):
    """The thread is gone."""


def run_ranks(size: int, body: Callable[[ThreadPeers], T]) -> list[T | BaseException]:
    """What `body` returned on each rank, or what it raised there."""
    exchange = Exchange(size)
    results: list[Any] = [None] * size

    def main(rank: int) -> None:
        try:
            results[rank] = body(ThreadPeers(rank, size, exchange))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def succeed(size: int, body: Callable[[ThreadPeers], T]) -> list[T]:
    """What `body` returned on each rank; raises what the first rank that failed raised."""
    results = run_ranks(size, body)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]
