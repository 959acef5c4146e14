"""The ranks of a job as `phalanx.core.peers.Peers`, over TCP connections that make a tree.

The store is used once: a rank that has children writes down where it listens, and each of them reads that. Whatever is
exchanged later goes over the connections, passed on by a thread of its own, so that no rank waits until the main
thread of one that it is connected to has time. See `phalanx.ipc.rank_tree`.

A rank that connects shows that it has read this attempt's store, which keeps out ranks of other attempts and stray
connections. That guards nothing: as with gloo and NCCL, any process that reaches the store can be a rank.
"""

from __future__ import annotations

import hmac
import json
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

from phalanx.core.addresses import is_loopback, own_address
from phalanx.core.peers import PeerError
from phalanx.ipc.rank_tree import OperationKind, TreeMessage, TreeNode, children_of, described, entries, parent_of

_HEAD = struct.Struct("!BBQQ")  # type, kind, number, bytes of the body
_HELLO = struct.Struct("!16sI64s")  # token, rank, host
_TOKEN_BYTES = 16
_PROVE_S = 10.0
_MOST_UNPROVEN = 64
_GRACE_S = 3.0
_FLUSH_S = 10.0
_CHUNK_BYTES = 1 << 18


class KeyStore(Protocol):
    """What is needed of a store."""

    def set(self, key: str, value: str) -> None:
        """Write down a value."""
        ...

    def get(self, key: str) -> bytes:
        """A value, waited for. Raises RuntimeError when it does not come in time."""
        ...


class TreePeers:
    """One rank among all; the constructor returns when it is connected to its parent.

    Args:
        store: of this attempt of the job; all ranks have the same.
        host: where the store is, as this rank reaches it: others are met by the same network.
        timeout_s: longest wait for others; it may be changed.
        counted: around every wait of the calling thread.

    Raises:
        PeerError: the parent did not come, or cannot be reached.
    """

    def __init__(
        self,
        store: KeyStore,
        rank: int,
        size: int,
        *,
        host: str,
        name: str,
        timeout_s: float,
        counted: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._name, self._counted = f"rank {rank} on {name}", counted
        self._lock = threading.Lock()
        self._node = TreeNode(rank, size, self._name, self._send)
        self._links: dict[int, _Neighbour] = {}
        self._unproven: dict[socket.socket, tuple[bytearray, float]] = {}
        self._poll = selectors.DefaultSelector()
        self._wake, self._awake = socket.socketpair()
        self._awake.setblocking(False)
        self._poll.register(self._awake, selectors.EVENT_READ)
        self._is_closing = False
        self._listener: socket.socket | None = None
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            if children_of(rank, size):
                self._listen(store, host, name)
            if (parent := parent_of(rank)) is not None:
                self._connect(store, host, parent, name)
        except BaseException:
            self._let_go()
            raise
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._thread.start()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in order of rank, on every rank."""
        return [json.loads(one) for one in entries(self._together(OperationKind.GATHER, value))]

    def collect(self, value: Any) -> list[Any] | None:
        """The values of all ranks, in order of rank, on rank 0; None elsewhere, where it does not wait."""
        body = self._together(OperationKind.COLLECT, value)
        return None if self.rank else [json.loads(one) for one in entries(body)]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return json.loads(self._together(OperationKind.BROADCAST, value if self.rank == 0 else None))

    def lowest(self, value: Any) -> Any:
        """The lowest of the values that are not None, on every rank; None where all are."""
        return json.loads(self._together(OperationKind.LOWEST, value))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._together(OperationKind.LOWEST, None)

    def ask_highest(self, value: int) -> Callable[[], int]:
        """Begin to ask all ranks for a number; what is returned waits for the highest of them."""
        number, answer = self._start(OperationKind.LOWEST, -value)
        return lambda: -int(json.loads(self._wait(OperationKind.LOWEST, number, answer)))

    def close(self) -> None:
        """Leave, once what was sent has gone out; what others do with it is not waited for.

        Children that have not connected yet are given `timeout_s` (10 s at most) to do so where something was sent to
        them: they receive it, or why the others have failed, instead of finding this rank gone.
        """
        with self._lock:
            self._is_closing = True
        self._wake_up()
        self._thread.join(_FLUSH_S)

    def _together(self, kind: OperationKind, value: Any) -> bytes:
        return self._wait(kind, *self._start(kind, value))

    def _start(self, kind: OperationKind, value: Any) -> tuple[int, Future[bytes]]:
        body = json.dumps(value).encode()
        with self._lock:
            if self._is_closing:
                raise PeerError(f"{self._name} has left the others")
            return self._node.start(kind, body)

    # `phalanx.detect.hangs.python_stacks` knows by this name that a rank waits for others.
    def _wait(self, kind: OperationKind, number: int, answer: Future[bytes]) -> bytes:
        with self._counted() if not answer.done() else nullcontext():
            try:
                return answer.result(self.timeout_s)
            except TimeoutError:
                pass
            except PeerError as error:
                raise PeerError(f"{self._name} was to {described(kind)}: {error}") from None
            # Find out who is missing, and have all ranks raise the same.
            with self._lock:
                self._node.ask_who_is_missing(number)
            # A neighbour whose thread gets no turn on a busy machine is not to be named for those whom it would name.
            until_s, knows = time.monotonic() + _GRACE_S, False
            with suppress(PeerError):
                while not knows and time.monotonic() < until_s:
                    with suppress(TimeoutError):
                        return answer.result(min(_GRACE_S, max(0.2, self.timeout_s / 4)))
                    with self._lock:
                        knows = self._node.knows_who_is_missing(number)
            with self._lock:
                who = self._node.missing(number)
                self._node.fail(f"within {self.timeout_s:g} s these have not come to {described(kind)}: {who}")
                why = self._node.failed
            raise PeerError(f"{self._name} was to {described(kind)}: {why}")

    def _listen(self, store: KeyStore, host: str, name: str) -> None:
        # Where this host's own end of a connection to the store is: by that network others reach it.
        address, family = own_address(host)
        is_stores = is_loopback(address) and not is_loopback(host)  # others know this host by the store's name alone
        listener = socket.create_server(("" if is_stores else address, 0), family=family, backlog=128)
        listener.setblocking(False)
        self._listener = listener
        self._poll.register(listener, selectors.EVENT_READ)
        place = ["" if is_loopback(address) else address, listener.getsockname()[1], self._token.hex(), name]
        store.set(f"peers/{self.rank}", json.dumps(place))

    def _connect(self, store: KeyStore, host: str, parent: int, name: str) -> None:
        try:
            address, port, token, its_name = json.loads(store.get(f"peers/{parent}"))
        except RuntimeError as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise PeerError(f"{self._name} was to meet rank {parent}, which has not come: {first}") from error
        try:
            connection = socket.create_connection((address or host, port), timeout=max(self.timeout_s, 1.0))
            connection.sendall(_HELLO.pack(bytes.fromhex(token), self.rank, name.encode()[:64]))
        except OSError as error:
            where = f"{address or host}:{port}"
            raise PeerError(f"{self._name} cannot reach rank {parent} at {where}: {error}") from error
        self._met(parent, f"rank {parent} on {its_name}", connection)

    def _met(self, neighbour: int, name: str, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._links[neighbour] = link = _Neighbour(neighbour, connection)
        self._poll.register(connection, selectors.EVENT_READ, link)
        self._node.met(neighbour, name)

    def _send(self, neighbour: int, message: TreeMessage) -> None:
        # What goes at once; the thread sends the rest. The lock is held.
        link = self._links.get(neighbour)
        if link is None or link.is_gone:
            return
        *head, body = message
        link.out += _HEAD.pack(*head, len(body)) + body
        link.flush()
        if link.out and threading.current_thread() is not self._thread:
            self._wake_up()

    def _wake_up(self) -> None:
        with suppress(OSError):
            self._wake.send(b".")

    def _run(self) -> None:
        try:
            self._pass_on()
        except Exception as error:  # whatever it is, nobody may wait for this rank
            with self._lock:
                self._node.fail(f"{self._name} cannot pass on what others send: {type(error).__name__}: {error}")
        self._let_go()

    def _pass_on(self) -> None:
        closing_since_s: float | None = None
        while True:
            with self._lock:
                if self._is_closing and closing_since_s is None:
                    closing_since_s = time.monotonic()
                if closing_since_s is not None and self._may_leave(time.monotonic() - closing_since_s):
                    break
                for link in self._links.values():
                    if not link.is_gone and bool(link.out) != link.is_watched:
                        link.is_watched = bool(link.out)
                        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.out else 0)
                        self._poll.modify(link.connection, events, link)
            longest_s = 1.0 if self._unproven else None
            for key, events in self._poll.select(longest_s if closing_since_s is None else 0.1):
                with self._lock:
                    self._on_event(key, events)
            now_s = time.monotonic()
            for connection in [one for one, (_, until_s) in self._unproven.items() if until_s < now_s]:
                self._forget(connection)

    def _may_leave(self, closing_s: float) -> bool:
        is_sent = all(link.is_gone or not link.out for link in self._links.values())
        is_received = not self._node.is_owing() or closing_s > min(_FLUSH_S, self.timeout_s)
        return (is_sent and is_received) or closing_s > _FLUSH_S

    def _on_event(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._awake:
            with suppress(BlockingIOError):
                self._awake.recv(4096)
        elif key.fileobj is self._listener:
            self._accept()
        elif isinstance(key.data, _Neighbour):
            if events & selectors.EVENT_WRITE:
                key.data.flush()
            if events & selectors.EVENT_READ:
                self._read(key.data)
        elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._unproven:  # not forgotten just now
            self._prove(key.fileobj)

    def _accept(self) -> None:
        assert self._listener is not None
        with suppress(OSError):
            connection, _ = self._listener.accept()
            if len(self._unproven) >= _MOST_UNPROVEN:  # the oldest goes: a child speaks at once, a scanner may never
                self._forget(next(iter(self._unproven)))
            connection.setblocking(False)
            self._unproven[connection] = bytearray(), time.monotonic() + _PROVE_S
            self._poll.register(connection, selectors.EVENT_READ)
            self._prove(connection)  # most children have spoken by now, so that no crowd of others can push them out

    def _prove(self, connection: socket.socket) -> None:
        # A child shows that it has read the store; any other connection is dropped.
        received, _ = self._unproven[connection]
        try:
            chunk = connection.recv(_HELLO.size - len(received))
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        received += chunk
        if chunk and len(received) < _HELLO.size:
            return
        del self._unproven[connection]
        self._poll.unregister(connection)
        if len(received) == _HELLO.size:
            token, rank, name = _HELLO.unpack(received)
            known = rank in self._links or rank not in self._node.children
            if hmac.compare_digest(token, self._token) and not known:
                self._met(rank, f"rank {rank} on {name.rstrip(bytes(1)).decode(errors='replace')}", connection)
                return
        connection.close()

    def _forget(self, connection: socket.socket) -> None:
        del self._unproven[connection]
        self._poll.unregister(connection)
        connection.close()

    def _read(self, link: _Neighbour) -> None:
        try:
            chunk = link.connection.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            link.is_gone = True
            self._poll.unregister(link.connection)
            self._node.lost(link.rank, "has ended: its connection is closed")
            return
        link.got += chunk
        for message in link.messages():
            self._node.hear(link.rank, message)

    def _let_go(self) -> None:
        for link in self._links.values():
            link.end()
        for one in (*self._unproven, self._listener, self._wake, self._awake):
            if one is not None:
                one.close()
        self._poll.close()


class _Neighbour:
    """The connection to a neighbour; `is_watched` says whether the thread waits until more can be sent."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self.out, self.got = bytearray(), bytearray()
        self.is_gone = self.is_watched = False

    def flush(self) -> None:
        """Send what can be sent without waiting."""
        try:
            while self.out:
                del self.out[: self.connection.send(memoryview(self.out)[:_CHUNK_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            self.out.clear()  # it is gone; reading finds that out

    def messages(self) -> list[TreeMessage]:
        """Those that are complete."""
        found, at = [], 0
        while len(self.got) >= at + _HEAD.size:
            message_type, kind, number, length = _HEAD.unpack_from(self.got, at)
            end = at + _HEAD.size + length
            if len(self.got) < end:
                break
            found.append(TreeMessage(message_type, kind, number, bytes(self.got[at + _HEAD.size : end])))
            at = end
        del self.got[:at]
        return found

    def end(self) -> None:
        """Hang up, so that what was sent arrives: with something unread, the system would take it back."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
        with suppress(OSError):
            while self.connection.recv(_CHUNK_BYTES):
                pass
        self.connection.close()
