"""Attempts of scripts without torch through one template: how they are started, how they end, what is left."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from launch_warm_helpers import GUARD_S, host, is_gone, until_gone
from support.progress_pages import read_progress

import phalanx
from phalanx.core.errors import UserError
from phalanx.launch.launch_messages import Exited, Over, Returned
from phalanx.launch.rank_failures import Failure
from phalanx.launch.user_script import Group
from phalanx.launch.warm_template import Gone

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")

SHOW = """
import json, os, sys
shown = {
    "argv": sys.argv, "path": sys.path, "folder": os.getcwd(), "file": __file__, "name": __name__,
    "globals": sorted(globals()), "environ": dict(os.environ), "leads": os.getsid(0) == os.getpid(),
    "package": __package__, "spec": getattr(__spec__, "name", None),
    "is_main": sys.modules["__main__"].__dict__ is globals(), "command": sys.orig_argv[1:],
    "through": sys.stdout.write_through,
}
open(os.path.join(sys.argv[1], "shown-" + os.environ["RANK"]), "w").write(json.dumps(shown))
"""


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 4 * GUARD_S))


def shown(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"shown-{rank}").read_text()) for rank in (0, 1)]


# What torchrun sets for itself, and what only we set.
OF_TORCHRUN = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
OURS = {"PHALANX_RUN_ATTEMPT", "PHALANX_PROGRESS", "GLOO_SOCKET_IFNAME"}


@pytest.mark.campaign(but=("path",))
@pytest.mark.slow
@pytest.mark.parametrize("is_module", [False, True], ids=["path", "module"])
def test_a_script_cannot_tell_us_from_torchrun(tmp_path: Path, is_module: bool) -> None:
    """The same in every respect that a script can see, against a real torchrun."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "show.py").write_text(SHOW)
    name = "inner.show" if is_module else "inner/show.py"
    ran = tmp_path / "torchrun"
    ran.mkdir()
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m"] * is_module + [name, str(ran), "--more", "a b"]
    subprocess.run(command, cwd=tmp_path, env=environ, check=True, capture_output=True, timeout=100)
    theirs = shown(ran)

    async def ours(forks: bool) -> None:
        mine = tmp_path / f"forks-{forks}"
        mine.mkdir()
        words = (str(mine), "--more", "a b")
        async with host(
            tmp_path, arguments=words, name=name, is_module=is_module, environ=environ, forks=forks
        ) as here:
            first = theirs[0]["environ"]
            group = Group(
                attempt=1,
                ranks=[0, 1],
                world_size=2,
                group_rank=0,
                hosts=1,
                host=first["MASTER_ADDR"],
                port=int(first["MASTER_PORT"]),
                run_id=first["TORCHELASTIC_RUN_ID"],
            )
            assert await here.end(await here.spawn(1, group=group)) == {0: 0, 1: 0}
        for they, we in zip(deepcopy(theirs), shown(mine), strict=True):
            environ_of_theirs, environ_of_ours = they.pop("environ"), we.pop("environ")
            assert set(environ_of_theirs) - set(environ_of_ours) == OF_TORCHRUN
            assert set(environ_of_ours) - set(environ_of_theirs) == OURS
            common = set(environ_of_ours) - OURS
            assert {key: environ_of_ours[key] for key in common} == {key: environ_of_theirs[key] for key in common}
            home = str(Path(phalanx.__file__).parent.parent)
            we["path"], they["path"] = ([path for path in x["path"] if path != home] for x in (we, they))
            for words in (they["argv"], they["command"]):
                words[:] = [word.replace(str(ran), str(mine)) for word in words]
            assert we == they

    run(lambda: ours(True))
    run(lambda: ours(False))


ENDS = """
import os, signal, sys, threading
how = sys.argv[1]
if os.environ["RANK"] == "1":
    if how == "status": sys.exit(3)
    if how == "text": sys.exit("a reason")
    if how == "raises": raise ValueError("wrong in the script")
    if how == "leaves": os._exit(5)
    if how == "killed": os.kill(os.getpid(), signal.SIGKILL)
    if how == "aborts": os.abort()
    if how == "threads":
        for name, daemon in ("uploader", False), ("ticks", True):
            threading.Thread(target=threading.main_thread().join, name=name, daemon=daemon).start()
        print("done")
        sys.exit()
print("done")
"""


@pytest.mark.parametrize(
    ("how", "code", "word"),
    [
        ("returns", 0, Returned(1, 0)),
        ("status", 3, Returned(1, 3)),
        ("text", 1, Returned(1, 1)),
        ("raises", 1, Failure(1, 0, "raised", 1, "ValueError: wrong in the script")),
        ("leaves", 5, None),
        ("killed", -signal.SIGKILL, None),
        ("aborts", -signal.SIGABRT, None),
        ("threads", 0, Returned(1, 0, ("uploader",))),
    ],
)
def test_every_end_is_told(tmp_path: Path, how: str, code: int, word: Any) -> None:
    async def test() -> None:
        async with host(tmp_path, ENDS, (how,)) as here:
            attempt = await here.spawn(1)
            assert await here.end(attempt) == {0: 0, 1: code}
            assert await attempt.rest(0) == "done\n"
            text = await attempt.rest(1)
            said = [w for _, w in here.words if isinstance(w, Failure | Returned) and w.rank == 1]
            if isinstance(word, Failure):
                (failure,) = said
                assert (failure.kind, failure.status, failure.summary) == (word.kind, word.status, word.summary)
                assert failure.text == text  # as Python shows it, from the script's own first line on
                lines = text.splitlines()
                assert lines[:2] == [
                    "Traceback (most recent call last):",
                    f'  File "{tmp_path / "script.py"}", line 7, in <module>',
                ]
            else:
                assert said == ([word] if word else [])
            assert how != "text" or text == "a reason\n"
            assert [type(w) for _, w in here.words].index(Over) == len(here.words) - 1

    run(test)


@pytest.mark.parametrize(
    ("source", "said"),
    [("def wrong(:\n", "SyntaxError"), ("", "error: script = 'script.py': cannot be read")],
    ids=["syntax", "absent"],
)
def test_a_script_that_cannot_be_run(tmp_path: Path, source: str, said: str) -> None:
    async def test() -> None:
        async with host(tmp_path, source) as here:
            attempt = await here.spawn(1, [0])
            assert await here.end(attempt) == {0: 1 if source else 2}
            text = await attempt.rest(0)
            assert said in text
            assert "phalanx/launch" not in text
            (failure,) = here.of(1, Failure)
            assert failure.kind == ("syntax" if source else "user")

    run(test)


def test_a_new_python_per_rank_where_that_is_wanted(tmp_path: Path) -> None:
    async def test() -> None:
        async with host(tmp_path, SHOW, (str(tmp_path),), forks=False) as here:
            assert await here.end(await here.spawn(1)) == {0: 0, 1: 0}
        for rank, found in enumerate(shown(tmp_path)):
            assert (found["environ"]["RANK"], found["path"][0], found["leads"]) == (str(rank), str(tmp_path), True)

    run(test)


WAITS = """
import os, signal, subprocess, sys
deaf = "import signal; signal.signal(15, 1); print('up', flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
while True:
    signal.pause()
"""


def test_a_signal_reaches_the_ranks_that_are_meant_and_a_kill_all_with_what_they_started(tmp_path: Path) -> None:
    async def test() -> None:
        async with host(tmp_path, WAITS) as here:
            attempt = await here.spawn(1)
            children = [int(await attempt.line(rank)) for rank in (0, 1)]
            here.template.signal(1, [1], signal.SIGTERM)
            (exited,) = await here.until(1, Exited)
            assert (exited.rank, exited.code) == (1, -signal.SIGTERM)
            assert not is_gone(attempt.pids[0])
            await here.template.kill(1)
            assert here.of(1, Over)
            assert {word.rank: word.code for word in here.of(1, Exited)} == {
                0: -signal.SIGKILL,
                1: -signal.SIGTERM,
            }
            for rank in (0, 1):  # the pipe ends when the last that held it is gone
                assert await attempt.rest(rank) == ""
            await until_gone([*attempt.pids.values(), *children])
            here.template.signal(1, [0, 1], signal.SIGTERM)  # nobody is left, and none is hit
            await here.template.kill(1)

    run(test)


def test_two_attempts_at_once_do_not_hear_of_each_other(tmp_path: Path) -> None:
    """An old attempt that the kernel does not let go keeps no new one from starting."""

    async def test() -> None:
        async with host(tmp_path, WAITS) as here:
            first, second = await here.spawn(1), await here.spawn(2)
            for attempt in (first, second):
                await attempt.line(0)
                await attempt.line(1)
            await here.template.kill(1)
            assert here.of(1, Over) and not here.of(2, Exited)
            assert not is_gone(second.pids[0])
            await here.template.kill(2)

    run(test)


def test_ranks_hold_nothing_that_is_not_theirs(tmp_path: Path) -> None:
    source = """
import os
names = {}
for name in os.listdir("/proc/self/fd"):
    try:
        names[int(name)] = os.readlink("/proc/self/fd/" + name)
    except OSError:
        pass
print(sum(text.startswith("socket:") for text in names.values()), sum("pidfd" in text for text in names.values()))
"""

    async def test() -> None:
        async with host(tmp_path, source) as here:
            waiting = await here.spawn(1, store=True)
            attempt = await here.spawn(2)
            assert await here.end(attempt) == {0: 0, 1: 0}
            for rank in (0, 1):
                assert await attempt.rest(rank) == "0 0\n"
            await here.template.kill(waiting.number)

    run(test)


def test_a_template_that_is_killed_takes_its_ranks_along_and_another_takes_its_place(tmp_path: Path) -> None:
    """What ranks have started is left, and the executor's to end."""

    async def test() -> None:
        async with host(tmp_path, "import signal\nprint('up', flush=True)\nwhile True: signal.pause()\n") as here:
            attempt = await here.spawn(1)
            await attempt.line(0)
            pidfds = [os.pidfd_open(pid) for pid in attempt.pids.values()]
            assert here.template._current is not None
            os.kill(here.template._current.pid, signal.SIGKILL)
            await here.until(1, Gone)
            assert await asyncio.to_thread(all_gone, pidfds)
            second = await here.spawn(2)
            await second.line(0)
            await here.template.kill(2)
            assert here.of(2, Over)

    run(test)


def all_gone(pidfds: list[int]) -> bool:
    """Whether processes end within the guard."""
    try:
        return all(select.select([pidfd], [], [], GUARD_S)[0] for pidfd in pidfds)
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


EXECUTOR = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from launch_warm_helpers import host
async def main():
    async with host(Path(sys.argv[2]), name="script.py") as here:
        attempt = await here.spawn(1, store=True)
        for rank in (0, 1):
            await attempt.line(rank)
        assert "torch" not in sys.modules and "numpy" not in sys.modules
        print(here.template._current.pid, *attempt.pids.values(), flush=True)
        await asyncio.sleep(3600)
asyncio.run(main())
"""


def test_no_process_outlives_an_executor_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import signal\nprint('up')\nwhile True: signal.pause()\n")
    command = [sys.executable, "-c", EXECUTOR, str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            pids = [int(word) for word in process.stdout.readline().split()]
            assert len(pids) == 4
            pidfds = [os.pidfd_open(pid) for pid in pids]
        finally:
            process.kill()
        assert all_gone(pidfds)


def test_what_cannot_be_imported_is_told_with_its_cure(tmp_path: Path) -> None:
    async def test() -> None:
        async with host(tmp_path, "pass", preload=("no_such_module_at_all",)) as here:
            with pytest.raises(UserError, match="No module named 'no_such_module_at_all'"):
                await here.template.ready()

    run(test)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    async def test() -> None:
        async with host(tmp_path, "pass") as here:
            assert await here.template.ready() is None
        async with host(tmp_path / "absent", name="script.py") as here:
            with pytest.raises(UserError, match=r"folder = .*absent"):
                await here.spawn(1)

    run(test)


def test_a_rank_says_its_attempt_on_its_page_and_a_bad_page_does_not_matter(tmp_path: Path) -> None:
    async def test() -> None:
        async with host(tmp_path, "print('ran')") as here:
            (tmp_path / "page-3-1").mkdir()
            attempt = await here.spawn(3)
            assert await here.end(attempt) == {0: 0, 1: 0}
            found = read_progress(attempt.pages[0])
            assert found is not None
            assert (found.attempt, found.pid, found.steps_here) == (3, attempt.pids[0], 0)
            assert await attempt.rest(0) == "ran\n"
            assert await attempt.rest(1) == f"steps are not reported: {attempt.pages[1]}: Is a directory\nran\n"

    run(test)
