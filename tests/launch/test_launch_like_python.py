"""Scripts under our template, forked and in fresh interpreters, against the same under torchrun and plain Python."""

from __future__ import annotations

import asyncio
import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch_warm_helpers import GUARD_S, host

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")

# Each rank does another thing, so that one start is enough for all; those that end well come first.
SCRIPT = """
import atexit, concurrent.futures, csv, gzip, multiprocessing, os, signal, sys, threading

class Point:
    def __init__(self, x):
        self.x = x

class Last:
    def __del__(self, open=open, path=os.path.join(sys.argv[1], "last-" + os.environ["RANK"])):
        open(path, "w").write("let go")

def path(name):
    return os.path.join(sys.argv[1], f"{name}-{os.environ['RANK']}")

def save():
    threading.main_thread().join()
    open(path("saved"), "w").write("by a thread")

def loose():
    global text, rows, zipped, last, _private
    text, last = open(path("text"), "w"), Last()
    text.write("left open")
    rows = csv.writer(_private := open(path("rows"), "w"))
    rows.writerow([1, 2])
    zipped = gzip.open(path("zipped"), "wt")
    zipped.write("compressed")
    atexit.register(print, "bye", file=open(path("bye"), "w"))
    threading.Thread(target=save).start()
    threading.Thread(target=signal.pause, daemon=True).start()

def pool():
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as workers:
        open(path("pool"), "w").write(str(workers.submit(Point, 7).result().x))

def early():
    os.environ.update(OMP_NUM_THREADS="3", TORCH_LOGS="+dynamo", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    import logging, torch
    level = logging.getLogger("torch._dynamo").level
    open(path("early"), "w").write(f"{torch.get_num_threads()} {level} {torch.distributed.get_debug_level()}")

def again():
    if "again" not in sys.argv:
        os.execv(sys.executable, [*sys.orig_argv, "again"])
    open(path("again"), "w").write(str(sys.argv[2:]))

def forks():
    if os.fork() == 0:
        sys.exit(9)
    open(path("forked"), "w").write(str(os.waitstatus_to_exitcode(os.wait()[1])))

def leave():
    print("left", flush=True)
    os._exit(0)

def stop(status):
    loose()
    sys.exit(status)

def fail(error):
    loose()
    raise error

if __name__ == "__main__":
    KINDS = [
        loose, pool, early, again, leave, forks, lambda: stop(3), lambda: stop("why"),
        lambda: fail(ValueError("wrong")), lambda: fail(KeyboardInterrupt()),
    ]
    KINDS[int(os.environ["RANK"])]()
"""
GOOD, ALL = range(6), range(10)


def written(folder: Path) -> dict[str, bytes]:
    return {
        file.name: gzip.decompress(file.read_bytes()) if file.name.startswith("zipped") else file.read_bytes()
        for file in folder.iterdir()
    }


def alone(folder: Path, out: Path, rank: int, name: str = "script.py") -> tuple[int, str]:
    """Status of plain Python, and what it says."""
    command = [sys.executable, "-u", name, str(out)]
    environ = {**os.environ, "RANK": str(rank)}
    done = subprocess.run(command, cwd=folder, env=environ, stdout=-1, stderr=subprocess.STDOUT, timeout=GUARD_S)
    return done.returncode, done.stdout.decode()


async def under_us(folder: Path, out: Path, *, forks: bool) -> dict[int, tuple[int, str]]:
    async with host(folder, arguments=(str(out),), name="script.py", forks=forks) as here:
        attempt = await here.spawn(1, ALL)
        codes = await here.end(attempt)
        return {rank: (codes[rank], await attempt.rest(rank)) for rank in ALL}


def test_a_script_does_and_ends_as_under_torchrun_and_python(tmp_path: Path) -> None:
    """Its files, statuses and last words."""
    (tmp_path / "script.py").write_text(SCRIPT)
    places = {name: tmp_path / name for name in ("torchrun", "fresh", "warm")}
    for place in places.values():
        place.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(GOOD)}"]
    subprocess.run([*torchrun, "script.py", str(places["torchrun"])], cwd=tmp_path, check=True, timeout=GUARD_S)
    ends = {rank: alone(tmp_path, places["torchrun"], rank) for rank in ALL if rank not in GOOD}
    assert [status for status, _ in ends.values()] == [3, 1, 1, -2]
    expected = written(places["torchrun"])
    assert {"zipped-0", "saved-9", "last-8", "bye-7", "pool-1", "early-2", "again-3"} <= expected.keys()
    for name, place in places.items():
        if name != "torchrun":
            found = asyncio.run(under_us(tmp_path, place, forks=name == "warm"))
            assert written(place) == expected, name
            assert {rank: end for rank, end in found.items() if rank not in GOOD} == ends, name
            assert {found[rank][0] for rank in GOOD} == {0} and found[4][1] == "left\n", name


def test_files_of_a_script_go_before_modules_of_python(tmp_path: Path) -> None:
    """In a fresh interpreter: also before those that we need ourselves, when an end is reported."""
    names = ("asyncio", "ctypes", "multiprocessing", "pickle", "platform", "queue", "signal", "subprocess", "tempfile")
    for name in names:
        (tmp_path / f"{name}.py").write_text(f"print('own {name}')\n")
    (tmp_path / "script.py").write_text(f"import {', '.join(names)}\nraise ValueError('wrong')\n")
    end = alone(tmp_path, tmp_path, 0)
    assert "own queue" in end[1] and end[0] == 1

    async def test() -> None:
        async with host(tmp_path, forks=False) as here:
            attempt = await here.spawn(1, [0])
            codes = await here.end(attempt)
            assert (codes[0], await attempt.rest(0)) == end

    asyncio.run(test())
