"""What a user would import by the docs is there, works as it is shown, and costs nothing before it is asked for."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "examples").glob("*.py")])
LIBRARY = (ROOT / "docs" / "library.md").read_text()
ROOMS = re.findall(r"^\| `(phalanx\.\w+)`", LIBRARY, flags=re.MULTILINE)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
BLOCKS = re.findall(r"```python\n(.*?)```", LIBRARY, flags=re.DOTALL)


def imports_of(page: Path) -> list[tuple[str, list[str]]]:
    """Every ``from phalanx… import …`` of a page: module and names."""
    found = re.findall(r"from (phalanx[\w.]*) import \(?([\w, ]+)", page.read_text())
    return [(module, [name.split()[0] for name in names.split(",") if name.strip()]) for module, names in found]


@pytest.mark.parametrize("page", [page for page in PAGES if imports_of(page)], ids=lambda page: page.name)
def test_every_name_that_the_docs_import_is_there(page: Path) -> None:
    for module, names in imports_of(page):
        for name in names:
            imported = importlib.import_module(module)
            assert hasattr(imported, name) or importlib.import_module(f"{module}.{name}"), f"{module}.{name}"


def test_there_are_rooms() -> None:
    assert {"phalanx.optim", "phalanx.model", "phalanx.data", "phalanx.parallel", "phalanx.checkpoint"} <= set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_offers_what_its_row_says_and_nothing_else(room: str) -> None:
    module = importlib.import_module(room)
    row = next(line for line in LIBRARY.splitlines() if line.startswith(f"| `{room}`"))
    told = set(re.findall(r"`(\w+)`", row.split("|")[2]))
    assert told == set(module.__all__) == set(dir(module))
    for name in told:
        assert getattr(module, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = module.Nothing
    assert not [name for name in told if (ROOT / room.replace(".", "/") / f"{name}.py").exists()]


def test_naming_costs_no_torch() -> None:
    """A config may be imported by name too without it."""
    code = (
        f"import sys, {', '.join(ROOMS)}\nfrom phalanx.optim import OptimConfig\nfrom phalanx.train import RunConfig\n"
    )
    code += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_examples_run_as_they_are_printed(tmp_path: Path, number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS[number]], cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
