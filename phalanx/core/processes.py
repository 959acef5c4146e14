"""What a process can arrange about itself and its parent: dying with it, its name, whether to fork it. Torch-free."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

# From <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15

_WATCH_S = 0.2

_GIVEN_WAY_TRIES = 5  # the kernel takes one change of an autogroup in a tenth of a second
_GIVEN_WAY_S = 0.1

# Open in a process that has initialised CUDA or ROCm; the driver's state does not survive a fork.
_DEVICE_FILES = ("/dev/nvidia-uvm", "/dev/kfd")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as `parent`, its parent, is gone, however that ends.

    Elsewhere than on Linux a thread watches for it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it went before the kernel was told
        os._exit(1)


def start_helper(module: str) -> subprocess.Popen[str]:
    """Start ``python -m MODULE PID``, which is spoken to in lines of text through its stdin and stdout.

    It imports nothing of the caller, is to call `die_with_parent` with the process id that it is given, and stands
    outside the terminal's foreground group: what a Ctrl-C means is for its parent alone to say.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, "-m", module, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        process_group=0,
    )


def name_process(name: str) -> None:
    """Show `name`, 15 bytes of it, in ps and top, where the system can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def give_way(nice: int) -> None:
    """Make the session of this process, which it began, as nice as `nice`, 0 to 19, towards all others.

    Where the kernel shares the cores out among sessions first (autogroup, see sched(7)), as on most desktops and cloud
    machines, the niceness of a thread counts within its session only: a process in a session of its own would take
    half of a busy core however nice its threads are.
    """
    group = Path("/proc/self/autogroup")
    for _ in range(_GIVEN_WAY_TRIES):
        try:
            group.write_text(str(nice))
            return
        except BlockingIOError:
            time.sleep(_GIVEN_WAY_S)
        except OSError:  # no such kernel
            return


def why_not_fork(modules: dict[str, Any]) -> str | None:
    """Why a fork of this process would not work, or None where it does.

    A fork copies one thread only, so locks that others hold stay locked forever, and their pools are gone; and a device
    that was initialised before a fork cannot be used after it.
    """
    if sys.platform != "linux":
        return f"forking after imports is not safe on {sys.platform}"
    names = task_names()
    if len(names) > 1:
        return f"the imports started {len(names) - 1} thread(s): {', '.join(names[1:])}"
    torch = modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the imports initialised CUDA"
    touched = [name for name in _open_files() if name in _DEVICE_FILES]
    return f"the imports opened {touched[0]}" if touched else None


def task_names() -> list[str]:
    """Names of the threads of this process as the kernel counts them, Python's or not, the main one first."""
    tasks = sorted(Path("/proc/self/task").iterdir(), key=lambda task: int(task.name))
    return [(task / "comm").read_text().strip() for task in tasks]


def _open_files() -> list[str]:
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor that lists the folder is gone again
            names.append(str(link.readlink()))
    return names


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(1)
