"""The Kubernetes back end: hosts that are pods; see docs/run_kubernetes.md for how driver and executors live there.

A host is an index of an Indexed Job. It is there from the moment that its Job is, whether or not its pod has been made
or placed yet, and gone when its pod has ended: then it never comes again. What was given up stays with the driver's
Job, as an annotation, so that a driver that is started again keeps off the same nodes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from phalanx.core.asyncio_tasks import report_failure
from phalanx.core.errors import UserError
from phalanx.run.backends.backend import BackendSetup, Listener
from phalanx.run.backends.kubernetes import manifests
from phalanx.run.backends.kubernetes.cluster_api import (
    DENIED,
    FIRST_WAIT_S,
    ClusterApi,
    ClusterError,
    Object,
    PodWatch,
    connect,
    has_ended,
    indexes,
    node_of,
    why_gone,
    why_leaving,
    why_waiting,
)
from phalanx.run.backends.kubernetes.kubernetes_options import KubernetesOptions, read_options
from phalanx.run.backends.kubernetes.manifests import DRIVER_VARIABLE, executors
from phalanx.run.clock import read_clocks
from phalanx.run.config import RunConfig

_log = logging.getLogger(__name__)


class DriverJob:
    """The Job that this driver's pod is of: its time, and the nodes that no pod of this job is to be placed on."""

    def __init__(self, api: ClusterApi, name: str, clock: Callable[[], float]) -> None:
        self._api, self._name, self._clock = api, name, clock
        self._found: Object | None = None
        self._written: set[str] = set()
        self.avoided: set[str] = set()
        self.is_known = False

    async def look(self) -> None:
        """Read it. Raises ClusterError: the API refuses, or does not answer."""
        self._found = await asyncio.to_thread(self._api.job, self._name) or {}
        self.is_known = True
        annotations = self._found.get("metadata", {}).get("annotations") or {}
        self._written = set(json.loads(annotations.get(manifests.EVICTED, "[]")))
        self.avoided |= self._written

    async def goes_on(self) -> bool:
        """Whether another pod follows when this one is ended: somebody ends the pod, and not the Job."""
        try:
            found = await asyncio.to_thread(self._api.job, self._name)
        except ClusterError as error:
            _log.warning("it is not known why the driver's pod is ended, and so the job goes on: %s", error)
            return True
        return found is not None and not has_ended(found)

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
            await asyncio.to_thread(self._api.annotate_job, self._name, {manifests.EVICTED: text})
            self._written = avoided


READY_S = 30.0  # an order waits so long for the first list of pods before it fails, and is tried again
UNCONFIRMED_S = 5.0  # after its grace, a pod whose node confirms nothing is gone after so long
YOUNG_S = 60.0  # a Job this old may not be in a list that was asked for before it was made


def check(config: RunConfig) -> None:
    """For `phalanx.run.backends.backend`; raises UserError where an option is wrong."""
    read_options(config)


def make(setup: BackendSetup) -> KubernetesBackend:
    """For `phalanx.run.backends.backend`. Raises UserError: the options are wrong, or this is not a driver's pod."""
    options = read_options(setup.config)
    base = setup.environment.get(DRIVER_VARIABLE) or os.environ.get(DRIVER_VARIABLE, "")
    if not base:
        cure = "give the command outside of the cluster: it makes the driver's pod"
        raise UserError("the driver does not run in its pod", cure=cure, field="run.backend", value="kubernetes")
    settings = {**json.loads(setup.command("")[-1]), "is_only_host": setup.config.hosts == 1}
    return KubernetesBackend(connect("", options.namespace, is_inside=True), base, options, settings)


@dataclass
class _Host:
    """One that is there.

    Attributes:
        begun_s: when this driver has learnt of it.
        pod, node: their names; empty: not made, not placed.
        unwanted: why it is to end; empty: it is not.
        waiting: what keeps it from starting, as it was logged.
        overdue: reports that it is gone when nothing confirms it.
    """

    wave: int
    begun_s: float
    pod: str = ""
    node: str = ""
    unwanted: str = ""
    waiting: str = ""
    overdue: asyncio.TimerHandle | None = None

    def confirmed(self) -> None:
        if self.overdue is not None:
            self.overdue.cancel()


class KubernetesBackend:
    """Implements `phalanx.run.backends.backend.Backend`, and `phalanx.run.backends.backend.Movable`.

    Args:
        base: name of the driver's Job, and the beginning of all other names.
        settings: of all executors, for `phalanx.run.executor.main.Settings`.
        unconfirmed_s, first_wait_s: see `UNCONFIRMED_S` and `PodWatch`.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        api: ClusterApi,
        base: str,
        options: KubernetesOptions,
        settings: Mapping[str, Any],
        *,
        unconfirmed_s: float = UNCONFIRMED_S,
        first_wait_s: float = FIRST_WAIT_S,
        clock: Callable[[], float] = lambda: read_clocks().unix_s,
    ) -> None:
        self._api, self._base, self._options, self._settings = api, base, options, dict(settings)
        self._unconfirmed_s, self._first_wait_s = unconfirmed_s, first_wait_s
        self._hosts: dict[str, _Host] = {}
        self._coming: set[str] = set()
        self._gone: set[str] = set()
        self._waves: set[int] = set()
        self._own = DriverJob(api, base, clock)
        self._listener: Listener | None = None
        self._watch: PodWatch | None = None
        self._is_listed = asyncio.Event()
        self._changed = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._cannot_cordon = False

    @property
    def hosts(self) -> list[str]:
        """Those that are there."""
        return list(self._hosts)

    async def begin(self, listener: Listener) -> None:
        """Look at what is there, and follow it; where the API does not answer now, as soon as it does.

        Raises:
            UserError: the API refuses the driver.
        """
        self._listener = listener
        try:
            await self._look_at_own()
        except ClusterError as error:
            if error.status in DENIED:
                cure = "give its account the rights that docs/run_kubernetes.md names"
                raise UserError(f"the cluster refuses the driver: {error}", cure=cure, field="run.backend") from None
            _log.warning("the cluster does not answer yet: %s", error)
        selector = manifests.selector(self._base, "executor")
        self._watch = PodWatch(self._api, selector, self._listed, self._pod_changed, self._first_wait_s)
        self._watch.start()

    async def ask(self, count: int) -> None:
        """Make one Job for all that are missing. Raises ClusterError: the API refuses, or does not answer."""
        if not self._own.is_known:
            await self._look_at_own()
        try:
            await asyncio.wait_for(self._is_listed.wait(), READY_S)
        except TimeoutError:
            raise ClusterError("the cluster has not said yet which pods there are") from None
        missing = count - len(self._coming)
        if missing <= 0:
            return
        wave = max(self._waves, default=0) + 1
        driver = f"{manifests.service_host(self._base, self._api.namespace)}:{self._options.port}"
        manifest = executors(
            self._base,
            wave,
            missing,
            self._options,
            {"settings": self._settings, "base": self._base, "wave": wave, "driver": driver},
            avoid=self._own.avoided,
            owner=self._own.reference(),
            deadline_s=self._own.left_s(),
        )
        self._begin_wave(await self._made(manifest))

    def arrived(self, host: str) -> None:
        """It is not on its way any more."""
        self._coming.discard(host)

    async def evict(self, host: str, why: str) -> None:
        """End the pod, keep off its node from now on, and cordon that where it is wanted and allowed."""
        known = self._hosts.get(host)
        node = known.node if known is not None else ""
        if node:
            self._own.avoided.add(node)
        if known is not None:
            await self._end_pod(host, known, why)
        await self._own.write_avoided()
        if node and self._options.cordon and not self._cannot_cordon:
            await self._cordon(node, why)

    async def release(self, host: str, why: str) -> None:
        """End the pod; another one may be placed on its node.

        Raises:
            ClusterError: the API refuses, or does not answer.
        """
        known = self._hosts.get(host)
        if known is not None:
            await self._end_pod(host, known, why)

    async def goes_on(self) -> bool:
        """See `phalanx.run.backends.backend.Movable`."""
        return await self._own.goes_on()

    async def leave(self) -> None:
        """Let go of all hosts."""
        if self._deadline is not None:
            self._deadline.cancel()
        for known in self._hosts.values():
            known.confirmed()
        for task in self._tasks:
            task.cancel()
        if self._watch is not None:
            await self._watch.close()

    async def end(self) -> None:
        """Remove all Jobs, and wait until their pods are gone, or none can be waited for any longer."""
        limit_s = self._options.grace_s + 4 * self._unconfirmed_s
        try:
            async with asyncio.timeout(limit_s):
                await self._remove_jobs()
                while self._hosts:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            _log.warning("after %.0f s these have not ended: %s", limit_s, ", ".join(self._hosts))
        await self.leave()

    async def _remove_jobs(self) -> None:
        for known in self._hosts.values():
            known.unwanted = "the job is over"
        for wave in sorted(self._waves):
            while True:
                try:
                    await asyncio.to_thread(self._api.delete_job, manifests.wave_name(self._base, wave))
                    break
                except ClusterError as error:
                    _log.warning("a Job cannot be removed: %s; it is tried again", error)
                    await asyncio.sleep(max(error.retry_after_s, 1.0))
        for name in [name for name, known in self._hosts.items() if not known.pod]:
            self._lose(name, "it was ended")  # and no pod will be made for it now

    async def _look_at_own(self) -> None:
        await self._own.look()
        left_s = self._own.left_s()
        if left_s and self._deadline is None:
            early_s = max(left_s - self._options.stop_before_s, 0)
            listener = self._listener

            def time_is_short() -> None:
                if listener is not None:
                    listener.time_is_short(float(self._own.left_s()))

            self._deadline = asyncio.get_running_loop().call_later(early_s, time_is_short)

    async def _made(self, manifest: Object) -> Object:
        try:
            made = await asyncio.to_thread(self._api.create_job, manifest)
        except ClusterError as error:
            if error.status != 409:
                raise
            # An earlier try has made it, although its answer was lost.
            found = await asyncio.to_thread(self._api.job, manifest["metadata"]["name"])
            made = found or manifest
        if "backoffLimitPerIndex" not in made["spec"]:
            await asyncio.to_thread(self._api.delete_job, manifest["metadata"]["name"])
            raise ClusterError("Jobs of this cluster have no backoffLimitPerIndex: Kubernetes 1.29 or later is needed")
        return made

    async def _end_pod(self, host: str, known: _Host, why: str) -> None:
        known.unwanted = why
        self._coming.discard(host)
        if known.pod:
            await asyncio.to_thread(self._api.delete_pod, known.pod)

    async def _cordon(self, node: str, why: str) -> None:
        try:
            await asyncio.to_thread(self._api.cordon, node, {manifests.CORDONED_BY: f"{self._base}: {why}"})
        except ClusterError as error:
            if error.status not in (*DENIED, 404):
                raise
            self._cannot_cordon = error.status != 404
            _log.warning("node %s is not cordoned (%s); this job keeps off it all the same", node, error)

    def _listed(self, pods: list[Object], jobs: list[Object]) -> None:
        """Everything as it was at one moment: what is not in it is gone."""
        for job in jobs:
            self._begin_wave(job)
        present = {manifests.host_of_pod(self._base, pod["metadata"]) for pod in pods}
        for pod in pods:
            self._pod_changed(pod, False)
        waves = {manifests.wave_of(job["metadata"]) for job in jobs}
        now = asyncio.get_running_loop().time()
        for name, known in list(self._hosts.items()):
            if known.pod and name not in present:
                self._lose(name, f"pod {known.pod} was removed")
            elif known.wave not in waves and not known.pod and now - known.begun_s > YOUNG_S:
                self._lose(name, "its Job was removed before it had a pod")
        for job in jobs:
            status = job.get("status") or {}
            for index in indexes(status.get("completedIndexes")) | indexes(status.get("failedIndexes")):
                name = manifests.host_name(self._base, manifests.wave_of(job["metadata"]), index)
                if name in self._hosts and name not in present:  # pods that have ended may not be kept
                    self._lose(name, "its pod had ended before the driver looked")
        self._is_listed.set()

    def _begin_wave(self, job: Object) -> None:
        wave = manifests.wave_of(job["metadata"])
        if not wave or wave in self._waves:
            return
        self._waves.add(wave)
        for index in range(int(job["spec"]["completions"])):
            name = manifests.host_name(self._base, wave, index)
            if name not in self._gone and name not in self._hosts:
                self._add(name, wave)

    def _add(self, name: str, wave: int) -> _Host:
        """A host has begun; its pod may be heard of before the answer to the making of its Job."""
        self._hosts[name] = _Host(wave, asyncio.get_running_loop().time())
        self._coming.add(name)
        return self._hosts[name]

    def _pod_changed(self, pod: Object, is_removed: bool) -> None:
        name = manifests.host_of_pod(self._base, pod["metadata"])
        if name is None:
            return
        if is_removed or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            self._lose(name, why_gone(pod))
        elif name in self._gone:
            self._spawn(self._api.delete_pod, pod["metadata"]["name"])  # it is never used again
        else:
            known = self._hosts.get(name) or self._add(name, manifests.wave_of(pod["metadata"]))
            known.pod, known.node = pod["metadata"]["name"], node_of(pod)
            self._look_after(name, known, pod)

    def _look_after(self, name: str, known: _Host, pod: Object) -> None:
        """A pod that is there: whether it may stay, and what people should hear of it."""
        metadata = pod["metadata"]
        if metadata.get("deletionTimestamp"):
            if known.overdue is None:
                wait_s = float(metadata.get("deletionGracePeriodSeconds") or 0) + self._unconfirmed_s
                known.overdue = asyncio.get_running_loop().call_later(wait_s, self._lose, name, why_leaving(pod))
        elif known.unwanted:
            self._spawn(self._api.delete_pod, known.pod)
        elif known.node in self._own.avoided:
            known.unwanted = f"it was placed on {known.node}, which this job does not use any more"
            self._coming.discard(name)
            self._spawn(self._api.delete_pod, known.pod)
        elif (waiting := why_waiting(pod)) != known.waiting:
            known.waiting = waiting
            if waiting:
                _log.warning("pod %s waits: %s", known.pod, waiting)

    def _lose(self, name: str, why: str) -> None:
        known = self._hosts.pop(name, None)
        self._coming.discard(name)
        self._gone.add(name)
        if known is None:
            return
        known.confirmed()
        self._changed.set()
        if self._listener is not None:
            self._listener.gone(name, f"it was ended ({known.unwanted})" if known.unwanted else why)

    def _spawn(self, call: Callable[..., None], *args: Any) -> None:
        """Ask something of the API beside everything else; where that fails, the next list asks again."""

        async def attempt() -> None:
            try:
                await asyncio.to_thread(call, *args)
            except ClusterError as error:
                _log.warning("the cluster could not be asked: %s", error)

        task = report_failure(asyncio.get_running_loop().create_task(attempt()), "asking the cluster")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
