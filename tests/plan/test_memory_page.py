"""docs/memory.md says what its script prints."""

from __future__ import annotations

from pathlib import Path

import memory_tables
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "memory.md"


@pytest.mark.parametrize("table", [memory_tables.levels, memory_tables.parts, memory_tables.cards])
def test_the_page_has_the_tables_of_its_script(table: object) -> None:
    lines = list(table())  # type: ignore[operator]
    assert "\n".join(lines) in PAGE.read_text()
