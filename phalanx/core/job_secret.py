"""What the processes of a job know and nobody else: a file on each host that only its user can read. Torch-free.

`phalanx run` makes one for each host; whoever starts ranks otherwise puts one there himself, the same on all hosts. It
is in no argument, no environment (which has the file's name only) and on no network. Each use takes a key of its own,
with which nothing else can be done.
"""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from phalanx.core.errors import UserError

VARIABLE = "PHALANX_JOB_SECRET_FILE"
"""Names the file."""

HANDED_OUT = "job-secret"
"""What `hand_out` calls it."""

_LEAST_BYTES = 32
_MOST_BYTES = 4096
_PRINTABLE = range(0x20, 0x7F)


def read_job_secret(environ: Mapping[str, str]) -> bytes | None:
    """The secret of this job, 32 bytes; None: it was given none.

    Every byte of the file counts, but for the line break at the end of one that is text.

    Raises:
        UserError: the file cannot be read, others can read it too, or what it holds can be guessed.
    """
    name = environ.get(VARIABLE, "")
    if not name:
        return None
    try:
        content = _read(Path(name))
    except OSError as error:
        raise _bad(name, f"cannot be read ({error.strerror})", "put the file there, on every host") from None
    secret = _without_line_break(content)
    if len(secret) < _LEAST_BYTES:
        cure = "make one that nobody can guess: openssl rand -hex 32 > FILE"
        raise _bad(name, f"holds {len(secret)} bytes, fewer than {_LEAST_BYTES}", cure)
    return derive(secret, "job secret")


def hand_out(folder: Path, secret: bytes) -> dict[str, str]:
    """Put a secret into a folder that only its owner can enter; the variable that tells processes of this host."""
    path = folder / HANDED_OUT
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret.hex() + "\n")
    return {VARIABLE: str(path)}


def derive(secret: bytes, purpose: str) -> bytes:
    """A key of 32 bytes for this purpose alone, out of a secret that cannot be guessed (HKDF-SHA256)."""
    extracted = hmac.digest(b"phalanx", secret, "sha256")
    return hmac.digest(extracted, purpose.encode() + b"\x01", "sha256")


def openness(descriptor: int) -> str:
    """Why an open file keeps no secret; empty: it is a plain one of this user that nobody else can read or write."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        return "is no plain file"
    if found.st_uid != os.geteuid():
        return "belongs to somebody else"
    mode = stat.S_IMODE(found.st_mode)
    return f"has the mode {mode:o}, others can read or write it" if mode & 0o077 else ""


def _without_line_break(content: bytes) -> bytes:
    """Of text (printable ASCII) what stands before the line break at its end, which editors add and copying loses; of
    anything else every byte."""
    text = content.removesuffix(b"\n").removesuffix(b"\r")
    return text if all(byte in _PRINTABLE for byte in text) else content


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        problem = openness(descriptor)
        if problem:
            cure = f"have the user of the job own it: chmod 600 {path}; make another if others could read it"
            raise _bad(str(path), problem, cure)
        return os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)


def _bad(path: str, problem: str, cure: str) -> UserError:
    return UserError(f"the file with the job's secret {problem}", cure=cure, field=VARIABLE, value=path)
