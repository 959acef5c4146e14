"""docs/check.md says what is so."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from phalanx.checks.runner import CHECKS

_TEXT = (Path(__file__).parents[2] / "docs" / "check.md").read_text()


def test_every_check_is_described() -> None:
    table = _TEXT.partition("## What is tested")[2].partition("## Thresholds")[0]
    described = set(re.findall(r"`([a-z-]+)`", table))
    assert {check.name for check in CHECKS} <= described


def test_the_examples_run_and_print_what_is_said() -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for block in re.findall(r"```python\n(.*?)```", _TEXT, re.DOTALL):
            exec(block, {})
    said = re.search(r"prints `(.*?)`", _TEXT)
    assert said is not None
    assert said[1] in out.getvalue()
