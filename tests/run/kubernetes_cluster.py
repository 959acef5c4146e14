"""A small server that answers as the API of Kubernetes does, as far as the back end asks. It is no Kubernetes.

The bodies have the shape that the official documentation shows; whatever is sent is read by the client's own classes
first, which are made from the API's OpenAPI description, so that no field is made up. Behaviour that is played:
versions of lists, watches with bookmarks, 409 for names in use, 410 for forgotten versions, pods that are leaving, and
Indexed Jobs.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes import client

Object = dict[str, Any]

MODELS = {
    "Pod": client.V1Pod,
    "Job": client.V1Job,
    "Node": client.V1Node,
    "Secret": client.V1Secret,
    "ConfigMap": client.V1ConfigMap,
    "Service": client.V1Service,
    "ServiceAccount": client.V1ServiceAccount,
    "Role": client.V1Role,
    "RoleBinding": client.V1RoleBinding,
    "ClusterRole": client.V1ClusterRole,
    "ClusterRoleBinding": client.V1ClusterRoleBinding,
    "Status": client.V1Status,
}
KINDS = {f"{kind.lower()}s": kind for kind in MODELS}
STARTED = "2026-11-21T20:00:00Z"


def checked(body: Object) -> Object:
    """The same, if the API knows every field of it."""
    back = client.ApiClient().sanitize_for_serialization(MODELS[body["kind"]].from_dict(body))
    assert json.loads(json.dumps(back).replace("+00:00", "Z")) == body, f"not as the API has it: {body}"
    return body


def status(code: int, reason: str, message: str) -> Object:
    head = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return checked({**head, "message": message, "reason": reason, "code": code})


@dataclass
class Refusal:
    """How the next request is refused whose method and path fit."""

    method: str
    path: str
    body: Object
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 1


class Cluster:
    """The state of the cluster; `say` what kubelets and controllers would do."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.objects: dict[tuple[str, str], Object] = {}
        self.events: list[tuple[int, Object]] = []
        self.version = 100
        self.oldest = 0
        self.refusals: list[Refusal] = []
        self.seen: list[tuple[str, str]] = []
        self.watches = 0
        self.cuts = 0
        self.kubelets_work = True
        self.makes_pods = True
        self.knows_indexes = True
        cluster = self

        class Handler(_Handler):
            state = cluster

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.cut_watches()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def until(self, holds: Callable[[], bool], limit_s: float = 60.0) -> None:
        with self.changed:
            assert self.changed.wait_for(holds, limit_s), "it did not happen"

    def refuse(
        self, method: str, path: str, code: int, reason: str, message: str, times: int = 1, **headers: str
    ) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with self.changed:
            self.refusals.append(Refusal(method, path, status(code, reason, message), named, times))

    def put(self, body: Object, event: str) -> None:
        """Write an object, with a new version of everything, and tell those who watch."""
        with self.changed:
            self.version += 1
            body["metadata"]["resourceVersion"] = str(self.version)
            checked(body)
            key = (body["kind"], body["metadata"]["name"])
            if event == "DELETED":
                self.objects.pop(key, None)
            else:
                self.objects[key] = body
            self.events.append((self.version, {"type": event, "object": json.loads(json.dumps(body))}))
            self.changed.notify_all()

    def get(self, kind: str, name: str) -> Object:
        with self.changed:
            return json.loads(json.dumps(self.objects[kind, name]))

    def pods(self) -> dict[str, Object]:
        """By their host names."""
        with self.changed:
            return {body["spec"]["hostname"]: body for (kind, _), body in self.objects.items() if kind == "Pod"}

    def forget(self) -> None:
        """What is older than now cannot be watched any more; those who do are cut off."""
        with self.changed:
            self.oldest = self.version
            self.events.clear()
        self.cut_watches()

    def cut_watches(self) -> None:
        with self.changed:
            self.cuts += 1
            self.changed.notify_all()

    # What controllers and kubelets do

    def make_pods(self, job: Object) -> None:
        for index in range(job["spec"]["completions"]):
            self.make_pod(job, index)

    def make_pod(self, job: Object, index: int) -> None:
        name, template = job["metadata"]["name"], job["spec"]["template"]
        mark = {"batch.kubernetes.io/job-completion-index": str(index)}
        metadata = {
            "name": f"{name}-{index}-x{self.version}",
            "namespace": "ml",
            "uid": f"uid-of-{name}-{index}",
            "creationTimestamp": STARTED,
            "labels": {**template["metadata"]["labels"], **mark, "batch.kubernetes.io/job-name": name},
            "annotations": mark,
        }
        spec = {**template["spec"], "hostname": f"{name}-{index}"}
        self.put(
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": "Pending"}},
            "ADDED",
        )

    def place(self, host: str, node: str) -> None:
        pod = self.pods()[host]
        pod["spec"]["nodeName"] = node
        pod["status"] = {"phase": "Running", "podIP": "10.0.0.9", "startTime": STARTED}
        self.put(pod, "MODIFIED")

    def end_pod(self, host: str, phase: str = "Failed", code: int = 1, message: str = "", **status: Any) -> None:
        pod = self.pods()[host]
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": STARTED}
        container = {
            "name": "executor",
            "image": "i",
            "imageID": "i@sha256:0",
            "ready": False,
            "restartCount": 0,
            "state": {"terminated": {**ended, **({"message": message} if message else {})}},
        }
        pod["status"] = {"phase": phase, "containerStatuses": [container], **status}
        self.put(pod, "MODIFIED")

    def begin_to_delete(self, host: str, grace_s: int, why: Object | None = None) -> None:
        pod = self.pods()[host]
        pod["metadata"] |= {"deletionTimestamp": STARTED, "deletionGracePeriodSeconds": grace_s}
        if why:
            pod["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True", **why}]
        self.put(pod, "MODIFIED")
        if self.kubelets_work:
            self.remove(host)

    def remove(self, host: str) -> None:
        """The pod is gone; its index is not tried again."""
        pod = self.pods()[host]
        self.put(pod, "DELETED")
        key = ("Job", pod["metadata"]["labels"]["batch.kubernetes.io/job-name"])
        if key in self.objects:
            job = self.get(*key)
            failed = job.get("status", {}).get("failedIndexes", "")
            index = pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"]
            job["status"] = {"failedIndexes": ",".join(sorted({*filter(None, failed.split(",")), index}))}
            self.put(job, "MODIFIED")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: Cluster

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve("GET")

    do_POST = do_PATCH = do_DELETE = lambda self: self._serve(self.command)

    def _serve(self, method: str) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        with self.state.changed:
            self.state.seen.append((method, path))
            self.state.changed.notify_all()
            refusal = next(
                (each for each in self.state.refusals if each.method == method and re.search(each.path, path)), None
            )
            if refusal is not None:
                refusal.times -= 1
                if not refusal.times:
                    self.state.refusals.remove(refusal)
        if refusal is not None:
            self._answer(refusal.body["code"], refusal.body, refusal.headers)
        elif "watch" in query:
            self._watch(query)
        else:
            self._ask(method, path, body, query)

    def _ask(self, method: str, path: str, body: Object, query: dict[str, list[str]]) -> None:
        found = re.fullmatch(r"/(?:api|apis)/.*?v1(?:/namespaces/ml)?/([a-z]+)(?:/([^/]+))?", path)
        assert found, path
        kind, name = KINDS[found[1]], found[2]
        if method == "POST":
            self._create(kind, body)
        elif name is None:
            self._list(kind, query)
        elif (kind, name) not in self.state.objects:
            self._answer(404, status(404, "NotFound", f'{found[1]} "{name}" not found'))
        elif method == "GET":
            self._answer(200, self.state.get(kind, name))
        elif method == "PATCH":
            assert self.headers["Content-Type"] == "application/merge-patch+json"
            self.state.put(_merged(self.state.get(kind, name), body), "MODIFIED")
            self._answer(200, self.state.get(kind, name))
        else:
            self._delete(kind, name)

    def _create(self, kind: str, body: Object) -> None:
        checked(body)
        assert body["kind"] == kind
        name = body["metadata"]["name"]
        if (kind, name) in self.state.objects:
            self._answer(409, status(409, "AlreadyExists", f'{kind.lower()}s "{name}" already exists'))
            return
        made = _merged(body, {"metadata": {"uid": f"uid-of-{name}", "creationTimestamp": STARTED}})
        if kind == "Job" and not self.state.knows_indexes:
            made["spec"].pop("backoffLimitPerIndex", None)
        self.state.put(made, "ADDED")
        self._answer(201, made)
        if kind == "Job" and made["spec"].get("completionMode") == "Indexed" and self.state.makes_pods:
            self.state.make_pods(made)

    def _list(self, kind: str, query: dict[str, list[str]]) -> None:
        with self.state.changed:
            wanted = dict(pair.split("=") for pair in query["labelSelector"][0].split(","))
            items = [
                body
                for (each, _), body in self.state.objects.items()
                if each == kind and wanted.items() <= (body["metadata"].get("labels") or {}).items()
            ]
            version = str(self.state.version)
        head = {"kind": f"{kind}List", "apiVersion": "v1", "metadata": {"resourceVersion": version}}
        self._answer(200, {**head, "items": items})

    def _delete(self, kind: str, name: str) -> None:
        body = self.state.get(kind, name)
        self._answer(200, body)
        if kind == "Pod":
            grace = body["spec"].get("terminationGracePeriodSeconds", 30)
            self.state.begin_to_delete(body["spec"]["hostname"], grace)
        else:
            self.state.put(body, "DELETED")
            for host, pod in list(self.state.pods().items()):
                if pod["metadata"]["labels"]["batch.kubernetes.io/job-name"] == name:
                    self.state.begin_to_delete(host, 0)

    def _watch(self, query: dict[str, list[str]]) -> None:
        since = int(query["resourceVersion"][0])
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if since < self.state.oldest:
            text = f"too old resource version: {since} ({self.state.oldest})"
            self._chunk({"type": "ERROR", "object": status(410, "Expired", text)})
        else:
            with suppress(ConnectionError):
                self._follow(since)
        with suppress(ConnectionError):
            self.wfile.write(b"0\r\n\r\n")

    def _follow(self, since: int) -> None:
        cuts = self.state.cuts
        with self.state.changed:
            self.state.watches += 1
            self.state.changed.notify_all()
        end_s = time.monotonic() + 120
        while time.monotonic() < end_s:
            with self.state.changed:
                new = [(version, event) for version, event in self.state.events if version > since]
                if not new and self.state.cuts == cuts:
                    self.state.changed.wait(1.0)
            for version, event in new:
                since = version
                if event["object"]["kind"] == "Pod":
                    self._chunk(event)
            mark = {"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": str(since)}}
            self._chunk({"type": "BOOKMARK", "object": mark})
            if self.state.cuts != cuts:
                return

    def _chunk(self, event: Object) -> None:
        text = json.dumps(event).encode() + b"\n"
        self.wfile.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")
        self.wfile.flush()

    def _answer(self, code: int, body: Object, headers: dict[str, str] | None = None) -> None:
        text = json.dumps(body).encode()
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def _merged(body: Object, patch: Object) -> Object:
    """RFC 7386."""
    found = dict(body)
    for key, value in patch.items():
        found[key] = _merged(found.get(key) or {}, value) if isinstance(value, dict) else value
    return found
