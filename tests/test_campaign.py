"""What `make test` and `make campaign` choose: the mark `campaign` of tests/conftest.py."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

CASES = """
    import pytest

    @pytest.mark.campaign(but=("{but}",))
    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_of_many(size):
        pass

    @pytest.mark.campaign
    def test_long():
        pass

    @pytest.mark.campaign(but=("a",))
    @pytest.mark.parametrize("file", [])
    def test_of_files_that_are_not_here(file):
        pass

    def test_short():
        pass
"""


def chosen(folder: Path, *arguments: str, but: str = "2") -> set[str] | str:
    """The names of the tests that are run; an error's text."""
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = campaign(but)\n")
    (folder / "test_cases.py").write_text(textwrap.dedent(CASES.format(but=but)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:schemathesis", "--collect-only", *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    found = {line.partition("::")[2] for line in ended.stdout.splitlines() if line.startswith("test_cases.py::")}
    return found if ended.returncode == 0 else ended.stdout


@pytest.mark.slow
def test_the_cases_of_the_tests_and_of_the_campaign(tmp_path: Path) -> None:
    assert chosen(tmp_path, "-m", "not campaign") == {"test_of_many[2]", "test_short"}
    every_second = chosen(tmp_path, "-m", "campaign", "--campaign-share", "2")
    assert every_second == {"test_of_many[1]", "test_of_many[4]", "test_of_files_that_are_not_here[NOTSET]"}
    error = chosen(tmp_path, but="5")
    assert "test_of_many: campaign(but=…): no case has the id ['5']" in error
