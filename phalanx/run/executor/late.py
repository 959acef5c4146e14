"""Asking what may never answer: a device whose driver hangs, a file system whose server is gone. Torch-free."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Late(Generic[T]):
    """The newest answer of a function that is called in a thread of its own, never twice at a time.

    Args:
        ask: may block for ever.
        name: of what is asked, for people.
        first: the answer until there is one.
    """

    def __init__(self, ask: Callable[[], T], name: str, first: T) -> None:
        self._ask = ask
        self._name = name
        self._answer = first
        self._asked_s = 0.0
        self._idle = threading.Event()
        self._idle.set()
        self.problem = ""
        """Why the last question had no answer: what it raised."""

    def take(self, within_s: float) -> T:
        """Ask, and wait at most `within_s` seconds; after that, and where asking fails, the last answer is given.

        While an earlier question is not answered, nobody asks or waits again.
        """
        if self._idle.is_set():
            self._idle.clear()
            self._asked_s = time.monotonic()
            threading.Thread(target=self._work, name=f"ask {self._name}", daemon=True).start()
            self._idle.wait(within_s)
        return self._answer

    @property
    def last(self) -> T:
        """The last answer."""
        return self._answer

    @property
    def silence(self) -> str:
        """Since when it does not answer, or why, for people; empty: it does."""
        if not self._idle.is_set():
            return f"{self._name} does not answer since {time.monotonic() - self._asked_s:.1f} s"
        return self.problem

    def _work(self) -> None:
        try:
            self._answer = self._ask()
            self.problem = ""
        except Exception as error:
            self.problem = f"{self._name}: {error}"
        finally:
            self._idle.set()
