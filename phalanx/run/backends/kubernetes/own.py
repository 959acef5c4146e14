"""The driver's own Job: its time, and what the next driver has to know. Torch-free."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from datetime import datetime

from phalanx.run.backends.kubernetes import names, seen
from phalanx.run.backends.kubernetes.api import ClusterApi, ClusterError, Object

_log = logging.getLogger(__name__)


class OwnJob:
    """The Job that this driver's pod is of.

    Args:
        name: of the Job.
        clock: seconds since 1970.

    Attributes:
        avoided: nodes that no pod of this job is to be placed on.
    """

    def __init__(self, api: ClusterApi, name: str, clock: Callable[[], float]) -> None:
        self._api, self._name, self._clock = api, name, clock
        self._found: Object | None = None
        self._written: set[str] = set()
        self.avoided: set[str] = set()

    @property
    def is_known(self) -> bool:
        """Whether it has been looked at."""
        return self._found is not None

    async def look(self) -> None:
        """Read it.

        Raises:
            ClusterError: the API refuses, or does not answer.
        """
        self._found = await asyncio.to_thread(self._api.job, self._name) or {}
        annotations = self._found.get("metadata", {}).get("annotations") or {}
        self._written = set(json.loads(annotations.get(names.EVICTED, "[]")))
        self.avoided |= self._written

    async def goes_on(self) -> bool:
        """Whether another pod follows when this one is ended: somebody ends the pod, and not the Job."""
        try:
            found = await asyncio.to_thread(self._api.job, self._name)
        except ClusterError as error:
            _log.warning("it is not known why the driver's pod is ended, and so the job goes on: %s", error)
            return True
        return found is not None and not seen.has_ended(found)

    def left_s(self) -> int:
        """Until the cluster ends it, at least 1; 0: never."""
        found = self._found or {}
        limit, start = found.get("spec", {}).get("activeDeadlineSeconds"), found.get("status", {}).get("startTime")
        if not limit or not start:
            return 0
        return max(1, int(datetime.fromisoformat(start).timestamp() + limit - self._clock()))

    def reference(self) -> Object | None:
        """For what is to go when it goes; None: it is not there, since somebody has begun the driver otherwise."""
        if not self._found:
            return None
        uid = self._found["metadata"]["uid"]
        return {"apiVersion": "batch/v1", "kind": "Job", "name": self._name, "uid": uid, "controller": True}

    async def write_avoided(self) -> None:
        """Write down which nodes are avoided, for the next driver.

        Raises:
            ClusterError: the API refuses, or does not answer.
        """
        avoided = set(self.avoided)
        if avoided != self._written and self._found:
            text = json.dumps(sorted(avoided))
            await asyncio.to_thread(self._api.annotate_job, self._name, {names.EVICTED: text})
            self._written = avoided
