from __future__ import annotations

import pytest

from phalanx.telemetry import writer_place


@pytest.fixture(autouse=True)
def writers_that_do_not_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test waits for the writer of spans that it starts, beside others that this would let go first."""
    start = writer_place._START.replace("give_way(NICE)", "")
    assert start != writer_place._START
    monkeypatch.setattr(writer_place, "_START", start)
