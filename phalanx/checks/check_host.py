"""A check, its result, and the host as checks see it: passed in, so that a check can be tried on recorded files.

Also what a check remembers of this host from one time to the next: a small file each, which takes the place of the one
before at once. It is not forced to the disk: after a power failure it is learnt again, and a check that only reads must
not wait for a disk.
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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from phalanx.checks.kernel_lines import KernelLine, read_kernel_lines
from phalanx.checks.nvml import Gpus

CheckVerdict = Literal["pass", "fail", "skip"]


@dataclass(frozen=True)
class CheckResult:
    """One check, one verdict; the fields are those of `phalanx.run.messages.CheckOutcome`.

    Attributes:
        outcome: ``fail`` says that the host is not fit; ``skip`` that there was nothing to test, or no way to.
        reason: in one line; also of a pass, where there is something to say.
        value, unit: what was measured; None: nothing that is one number.
        threshold: what the value was held against; None: no threshold is known, and the value is shown only.
        threshold_source: where the threshold comes from.
        action: what a person, or the driver, had better do about a failure.
        bad_peers: address of a peer -> what is bad between it and this host; either end may be at fault.
        peer_rates: address of a peer -> bytes per second to and from it, of the slower direction.
    """

    name: str
    outcome: CheckVerdict
    reason: str = ""
    value: float | None = None
    unit: str = ""
    threshold: float | None = None
    threshold_source: str = ""
    action: str = ""
    bad_peers: dict[str, str] = field(default_factory=dict)
    peer_rates: dict[str, float] = field(default_factory=dict)

    def explained(self, *parts: str) -> CheckResult:
        """The same with another reason: those of `parts` that are not empty."""
        return replace(self, reason="; ".join(filter(None, parts)))


def passed(name: str, reason: str = "", *, value: float | None = None, unit: str = "") -> CheckResult:
    """All is well as far as this check can tell."""
    return CheckResult(name, "pass", reason, value, unit)


def failed(name: str, reason: str, action: str, *, value: float | None = None, unit: str = "") -> CheckResult:
    """The host is not fit, whatever was measured."""
    return CheckResult(name, "fail", reason, value, unit, action=action)


def skipped(name: str, reason: str) -> CheckResult:
    """Nothing here to test, or no way to test it."""
    return CheckResult(name, "skip", reason)


Level = Literal["passive", "quick", "full"]
LEVELS: tuple[Level, ...] = ("passive", "quick", "full")

Resource = Literal["cpu", "memory", "disk", "gpu"]


@dataclass(frozen=True)
class Check:
    """One self-test of a host.

    Attributes:
        name: as it is shown and given to ``--only``.
        summary: what it tests, in one line.
        level: the smallest set that it belongs to; each set contains the smaller ones.
        run: the test; a module-level function, so that another process can find it.
        limit_s: after so many seconds without an answer it has failed.
        isolated: run it in a process of its own: it may hang in the kernel, crash, or load large libraries.
        uses: what it keeps busy; two checks that share one never run at the same time.
    """

    name: str
    summary: str
    level: Level
    run: Callable[[Host], CheckResult]
    limit_s: float = 5.0
    isolated: bool = False
    uses: frozenset[Resource] = frozenset()


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
        folder: where checkpoints go, a path or a URL; empty: not known.
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
        return {name: _plain(getattr(self, name)) for name in _SETTINGS}


_SETTINGS = (
    *("proc", "sys", "dev", "environment", "cache", "folder", "makes_folder", "peers", "peer_key", "is_suspect"),
    *("expected", "own_pids"),
)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return dict(value) if isinstance(value, Mapping) else sorted(value) if isinstance(value, frozenset) else value


def host_from_settings(settings: Mapping[str, Any]) -> Host:
    """The host of `Host.settings`, with the clock, the commands and the devices of this process."""
    paths = {name: Path(settings[name]) for name in ("proc", "sys", "dev", "cache", "peer_key") if settings[name]}
    own = {"peers": tuple(settings["peers"]), "own_pids": frozenset(settings["own_pids"])}
    return Host(**{**settings, **paths, **own, "read_kernel_lines": partial(read_kernel_lines, paths["dev"])})


def this_host(environment: Mapping[str, str], **given: Any) -> Host:
    """This machine; `given` are fields of `Host`."""
    return Host(**{"environment": dict(environment), "cache": cache_folder(environment), **given})


def cache_folder(environment: Mapping[str, str]) -> Path:
    """``$XDG_CACHE_HOME/phalanx/checks/HOST``: by host, because a home may be shared by many."""
    home = environment.get("HOME", "")
    named = environment.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else "")
    base = Path(named) if named else Path(tempfile.gettempdir()) / f"phalanx-{os.geteuid()}"
    return base / "phalanx" / "checks" / socket.gethostname()
