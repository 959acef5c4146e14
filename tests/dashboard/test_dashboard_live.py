"""While a job goes on: a rank that becomes slow and one that is killed stand on the page soon after."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from dashboard_helpers import client_of, make_run
from support.live_ranks import live_ranks

from phalanx.core.errors import UserError
from phalanx.dashboard.data_source import DataSource

GUARD_S = 240.0


def _until(look: Callable[[], str], words: str) -> str:
    until_s = time.monotonic() + GUARD_S
    while words not in (text := look()):
        assert time.monotonic() < until_s, f"{words!r} did not come: {text}"
        time.sleep(0.05)
    return text


def test_what_happens_to_ranks_is_seen_while_they_run(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "live"
    with live_ranks(run, tmp_path / "orders") as ranks:
        until_s = time.monotonic() + GUARD_S
        while not list((run / "telemetry" / "live").glob("*.arrows")):
            assert time.monotonic() < until_s, "no rank records"
            time.sleep(0.05)
        client = client_of(tmp_path / "runs")

        def now() -> str:
            return client.get("/machines/now?run=live").text

        _until(now, "3</b><span>ranks")
        assert 'data-every-s="1"' in client.get("/machines?run=live").text  # it looks again by itself
        (tmp_path / "orders" / "slow-2").touch()
        _until(now, "slow: rank 2")
        ranks[1].kill()
        text = _until(now, "dead: rank 1")
        assert "look-dead" in text and "its process ended in step" in text


def test_the_end_of_a_loop_that_holds_no_lock_of_ours_is_seen(tmp_path: Path) -> None:
    writer = tmp_path / "runs" / "own" / "telemetry" / "live" / "host.writer"
    writer.parent.mkdir(parents=True)
    source = DataSource.of_folder(tmp_path / "runs")
    with writer.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as the process that writes its spans does
        assert source.run("own").is_live
    assert not source.run("own").is_live


def test_a_link_of_an_alert_reaches_a_run_wherever_it_lies(tmp_path: Path) -> None:
    """It names the run by its path on the host where it went on; the folder may be mounted elsewhere here."""
    make_run(tmp_path / "runs" / "lab" / "night")
    source = DataSource.of_folder(tmp_path / "runs")
    for link in (f"{tmp_path}/runs/lab/night", "/home/them/lab/night"):
        assert source.run(link).id == "lab/night"
    for other in ("/home/them/lab/day", "/lab/../../night", "night"):
        with pytest.raises(UserError, match="no such run"):
            source.run(other)
    alone = DataSource.of_folder(tmp_path / "runs" / "lab" / "night")
    assert alone.run("/home/them/lab/night").id == "."
    with pytest.raises(UserError, match="no such run"):
        alone.run("/home/them/lab/day")
