"""The host as checks see it, passed in so that a check can be tried on recorded files; and what checks remember of it.

What a check remembers of this host from one time to the next: a small file each.

A file takes the place of the one before at once. It is not forced to the disk: after a power failure the memory is lost
and is learnt again, and a check that only reads must not wait for a disk.

The host as checks see it: where the kernel's files lie, how commands are run, whose clock counts.

All of it is passed in, so that a check can be tried on the recorded files of another machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.checks.kernel_lines import KernelLine, read_kernel_lines
from phalanx.checks.nvml import Gpus


def recall(cache: Path, name: str) -> dict[str, Any]:
    """What `remember` has written last; empty where there is nothing that can be read."""
    try:
        value = json.loads((cache / f"{name}.json").read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def remember(cache: Path, name: str, value: dict[str, Any]) -> None:
    """Keep `value` for the next time, all at once; where the folder cannot be written, it is forgotten."""
    aside = cache / f".{name}.{os.getpid()}"
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(value))
        aside.replace(cache / f"{name}.json")


RunCommand = Callable[[Sequence[str], float], str | None]
"""Runs a command for at most so many seconds; None: it is not there, failed or gave no answer."""


def run_command(command: Sequence[str], limit_s: float) -> str | None:
    """What the command writes to stdout; None where it is not there, fails, or gives no answer within `limit_s`.

    A command that the kernel does not let go is left alone: waiting for it would hang with it.
    """
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return None
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return None
    return output if process.returncode == 0 else None


@dataclass(frozen=True)
class Host:
    """What a check may look at.

    Attributes:
        proc, sys, dev: roots of the kernel's file systems.
        environment: variables that a job on this host would have.
        cache: folder for what checks remember of this host from one time to the next.
        folder: where checkpoints go, a path or a URL; empty: not told.
        makes_folder: it is made where it is not there yet.
        peers: ``address:port`` of hosts that serve the network test (`phalanx.checks.peer_bandwidth.serve_peer`).
        peer_key: file with the key that peers ask for; None: they ask for none.
        is_suspect: the peers are believed good, and this host is in doubt.
        expected: thresholds given by the user, by name of the check.
        own_pids: processes that belong to the present run, besides this one and its ancestors.
        run: see `run_command`.
        unix_s: the clock.
        read_kernel_lines: the kernel's log, newest last; None: it may not be read here.
        gpus: NVIDIA's GPUs, asked once and in a process of its own.
    """

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    environment: Mapping[str, str] = field(default_factory=dict)
    cache: Path = Path("/nonexistent")
    folder: str = ""
    makes_folder: bool = False
    peers: tuple[str, ...] = ()
    peer_key: Path | None = None
    is_suspect: bool = False
    expected: Mapping[str, float] = field(default_factory=dict)
    own_pids: frozenset[int] = frozenset()
    run: RunCommand = run_command
    unix_s: Callable[[], float] = time.time
    read_kernel_lines: Callable[[], list[KernelLine] | None] = field(default=read_kernel_lines)
    gpus: Gpus = field(default_factory=Gpus)

    def settings(self) -> dict[str, Any]:
        """What another process needs to look at the same host, as JSON can hold it; not what tests pass in."""
        return {
            "proc": str(self.proc),
            "sys": str(self.sys),
            "dev": str(self.dev),
            "environment": dict(self.environment),
            "cache": str(self.cache),
            "folder": self.folder,
            "makes_folder": self.makes_folder,
            "peers": list(self.peers),
            "peer_key": str(self.peer_key) if self.peer_key else None,
            "is_suspect": self.is_suspect,
            "expected": dict(self.expected),
            "own_pids": sorted(self.own_pids),
        }


def host_from_settings(settings: Mapping[str, Any]) -> Host:
    """The host that `Host.settings` told of, with the clock, the commands and the devices of this process."""
    return Host(
        proc=Path(settings["proc"]),
        sys=Path(settings["sys"]),
        dev=Path(settings["dev"]),
        environment=settings["environment"],
        cache=Path(settings["cache"]),
        folder=settings["folder"],
        makes_folder=settings["makes_folder"],
        peers=tuple(settings["peers"]),
        peer_key=Path(settings["peer_key"]) if settings["peer_key"] else None,
        is_suspect=settings["is_suspect"],
        expected=settings["expected"],
        own_pids=frozenset(settings["own_pids"]),
        read_kernel_lines=partial(read_kernel_lines, Path(settings["dev"])),
    )


def this_host(environment: Mapping[str, str], **given: Any) -> Host:
    """This machine; `given` are fields of `Host`."""
    return Host(**{"environment": dict(environment), "cache": cache_folder(environment), **given})


def cache_folder(environment: Mapping[str, str]) -> Path:
    """``$XDG_CACHE_HOME/phalanx/checks/HOST``: by host, because a home may be shared by many."""
    home = environment.get("HOME", "")
    named = environment.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else "")
    base = Path(named) if named else Path(tempfile.gettempdir()) / f"phalanx-{os.geteuid()}"
    return base / "phalanx" / "checks" / socket.gethostname()
