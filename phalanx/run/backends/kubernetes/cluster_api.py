"""The cluster's API through the official client: calls, what pods and Jobs say, and the watch that follows pods.

Plain dictionaries in and out, and one kind of error. Answers are taken as JSON and not as the client's classes: those
refuse what a later version of the API has added. Every call blocks, for a limited time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from phalanx.core.errors import UserError

CONNECT_S, ANSWER_S = 5.0, 30.0

WATCH_S = 240  # the server ends a watch after so long, and it is begun again: so a dead connection is noticed

Object = dict[str, Any]

_MERGE = "application/merge-patch+json"


class ClusterError(Exception):
    """A call failed, with this HTTP status (0: no answer) and the server's wish to wait (0: none)."""

    def __init__(self, problem: str, status: int = 0, retry_after_s: float = 0.0) -> None:
        super().__init__(problem)
        self.status = status
        self.retry_after_s = retry_after_s


class ClusterApi:
    """What the back end needs of the API, in one namespace; `client` is a ``kubernetes.client.ApiClient``."""

    def __init__(self, client: Any, namespace: str) -> None:
        from kubernetes import client as models

        self.namespace = namespace
        self._client = client
        self._core = models.CoreV1Api(client)
        self._batch = models.BatchV1Api(client)
        self._watched: Any = None

    def pods(self, selector: str) -> Object:
        """A ``PodList``. Raises ClusterError: as for every call here."""
        return self._call(self._core.list_namespaced_pod, self.namespace, label_selector=selector)

    def watch_pods(self, selector: str, version: str) -> Iterator[Object]:
        """Events ``{"type": …, "object": …}`` since `version` of the list, until the server ends the watch."""
        response = self._answer(
            self._core.list_namespaced_pod,
            self.namespace,
            label_selector=selector,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=WATCH_S,
            watch=True,
            _request_timeout=(CONNECT_S, WATCH_S + ANSWER_S),
        )
        self._watched = response
        try:
            yield from _lines(response)
        finally:
            self._watched = None
            response.close()

    def stop_watching(self) -> None:
        """From another thread: `watch_pods` ends soon."""
        response = self._watched
        if response is not None:
            with suppress(Exception):  # it may end by itself at this moment
                response.shutdown()

    def delete_pod(self, name: str, grace_s: int | None = None) -> None:
        """Have a pod ended; nothing where it is gone."""
        grace = {} if grace_s is None else {"grace_period_seconds": grace_s}
        with _if_present():
            self._call(self._core.delete_namespaced_pod, name, self.namespace, **grace)

    def job(self, name: str) -> Object | None:
        """A Job; None: there is none of this name."""
        with _if_present():
            return self._call(self._batch.read_namespaced_job, name, self.namespace)
        return None

    def jobs(self, selector: str) -> list[Object]:
        """The Jobs that are there."""
        found = self._call(self._batch.list_namespaced_job, self.namespace, label_selector=selector)
        return list(found.get("items") or [])

    def create_job(self, manifest: Object) -> Object:
        """Make a Job; status 409: there is one of this name."""
        return self._call(self._batch.create_namespaced_job, self.namespace, manifest)

    def annotate_job(self, name: str, annotations: dict[str, str]) -> None:
        """Add annotations to a Job."""
        body = {"metadata": {"annotations": annotations}}
        self._call(self._batch.patch_namespaced_job, name, self.namespace, body, _content_type=_MERGE)

    def begin_job(self, name: str) -> None:
        """Let a Job that was made suspended begin."""
        body = {"spec": {"suspend": False}}
        self._call(self._batch.patch_namespaced_job, name, self.namespace, body, _content_type=_MERGE)

    def delete_job(self, name: str) -> None:
        """Remove a Job with its pods; nothing where it is gone."""
        with _if_present():
            self._call(self._batch.delete_namespaced_job, name, self.namespace, propagation_policy="Background")

    def cordon(self, node: str, annotations: dict[str, str]) -> None:
        """Let nothing more be placed on a node."""
        body = {"metadata": {"annotations": annotations}, "spec": {"unschedulable": True}}
        self._call(self._core.patch_node, node, body, _content_type=_MERGE)

    def create(self, manifest: Object) -> bool:
        """Make an object that a job begins with; False: there is one of this name already."""
        from kubernetes import client as models

        rights = models.RbacAuthorizationV1Api(self._client)
        create = {
            "ServiceAccount": self._core.create_namespaced_service_account,
            "Secret": self._core.create_namespaced_secret,
            "ConfigMap": self._core.create_namespaced_config_map,
            "Service": self._core.create_namespaced_service,
            "Job": self._batch.create_namespaced_job,
            "Role": rights.create_namespaced_role,
            "RoleBinding": rights.create_namespaced_role_binding,
            "ClusterRole": rights.create_cluster_role,
            "ClusterRoleBinding": rights.create_cluster_role_binding,
        }[manifest["kind"]]
        place = [self.namespace] if "namespace" in manifest["metadata"] else []
        try:
            self._call(create, *place, manifest)
        except ClusterError as error:
            if error.status != 409:
                raise
            return False
        return True

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Object:
        response = self._answer(function, *args, **kwargs)
        try:
            found: Object = json.loads(response.data)
        except ValueError as error:
            raise ClusterError(f"the API's answer is no JSON: {error}") from None
        return found

    def _answer(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        limits = {"_request_timeout": (CONNECT_S, ANSWER_S), **kwargs}
        try:
            response = function(*args, _preload_content=False, **limits)
        except ApiException as error:
            raise _refused(error.status or 0, error.reason, error.body, error.headers) from None
        except (HTTPError, OSError) as error:
            raise ClusterError(f"the API does not answer: {error}") from None
        if not 200 <= response.status <= 299:
            raise _refused(response.status, response.reason, response.data, response.headers)
        return response


@contextmanager
def _if_present() -> Iterator[None]:
    """Let status 404 pass."""
    try:
        yield
    except ClusterError as error:
        if error.status != 404:
            raise


def _lines(response: Any) -> Iterator[Object]:
    from kubernetes.watch.watch import iter_resp_lines
    from urllib3.exceptions import HTTPError

    try:
        for line in iter_resp_lines(response):
            if line:
                yield json.loads(line)
    except (HTTPError, OSError, ValueError, AttributeError) as error:  # cut off, also in the middle of a line
        raise ClusterError(f"the watch was cut off: {error}") from None


def _refused(status: int, reason: object, body: object, headers: Any) -> ClusterError:
    """What an answer of the API means: its body is a ``Status`` as a rule."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body or "")
    try:
        message = str(json.loads(text).get("message") or reason)
    except (ValueError, AttributeError):
        message = text.strip()[:200] or str(reason)
    wait = (headers or {}).get("Retry-After") or ""
    return ClusterError(f"{status}: {message}", status, float(wait) if wait.isdecimal() else 0.0)


def connect(context: str, namespace: str, *, is_inside: bool) -> ClusterApi:
    """The API of the cluster that this pod is in, or that a kubeconfig names.

    Raises:
        UserError: the client is not installed, or there is no such configuration.
    """
    client, config = _client()
    configuration = client.Configuration()
    try:
        if is_inside:
            config.load_incluster_config(client_configuration=configuration)
        else:
            config.load_kube_config(context=context or None, client_configuration=configuration)
    except (config.ConfigException, OSError) as error:
        cure = "check KUBECONFIG, and run.backend_options.context"
        raise UserError(f"no cluster is known ({error})", cure=cure, field="run.backend", value="kubernetes") from None
    configuration.retries = False  # callers try again, and say so
    return ClusterApi(client.ApiClient(configuration), namespace)


def current_namespace(context: str) -> str:
    """That of a context of the kubeconfig; ``default`` where it names none.

    Raises:
        UserError: the client is not installed, or there is no such context.
    """
    config = _client()[1]
    try:
        contexts, current = config.list_kube_config_contexts()
    except config.ConfigException as error:
        cure = "give run.backend_options.namespace, or check KUBECONFIG"
        raise UserError(f"the namespace is not known ({error})", cure=cure, field="run.backend_options") from None
    chosen = next((each for each in contexts if each["name"] == context), None if context else current)
    if chosen is None:
        cure = "give one of " + ", ".join(each["name"] for each in contexts)
        raise UserError("there is no such context", cure=cure, field="run.backend_options.context", value=context)
    return str(chosen["context"].get("namespace") or "default")


def _client() -> tuple[Any, Any]:
    """The official client, and its configuration."""
    try:
        from kubernetes import client, config
    except ImportError:
        cure = "pip install 'phalanx-train[kubernetes]'"
        raise UserError("needs the official client", cure=cure, field="run.backend", value="kubernetes") from None
    return client, config


def node_of(pod: Object) -> str:
    """Where it was placed; empty: nowhere yet."""
    return str((pod.get("spec") or {}).get("nodeName") or "")


def why_gone(pod: Object) -> str:
    """Why a pod has ended, as far as the cluster says."""
    status = pod.get("status") or {}
    parts = [_disruption(status), f"{status.get('reason') or ''}: {status.get('message') or ''}".strip(": ")]
    for each in status.get("containerStatuses") or []:
        if ended := (each.get("state") or {}).get("terminated"):
            reason = ended.get("reason") or ""
            last = (ended.get("message") or "").strip().splitlines()[-1:]
            number = f"signal {ended['signal']}" if ended.get("signal") else f"exit status {ended.get('exitCode')}"
            parts.append(", ".join([f"{reason} ({number})" if reason else number, *last]))
    where = f" on {node_of(pod)}" if node_of(pod) else ""
    why = "; ".join(part for part in parts if part)
    return f"pod {pod['metadata']['name']}{where} has ended{': ' + why if why else ''}"


def why_leaving(pod: Object) -> str:
    """Why a pod is being ended of which nothing is heard again."""
    said = _disruption(pod.get("status") or {})
    where = f"node {node_of(pod)}" if node_of(pod) else "the cluster"
    why = f" ({said})" if said else ""
    return f"pod {pod['metadata']['name']} was to end{why}, and {where} has not confirmed it in time"


def why_waiting(pod: Object) -> str:
    """What keeps a pod from starting, if it is something that a person may have to change; else empty."""
    status = pod.get("status") or {}
    for each in status.get("conditions") or []:
        if each.get("type") == "PodScheduled" and each.get("reason") == "Unschedulable":
            return f"it cannot be placed: {each.get('message', '')}"
    for each in status.get("containerStatuses") or []:
        waiting = (each.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "", "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {waiting.get('message', '')}"
    return ""


def indexes(text: str | None) -> set[int]:
    """Those that ``1,3-5`` stands for, as a Job's status lists its finished ones."""
    found: set[int] = set()
    for part in (text or "").split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


def has_ended(job: Object) -> bool:
    """Whether a Job is over, or somebody has ended it."""
    conditions = (job.get("status") or {}).get("conditions") or []
    ends = ("Complete", "Failed", "FailureTarget", "SuccessCriteriaMet", "Suspended")
    is_over = any(each.get("type") in ends and each.get("status") == "True" for each in conditions)
    return is_over or bool(job["metadata"].get("deletionTimestamp"))


def _disruption(status: Object) -> str:
    """What the cluster itself does to a pod: a drained node, a lost one, preemption."""
    for each in status.get("conditions") or []:
        if each.get("type") == "DisruptionTarget" and each.get("status") == "True":
            return f"{each.get('reason', '')}: {each.get('message', '')}".strip(": ")
    return ""


_log = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
BETWEEN_S = 0.2  # so that a server that ends every watch at once is not asked without pause
DENIED = (401, 403)
GONE = 410


class PodWatch:
    """Follows the pods of a selector in a thread of its own, and reports them in the event loop that made it.

    The thread lists all pods and then follows changes from that version of the list on. When the server has forgotten
    the version (status 410), ends the watch, refuses or is gone, it lists again, so that nothing stays unseen.

    `listed` is called with all pods, and all Jobs, as they are at one moment; `changed` with a pod that is new, has
    changed, or is gone (then True). The wait before a new try after an error doubles with each.
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
        """Report nothing more, and end the thread; one that does not end by itself is left behind."""
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
                    self._warn(error)
                    self._stopped.wait(max(error.retry_after_s, wait_s * random.uniform(0.8, 1.2)))
                    wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            except Exception:  # an unexpected answer: unseen pods would leave the job waiting for ever
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
                what = event["object"]
                if event["type"] == "ERROR":
                    raise ClusterError(str(what.get("message", what)), int(what.get("code", 0)))
                if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                    self._later(self._changed, what, event["type"] == "DELETED")
                version = str(what["metadata"]["resourceVersion"])
                yield
            self._stopped.wait(BETWEEN_S)

    def _warn(self, error: ClusterError) -> None:
        """Once for each reason; while it lasts, nothing that happens to pods is seen."""
        if str(error) != self._problem:
            self._problem = str(error)
            denied = "; the driver's account lacks the right, see docs/run_kubernetes.md"
            cure = denied if error.status in DENIED else ""
            _log.warning("pods cannot be followed: %s%s; it is tried again", error, cure)

    def _later(self, call: Callable[..., None], *args: Any) -> None:
        def unless_stopped() -> None:
            if not self._stopped.is_set():
                call(*args)

        try:
            self._loop.call_soon_threadsafe(unless_stopped)
        except RuntimeError:  # the loop has ended
            self._stopped.set()
