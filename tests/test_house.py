"""The house keeps its shape: files that hold one concept, names that mean one thing, and short chains of imports.

The walks (how many files a heartbeat, a config or a token passes) are in `test_walks.py`; which room may import which
is import-linter's to say.
"""

from __future__ import annotations

import ast
import functools
import statistics
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path for path in (ROOT / "phalanx").rglob("*.py") if path.name != "__init__.py")
LINES = {path: len(path.read_text().splitlines()) for path in FILES}
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}

SAME_ROLE = {"config", "main", "__main__"}
"""Stems that mean the same in every room: settings, and where a process begins."""


class Facts(NamedTuple):
    """Of a file: lines of its functions, lines with a console that writes emojis, and what its import imports."""

    functions: list[int]
    consoles: list[int]
    imported: set[str]


@functools.cache
def facts(path: Path) -> Facts:
    """Read when a test asks: every process that collects tests imports this file, few run its tests."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    consoles = [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Console"
        and "emoji=False" not in map(ast.unparse, node.keywords)
    ]
    return Facts([(node.end_lineno or 0) - node.lineno + 1 for node in functions], consoles, imported(tree))


def test_files_hold_one_concept_each() -> None:
    assert statistics.median(LINES.values()) >= 170
    assert not [path for path, lines in LINES.items() if lines > 600]
    assert sum(lines < 50 for lines in LINES.values()) <= 30


def test_functions_can_be_read_without_scrolling() -> None:
    functions = [lines for path in FILES for lines in facts(path).functions]
    assert statistics.quantiles(functions, n=20)[-1] <= 60


def test_no_two_modules_share_a_name_that_means_two_things() -> None:
    stems = Counter(path.stem for path in FILES)
    assert not [stem for stem, count in stems.items() if count > 1 and stem not in SAME_ROLE]


def imported(tree: ast.Module) -> set[str]:
    """Modules that are imported when this one is imported itself."""
    found: set[str] = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
            waiting.append(node)
    return found


def imports(module: str) -> set[str]:
    """Modules of ours that `module` imports when it is imported itself."""
    return (facts(MODULES[module]).imported & MODULES.keys()) - {module}


@functools.cache
def longest_chain(module: str) -> tuple[str, ...]:
    return (module, *max((longest_chain(one) for one in imports(module)), key=len, default=()))


@pytest.mark.parametrize("room", sorted({module.split(".")[1] for module in MODULES}))
def test_chains_of_imports_are_short(room: str) -> None:
    """Whoever changes the lowest module of a chain has to think of all above it."""
    chains = [longest_chain(module) for module in MODULES if module.split(".")[1] == room]
    longest = max(chains, key=len)
    assert len(longest) <= 14, " > ".join(longest)


def test_what_is_printed_stays_as_it_is() -> None:
    """rich writes `gpu00:100:1300` of NCCL with an emoji, for 100 is the name of one: every console says no."""
    assert not [(path, line) for path in FILES for line in facts(path).consoles]
