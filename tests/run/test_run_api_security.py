"""Who may come in: nobody without the token changes anything, or learns anything; and nobody holds the driver up."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from api_house import GUARD_S, House, open_house

from phalanx.run.api import guard, http_server
from phalanx.run.api.app import make_app
from phalanx.run.api.guard import SESSION_S, Sessions
from phalanx.run.reports.recent_events import Wrote
from phalanx.run.secrets import Token
from phalanx.run.wire import arrivals

OPEN = {("/health", "get")}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Strangers have as many turns as they like."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrivals, "TURNS", 10_000)
        with open_house(tmp_path_factory.mktemp("api") / "run") as house:
            yield house


def routes(house: House) -> list[tuple[str, str]]:
    """Every operation of the description, and what is not in it."""
    paths = house.friend().get("/openapi.json").json()["paths"]
    described = [(path, method) for path, operations in paths.items() for method in operations]
    assert len(described) >= 14
    others = [("/", "get"), ("/openapi.json", "get"), ("/nothing", "post"), ("/api/status", "delete"), ("/docs", "get")]
    return [*described, *others]


def ask(client: httpx.Client, path: str, method: str) -> httpx.Response:
    where = path.format(host="node-1", number=1)
    body = {"json": {"who": "mallory"}} if method == "post" else {}
    return client.request(method.upper(), where, params={"seconds": 0} if "follow" in path else None, **body)


def strangers(house: House) -> list[dict[str, str]]:
    right = house.token.reveal()
    session = Sessions(house.token, "demo", time.time)
    expired = Sessions(house.token, "demo", lambda: time.time() - SESSION_S - 1)
    forged = Sessions(Token("0" * 64), "demo", time.time)
    wrong_job = Sessions(house.token, "other", time.time)
    return [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": f"Bearer {'0' * 64}"},
        {"authorization": f"Bearer {right[:-1]}"},
        {"authorization": f"Bearer {right}0"},
        {"authorization": f"Basic {right}"},
        {"authorization": right},
        {"x-token": right},
        {"cookie": f"{session.cookie}={right}"},
        {"cookie": f"{session.cookie}={expired.issue()}"},
        {"cookie": f"{session.cookie}={forged.issue()}"},
        {"cookie": f"{wrong_job.cookie}={wrong_job.issue()}"},
        {"cookie": f"{session.cookie}=9999999999.{session.issue().partition('.')[2]}"},
        {"cookie": f"{session.cookie}=.; {session.cookie}=x.y"},
    ]


def test_no_stranger_gets_an_answer_or_changes_anything(house: House) -> None:
    before = house.written()
    for headers in strangers(house):
        with house.client(**headers) as client:
            for path, method in routes(house):
                if (path, method) not in OPEN:
                    answer = ask(client, path, method)
                    assert answer.status_code == 401, (headers, path, method)
                    assert answer.json()["problem"] == "this needs the job's token"
    assert house.written() == before
    assert not house.job.state.hosts["node-1"].leaves


def test_a_cookie_only_reads_whatever_site_the_request_is_from(house: House) -> None:
    sessions = Sessions(house.token, "demo", time.time)
    before = house.written()
    for origin in ("https://evil.example", house.url):
        cookie = f"{sessions.cookie}={sessions.issue()}"
        with house.client(cookie=cookie, origin=origin) as client:
            assert client.get("/api/status").status_code == 200
            for path, method in routes(house):
                if method != "get":
                    assert ask(client, path, method).status_code == 401, (path, method)
    assert house.written() == before


def test_the_login_gives_a_cookie_that_scripts_and_other_sites_do_not_get(house: House) -> None:
    with house.client(accept="text/html") as client:
        assert client.get("/").headers["location"] == "/login"
        assert client.post("/login", data={"token": "0" * 64}).status_code == 401
        answer = client.post("/login", data={"token": house.token.reveal()})
        given = answer.headers["set-cookie"].lower()
        assert answer.status_code == 303 and "httponly" in given and "samesite=strict" in given
        assert house.token.reveal() not in given
        assert client.get("/api/status").status_code == 200


def test_health_says_nothing_but_that_the_driver_answers(house: House) -> None:
    assert house.client().get("/health").json() == {"status": "ok"}


def test_the_token_is_nowhere_in_what_is_answered(house: House) -> None:
    with house.friend() as client:
        for path, method in routes(house):
            if path not in ("/api/stop",):
                answer = ask(client, path, method)
                assert answer.status_code < 500, (path, answer.text)
                assert house.token.reveal() not in answer.text + str(answer.headers)


def test_large_requests_are_refused_before_they_are_read(house: House) -> None:
    with house.friend() as client:
        assert client.post("/api/stop", content=b"x" * (1 << 20)).status_code == 413

        def pieces() -> Iterator[bytes]:  # without a length that could be looked at
            for _ in range(64):
                yield b"x" * 4096

        try:
            status = client.post("/api/stop", content=pieces()).status_code
        except httpx.TransportError:  # it may end the connection while we still write
            status = 413
        assert status == 413
    assert house.job.state.ending is None


def test_a_body_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    with open_house(tmp_path / "run", body_s=0.2) as house, socket.create_connection(("127.0.0.1", house.port)) as line:
        head = (
            f"POST /api/stop HTTP/1.1\r\nhost: x\r\nauthorization: {house.token.header()}\r\ncontent-length: 9\r\n\r\n"
        )
        line.sendall(head.encode())
        line.settimeout(GUARD_S)
        assert b" 408 " in line.recv(4096)


def test_headers_that_do_not_come_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADERS_S", 0.2)
    with open_house(tmp_path / "run") as house:
        for beginning in (b"", b"GET /health HTTP/1.1\r\nhost: ", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /hea"):
            with socket.create_connection(("127.0.0.1", house.port)) as line:
                line.settimeout(GUARD_S)
                line.sendall(beginning)
                _until_closed(line)


def test_a_client_that_takes_nothing_is_dropped(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "WRITE_S", 0.3)
    big = [Wrote(0, 1.0, 0, "x" * 16_000) for _ in range(1000)]
    house.do(lambda: [house.job.hub._add(item) for item in big])
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", house.port))
        line.settimeout(GUARD_S)
        head = f"GET /api/items/follow HTTP/1.1\r\nhost: x\r\nauthorization: {house.token.header()}\r\n\r\n"
        line.sendall(head.encode())
        until_s = time.monotonic() + GUARD_S
        while _is_open(line):
            assert time.monotonic() < until_s
            time.sleep(0.02)
    with house.friend() as client:
        assert client.get("/api/status").status_code == 200


def test_those_who_say_nothing_are_few_and_keep_nobody_out(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MOST_STRANGERS", 8)
    lines = [socket.create_connection(("127.0.0.1", house.port)) for _ in range(40)]
    try:
        for line in lines:
            line.sendall(b"GET /")
        is_open = set(lines)
        while len(is_open) > 10:
            closed, _, _ = select.select(list(is_open), [], [], GUARD_S)
            assert closed, f"{len(is_open)} of {len(lines)} were not closed"
            for line in closed:
                with suppress(ConnectionResetError):
                    assert line.recv(1) == b""
            is_open.difference_update(closed)
        with house.friend() as client:
            assert client.get("/api/status").status_code == 200
    finally:
        for line in lines:
            line.close()


def login(length: int, said: str = "token=") -> bytes:
    form = "content-type: application/x-www-form-urlencoded"
    return f"POST /login HTTP/1.1\r\nhost: x\r\n{form}\r\ncontent-length: {length}\r\n\r\n{said}".encode()


def heard(line: socket.socket) -> bytes:
    """All that comes until the other side hangs up."""
    line.settimeout(GUARD_S)
    found = b""
    with suppress(ConnectionResetError):
        while piece := line.recv(65_536):
            found += piece
    return found


def test_logins_that_never_end_take_no_place_of_those_with_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MOST_REQUESTS", 16)
    monkeypatch.setattr(http_server, "MOST_STRANGERS", 8)
    monkeypatch.setattr(http_server, "HEADERS_S", GUARD_S)
    monkeypatch.setattr(guard, "LOGIN_S", GUARD_S)
    with open_house(tmp_path / "run") as house, ExitStack() as lines:
        crowd = [lines.enter_context(socket.create_connection(("127.0.0.1", house.port))) for _ in range(60)]
        for line in crowd:
            line.sendall(login(4000))
        for line in crowd[:-8]:  # those who came first; no newcomer is refused
            assert heard(line) == b""
        with ExitStack() as friends:
            for _ in range(16):
                follow = friends.enter_context(house.friend()).stream("GET", "/api/items/follow")
                assert friends.enter_context(follow).status_code == 200
            assert house.friend().get("/api/status").status_code == 503
        with house.client() as newcomer:
            assert newcomer.post("/login", data={"token": house.token.reveal()}).status_code == 303


def test_a_login_is_short_and_quick(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_connection(("127.0.0.1", house.port)) as line:
        line.sendall(login(4097))
        assert b" 413 " in heard(line)
    monkeypatch.setattr(guard, "LOGIN_S", 0.1)
    with socket.create_connection(("127.0.0.1", house.port)) as line:
        line.sendall(login(70))
        assert b" 408 " in heard(line)


def test_strangers_get_one_answer_to_a_connection(house: House) -> None:
    with socket.create_connection(("127.0.0.1", house.port)) as line:
        line.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 100)
        assert heard(line).count(b"HTTP/1.1 200") == 1


def test_who_is_refused_hears_it_though_the_body_comes_late(house: House) -> None:
    """A connection that is closed with a body unread is reset, which may take the answer from who asked."""
    with socket.create_connection(("127.0.0.1", house.port)) as line, house.friend() as friend:
        line.sendall(b"POST /api/stop HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n")
        for _ in range(3):
            assert friend.get("/api/status").status_code == 200
        assert not select.select([line], [], [], 0)[0]
        line.sendall(b"{}")
        assert b"HTTP/1.1 401" in heard(line)


def test_strangers_take_turns_and_those_with_the_token_do_not_wait_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "TURNS", 2)
    monkeypatch.setattr(arrivals, "TURNS_PER_S", 1e-6)
    monkeypatch.setattr(http_server, "HEADERS_S", GUARD_S)
    with open_house(tmp_path / "run") as house, ExitStack() as lines:
        crowd = [lines.enter_context(socket.create_connection(("127.0.0.1", house.port))) for _ in range(40)]
        for line in crowd:
            line.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nAuthorization: Bearer wrong\r\nCookie: x=y\r\n\r\n")
            if line in crowd[:2]:
                assert b"HTTP/1.1 200" in heard(line)
        sessions = Sessions(house.token, "demo", time.time)
        with house.friend() as friend, house.client(cookie=f"{sessions.cookie}={sessions.issue()}") as browser:
            for _ in range(10):
                assert friend.get("/api/status").status_code == 200
                assert browser.get("/api/status").status_code == 200
        assert not select.select(crowd[2:], [], [], 0)[0]


def test_what_waiting_strangers_have_said_takes_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "TURNS", 0)
    monkeypatch.setattr(arrivals, "_MOST_BYTES", 100_000)
    monkeypatch.setattr(http_server, "HEADERS_S", GUARD_S)
    with open_house(tmp_path / "run") as house, ExitStack() as lines:
        crowd = [lines.enter_context(socket.create_connection(("127.0.0.1", house.port))) for _ in range(10)]
        for line in crowd:
            line.sendall(b"GET /health HTTP/1.1\r\nx: " + b"x" * 30_000)
        for line in crowd[:6]:
            assert heard(line) == b""
        assert house.friend().get("/api/status").status_code == 200


def test_a_token_that_comes_in_pieces_is_as_good(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADERS_S", 0.5)
    head = "GET /api/items/follow?seconds=1 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += f"authorization: {house.token.header()}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", house.port)) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began_s = time.monotonic()
        for start in range(0, len(head), 40):
            line.sendall(head[start : start + 40].encode())
        assert heard(line).endswith(b"\r\n0\r\n\r\n") or time.monotonic() - began_s > 1.0


def test_garbage_is_answered_and_nothing_breaks(house: House) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00\x01", b"GET  \r\n\r\n", b"A" * 100_000, b"GET / HTTP/9.9\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", house.port)) as line:
            line.settimeout(GUARD_S)
            try:
                line.sendall(garbage)
                _until_closed(line)
            except (ConnectionResetError, BrokenPipeError):
                pass
    assert house.client().get("/health").status_code == 200


def test_a_stream_does_not_hold_up_what_others_ask(house: House) -> None:
    heard = threading.Event()

    def follow() -> None:
        with house.friend() as client, client.stream("GET", "/api/items/follow", params={"seconds": 30}) as answer:
            for _ in answer.iter_lines():
                heard.set()
                return

    thread = threading.Thread(target=follow)
    thread.start()
    house.do(lambda: house.job.hub.say("info", "hello", 1.0))
    assert heard.wait(GUARD_S)
    thread.join(GUARD_S)
    assert house.friend().get("/api/status").status_code == 200


def test_every_route_is_described_with_what_it_needs(house: House) -> None:
    found = house.friend().get("/openapi.json").json()
    assert found["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            assert bool(operation["security"]) == ((path, method) not in OPEN)
    app = make_app(house.job, house.token)._app
    in_schema = {route.path for route in app.routes if getattr(route, "include_in_schema", False)}
    assert in_schema == set(found["paths"])


def _until_closed(line: socket.socket) -> None:
    while line.recv(65_536):
        pass


def _is_open(line: socket.socket) -> bool:
    """Whether the other side still holds the connection, without taking what it has sent."""
    state = Path("/proc/net/tcp").read_text()
    port = f":{line.getsockname()[1]:04X}"
    return any(row.split()[2].endswith(port) and row.split()[3] == "01" for row in state.splitlines()[1:])
