"""The cluster's API through the official client: plain dictionaries in and out, one kind of error. Torch-free.

Answers are taken as JSON and not as the client's classes: those refuse what a later version of the API has added. Every
call blocks, for a limited time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from phalanx.core.errors import UserError

CONNECT_S, ANSWER_S = 5.0, 30.0

WATCH_S = 240
"""The server ends a watch after so long, and it is begun again: so a dead connection is noticed."""

Object = dict[str, Any]

_MERGE = "application/merge-patch+json"


class ClusterError(Exception):
    """A call failed.

    Attributes:
        status: HTTP status; 0: there was no answer.
        retry_after_s: how long the server asks to wait; 0: it does not say.
    """

    def __init__(self, problem: str, status: int = 0, retry_after_s: float = 0.0) -> None:
        super().__init__(problem)
        self.status = status
        self.retry_after_s = retry_after_s


class ClusterApi:
    """What the back end needs of the API, in one namespace.

    Args:
        client: a ``kubernetes.client.ApiClient``.
    """

    def __init__(self, client: Any, namespace: str) -> None:
        from kubernetes import client as models

        self.namespace = namespace
        self._client = client
        self._core = models.CoreV1Api(client)
        self._batch = models.BatchV1Api(client)
        self._watched: Any = None

    def pods(self, selector: str) -> Object:
        """A ``PodList``.

        Raises:
            ClusterError: as for every call here.
        """
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
        with _unless_absent():
            self._call(self._core.delete_namespaced_pod, name, self.namespace, **grace)

    def job(self, name: str) -> Object | None:
        """A Job; None: there is none of this name."""
        with _unless_absent():
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
        with _unless_absent():
            self._call(self._batch.delete_namespaced_job, name, self.namespace, propagation_policy="Background")

    def cordon(self, node: str, annotations: dict[str, str]) -> None:
        """Let nothing more be placed on a node."""
        body = {"metadata": {"annotations": annotations}, "spec": {"unschedulable": True}}
        self._call(self._core.patch_node, node, body, _content_type=_MERGE)

    def create(self, manifest: Object) -> bool:
        """Make an object that a job begins with; False: there is one of this name already."""
        place = [self.namespace] if "namespace" in manifest["metadata"] else []
        try:
            self._call(self._makers()[manifest["kind"]], *place, manifest)
        except ClusterError as error:
            if error.status != 409:
                raise
            return False
        return True

    def _makers(self) -> dict[str, Callable[..., Any]]:
        from kubernetes import client as models

        rights = models.RbacAuthorizationV1Api(self._client)
        return {
            "ServiceAccount": self._core.create_namespaced_service_account,
            "Secret": self._core.create_namespaced_secret,
            "ConfigMap": self._core.create_namespaced_config_map,
            "Service": self._core.create_namespaced_service,
            "Job": self._batch.create_namespaced_job,
            "Role": rights.create_namespaced_role,
            "RoleBinding": rights.create_namespaced_role_binding,
            "ClusterRole": rights.create_cluster_role,
            "ClusterRoleBinding": rights.create_cluster_role_binding,
        }

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


class _unless_absent:  # noqa: N801 - reads as what it is
    """Let status 404 pass."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return isinstance(error, ClusterError) and error.status == 404


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
    configuration.retries = False  # who calls tries again, and says so
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
    """The official client, and its configuration.

    Raises:
        UserError: it is not installed.
    """
    try:
        from kubernetes import client, config
    except ImportError:
        cure = "pip install 'phalanx-train[kubernetes]'"
        raise UserError("needs the official client", cure=cure, field="run.backend", value="kubernetes") from None
    return client, config
