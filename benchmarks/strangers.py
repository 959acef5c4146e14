"""How long somebody with the job's secret waits to be served while strangers crowd the door.

    python benchmarks/strangers.py                          # all doors, 1,000 strangers of every kind
    python benchmarks/strangers.py --strangers 200 --calls 5 --doors keeper,driver
    python benchmarks/strangers.py --strangers 1500 --doors http --kinds login,health
    python benchmarks/strangers.py --json FILE

Doors: `keeper`, where other hosts' keepers come with replicas (a caller asks what is held); `driver`, where executors
come (a caller is welcomed), and `http`, where people and programs come (a caller reads the job with the token), both
also with TLS; `peer`, where a host lets others measure the network to it. Each is a process of its own.

Strangers, in two processes of their own: `none`; `idle`: they connect and say nothing, and again when they are hung up
on; `slow`: they say a byte a second; `again`: they connect and hang up, each as soon as it can; `wrong`: as `again`,
with a wrong proof or token before they hang up, every second one as soon as it is connected and the others when they
have heard something, or half a second later. Of HTTP only: `login`: they begin a long body for the login and never end
it; `health`: they ask what is open to all, again as soon as it is answered. All come from this machine, as the caller
does. The bar: no call takes longer than a second.
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import os
import selectors
import socket
import ssl
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.harness import benchmark_parser, write_json
from support.leaving import nothing_left

SECRET = bytes(range(32))
TOKEN = SECRET.hex()
JOB = "strangers"
DOORS = ("keeper", "driver", "driver-tls", "http", "http-tls", "peer")
KINDS = ("none", "idle", "slow", "again", "wrong", "login", "health")
HTTP_KINDS = ("login", "health")
BAR_S = 1.0
_CALL_S = 30.0
_PROCESSES = 2
_SETTLE_S = 2.0
_SPEAK_S = 0.5  # after which a stranger with a wrong proof does not wait for the door to speak first
_WORDS = {
    "login": b"POST /login HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-www-form-urlencoded\r\n"
    b"Content-Length: 60000\r\n\r\ntoken=",
    "health": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "slow": b"G",
}
_WRONG_TOKEN = b"GET /job HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\n\r\n"


def main() -> None:
    parser = benchmark_parser(__doc__, quick="100 strangers, three calls, one door each without TLS", as_json=True)
    parser.add_argument("--strangers", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--doors", default=",".join(DOORS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.strangers, arguments.calls, arguments.doors = 100, 3, "keeper,driver,http,peer"
    print(f"{'door':12} {'strangers':10} {'median ms':>10} {'longest ms':>10} {'failed':>7} {'bar':>4}", flush=True)
    with nothing_left():
        rows = [
            row
            for door in arguments.doors.split(",")
            for row in measure(door, arguments.kinds.split(","), arguments.strangers, arguments.calls)
        ]
    write_json(arguments.json, {"strangers": arguments.strangers, "rows": rows})


def measure(door: str, kinds: list[str], strangers: int, calls: int) -> list[dict[str, Any]]:
    """A fresh door for each kind of strangers."""
    context = multiprocessing.get_context("spawn")
    rows = []
    for kind in kinds:
        if kind in HTTP_KINDS and door != "http":
            continue
        here, there = context.Pipe()
        with tempfile.TemporaryDirectory() as folder:
            server = context.Process(target=_serve, args=(door, there, folder), daemon=True)
            server.start()
            port = here.recv()
            crowd = [
                context.Process(target=_crowd, args=(kind, door, port, strangers // _PROCESSES), daemon=True)
                for _ in range(_PROCESSES if kind != "none" else 0)
            ]
            for process in crowd:
                process.start()
            try:
                if crowd:
                    time.sleep(_SETTLE_S)
                rows.append(_row(door, kind, _ask(door, port, Path(folder)), calls))
            finally:
                for process in (*crowd, server):
                    process.kill()
                    process.join()
    return rows


def _row(door: str, kind: str, call: Callable[[], None], calls: int) -> dict[str, Any]:
    seconds, failures = [], []
    for _ in range(calls):
        began_s = time.monotonic()
        try:
            call()
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
        seconds.append(time.monotonic() - began_s)
    median, longest = statistics.median(seconds), max(seconds)
    met = "met" if longest < BAR_S and not failures else "NOT"
    print(f"{door:12} {kind:10} {median * 1e3:10.1f} {longest * 1e3:10.1f} {len(failures):7} {met:>4}", flush=True)
    if failures:
        print(f"  {failures[0][:150]}", flush=True)
    return {"door": door, "strangers": kind, "median_s": median, "longest_s": longest, "failures": failures}


# The strangers


def _crowd(kind: str, door: str, port: int, count: int) -> None:
    """Keep so many connections busy for ever."""
    wrong = (
        b"GET /job HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\n\r\n" if door.startswith("http") else bytes(48)
    )
    crowd = _Crowd(kind, port, wrong if kind == "wrong" else _WORDS.get(kind, b""))
    for number in range(count):
        crowd.connect(is_hasty=number % 2 == 0)
    slow_s = time.monotonic()
    while True:
        crowd.turn()
        if kind == "slow" and time.monotonic() - slow_s > 1.0:
            slow_s = time.monotonic()
            crowd.all_speak()


class _Crowd:
    def __init__(self, kind: str, port: int, words: bytes) -> None:
        self._kind, self._port, self._words = kind, port, words
        self._selector = selectors.DefaultSelector()
        self._patient: dict[socket.socket, float] = {}  # since when they wait to be spoken to, the first first

    def connect(self, is_hasty: bool) -> None:
        connection = socket.socket()
        connection.setblocking(False)
        with suppress(BlockingIOError):
            connection.connect(("127.0.0.1", self._port))
        self._selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, is_hasty)

    def turn(self) -> None:
        for key, events in self._selector.select(0.2):
            connection: socket.socket = key.fileobj  # type: ignore[assignment]
            if events & selectors.EVENT_WRITE:
                self._connected(connection, is_hasty=key.data)
            elif events & selectors.EVENT_READ:
                self._heard(connection, is_hasty=key.data)
        while self._patient and time.monotonic() - next(iter(self._patient.values())) > _SPEAK_S:
            self._speak_and_leave(next(iter(self._patient)), is_hasty=False)

    def all_speak(self) -> None:
        for key in list(self._selector.get_map().values()):
            self._say(key.fileobj)  # type: ignore[arg-type]

    def _connected(self, connection: socket.socket, *, is_hasty: bool) -> None:
        if self._kind == "again":
            self._come_again(connection, is_hasty=is_hasty)
        elif self._kind == "wrong" and is_hasty:
            self._speak_and_leave(connection, is_hasty=is_hasty)
        else:
            if self._kind == "wrong":
                self._patient[connection] = time.monotonic()
            elif self._kind in HTTP_KINDS:
                self._say(connection)
            self._selector.modify(connection, selectors.EVENT_READ, is_hasty)

    def _heard(self, connection: socket.socket, *, is_hasty: bool) -> None:
        heard = b""
        with suppress(OSError):
            heard = connection.recv(4096)
        if not heard:
            self._come_again(connection, is_hasty=is_hasty)
        elif self._kind == "wrong":
            self._speak_and_leave(connection, is_hasty=is_hasty)
        elif self._kind == "health":
            self._say(connection)

    def _speak_and_leave(self, connection: socket.socket, *, is_hasty: bool) -> None:
        self._say(connection)
        self._come_again(connection, is_hasty=is_hasty)

    def _come_again(self, connection: socket.socket, *, is_hasty: bool) -> None:
        self._patient.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()
        self.connect(is_hasty)

    def _say(self, connection: socket.socket) -> None:
        with suppress(OSError):
            connection.send(self._words)


# The doors


def _serve(door: str, pipe: Any, folder: str) -> None:
    os.chdir(folder)
    if door == "keeper":
        _serve_keeper(pipe)
    elif door == "peer":
        _serve_peer(pipe)
    else:
        from phalanx.run.drive.main import _allow_many_files, _run

        _allow_many_files()
        serve = _serve_driver if door.startswith("driver") else _serve_http
        _run(serve(pipe, _own_certificate(Path(folder)) if door.endswith("tls") else None))


def _serve_keeper(pipe: Any) -> None:
    from phalanx.checkpoint.replicas.replica_service import ReplicaService
    from phalanx.checkpoint.snapshot_slots import SnapshotMemory

    service = ReplicaService(SnapshotMemory(), lambda replicated: None, host="here")
    service.use_secret(SECRET)
    pipe.send(service.start_listening().port)
    pipe.recv()


def _serve_peer(pipe: Any) -> None:
    from phalanx.checks.peer_bandwidth import serve_peer

    with serve_peer(key=SECRET) as port:
        pipe.send(port)
        pipe.recv()


async def _serve_driver(pipe: Any, tls: ssl.SSLContext | None) -> int:
    from phalanx.run import messages
    from phalanx.run.wire.executor_server import ExecutorServer

    def welcome(host: str, hello: messages.Hello) -> None:
        server.send(host, messages.Welcome(messages.VERSION, JOB, 0, 1.0))

    server = ExecutorServer(
        SECRET,
        JOB,
        "127.0.0.1",
        0,
        on_hello=welcome,
        on_heartbeats=lambda beats: {},
        on_message=lambda host, message: None,
        on_gone=lambda host, why: None,
        ssl=tls,
    )
    async with server:
        pipe.send(server.address.port)
        await asyncio.Event().wait()
    return 0


async def _serve_http(pipe: Any, tls: ssl.SSLContext | None) -> int:
    from phalanx.run.api.guard import Guard, Sessions
    from phalanx.run.api.http_server import HttpServer
    from phalanx.run.secrets import Token
    from phalanx.run.wire.driver_address import Address

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})

    token = Token(TOKEN)
    app = Guard(answer, token, Sessions(token, JOB, time.time))
    async with HttpServer(app, Address("127.0.0.1", 0), None, tls) as server:
        pipe.send(server.address.port)
        await asyncio.Event().wait()
    return 0


def _own_certificate(folder: Path) -> ssl.SSLContext:
    from phalanx.run.secrets import ensure_certificate, server_context

    return server_context(ensure_certificate(folder, ["127.0.0.1"]))


# Somebody who has the secret

_NEEDED = (
    "phalanx.checkpoint.replicas.fetch",
    "phalanx.checks.peer_bandwidth",
    "phalanx.run.wire.driver_link",
    "httpx",
)


def _ask(door: str, port: int, folder: Path) -> Callable[[], None]:
    for needed in _NEEDED:  # before the clock runs
        importlib.import_module(needed)
    if door == "keeper":
        return lambda: _ask_keeper(port)
    if door == "peer":
        return lambda: _ask_peer(port)
    tls = None
    if door.endswith("tls"):
        from phalanx.run.secrets import CERTIFICATE, TlsFiles, client_context

        tls = client_context(TlsFiles(folder / CERTIFICATE, folder / CERTIFICATE, folder / CERTIFICATE))
    if door.startswith("driver"):
        return lambda: asyncio.run(_ask_driver(port, tls))
    return lambda: _ask_http(port, tls)


def _ask_keeper(port: int) -> None:
    from phalanx.checkpoint.keeper_contract import Endpoint
    from phalanx.checkpoint.replicas.fetch import list_held

    assert list_held(Endpoint("here", ("127.0.0.1",), port), SECRET, _CALL_S) == []


def _ask_peer(port: int) -> None:
    from phalanx.checks.peer_bandwidth import measure_peer

    measure_peer(f"127.0.0.1:{port}", transfer_bytes=0, limit_s=_CALL_S, key=SECRET)


async def _ask_driver(port: int, tls: ssl.SSLContext | None) -> None:
    from phalanx.run import messages
    from phalanx.run.wire.driver_link import DriverLink

    hello = messages.Hello(messages.VERSION, "host", "127.0.0.1", 2, 1 << 30, [], "", "boot", 1, 0, [])
    welcomed = asyncio.Event()
    link = DriverLink(lambda: [f"127.0.0.1:{port}"], SECRET, JOB, lambda: hello, lambda _: welcomed.set(), ssl=tls)
    running = asyncio.create_task(link.run())
    try:
        async with asyncio.timeout(_CALL_S):
            await welcomed.wait()
    finally:
        link.close()
        await running


def _ask_http(port: int, tls: ssl.SSLContext | None) -> None:
    import httpx

    verify: Any = tls if tls is not None else False  # which of certificates for other servers loads none
    url = f"{'https' if tls else 'http'}://127.0.0.1:{port}/job"
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx.get(url, headers=headers, timeout=_CALL_S, verify=verify, trust_env=False)
    assert answer.status_code == 200, answer.status_code


if __name__ == "__main__":
    main()
