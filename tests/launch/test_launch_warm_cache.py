"""What a template has learnt outlives it on disk: used when it is right, passed over when it is not."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from launch_warm_helpers import GUARD_S, Host, host

from phalanx.launch.user_script import Script
from phalanx.launch.warm_cache import Recalled, WarmCache, open_cache

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")

# What was there before the script asked for it.
SCRIPT = """
import json, sys
names = json.loads(sys.argv[1])
there = sorted(set(sys.modules) & set(names))
import colorsys, mine.inner
print(json.dumps(there))
"""
NAMES = ["colorsys", "mine", "mine.inner"]
ARGUMENTS = (json.dumps([*NAMES, "mine.seeds", "antigravity"]),)


def write_modules(folder: Path, inner: str = "", seeds: str = "import random\nrandom.seed(1)\n") -> None:
    (folder / "mine").mkdir(exist_ok=True)
    if not (folder / "mine" / "__init__.py").exists():
        (folder / "mine" / "__init__.py").touch()
    (folder / "mine" / "inner.py").write_text(inner)
    (folder / "mine" / "seeds.py").write_text(seeds)


def cache_of(folder: Path, home: Path) -> WarmCache:
    cache = open_cache(Script("script.py", folder=str(folder)), {"XDG_CACHE_HOME": str(home)})
    assert cache is not None
    return cache


def file_of(home: Path) -> Path:
    (found,) = (home / "phalanx" / "warm").glob("*.json")
    return found


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 4 * GUARD_S))


async def there(here: Host, number: int) -> list[str]:
    """One attempt, and then what was learnt is imported: what was there before the script began."""
    attempt = await here.spawn(number)
    assert await here.end(attempt) == {0: 0, 1: 0}
    await asyncio.wait_for(here.template.settle(), GUARD_S)
    await asyncio.wait_for(here.template.ready(), GUARD_S)
    found = json.loads((await attempt.rest(0)).splitlines()[-1])
    return [str(name) for name in found]


def first_of_a_cold_start(folder: Path, home: Path, source: str = SCRIPT, begun: list[int] | None = None) -> list[str]:
    """Everything starts anew: what the ranks of the first attempt find imported."""
    found: list[str] = []

    async def story() -> None:
        (folder / "script.py").write_text(source)
        started: Any = (begun if begun is not None else []).append
        async with host(folder, source, ARGUMENTS, cache=cache_of(folder, home), started=started) as here:
            found.extend(await there(here, 1))

    before = os.umask(0o002)  # as many systems have it, where each user has a group of their own
    try:
        run(story)
    finally:
        os.umask(before)
    return found


@pytest.mark.slow
def test_a_cold_start_begins_with_what_the_last_run_has_learnt(tmp_path: Path) -> None:
    write_modules(tmp_path)
    home, begun = tmp_path / "cache", []
    assert first_of_a_cold_start(tmp_path, home) == []
    assert first_of_a_cold_start(tmp_path, home, begun=begun) == NAMES
    assert len(begun) == 1  # and nothing is learnt anew
    assert file_of(home).stat().st_mode & 0o777 == 0o600 and file_of(home).parent.stat().st_mode & 0o777 == 0o700
    other = SCRIPT.replace("print(", "print(  ") + "lr = 3e-4\n"
    assert first_of_a_cold_start(tmp_path, home, other) == NAMES  # it imports what it did


@pytest.mark.slow
def test_what_must_not_be_imported_beforehand_is_remembered_too(tmp_path: Path) -> None:
    write_modules(tmp_path)
    home, begun = tmp_path / "cache", []
    source = SCRIPT.replace("mine.inner\n", "mine.inner, mine.seeds\n")
    assert first_of_a_cold_start(tmp_path, home, source) == []
    assert first_of_a_cold_start(tmp_path, home, source, begun) == NAMES
    assert len(begun) == 1  # no template is spoiled again
    assert "mine.seeds" in cache_of(tmp_path, home).recall().refused


@pytest.mark.slow
def test_what_has_become_harmful_costs_one_template_and_is_forgotten(tmp_path: Path) -> None:
    write_modules(tmp_path)
    home, begun = tmp_path / "cache", []
    assert first_of_a_cold_start(tmp_path, home) == []
    write_modules(tmp_path, "import os\nos.environ.get('RANK') or os.abort()\n")  # it kills the template
    assert first_of_a_cold_start(tmp_path, home, begun=begun) == []
    assert len(begun) >= 2


def recalled(tmp_path: Path, change: Callable[[Path], object]) -> Recalled:
    """What is recalled of a cache that was kept well, and then changed."""
    write_modules(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    home = tmp_path / "cache"
    cache = cache_of(tmp_path, home)
    cache.keep(NAMES, ["mine.seeds"], [str(tmp_path / "mine" / "inner.py"), json.__file__])
    assert cache.recall() == Recalled(tuple(NAMES), frozenset({"mine.seeds"}))
    change(tmp_path)
    return cache_of(tmp_path, home).recall()


def rewritten(**fields: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = file_of(folder / "cache")
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda folder: (folder / "script.py").write_text(SCRIPT + "import wave\n"), id="script"),
        pytest.param(lambda folder: (folder / "mine" / "inner.py").write_text("import wave"), id="own module"),
        pytest.param(lambda folder: (folder / "mine" / "inner.py").unlink(), id="own module gone"),
        pytest.param(lambda folder: (folder / "script.py").write_text("import ("), id="no script any more"),
        pytest.param(lambda folder: file_of(folder / "cache").write_bytes(b""), id="empty"),
        pytest.param(lambda folder: file_of(folder / "cache").write_bytes(os.urandom(4000)), id="noise"),
        pytest.param(lambda folder: os.truncate(file_of(folder / "cache"), 60), id="torn"),
        pytest.param(lambda folder: os.truncate(file_of(folder / "cache"), 5 << 20), id="large"),
        pytest.param(lambda folder: file_of(folder / "cache").chmod(0o666), id="others may write"),
        pytest.param(lambda folder: linked(file_of(folder / "cache")), id="link"),
        pytest.param(lambda folder: piped(file_of(folder / "cache")), id="pipe"),
        pytest.param(rewritten(learnt=["os", "a b; import antigravity"]), id="no names"),
        pytest.param(rewritten(learnt=["..os"]), id="no name"),
        pytest.param(rewritten(learnt=[1]), id="numbers"),
        pytest.param(rewritten(learnt={"os": 1}), id="no list"),
        pytest.param(rewritten(format=0), id="another format"),
        pytest.param(rewritten(packages="x"), id="other packages"),
    ],
)
def test_a_cache_that_is_not_right_is_passed_over(tmp_path: Path, change: Callable[[Path], object]) -> None:
    assert recalled(tmp_path, change) == Recalled()
    write_modules(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    cache = cache_of(tmp_path, tmp_path / "cache")
    cache.keep(["colorsys"], [], [])  # and written anew
    assert cache.recall() == Recalled(("colorsys",))


def linked(file: Path) -> None:
    file.rename(file.with_suffix(".elsewhere"))
    file.symlink_to(file.with_suffix(".elsewhere"))


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def test_another_script_or_another_path_has_another_cache(tmp_path: Path) -> None:
    write_modules(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    cache_of(tmp_path, tmp_path / "cache").keep(NAMES, [], [])
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    (tmp_path / "other.py").write_text(SCRIPT)
    for script, more in (
        (Script("other.py", folder=str(tmp_path)), {}),
        (Script("script.py", folder=str(tmp_path)), {"PYTHONPATH": "x"}),
    ):
        cache = open_cache(script, {**environ, **more})
        assert cache is not None and cache.recall() == Recalled()
    elsewhere = open_cache(Script(str(tmp_path / "script.py"), ("--lr", "1"), folder="/"), environ)
    assert elsewhere is not None and elsewhere.recall().learnt == tuple(NAMES)


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    script = Script("script.py", folder=str(tmp_path))
    for environ in (
        {"PHALANX_WARM_CACHE": str(tmp_path / "open")},
        {"PHALANX_WARM_CACHE": ""},
        {"PHALANX_WARM_CACHE": "relative"},
        {"HOME": "/proc/nowhere"},
        {},
    ):
        assert open_cache(script, environ) is None


def test_scripts_of_long_ago_are_forgotten(tmp_path: Path) -> None:
    names = [f"script-{number}.py" for number in range(140)]
    for age, name in enumerate(names):
        (tmp_path / name).touch()
        cache = open_cache(Script(name, folder=str(tmp_path)), {"XDG_CACHE_HOME": str(tmp_path / "cache")})
        assert cache is not None
        cache.keep(["colorsys"], [], [])
        os.utime(cache._file, (age, age))
    assert len(list((tmp_path / "cache" / "phalanx" / "warm").glob("*.json"))) == 128


BYTECODE = """
import sys
from pathlib import Path
from phalanx.launch import bytecode
compiled = []
source_to_code = bytecode._Loader.source_to_code
bytecode._Loader.source_to_code = lambda self, *a, **k: compiled.append(self.name) or source_to_code(self, *a, **k)
finders = list(sys.meta_path)
with bytecode.kept_bytecode(Path(sys.argv[1])):
    import mine.inner, colorsys
assert finders == sys.meta_path
import mine.seeds
print(compiled, mine.inner.VALUE, mine.inner.__file__)
"""


def compiled(folder: Path, **environ: str) -> str:
    command = [sys.executable, "-c", BYTECODE, str(folder / "kept")]
    variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": os.pathsep.join(sys.path), **environ}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_what_python_does_not_keep_is_compiled_once(tmp_path: Path) -> None:
    write_modules(tmp_path, "VALUE = 1\n")
    file = f"{tmp_path}/mine/inner.py"
    assert compiled(tmp_path) == f"['mine', 'mine.inner'] 1 {file}"
    assert compiled(tmp_path) == f"[] 1 {file}"
    assert not list(tmp_path.rglob("__pycache__"))
    for path in (tmp_path / "kept").iterdir():
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
    assert compiled(tmp_path) == f"['mine', 'mine.inner'] 1 {file}"
    for path in (tmp_path / "kept").iterdir():
        os.truncate(path, 30)
    assert compiled(tmp_path) == f"['mine', 'mine.inner'] 1 {file}"
    write_modules(tmp_path, "VALUE = 'another'\n")
    assert compiled(tmp_path) == f"['mine.inner'] another {file}"
    (tmp_path / "kept").chmod(0o777)
    assert compiled(tmp_path) == f"[] another {file}"  # Python's own loader, which keeps nothing
    (tmp_path / "kept").chmod(0o700)
    assert compiled(tmp_path) == f"[] another {file}"


def test_what_python_keeps_is_left_to_it(tmp_path: Path) -> None:
    write_modules(tmp_path, "VALUE = 1\n")
    assert compiled(tmp_path, PYTHONDONTWRITEBYTECODE="").startswith("[]")
    assert list(tmp_path.rglob("*.pyc")) and not list((tmp_path / "kept").iterdir())


@pytest.mark.campaign(but=("executor",))
@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [("phalanx.run.executor", "no settings"), ("phalanx.cli.main", "run", "absent.py")],
    ids=["executor", "command"],
)
def test_command_and_executor_keep_bytecode_too(tmp_path: Path, words: tuple[str, ...]) -> None:
    hidden = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": str(tmp_path / "nothing")}
    environ = {**os.environ, **hidden, "PHALANX_WARM_CACHE": str(tmp_path / "warm")}
    kept: list[dict[str, int]] = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert done.returncode and ("absent.py" in done.stderr or "malformed" in done.stderr)
        (folder,) = (tmp_path / "warm").glob("bytecode-*")
        kept.append({path.name: path.stat().st_mtime_ns for path in folder.iterdir()})
    assert len(kept[0]) > 100 and kept[0] == kept[1]  # nothing was compiled again
