"""A process that has imported what keepers need, and forks them. Not a test itself.

A keeper that is started as `ensure_keeper` does it imports for half a second of a core, which is most of what many a
test would take. Reads lines of JSON from standard input: address, time to live and environment of a keeper; answers
each with a line when it serves: whether it does.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_IMPORTED = (
    "phalanx.checkpoint.keeper.main",
    "phalanx.checkpoint.persist.persister_process",
    "phalanx.checkpoint.replicas.replica_routes",
    "phalanx.checkpoint.replicas.replica_service",
)
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}


def fork_keeper(address: Path, *, ttl_s: float, environ: Mapping[str, str]) -> None:
    """A keeper at `address`, where there is none; it serves when this returns."""
    process = _process()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps([str(address), ttl_s, dict(environ)]) + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "serves\n", f"no keeper at {address}"


@functools.cache
def _process() -> subprocess.Popen[str]:
    """One for all tests; it ends when this process does, which hangs up."""
    program = f"import sys; sys.path[:] = {sys.path!r}; from keeper_forks import serve; serve()"
    environ = os.environ | _ENVIRONMENT
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def serve() -> None:
    """Fork what is asked for until nobody can ask any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in _IMPORTED:
        importlib.import_module(module)
    for line in sys.stdin:
        address, ttl_s, environ = json.loads(line)
        print("serves" if _fork(address, ttl_s, environ) else "does not serve", flush=True)


def _fork(address: str, ttl_s: float, environ: dict[str, str]) -> bool:
    """Start a keeper that is nobody's child; whether it serves."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        if os.fork() == 0:
            _become(address, told, ttl_s, environ)
        os._exit(0)
    os.close(told)
    os.waitpid(pid, 0)
    with os.fdopen(ready, "rb") as answer:
        return answer.read(1) == b"r"


def _become(address: str, told: int, ttl_s: float, environ: dict[str, str]) -> None:
    """Be the keeper, with nothing of this process but what it has imported."""
    from phalanx.checkpoint.keeper import main as program
    from phalanx.checkpoint.keeper.keeper_start import log_of

    program.give_way = lambda nice: None  # a test waits for it, beside others that it would let go first
    try:
        os.setsid()
        log = os.open(log_of(Path(address)), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for number, descriptor in enumerate((null, log, log)):
            os.dup2(descriptor, number)
        os.environ.clear()
        os.environ.update(environ)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(address)
        Path(address).chmod(0o600)
        listener.listen()
        program.main(address, listener.detach(), told, ttl_s)
    finally:
        os._exit(1)
