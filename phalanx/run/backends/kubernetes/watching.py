"""Pods as the cluster says they are, told in the driver's event loop whatever becomes of the connection. Torch-free.

A thread lists all pods and then follows changes from that version of the list on. When the server has forgotten the
version (status 410), ends the watch, refuses or is gone, it lists again, so that nothing stays unseen.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

from phalanx.run.backends.kubernetes.api import ClusterApi, ClusterError, Object

_log = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
BETWEEN_S = 0.2  # so that a server that ends every watch at once is not asked without pause
DENIED = (401, 403)
GONE = 410


class PodWatch:
    """Follows the pods of a selector in a thread of its own.

    Args:
        listed: called with all pods, and all Jobs, as they are at one moment.
        changed: called with a pod that is new, has changed, or is gone (then True).
        first_wait_s: before the first new try after an error; doubles with each.
    """

    def __init__(
        self,
        api: ClusterApi,
        selector: str,
        listed: Callable[[list[Object], list[Object]], None],
        changed: Callable[[Object, bool], None],
        first_wait_s: float = FIRST_WAIT_S,
    ) -> None:
        self._api, self._selector = api, selector
        self._listed, self._changed = listed, changed
        self._first_wait_s = first_wait_s
        self._loop = asyncio.get_running_loop()
        self._stopped = threading.Event()
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="kubernetes-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    async def close(self) -> None:
        """Tell nothing more, and end the thread; one that does not end by itself is left behind."""
        self._stopped.set()
        self._api.stop_watching()
        await asyncio.to_thread(self._thread.join, 5.0)

    def _run(self) -> None:
        wait_s = self._first_wait_s
        while not self._stopped.is_set():
            try:
                for _ in self._follow():
                    wait_s = self._first_wait_s
            except ClusterError as error:
                if error.status != GONE and not self._stopped.is_set():
                    self._tell(error)
                    self._stopped.wait(max(error.retry_after_s, wait_s * random.uniform(0.8, 1.2)))
                    wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            except Exception:  # an answer that nobody expected: unseen pods would leave the job waiting for ever
                _log.exception("pods cannot be followed; it is tried again")
                self._stopped.wait(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _follow(self) -> Iterator[None]:
        """List, and then follow; yields after everything that worked."""
        pods = self._api.pods(self._selector)
        jobs = self._api.jobs(self._selector)
        self._problem = ""
        self._later(self._listed, list(pods.get("items") or []), jobs)
        yield
        version = pods["metadata"]["resourceVersion"]
        while not self._stopped.is_set():
            for event in self._api.watch_pods(self._selector, version):
                if self._stopped.is_set():
                    return
                version = self._heard(event)
                yield
            self._stopped.wait(BETWEEN_S)

    def _heard(self, event: Object) -> str:
        """The version of the list that has been reached."""
        what = event["object"]
        if event["type"] == "ERROR":
            raise ClusterError(str(what.get("message", what)), int(what.get("code", 0)))
        if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
            self._later(self._changed, what, event["type"] == "DELETED")
        return str(what["metadata"]["resourceVersion"])

    def _tell(self, error: ClusterError) -> None:
        """Once for each reason; while it lasts, nothing that happens to pods is seen."""
        if str(error) != self._problem:
            self._problem = str(error)
            cure = (
                "; the driver's account lacks the right, see docs/run_kubernetes.md" if error.status in DENIED else ""
            )
            _log.warning("pods cannot be followed: %s%s; it is tried again", error, cure)

    def _later(self, call: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(self._unless_stopped, call, *args)
        except RuntimeError:  # the loop has ended
            self._stopped.set()

    def _unless_stopped(self, call: Callable[..., None], *args: Any) -> None:
        if not self._stopped.is_set():
            call(*args)
