"""A proxy before a TCPStore that writes down what each client says: one port per client, so that also connections which
torch opens by itself are known to be that client's."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

from rendezvous.wire import Request, requests


@dataclass
class Recording:
    """What one client said."""

    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class Proxy:
    """Ports that lead to the store at `target`; `recordings[i]` is what came through `ports[i]`."""

    def __init__(self, target: tuple[str, int], count: int) -> None:
        self._target = target
        self.recordings = [Recording() for _ in range(count)]
        self._selector = selectors.DefaultSelector()
        self._listeners = [socket.create_server(("127.0.0.1", 0), backlog=1024) for _ in range(count)]
        self.ports = [listener.getsockname()[1] for listener in self._listeners]
        for listener, recording in zip(self._listeners, self.recordings, strict=True):
            self._selector.register(listener, selectors.EVENT_READ, ("accept", recording))
        self._stop_reader, self._stop = socket.socketpair()
        self._selector.register(self._stop_reader, selectors.EVENT_READ, ("stop", None))
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def drain(self, quiet_s: float = 0.2) -> None:
        """Wait until all that was sent has been written down: nothing more has come for `quiet_s`."""
        seen = -1
        while seen != (now := sum(recording.sent_bytes for recording in self.recordings)):
            seen = now
            time.sleep(quiet_s)

    def close(self) -> None:
        """Stop, and cut what is connected."""
        self._stop.send(b"x")
        self._thread.join()
        for end in (*self._listeners, *self._open, self._stop, self._stop_reader):
            end.close()
        self._selector.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                what, detail = key.data
                if what == "stop":
                    return
                if what == "accept":
                    self._accept(key.fileobj, detail)
                else:
                    self._pump(key.fileobj, *detail)

    def _accept(self, listener: socket.socket, recording: Recording) -> None:
        client, _ = listener.accept()
        server = socket.create_connection(self._target)
        recording.connections += 1
        self._open += [client, server]
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(client, selectors.EVENT_READ, ("pump", (server, recording, bytearray())))
        self._selector.register(server, selectors.EVENT_READ, ("pump", (client, recording, None)))

    def _pump(self, source: socket.socket, sink: socket.socket, recording: Recording, said: bytearray | None) -> None:
        chunk = source.recv(1 << 16)
        if not chunk:
            self._selector.unregister(source)
            sink.shutdown(socket.SHUT_WR)
            return
        sink.sendall(chunk)
        if said is None:
            recording.received_bytes += len(chunk)
        else:
            recording.sent_bytes += len(chunk)
            said += chunk
            recording.requests += requests(said)
