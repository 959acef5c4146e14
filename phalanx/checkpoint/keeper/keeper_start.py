"""Where the keeper of a job is found on a host, starting it, and ending it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import select
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from phalanx.checkpoint.keeper.keeper_messages import End, Stay
from phalanx.checkpoint.keeper_contract import KeeperLostError
from phalanx.core.errors import UserError
from phalanx.ipc import local_socket
from phalanx.ipc.codec import PACKET_BYTES

VARIABLE = "PHALANX_KEEPER"

TTL_S = 900.0
"""How long a keeper lives after the last rank has hung up."""

_MAX_ADDRESS_BYTES = 107  # of a Unix socket's path, on Linux
_BACKLOG = 1024
_START_S = 60.0
_END_S = 60.0
_LOG_LINES = 20

# Its examiner needs no pool of threads for linear algebra, nor an arena of memory for every thread.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}

_PROGRAM = """\
import os, sys
if os.fork():
    os._exit(0)
sys.path[:] = {path!r}
from phalanx.checkpoint.keeper.main import main
main(*{arguments!r})
"""


def address_for(destination_url: str, environ: Mapping[str, str]) -> Path:
    """The path of the socket of the keeper that belongs to a destination; the folder it is in is there then.

    It is ``PHALANX_KEEPER`` where that is set; else in a folder that only this user can enter, below
    ``XDG_RUNTIME_DIR`` or the folder for temporary files.

    Raises:
        UserError: the path is too long, or its folder is not safe.
    """
    given = environ.get(VARIABLE)
    if given:
        address = Path(given).absolute()
        _own_folder(address.parent, 0o022, "which others can write to")
    else:
        runtime = Path(environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        folder = (runtime if runtime.is_dir() else Path(tempfile.gettempdir())) / f"phalanx-{os.geteuid()}"
        _own_folder(folder, 0o077, "which others can enter")
        url = destination_url if "://" in destination_url else str(Path(destination_url).absolute())
        address = folder / f"keeper-{hashlib.sha256(os.fsencode(url)).hexdigest()[:16]}"
    if len(os.fsencode(address)) > _MAX_ADDRESS_BYTES:
        raise UserError(
            f"the path of a socket has {_MAX_ADDRESS_BYTES} bytes at most",
            cure=f"set {VARIABLE} to a shorter path",
            field=VARIABLE if given else None,
            value=str(address),
        )
    return address


def ensure_keeper(address: Path, *, ttl_s: float = TTL_S, environ: Mapping[str, str] | None = None) -> None:
    """Start a keeper at `address` unless one listens there; returns when one does. Any number of ranks may call this.

    Args:
        ttl_s: of a keeper that is started.
        environ: its environment; None: this process's.

    Raises:
        KeeperLostError: it could not be started. OSError: nothing can be written to the folder of `address`.
    """
    clear_left_keepers(address.parent)
    lock = _held(lock_of(address))
    try:
        if _stays(address):
            return
        address.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(address))
            address.chmod(0o600)
            listener.listen(_BACKLOG)
            _start(address, listener, ttl_s, dict(os.environ if environ is None else environ))
    finally:
        os.close(lock)


def clear_left_keepers(folder: Path) -> list[Path]:
    """Take away what keepers in `folder` that live no more have left there; returns that. Their last words stay."""
    gone = []
    for path in folder.glob("keeper-*.lock"):
        address = path.with_suffix("")
        with suppress(OSError), os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_listening(address):
                forget(address)
                gone.append(path)
    return gone


def forget(address: Path) -> None:
    """Take away what is left of a keeper that has ended; for who holds its lock."""
    address.unlink(missing_ok=True)
    with suppress(OSError):
        if not log_of(address).stat().st_size:
            log_of(address).unlink()
    lock_of(address).unlink(missing_ok=True)


def prepare_keeper(destination_url: str, *, ttl_s: float = TTL_S) -> threading.Thread:
    """Begin to start the keeper that belongs to a destination, if there is none, while the caller does other things.

    To be called as early as the destination is known, by one rank of each host or by all. What goes wrong is reported
    when a session is opened, which tries again.
    """

    def work() -> None:
        with suppress(Exception):
            ensure_keeper(address_for(destination_url, os.environ), ttl_s=ttl_s)

    thread = threading.Thread(target=work, name="prepare keeper", daemon=True)
    thread.start()
    return thread


def is_listening(address: Path) -> bool:
    """Whether there is a keeper."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(str(address))
        except OSError:
            return False
        return True


def until_ended(address: Path) -> None:
    """Wait until the keeper at `address` is gone; at once where there is none. It lives no longer for this."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, suppress(OSError):
        connection.connect(str(address))
        while connection.recv(PACKET_BYTES):
            pass


def end_keeper(address: Path) -> None:
    """End the keeper at `address`, with all that it holds, and wait until it is gone; nothing where there is none.

    Raises:
        TimeoutError: it does not end.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(str(address))
            local_socket.send(connection, End())
            connection.settimeout(_END_S)
            connection.recv(1)  # nothing: it hangs up
        except TimeoutError:
            raise TimeoutError(f"the keeper at {address} does not end") from None
        except OSError:  # none is there, or it has just gone
            return
    until_s = time.monotonic() + _END_S
    while is_listening(address):
        if time.monotonic() > until_s:
            raise TimeoutError(f"the keeper at {address} does not end")
        time.sleep(0.01)


def host_name() -> str:
    """Of this host, or of what plays one: where ``PHALANX_KEEPER`` sets an address, that belongs to it."""
    address = os.environ.get(VARIABLE, "")
    return f"{platform.node()}:{address}" if address else platform.node()


def lock_of(address: Path) -> Path:
    """The process that holds it (flock) may start a keeper at `address`, or end one."""
    return address.with_name(f"{address.name}.lock")


def log_of(address: Path) -> Path:
    """What the keeper has written to stderr."""
    return address.with_name(f"{address.name}.log")


def _held(path: Path) -> int:
    """The descriptor of the lock at `path`, held; it may be taken away together with what has ended."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(lock).st_ino:
                return lock
        os.close(lock)


def _stays(address: Path) -> bool:
    """Whether there is a keeper, which does not end before somebody has had the time to connect to it.

    Raises:
        KeeperLostError: there is one that does not answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_START_S)
        try:
            connection.connect(str(address))
            local_socket.send(connection, Stay())
            return bool(connection.recv(PACKET_BYTES))
        except TimeoutError:
            raise KeeperLostError(f"the keeper at {address} does not answer") from None
        except OSError:  # none is there, or it is ending
            return False


def _start(address: Path, listener: socket.socket, ttl_s: float, environ: dict[str, str]) -> None:
    """A new Python, in a session of its own, whose parent ends at once: it is nobody's child to wait for."""
    ready, ready_writer = os.pipe()
    log = os.open(log_of(address), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        arguments = (str(address), listener.fileno(), ready_writer, ttl_s)
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(path=sys.path, arguments=arguments)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environ | _ENVIRONMENT,
            pass_fds=(listener.fileno(), ready_writer),
            start_new_session=True,
        )
        os.close(ready_writer)  # so that the end of the keeper ends the pipe
        ready_writer = -1
        process.wait()
        if not (select.select([ready], [], [], _START_S)[0] and os.read(ready, 1)):
            address.unlink(missing_ok=True)
            lines: list[str] = []
            with suppress(OSError):
                lines = log_of(address).read_text(errors="replace").splitlines()
            why = "\n".join(lines[-_LOG_LINES:]) or f"it did not answer within {_START_S:.0f} s"
            raise KeeperLostError(f"no keeper could be started at {address}: {why}")
    finally:
        for descriptor in (ready, ready_writer, log):
            if descriptor >= 0:
                os.close(descriptor)


def _own_folder(folder: Path, forbidden: int, why: str) -> None:
    """Make `folder`, or see that it is ours alone.

    Raises:
        UserError: it is not.
    """

    def unsafe(problem: str) -> UserError:
        cure = f"set {VARIABLE} to a path in a folder that only you can write to"
        return UserError(f"the folder for the keeper's socket {problem}", cure=cure, value=str(folder))

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat() if forbidden & 0o044 else folder.stat()
    except OSError as error:
        raise unsafe(f"cannot be made or looked at ({error.strerror})") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise unsafe("is not a folder of this user")
    if stat.S_IMODE(found.st_mode) & forbidden:
        raise unsafe(f"has the mode {stat.S_IMODE(found.st_mode):o}, {why}")
