"""A real browser for tests of the dashboard; they skip, saying so, where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.browser import Watched, served, watched, why_no_browser

from phalanx.dashboard.data_source import DataSource


@pytest.fixture
def browse(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Opens a browser on the dashboard of a folder, which complains at the end of what went wrong in it."""
    if why := why_no_browser():
        pytest.skip(why)
    with ExitStack() as stack:

        def start(folder: Path, **context: Any) -> Watched:
            address = stack.enter_context(served(DataSource.of_folder(folder), tmp_path / "dashboard-cache"))
            return stack.enter_context(watched(address, **context))

        yield start
