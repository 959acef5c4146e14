"""A small S3 server on loopback whose answers take their time: latency per request, and a limit per stream and for the
link that all streams share. In a process of its own; objects lie in a folder, or in memory once they were written.

Only what checkpoints need of S3's interface is there; nothing is authenticated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

CHUNK_BYTES = 1 << 18
BURST_S = 0.1
"""A limit that was not made use of for so long is made up for: a sleep takes longer than it was asked to."""
PAGE = 1000
RANK = re.compile(r"rank/(\d+)")
LOG = "/__log"


@dataclass
class Request:
    """What was asked for; `rank` is from the User-Agent, -1 where that says none."""

    rank: int
    method: str
    key: str
    size_bytes: int
    ended_s: float


class Limit:
    """Bytes per second of all who share it; 0: none."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def passes_s(self, count: int) -> float:
        """When so many bytes are through (monotonic)."""
        if not self._bytes_per_s:
            return 0.0
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic() - BURST_S) + count / self._bytes_per_s
            return self._free_s


class Objects:
    """What is stored, by key (``bucket/run/file``); what lies in `folder` does not change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        found = ((path.relative_to(folder), path) for path in folder.rglob("*") if path.is_file())
        self._there = {str(key): path.stat().st_size for key, path in found}
        self._written: dict[str, bytes] = {}
        self._uploads: dict[str, dict[int, bytes]] = {}
        self.lock = threading.Lock()

    def sizes(self) -> dict[str, int]:
        """Of all objects."""
        return self._there | {key: len(content) for key, content in self._written.items()}

    def size(self, key: str) -> int | None:
        """Of one; None: it is not there."""
        if key in self._written:
            return len(self._written[key])
        return self._there.get(key)

    def read(self, key: str, start: int, end: int) -> bytes:
        """Some of it."""
        if key in self._written:
            return self._written[key][start:end]
        with (self._folder / key).open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    def put(self, key: str, content: bytes) -> None:
        """Write one."""
        self._written[key] = content

    def remove(self, key: str) -> None:
        """Remove what was written."""
        self._written.pop(key, None)

    def begin(self, key: str) -> str:
        """A multipart upload; its id."""
        upload = hashlib.sha256(f"{key} {len(self._uploads)}".encode()).hexdigest()[:16]
        self._uploads[upload] = {}
        return upload

    def part(self, upload: str, number: int, content: bytes) -> None:
        """A part of one."""
        self._uploads[upload][number] = content

    def complete(self, key: str, upload: str) -> None:
        """All parts are there."""
        parts = self._uploads.pop(upload)
        self._written[key] = b"".join(parts[number] for number in sorted(parts))


class Handler(BaseHTTPRequestHandler):
    """One connection; `objects`, `link` and the rest are set by `serve`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    objects: Objects
    link: Limit
    stream_bytes_per_s: float
    latency_s: float
    log: list[Request]

    def setup(self) -> None:
        super().setup()
        self._stream = Limit(self.stream_bytes_per_s)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        if self.path == LOG:
            self._answer(200, json.dumps([asdict(one) for one in self.log]).encode())
            self.log.clear()
            return
        key, query = self._asked()
        if "list-type" in query:
            self._list(key, query)
            return
        size_bytes = self.objects.size(key)
        if size_bytes is None:
            self._missing()
            return
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, end = (int(match[1]), min(int(match[2] or size_bytes - 1) + 1, size_bytes)) if match else (0, size_bytes)
        extra = {"Content-Range": f"bytes {start}-{end - 1}/{size_bytes}"} if match else {}
        self._answer(206 if match else 200, self.objects.read(key, start, end), {"ETag": '"x"', **extra})

    def do_HEAD(self) -> None:
        key, _ = self._asked()
        size_bytes = self.objects.size(key)
        if size_bytes is None:
            self._answer(404, b"")
            return
        self._answer(200, b"", {"ETag": '"x"'}, length=size_bytes)

    def do_PUT(self) -> None:
        key, query = self._asked()
        content = self._body()
        if "partNumber" in query:
            self.objects.part(query["uploadId"], int(query["partNumber"]), content)
        else:
            with self.objects.lock:
                if "If-None-Match" in self.headers and self.objects.size(key) is not None:
                    self._answer(412, b"<Error><Code>PreconditionFailed</Code><Message>there</Message></Error>")
                    return
                self.objects.put(key, content)
        self._answer(200, b"", {"ETag": '"x"'})

    def do_POST(self) -> None:
        key, query = self._asked()
        self._body()
        if "uploads" in query:
            self._xml("InitiateMultipartUploadResult", f"<UploadId>{self.objects.begin(key)}</UploadId>")
        else:
            self.objects.complete(key, query["uploadId"])
            self._xml("CompleteMultipartUploadResult", '<ETag>"x"</ETag>')

    def do_DELETE(self) -> None:
        key, _ = self._asked()
        self.objects.remove(key)
        self._answer(204, b"")

    def _asked(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        time.sleep(self.latency_s)
        return unquote(parts.path).strip("/"), query

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, after = f"{bucket}/{query.get('prefix', '')}", query.get("continuation-token", "")
        rows: dict[str, int | None] = {}
        for key, size_bytes in self.objects.sizes().items():
            if key.startswith(prefix):
                rest, slash, _ = key[len(prefix) :].partition(query.get("delimiter") or "\0")
                rows[f"{prefix}{rest}{slash}"] = None if slash else size_bytes
        left = [name for name in sorted(rows) if name > after]
        page, more = left[:PAGE], len(left) > PAGE
        text = f"<IsTruncated>{str(more).lower()}</IsTruncated><KeyCount>{len(page)}</KeyCount>"
        text += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        for name in page:
            key, size = escape(name[len(bucket) + 1 :]), rows[name]
            if size is None:
                text += f"<CommonPrefixes><Prefix>{key}</Prefix></CommonPrefixes>"
            else:
                text += f'<Contents><Key>{key}</Key><Size>{size}</Size><ETag>"x"</ETag></Contents>'
        self._xml("ListBucketResult", text)

    def _xml(self, name: str, inner: str) -> None:
        self._answer(200, f'<?xml version="1.0"?><{name}>{inner}</{name}>'.encode(), {"Content-Type": "text/xml"})

    def _missing(self) -> None:
        self._answer(404, b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>")

    def _body(self) -> bytes:
        """Of a request, taken at the pace of stream and link."""
        if self.headers.get("Transfer-Encoding", "") == "chunked":
            return self._chunked()
        left, pieces = int(self.headers.get("Content-Length") or 0), []
        while left:
            piece = self.rfile.read(min(left, CHUNK_BYTES))
            self._pass(len(piece))
            pieces.append(piece)
            left -= len(piece)
        return _unwrapped(b"".join(pieces), self.headers.get("Content-Encoding", ""))

    def _chunked(self) -> bytes:
        pieces = []
        while length := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(length))
            self._pass(length)
            self.rfile.readline()
        self.rfile.readline()
        return _unwrapped(b"".join(pieces), self.headers.get("Content-Encoding", ""))

    def _pass(self, count: int) -> None:
        until_s = max(self.link.passes_s(count), self._stream.passes_s(count))
        time.sleep(max(until_s - time.monotonic(), 0.0))

    def _answer(
        self, status: int, content: bytes, headers: dict[str, str] | None = None, length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Last-Modified": "Mon, 23 Nov 2026 00:00:00 GMT"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        view = memoryview(content)
        for start in range(0, len(view), CHUNK_BYTES):
            piece = view[start : start + CHUNK_BYTES]
            self._pass(len(piece))
            self.wfile.write(piece)
        if self.path != LOG:
            rank = RANK.search(self.headers.get("User-Agent", ""))
            key = unquote(urlsplit(self.path).path).strip("/")
            sent = len(content) or int(self.headers.get("Content-Length") or 0)
            self.log.append(Request(int(rank[1]) if rank else -1, self.command, key, sent, time.time()))


def _unwrapped(content: bytes, encoding: str) -> bytes:
    """Without the frames of ``aws-chunked``."""
    if "aws-chunked" not in encoding:
        return content
    pieces, at = [], 0
    while True:
        line = content.index(b"\r\n", at)
        length = int(content[at:line].split(b";")[0], 16)
        if not length:
            return b"".join(pieces)
        pieces.append(content[line + 2 : line + 2 + length])
        at = line + 2 + length + 2


@dataclass(frozen=True)
class Server:
    """A running one; `options` are fsspec's for a client without tries of its own."""

    url: str

    def options(self, rank: int) -> dict[str, Any]:
        """Of a client of its own for each rank, as in a process of its own."""
        about = {"retries": {"max_attempts": 0}, "user_agent_extra": f"rank/{rank}"}
        return {"endpoint_url": self.url, "key": "k", "secret": "s", "config_kwargs": about}

    def take_log(self) -> list[Request]:
        """What was asked for since the last call."""
        with urllib.request.urlopen(self.url + LOG) as answer:
            return [Request(**one) for one in json.load(answer)]


@contextmanager
def serving(folder: Path, latency_s: float, stream_bytes_per_s: float, link_bytes_per_s: float) -> Iterator[Server]:
    """A server of the objects in `folder` (``bucket/key``) in a process of its own, which ends with the context."""
    numbers = [str(latency_s), str(stream_bytes_per_s), str(link_bytes_per_s)]
    command = [sys.executable, __file__, str(folder), *numbers]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Server(f"http://127.0.0.1:{int(process.stdout.readline())}")
    finally:
        process.kill()
        process.wait()


def serve() -> None:
    """Until it is killed; prints its port first."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in ("latency_s", "stream_bytes_per_s", "link_bytes_per_s"):
        parser.add_argument(name, type=float)
    given = parser.parse_args()
    Handler.objects, Handler.log = Objects(given.folder), []
    Handler.link, Handler.stream_bytes_per_s = Limit(given.link_bytes_per_s), given.stream_bytes_per_s
    Handler.latency_s = given.latency_s
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer.request_queue_size = 256
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    serve()
