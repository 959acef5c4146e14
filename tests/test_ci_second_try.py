"""The second try of `.ci/run`: what is flaky, what fails twice, and what gets no second try."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "second_try.py"
TESTS = """
    import pathlib, pytest
    TRIED = pathlib.Path("tried")

    def once(name):
        path = pathlib.Path(name)
        first = not path.exists()
        path.touch()
        return first

    @pytest.mark.parametrize("number", range({flaky}))
    def test_by_chance(number):
        assert not once(f"chance-{{number}}")

    @pytest.mark.parametrize("number", range({broken}))
    def test_broken(number):
        assert False

    @pytest.mark.later
    @pytest.mark.parametrize("number", range({skipped}))
    def test_skipped_later(number):
        if not once(f"skip-{{number}}"):
            pytest.skip("not this time")
        assert False

    @pytest.fixture
    def unsafe():
        yield
        assert False

    @pytest.mark.parametrize("number", range({unsafe}))
    def test_teardown(number, unsafe):
        pass

    def test_good():
        pass

    @pytest.mark.later
    def test_good_later():
        pass
"""


def both_tries(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """`make test` and `make campaign` in small (with two processes), and then the second try."""
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = later\n")
    hooks = ast.parse((Path(__file__).parent / "conftest.py").read_text()).body
    names = ("pytest_sessionfinish", "pytest_xdist_auto_num_workers")
    ours = [ast.unparse(one) for one in hooks if isinstance(one, ast.FunctionDef) and one.name in names]
    (folder / "conftest.py").write_text("\n".join(["import os", "import pytest", *ours]))
    (folder / "test_it.py").write_text(source)
    first = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", "2"]
    for part in ("not later", "later"):
        subprocess.run([*first, "-m", part], cwd=folder, env=environ, capture_output=True)
    environ["PYTEST_PLUGINS"] = "xdist.plugin"  # as where plugins are found by themselves
    return subprocess.run([sys.executable, SCRIPT, "2"], cwd=folder, env=environ, capture_output=True, text=True)


def source(flaky: int = 0, broken: int = 0, skipped: int = 0, unsafe: int = 0) -> str:
    lines = TESTS.format(flaky=flaky, broken=broken, skipped=skipped, unsafe=unsafe).splitlines()
    return "\n".join(line.removeprefix("    ") for line in lines)


def test_up_to_three_flaky_tests_are_named_and_do_not_fail_the_run(tmp_path: Path) -> None:
    done = both_tries(tmp_path, source(flaky=3))
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-3:] == [f"flaky: test_it.py::test_by_chance[{number}]" for number in range(3)]


def test_more_than_three_fail_it(tmp_path: Path) -> None:
    done = both_tries(tmp_path, source(flaky=4))
    assert done.returncode == 1
    assert done.stdout.count("flaky: ") == 4 and "4 flaky tests, 3 at most may be" in done.stdout


@pytest.mark.parametrize(("kind", "name"), [("broken", "broken"), ("skipped", "skipped_later"), ("unsafe", "teardown")])
def test_what_does_not_pass_the_second_time_fails_it(tmp_path: Path, kind: str, name: str) -> None:
    done = both_tries(tmp_path, source(flaky=1, **{kind: 1}))
    assert done.returncode == 1
    assert f"failed twice: test_it.py::test_{name}[0]\nflaky: test_it.py::test_by_chance[0]\n" in done.stdout


BROKEN_OFF = source(flaky=1) + "\n\ndef test_breaks_off():\n    pytest.exit('no more')\n\ndef test_never_run(): pass\n"


@pytest.mark.parametrize(
    "text", [source(flaky=21), source(), "import no_such_module", "raise SystemExit(0)", BROKEN_OFF]
)
def test_what_gets_no_second_try_or_cannot_be_collected_fails_it(tmp_path: Path, text: str) -> None:
    done = both_tries(tmp_path, text)
    assert done.returncode == 1
    assert "flaky: " not in done.stdout
