"""Answers that several parts of a page, and several pages, ask for at once: each is made once and kept for a while."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

_KEPT = 48


class Remembered:
    """Answers by what they were asked of; a question that several ask at once is answered once."""

    def __init__(self, most: int = _KEPT) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._answers: OrderedDict[Hashable, Any] = OrderedDict()
        self._asked: dict[Hashable, threading.Lock] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The answer of `key`, made if it is not there yet."""
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
                return self._answers[key]  # type: ignore[no-any-return]
            asking = self._asked.setdefault(key, threading.Lock())
        with asking:
            with self._lock:
                if key in self._answers:
                    return self._answers[key]  # type: ignore[no-any-return]
            try:
                answer = make()
                with self._lock:
                    self._answers[key] = answer
                    while len(self._answers) > self._most:
                        self._answers.popitem(last=False)
            finally:
                with self._lock:
                    self._asked.pop(key, None)
            return answer
