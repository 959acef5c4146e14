"""Stacks of a Python process that may hang, be stopped or hold the GIL: by py-spy, else by faulthandler.

py-spy reads the memory of the process, so that has not to do anything. Where it may not (a container without
SYS_PTRACE), a rank that has called `phalanx.ipc.processes.register` writes its stacks itself when it is asked to.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from phalanx.core.host import PROC
from phalanx.ipc.processes import StartChild, dump_signal, read_process, send

_POLL_S = 0.02
_QUIET_S = 0.06  # without a new byte, and with a frame at its end, what faulthandler writes is complete
_ENDS_IN_FRAME = re.compile(rb"\n  [^\n]+\n\Z")
_STOPPED = "Tt"
_C_LIBRARY = ("libc.", "libc-", "libpthread", "ld-linux", "ld-musl", "linux-vdso", "[vdso]")
_SHARE = 0.6  # of the time, for py-spy where the process can be asked too
_FLOAT = re.compile(r"-?\d+\.\d*(?:e[+-]?\d+)?")
_MAX_BYTES = 128 << 10  # of one rank: a message of all ranks of a host has to fit into a frame


@dataclass(frozen=True)
class Stacks:
    """What was learnt of a process.

    Attributes:
        text: as py-spy or faulthandler writes it; empty: nothing.
        problem: why there is no text, for people.
        is_silent: the process did not answer in time, or is gone: that is evidence. False without text: we could
            not ask.
    """

    text: str = ""
    problem: str = ""
    is_silent: bool = False


def py_spy_program() -> Path | None:
    """Where py-spy is; beside this Python first. None: nowhere."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")
    return Path(found) if found else None


def stacks_of(
    pid: int,
    until_s: float,
    *,
    program: Path | None,
    dump: Path | None = None,
    start: StartChild = lambda make: make(),
    proc: Path = PROC,
) -> Stacks:
    """Ask for the stacks of a process, until this time of the monotonic clock.

    Args:
        program: py-spy; None: there is none.
        dump: the file of `phalanx.ipc.processes.register`, if the process may have called that.
    """
    process = read_process(pid, proc)
    if process is None or not process.is_alive:
        return Stacks(problem="the process is gone", is_silent=True)
    by_py_spy = Stacks(problem="py-spy is not installed")
    is_stopped = process.state in _STOPPED
    may_write = dump is not None and not is_stopped and _catches(pid, dump_signal(), proc)
    if program is not None:
        share = _SHARE if may_write else 1.0
        by_py_spy = _by_py_spy(program, pid, is_stopped, share * until_s + (1 - share) * time.monotonic(), start)
    if by_py_spy.text or dump is None:
        return by_py_spy
    if is_stopped:
        itself = Stacks(problem="the rank is stopped, so it cannot write its stacks", is_silent=True)
    else:
        itself = _by_itself(pid, dump, until_s, proc)
    if itself.text:
        return itself
    problem = f"{by_py_spy.problem}; {itself.problem}"
    return Stacks(problem=problem, is_silent=by_py_spy.is_silent or itself.is_silent)


def _by_py_spy(program: Path, pid: int, is_stopped: bool, until_s: float, start: StartChild) -> Stacks:
    """py-spy halts a process to look at it; one that is stopped already it can only look at without that."""
    began_s = time.monotonic()
    ways: tuple[list[str], ...] = (["--nonblocking"],) if is_stopped else ([], ["--nonblocking"])
    problem = ""
    for options in ways:
        command = [str(program), "dump", "--json", *options, "--pid", str(pid)]
        output, errors = _run(command, until_s, start)
        if output is None:
            return Stacks(problem=f"py-spy did not answer within {time.monotonic() - began_s:.1f} s", is_silent=True)
        with suppress(ValueError, KeyError, TypeError):
            if text := format_py_spy(json.loads(output), pid):
                return Stacks(text)
        # The innermost cause that py-spy names.
        lines = [line.strip() for line in errors.partition("Stack backtrace")[0].splitlines() if line.strip()]
        causes = [line.partition(": ")[2] for line in lines if line[:1].isdigit()]
        problem = "py-spy: " + (causes or lines or ["it said nothing"])[-1].removeprefix("Error: ")
    return Stacks(problem=problem)


def format_py_spy(threads: Any, pid: int) -> str:
    """What ``py-spy dump --json`` gives, as it writes it for people; the main thread always has its name.

    Raises:
        ValueError, KeyError, TypeError: it is something else.
    """
    lines = []
    for thread in threads:
        name = thread["thread_name"] or ("MainThread" if thread["os_thread_id"] == pid else "")
        state = ("active" if thread["active"] else "idle") + ("+gil" if thread["owns_gil"] else "")
        lines.append(f"Thread {thread['os_thread_id'] or thread['thread_id']} ({state}): {json.dumps(name)}")
        lines += [f"    {frame['name']} ({frame['filename']}:{frame['line']})" for frame in thread["frames"]]
    return "\n".join(lines)[:_MAX_BYTES]


def native_library(program: Path, pid: int, until_s: float, start: StartChild = lambda make: make()) -> str | None:
    """The compiled library that the main thread of a process is in, such as ``libtorch_cpu.so``.

    Returns:
        Where several have called each other the innermost, but for the C library. Empty: it is in Python itself; None:
        py-spy cannot tell.
    """
    output, _ = _run([str(program), "dump", "--json", "--native", "--pid", str(pid)], until_s, start)
    with suppress(ValueError, KeyError, TypeError):
        main = next((one for one in json.loads(output or "") if pid in (one["os_thread_id"], one["thread_id"])), None)
        if main is not None:
            # Frames of compiled code have a module, those of Python have none.
            compiled = takewhile(lambda frame: frame["module"], main["frames"])
            found = [Path(frame["module"]).name for frame in compiled]
            return next((name for name in found if not name.startswith(_C_LIBRARY)), found[0] if found else "")
    return None


def variables_of(program: Path, pid: int, until_s: float) -> tuple[tuple[str, ...], ...] | None:
    """The functions that the main thread of a process is in, innermost first, each with its variables.

    Times do not count, which a loop that waits for one asks for again and again; objects do by where they are.

    Returns:
        None: py-spy cannot tell.
    """
    output, _ = _run([str(program), "dump", "--json", "--locals", "--pid", str(pid)], until_s, lambda make: make())
    with suppress(ValueError, KeyError, TypeError):
        main = next((one for one in json.loads(output or "") if pid in (one["os_thread_id"], one["thread_id"])), None)
        if main is not None:
            return tuple((frame["name"], *map(_variable, frame.get("locals") or ())) for frame in main["frames"])
    return None


def _variable(local: dict[str, Any]) -> str:
    text = str(local.get("repr") or "")
    is_time = _FLOAT.fullmatch(text) is not None
    return str(local["name"]) if is_time else f"{local['name']} {local['addr']} {text[:80]}"


def _by_itself(pid: int, dump: Path, until_s: float, proc: Path) -> Stacks:
    """Have the process write its stacks, if it waits for the signal; else that would end it."""
    process = read_process(pid, proc)
    if process is None or not _catches(pid, dump_signal(), proc):
        return Stacks(problem="the rank does not write its stacks itself")
    began_s = time.monotonic()
    try:
        with dump.open("rb") as file:
            file.seek(0, os.SEEK_END)
            send(process, dump_signal())
            written, quiet_since_s = b"", began_s
            while (now_s := time.monotonic()) < until_s:
                if new := file.read(_MAX_BYTES):
                    written += new
                    quiet_since_s = now_s
                elif now_s - quiet_since_s > _QUIET_S and _ENDS_IN_FRAME.search(written):
                    break
                time.sleep(_POLL_S)
    except OSError as error:
        return Stacks(problem=f"{dump}: {error.strerror}")
    if not written:
        waited_s = time.monotonic() - began_s
        return Stacks(problem=f"the rank did not write its stacks within {waited_s:.1f} s", is_silent=True)
    return Stacks(written.decode(errors="replace").strip()[:_MAX_BYTES])


def _catches(pid: int, number: int, proc: Path) -> bool:
    """Whether a process has a handler for this signal."""
    with suppress(OSError):
        for line in (proc / str(pid) / "status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _run(command: list[str], until_s: float, start: StartChild) -> tuple[str | None, str]:
    """Output and errors of a command, which is killed at the limit; no output then."""
    try:
        process = start(
            lambda: subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    except OSError as error:
        return "", str(error)
    try:
        return process.communicate(timeout=max(0.0, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()  # not waited for: it may be held up in the kernel, by the process that it looks at
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        return None, ""
