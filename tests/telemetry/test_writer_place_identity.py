"""Rings in memory belong to a run folder, not to its path."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from phalanx.telemetry import Trace, record_spans
from phalanx.telemetry.spans import Recorder
from phalanx.telemetry.writer_place import IDENTITY, WriterPlace, WriterSettings


def test_all_ranks_have_one_place_and_a_restart_finds_it_again(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        places = set(pool.map(lambda _: WriterPlace.of(tmp_path), range(32)))
    assert len(places) == 1 and WriterPlace.of(tmp_path) in places
    assert [path.name for path in (tmp_path / "telemetry").iterdir()] == [IDENTITY]


def test_a_run_that_is_begun_anew_where_another_was_removed_has_none_of_its_spans(tmp_path: Path) -> None:
    before = WriterPlace.of(tmp_path / "run")
    left = Recorder.open(before.rings / "0.ring", rank=0)  # its process and its writer were killed
    left.step = 7
    left.begin(left.type("step")).end()
    shutil.rmtree(tmp_path / "run")
    recording = record_spans(tmp_path / "run", environ={}, settings=WriterSettings(period_s=0.05))
    with recording.step(1):
        pass
    recording.close()
    assert Trace.open(tmp_path / "run").sql("select distinct step from spans").to_pylist() == [{"step": 1}]
    assert WriterPlace.of(tmp_path / "run").rings != before.rings
    shutil.rmtree(before.rings)
