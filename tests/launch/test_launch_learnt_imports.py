"""What a template learns to import, what it must not import, and what happens when a file changes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch_warm_helpers import GUARD_S, Host, host

from phalanx.launch.learnt_imports import changed, learnable, pieces, stamps

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 4 * GUARD_S))


# What was there before the script asked for it, and what a module of its own says.
SCRIPT = """
import json, sys
there = sorted(set(sys.modules) & set(json.loads(sys.argv[1])))
import colorsys, mine.inner, mine.more
print(json.dumps([there, mine.inner.VALUE]))
"""
NAMES = ["colorsys", "mine", "mine.inner", "mine.more"]


def write_modules(folder: Path, inner: str, more: str = "") -> None:
    (folder / "mine").mkdir(exist_ok=True)
    (folder / "mine" / "__init__.py").touch()
    (folder / "mine" / "inner.py").write_text(inner)
    (folder / "mine" / "more.py").write_text(more)


async def shown(here: Host, number: int, rank: int = 0) -> tuple[list[str], object]:
    """One attempt: what was imported before it, and the value that its module has."""
    attempt = await here.spawn(number)
    assert await here.end(attempt) == {0: 0, 1: 0}
    await asyncio.wait_for(here.template.settle(), GUARD_S)
    there, value = json.loads((await attempt.rest(rank)).splitlines()[-1])
    return there, value


def test_what_a_script_imports_is_there_before_the_next_attempt_and_new_when_its_file_is(tmp_path: Path) -> None:
    write_modules(tmp_path, "VALUE = 1\n")
    told: list[object] = []

    async def test() -> None:
        arguments = (json.dumps(NAMES),)
        async with host(tmp_path, SCRIPT, arguments, has_learnt=lambda learnt: told.append(list(learnt))) as here:
            assert await shown(here, 1) == ([], 1)
            assert len(told) == 1 and [name for name in told[0] if name in NAMES] == NAMES  # type: ignore[attr-defined]
            first = here.template._current
            assert await shown(here, 2) == (NAMES, 1)
            second = here.template._current
            assert second is not first and second is not None
            assert await shown(here, 3) == (NAMES, 1)
            assert here.template._current is second
            (tmp_path / "mine" / "inner.py").write_text("VALUE = 'another'\n")
            assert await shown(here, 4) == (NAMES, "another")
            (tmp_path / "mine" / "more.py").unlink()
            (tmp_path / "mine" / "more").mkdir()  # a package of that name instead
            (tmp_path / "mine" / "more" / "__init__.py").write_text("import mine.inner\nmine.inner.VALUE = 'patched'\n")
            assert await shown(here, 5) == (NAMES, "patched")

    run(test)


def test_what_one_host_has_learnt_another_begins_with(tmp_path: Path) -> None:
    write_modules(tmp_path, "VALUE = 1\n")

    async def test() -> None:
        learnt = [*NAMES, "no_such_module_at_all"]
        async with host(tmp_path, SCRIPT, (json.dumps(NAMES),), learnt=learnt) as here:
            assert await shown(here, 1) == (NAMES, 1)

    run(test)


def test_a_module_that_is_not_there_costs_no_template(tmp_path: Path) -> None:
    """Not every version of a library has all that is imported beforehand."""
    write_modules(tmp_path, "VALUE = 1\n")
    begun: list[int] = []

    async def test() -> None:
        learnt = [*NAMES, "no_such_module_at_all", "json.no_such_part.of_it"]
        async with host(tmp_path, SCRIPT, (json.dumps(NAMES),), learnt=learnt, started=begun.append) as here:
            assert await shown(here, 1) == (NAMES, 1)
            assert await shown(here, 2) == (NAMES, 1)
            assert len(begun) == 1

    run(test)


def test_a_module_that_lacks_another_is_imported_by_each_rank(tmp_path: Path) -> None:
    write_modules(tmp_path, "import random\nrandom.seed(3)\nimport no_such_module_at_all\n", "VALUE = 1\n")
    lacking = "try:\n    import mine.inner\nexcept ImportError:\n    import mine\n    print(mine)\n"
    begun: list[int] = []

    async def test() -> None:
        async with host(tmp_path, lacking, learnt=["mine.inner"], learns=False, started=begun.append) as here:
            attempt = await here.spawn(1)
            assert await here.end(attempt) == {0: 0, 1: 0}
            assert len(begun) == 2

    run(test)


def test_nothing_is_learnt_where_that_is_not_wanted(tmp_path: Path) -> None:
    write_modules(tmp_path, "VALUE = 1\n")

    async def test() -> None:
        async with host(tmp_path, SCRIPT, (json.dumps(NAMES),), learns=False) as here:
            assert await shown(here, 1) == ([], 1)
            assert await shown(here, 2) == ([], 1)

    run(test)


THREAD = "import threading\nt = threading.Thread(target=threading.Event().wait, daemon=True)\nt.start()\nVALUE = 1\n"


@pytest.mark.parametrize(
    ("inner", "values"),
    [
        ("import os\nVALUE = os.environ['RANK']\n", ["0", "1"]),
        ("import os\nVALUE = os.getenv('LOCAL_RANK', 'none')\n", ["0", "1"]),
        ("import os\nVALUE = dict(os.environ).get('RANK', 'none')\n", ["0", "1"]),
        ("import os\nVALUE = 'RANK' in os.environ\n", [True, True]),
        ("import os, tempfile\nVALUE = 1\nfile = tempfile.TemporaryFile()\n", [1, 1]),
        (THREAD, [1, 1]),
        ("import random\nrandom.seed(3)\nVALUE = 1\n", [1, 1]),
        ("import numpy\nnumpy.random.seed(3)\nVALUE = 1\n", [1, 1]),
        ("import sys\nVALUE = sys.argv[0]\n", ["script.py", "script.py"]),
    ],
    ids=["rank", "default", "all", "contains", "file", "thread", "seed", "numpy", "argv"],
)
def test_a_module_that_knows_its_rank_or_leaves_a_trace_is_imported_by_each_rank(
    tmp_path: Path, inner: str, values: list[object]
) -> None:
    """And so is what imports it, before or after it has been imported by another."""
    write_modules(tmp_path, inner, "from mine import inner\n")
    depends = {"mine.inner", "mine.more"}

    async def test() -> None:
        async with host(tmp_path, SCRIPT, (json.dumps(NAMES),)) as here:
            for number in (1, 2, 3):
                rank = number % 2
                there, value = await shown(here, number, rank)
                assert value == values[rank]
            assert "colorsys" in there
            assert "argv" in inner or not depends & set(there)

    run(test)


def test_files_that_never_stay_the_same_are_left_to_new_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_modules(tmp_path, "VALUE = 1\n")
    asked: list[object] = []

    def always(before: object) -> list[str]:
        asked.append(before)
        return ["a file"]

    async def test() -> None:
        async with host(tmp_path, SCRIPT, (json.dumps(NAMES),)) as here:
            assert await shown(here, 1) == ([], 1)
            assert await shown(here, 2) == (NAMES, 1)
            monkeypatch.setattr("phalanx.launch.warm_template.changed", always)
            assert await shown(here, 3) == ([], 1)
            assert len(asked) == 4

    run(test)


@given(st.lists(st.text("abc.", min_size=1, max_size=120), max_size=200))
def test_pieces_are_small_and_together_all(names: list[str]) -> None:
    cut = list(pieces(names))
    assert [name for piece, _ in cut for name in piece] == names
    assert [is_last for _, is_last in cut] == [False] * (len(cut) - 1) + [True]
    assert all(sum(map(len, piece)) <= 3000 for piece, _ in cut)


def test_what_can_be_learnt_comes_from_files_and_is_whole() -> None:
    modules = {name: sys.modules[name] for name in ("sys", "json", "json.decoder", "__main__")}
    assert learnable(modules, frozenset()) == ["json", "json.decoder"]
    assert learnable(modules, frozenset({"json"})) == ["json.decoder"]
    assert learnable({"another.name": sys.modules["json"], "none": object()}, frozenset()) == []


def test_stamps_tell_what_has_changed(tmp_path: Path) -> None:
    program = (
        "import sys, json; sys.path[:0] = [sys.argv[1]]; import one, two; "
        "from phalanx.launch.learnt_imports import stamps"
    )
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("")
    show = f"{program}; from phalanx.launch.learnt_imports import stamps; print(json.dumps(stamps(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", show, str(tmp_path)], check=True, capture_output=True, text=True)
    found = {path: tuple(stamp) for path, stamp in json.loads(done.stdout).items()}
    one, two = (str(tmp_path / f"{name}.py") for name in ("one", "two"))
    assert {one, two} <= set(found)
    mine = {path: found[path] for path in (one, two)}
    assert changed(mine) == []
    Path(one).write_text("1")
    assert changed(mine) == [one]
    Path(two).unlink()
    assert changed(mine) == [one, two]
    assert stamps({"sys": sys}) == {}
