"""What a reader and the loader process of its host say to each other. Torch-free.

One stream of batches is one connection (`phalanx.core.packets`).

    reader                     loader
    Hello ───────────────────►
    Wanted(0) … Wanted(a-1) ─►
          ◄─────────────────── Welcome + descriptors of the `a` slots
          ◄─────────────────── Ready(0)
    copies slot 0
    Wanted(a) ───────────────►                 which lets go of step 0: its slot may be filled again
          ◄─────────────────── Ready(1) …
          ◄─────────────────── Failed          in place of the first step that cannot be had

Its name is in Linux's abstract namespace ("@" stands for the zero byte), so no file is left behind.
"""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass

from phalanx.core import packets
from phalanx.core.errors import UserError
from phalanx.core.packets import same_user

VERSION = 1

MAX_AHEAD = 128


class HostLoaderError(RuntimeError):
    """The loader process of this host is gone, cannot be reached, or cannot give what was asked of it."""


@dataclass(frozen=True)
class Hello:
    """A reader opens the `number`-th of its streams: it is data-parallel rank `index` of `ranks`."""

    version: int
    index: int
    ranks: int
    ahead: int
    number: int


@dataclass(frozen=True)
class Wanted:
    """The reader will read samples ``start..start+count`` as step `step`, and lets go of step ``step - ahead``."""

    step: int
    start: int
    count: int


@dataclass(frozen=True)
class Welcome:
    """The slots are in the descriptors that come along; `pid` is the loader's."""

    pid: int


@dataclass(frozen=True)
class Ready:
    """Step `step` is in slot ``step % ahead``: `rows` samples from `first` on, with documents or without."""

    step: int
    first: int
    rows: int
    length: int
    documents: bool


@dataclass(frozen=True)
class Failed:
    """No step comes any more. `problem` and what follows are those of a `UserError`; else `problem` is all there is."""

    user_error: bool
    problem: str
    cure: str = ""
    field: str | None = None
    text: str = ""


Message = Hello | Wanted | Welcome | Ready | Failed

_KINDS: dict[str, type[Hello | Wanted | Welcome | Ready | Failed]] = {
    kind.__name__: kind for kind in (Hello, Wanted, Welcome, Ready, Failed)
}


def failed_with(error: BaseException) -> Failed:
    """`error` as it travels to the readers."""
    if isinstance(error, UserError):
        return Failed(True, error.problem, error.cure, error.field, str(error))
    return Failed(False, f"{type(error).__name__}: {error}")


def error_of(failed: Failed, who: str) -> Exception:
    """The exception to raise in a reader; a `UserError` has the text and field that it had in the loader."""
    if not failed.user_error:
        return HostLoaderError(f"{who} failed: {failed.problem}")
    where = failed.text.removesuffix(f"{failed.problem}; {failed.cure}").removesuffix(": ")
    error = UserError(failed.problem, cure=failed.cure, field=where or None)
    error.field = failed.field
    return error


def receive(connection: socket.socket) -> tuple[Message | None, list[int]]:
    """Wait for the next packet and its descriptors; (None, []) when the other side is gone."""
    return packets.receive(connection, _KINDS)


def listen() -> tuple[str, socket.socket]:
    """A new address on this host, and the socket that listens there."""
    address = f"@phalanx-loader-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(_abstract(address))
    listener.listen(1024)
    return address, listener


def connect(address: str) -> socket.socket:
    """A connection to the loader at `address`.

    Raises:
        HostLoaderError: nobody listens there, or somebody else's process does.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(_abstract(address))
    except OSError as error:
        connection.close()
        problem = "the process that started it is gone, or runs on another host or in another network namespace"
        raise HostLoaderError(f"no loader listens at {address} ({error.strerror}): {problem}") from error
    if not same_user(connection):
        connection.close()
        raise HostLoaderError(f"another user listens at {address}")
    return connection


def _abstract(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address
