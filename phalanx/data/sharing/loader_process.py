"""Starting the loader process: a fork of this one where that is safe, else a new Python.

It never outlives the process that started it: the kernel kills it then (PR_SET_PDEATHSIG). That goes by the thread that
started it, so only the main thread asks for it; a pipe that closes tells it in every case, and it ends with its last
reader.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Literal, NoReturn

from phalanx.data.config import DataConfig, Split
from phalanx.data.samples import Arrays, PackedSplit, Parts
from phalanx.data.sharing.loader_server import serve
from phalanx.ipc.processes import die_with_parent, name_process
from phalanx.ipc.stop_request import STOP_SIGNALS

Method = Literal["fork", "exec"]


@dataclass(frozen=True)
class LoaderTask:
    """What a loader process serves: samples of `parts` of a split, to so many readers of each data-parallel index; on
    these `cores`, or on those of the process that starts it."""

    parts: Parts
    config: DataConfig
    split: Split
    seed: int | None
    readers: Mapping[int, int]
    cores: tuple[int, ...] | None = None


def fork_is_safe() -> bool:
    """Whether a fork of this process works: it has one thread, the kernel says, and no device was initialised.

    The locks that other threads hold stay locked forever in a fork; a device's driver does not survive it.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return False
    return len(os.listdir("/proc/self/task")) == 1  # noqa: PTH208


def start(task: LoaderTask, listener: socket.socket, method: Method) -> tuple[Callable[[float | None], int], int, int]:
    """Start a loader process that serves `task` at `listener`.

    Returns:
        A function that waits for its end, so many seconds at most, and returns its exit status as `subprocess` has it
        (raising `subprocess.TimeoutExpired`); its process id; and the descriptor to close when it shall end.
    """
    life, hold = os.pipe()
    mortal = threading.current_thread() is threading.main_thread()
    try:
        wait, pid = (_fork if method == "fork" else _execute)(task, listener, life, mortal)
    except BaseException:
        os.close(hold)
        raise
    finally:
        os.close(life)
    return wait, pid, hold


def _fork(
    task: LoaderTask, listener: socket.socket, life: int, mortal: bool
) -> tuple[Callable[[float | None], int], int]:
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid == 0:
        try:
            gc.freeze()  # objects of the parent are not collected, which would copy their pages
            _hide_descriptors({0, 1, 2, *_standard_streams(), listener.fileno(), life})
            _become(task, listener, life, parent if mortal else None)
        finally:
            os._exit(1)  # never back into the frames of the parent
    return _Forked(pid).wait, pid


def _execute(
    task: LoaderTask, listener: socket.socket, life: int, mortal: bool
) -> tuple[Callable[[float | None], int], int]:
    with tempfile.TemporaryFile() as file:
        pickle.dump((task, os.getpid() if mortal else None), file)
        file.seek(0)
        program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import new_process"
        descriptors = [file.fileno(), listener.fileno(), life]
        process = subprocess.Popen(
            [sys.executable, "-c", f"{program}; new_process(*{descriptors})"],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
        )
    return process.wait, process.pid


def new_process(task_fd: int, listener_fd: int, life: int) -> NoReturn:
    """The first thing that a new Python does: it becomes the loader of the task that its parent pickled."""
    with os.fdopen(task_fd, "rb") as file:
        task, parent = pickle.load(file)
    _become(task, socket.socket(fileno=listener_fd), life, parent)


def _become(task: LoaderTask, listener: socket.socket, life: int, parent: int | None) -> NoReturn:
    status = 1
    try:
        # A terminal or a scheduler sends these to every process of a job: the ranks decide what they mean.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        name_process("phalanx loader")
        if parent is not None:
            die_with_parent(parent)
        if task.cores:
            os.sched_setaffinity(0, task.cores)
        serve(listener, _reader(task), task.readers, life)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(status)


def _reader(task: LoaderTask) -> Callable[[int, int], Arrays]:
    """Reads samples; what is wrong with the corpus is raised at each request, for each reader."""
    try:
        return PackedSplit(task.parts, task.config, split=task.split, seed=task.seed).read
    except Exception as error:
        problem = error

        def refuse(start: int, count: int) -> Arrays:
            raise problem

        return refuse


def _standard_streams() -> Iterator[int]:
    """Where Python's stdout and stderr go: mostly 1 and 2, but not where a log takes what is written to fd 2."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            yield stream.fileno()


def _hide_descriptors(kept: set[int]) -> None:
    """Replace each descriptor of the parent by /dev/null, or its peers would not see the parent's end. They are not
    closed, since objects of the parent still own their numbers."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        descriptor = int(name)
        with contextlib.suppress(OSError):  # the one that listed the folder is gone
            if descriptor not in kept and os.fstat(descriptor):
                os.dup2(nothing, descriptor)


@dataclass
class _Forked:
    """A forked child, with the `wait` of `subprocess.Popen`."""

    pid: int
    status: int | None = None

    def wait(self, timeout_s: float | None = None) -> int:
        if self.status is not None:
            return self.status
        if timeout_s is not None:
            ended = os.pidfd_open(self.pid)
            try:
                if not wait([ended], timeout_s):
                    raise subprocess.TimeoutExpired(f"loader process {self.pid}", timeout_s)
            finally:
                os.close(ended)
        _, status = os.waitpid(self.pid, 0)
        self.status = os.waitstatus_to_exitcode(status)
        return self.status
