"""The same storage tests in a folder, in fsspec's memory, and on a real S3 server on loopback (moto's)."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import fsspec
import pytest
from checkpoint_helpers import make_tensors, rewrite
from moto.server import ThreadedMotoServer

from phalanx.checkpoint.format.manifest import MANIFEST, SUMS
from phalanx.checkpoint.session.blocking_session import save
from phalanx.checkpoint.storage.checkpoint_store import Store
from phalanx.checkpoint.storage.latest import advance
from phalanx.checkpoint.storage.location import open_store
from phalanx.core import object_requests
from phalanx.core.fault_points import NO_POINTS, Points

KINDS = ("folder", "memory", "s3")


SLOW_DOWN = ("503 Slow Down", "SlowDown", "Please reduce your request rate.")
"""S3's answer where more is asked for than it gives."""
DENIED = ("403 Forbidden", "AccessDenied", "Access Denied")
"""S3's answer where something is forbidden."""
FULL = ("507 Insufficient Storage", "XMinioStorageFull", "Storage backend has reached its minimum free drive threshold")
"""MinIO's answer where its disks are full."""


class Gate:
    """Stands before moto's server: makes its conditional writes atomic as S3's are (moto looks first and then writes),
    and on demand fails, dawdles, refuses, or ignores the condition.

    Attributes:
        fail_every: every so many requests fail; 0: none.
        delay_s: before each request, seconds.
        bytes_per_s: how fast bodies of requests are taken; 0: as fast as they come.
        refusal: status, code and message of the error that requests of `refused_methods` get; empty: none.
        refused_name: part of the path of what is refused; empty: all.
        ranges: how a part of an object is answered: "exact", "short" (by 50 bytes) or "ignored" (all of it comes).
        loses: given method, path and query: whether all is done, and a failure answered all the same.
        watch: called with method and path of each request, in the thread that serves it, before anything is done.
    """

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.fail_every, self.delay_s, self.ignores_conditions = 0, 0.0, False
        self.bytes_per_s = 0.0
        self.refusal: tuple[str, str, str] | tuple[()] = ()
        self.refused_methods: tuple[str, ...] = ("PUT", "POST", "DELETE")
        self.refused_name = ""
        self.ranges: Literal["exact", "short", "ignored"] = "exact"
        self.loses: Callable[[str, str, str], bool] = lambda method, path, query: False
        self.watch: Callable[[str, str], None] = lambda method, path: None
        self.requests = 0
        self.sent_bytes = 0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        self.requests += 1
        method, length = environ["REQUEST_METHOD"], int(environ.get("CONTENT_LENGTH") or 0)
        time.sleep(self.delay_s + (length / self.bytes_per_s if self.bytes_per_s else 0.0))
        self.watch(method, environ["PATH_INFO"])
        if self.fail_every and self.requests % self.fail_every == 0:
            return _refuse(environ, start_response, "503 Service Unavailable", b"")
        if self.refusal and method in self.refused_methods and self.refused_name in environ["PATH_INFO"]:
            status, code, message = self.refusal
            body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
            return _refuse(environ, start_response, status, body)
        if "HTTP_RANGE" in environ and self.ranges == "short":
            first, last = (int(number) for number in environ["HTTP_RANGE"].removeprefix("bytes=").split("-"))
            environ["HTTP_RANGE"] = f"bytes={first}-{max(first, last - 50)}"
        if self.ranges == "ignored":
            environ.pop("HTTP_RANGE", None)
        if self.ignores_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if "HTTP_IF_NONE_MATCH" in environ:
            with self._lock:
                return self._counted(environ, start_response)
        return self._counted(environ, start_response)

    def _counted(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        method, path, query = (environ.get(name, "") for name in ("REQUEST_METHOD", "PATH_INFO", "QUERY_STRING"))
        if self.loses(method, path, query):
            list(self._app(environ, lambda *_: lambda _: None))
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return [b""]
        answer = list(self._app(environ, start_response))
        if environ["REQUEST_METHOD"] == "GET" and "QUERY_STRING" in environ and not environ["QUERY_STRING"]:
            self.sent_bytes += sum(map(len, answer))
        return answer


def _refuse(environ: dict[str, Any], start_response: Callable[..., Any], status: str, body: bytes) -> list[bytes]:
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    start_response(status, [("Content-Length", str(len(body))), ("Content-Type", "application/xml")])
    return [body]


@dataclass(frozen=True)
class Server:
    gate: Gate
    options: dict[str, Any]


@pytest.fixture(name="s3_server", scope="module")
def s3_server_fixture() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
            patch.delenv(name, raising=False)
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            patch.setenv(name, "/nonexistent")
        server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        try:
            made: Any = server._server
            made.app = gate = Gate(made.app)
            made.RequestHandlerClass.log = lambda *_: None
            retries = {"retries": {"max_attempts": 0}}  # of the client library, whose waits are long
            options = {"endpoint_url": f"http://127.0.0.1:{made.server_address[1]}", "config_kwargs": retries}
            fsspec.filesystem("s3", **options).makedirs("bucket", exist_ok=True)
            yield Server(gate, options)
        finally:
            server.stop()


@dataclass(frozen=True)
class Place:
    """Where a test keeps its checkpoints."""

    kind: str
    url: str
    options: dict[str, Any] = field(default_factory=dict)
    gate: Gate | None = None

    def open(self, points: Points = NO_POINTS) -> Store:
        return open_store(self.url, self.options, points)

    def change(self, name: str, file: str, change: Callable[[bytes], bytes] | None) -> None:
        """Change the bytes of a file behind the store's back; None removes it."""
        fs, root = fsspec.core.url_to_fs(self.url, **self.options)
        path = "/".join(part for part in (root, name, file) if part)
        if change is None:
            fs.rm_file(path)
        else:
            fs.pipe_file(path, change(fs.cat_file(path)))


@pytest.fixture(name="place", params=KINDS)
def place_fixture(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(object_requests, "WAITS_S", (0.0, 0.0, 0.0))
    run = uuid.uuid4().hex
    if request.param == "folder":
        yield Place("folder", str(tmp_path / "checkpoints"))
    elif request.param == "memory":
        yield Place("memory", f"memory://{run}/checkpoints")
        fs = fsspec.filesystem("memory")
        if fs.exists(f"/{run}"):
            fs.rm(f"/{run}", recursive=True)
    else:
        server = request.getfixturevalue("s3_server")
        yield Place("s3", f"s3://bucket/{run}/checkpoints", server.options, server.gate)
        server.gate.reset()


@pytest.fixture(name="s3_place")
def s3_place_fixture(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(object_requests, "WAITS_S", (0.0, 0.0, 0.0))
    yield Place("s3", f"s3://bucket/{uuid.uuid4().hex}/checkpoints", s3_server.options, s3_server.gate)
    s3_server.gate.reset()


def made(folder: Path, step: int, metrics: Mapping[str, float] | None = None) -> dict[str, bytes]:
    """The files of a checkpoint of `step`, with `make_tensors(step)` and the step as its state."""
    path = save(folder / uuid.uuid4().hex, step, make_tensors(step), {"step": step})
    if metrics:
        rewrite(path, lambda tree: tree.update(metrics=dict(metrics)))
    return {file.name: file.read_bytes() for file in path.iterdir()}


def put(store: Store, step: int, attempt: int, files: Mapping[str, bytes], *, pointed: bool = True) -> str:
    """Publish a checkpoint of these files, and point to it."""
    area = store.begin(step, attempt, "aa")
    entries = [store.write(area, name, [content]) for name, content in files.items()]
    name = store.publish(area, step)
    if pointed:
        sha256 = next(entry.sha256 for entry in entries if entry.name == MANIFEST)
        advance(store, attempt, step, name, sha256)
    return name


def tiny(store: Store, step: int, attempt: int = 1, nonce: str = "aa") -> str:
    """Publish what is enough of a checkpoint for a store."""
    area = store.begin(step, attempt, nonce)
    for file in ("__0_0.distcp", MANIFEST, SUMS):
        store.write(area, file, [f"{file} of {step}".encode()])
    return store.publish(area, step)


def flipped(content: bytes, where: int = 700) -> bytes:
    changed = bytearray(content)
    changed[where % len(changed)] ^= 0x10
    return bytes(changed)
