"""Asking what may never answer: a device whose driver hangs, a file system whose server is gone. Torch-free."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)

_TOLD_AFTER_S = 5.0


class Late(Generic[T]):
    """The newest answer of a function that is called in a thread of its own, never twice at a time.

    That it does not answer for long, answers again, or fails is written to the log once.

    Args:
        ask: may block for ever.
        name: of what is asked, for people.
        first: the answer until there is one.
        told_after_s: how long is long.
    """

    def __init__(self, ask: Callable[[], T], name: str, first: T, *, told_after_s: float = _TOLD_AFTER_S) -> None:
        self._ask = ask
        self._name = name
        self._answer = first
        self._told_after_s = told_after_s
        self._asked_s = 0.0
        self._is_told = False
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
            self._is_told = False
            threading.Thread(target=self._work, name=f"ask {self._name}", daemon=True).start()
            self._idle.wait(within_s)
        elif not self._is_told and time.monotonic() - self._asked_s >= self._told_after_s:
            self._is_told = True
            _log.warning("%s", self.silence)
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
        before, self.problem = self.problem, ""
        try:
            self._answer = self._ask()
        except Exception as error:
            self.problem = f"{self._name}: {error}"
            if self.problem != before:
                _log.warning("%s", self.problem)
        if self._is_told:
            _log.info("%s has answered after %.0f s", self._name, time.monotonic() - self._asked_s)
        self._idle.set()
