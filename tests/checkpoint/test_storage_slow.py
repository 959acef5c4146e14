"""Storage that takes 1 MB/s, behind a real keeper and persister: training does not wait for it, what it cannot take is
left out and counted, and no more is in memory than the slots."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from storage_helpers import Place, s3_place_fixture, s3_server_fixture  # noqa: F401
from torch import nn

from phalanx.checkpoint import Checkpointer
from phalanx.checkpoint.keeper.keeper_start import end_keeper
from phalanx.checkpoint.session.snapshot_outcomes import SnapshotEvent
from phalanx.checkpoint.storage.latest import read_latest

BYTES_PER_S = 1e6
EVERY, SLOTS = 5, 2
STEPS_MEANWHILE = 6 * EVERY
UPLOADS = 2
GUARD_S = 120.0
STEP_S = 0.003
"""A step leaves the interpreter to the server, which is in this process too."""


class Training:
    """A loop of tiny steps, whose state is 0.6 MB."""

    def __init__(self, place: Place) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(220, 220)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.lines: list[str] = []
        self.checkpoints = Checkpointer(
            place.url,
            model=self.model,
            optimizer=self.optimizer,
            report=self.lines.append,
            every_steps=EVERY,
            keep_last=20,
            memory_slots=SLOTS,
            storage_options=place.options,
        )
        self.events: list[SnapshotEvent] = []
        self.step = 0

    def go_on(self, *, ending: bool = False) -> None:
        self.step += 1
        self.optimizer.zero_grad()
        self.model(torch.rand(4, 220)).square().mean().backward()
        self.optimizer.step()
        time.sleep(STEP_S)
        self.checkpoints.step(self.step, ending=ending)
        self.events += self.checkpoints._session.events()


class SlowUploads:
    """Looks on while tensors are uploaded, which goes on until `STEPS_MEANWHILE` steps were done meanwhile.

    Attributes:
        ended: uploads of tensors that have.
        waited_for: uploads during which training did not go on.
        at_a_time: the most that were under way at a time.
        snapshots: how many pieces of memory, each large enough for a snapshot, keeper and persister had then.
    """

    def __init__(self, keeper: Path) -> None:
        self._keeper = keeper
        self._stepped = threading.Condition()
        self._step = self._under_way = 0
        self.ended = self.at_a_time = 0
        self.waited_for: list[str] = []
        self.snapshots: list[int] = []

    def step_done(self, step: int) -> None:
        with self._stepped:
            self._step = step
            self._stepped.notify_all()

    def watch(self, method: str, path: str) -> None:
        """Called by the server, which has taken the body at its pace."""
        if method != "PUT" or not path.endswith(".distcp"):
            return
        with self._stepped:
            self._under_way += 1
            self.at_a_time = max(self.at_a_time, self._under_way)
            goal = self._step + STEPS_MEANWHILE
            if not self._stepped.wait_for(lambda: self._step >= goal, GUARD_S):
                self.waited_for.append(path)
            self.snapshots.append(snapshots_in_memory(self._keeper))
            self._under_way -= 1
            self.ended += 1


def snapshots_in_memory(keeper: Path, size_bytes: int = 220 * 220 * 4 * 3) -> int:
    """Pieces of anonymous shared memory of at least this size that keeper and persister have between them."""
    found: set[int] = set()
    for process in psutil.process_iter(["name"]):
        with suppress(psutil.Error, FileNotFoundError):
            if not process.info["name"].startswith("phalanx"):
                continue
            if process.environ().get("PHALANX_KEEPER") != str(keeper):
                continue
            for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                about = descriptor.stat()
                if str(descriptor.readlink()).startswith("/memfd:") and about.st_size >= size_bytes:
                    found.add(about.st_ino)
    return len(found)


@pytest.fixture(name="keeper")
def keeper_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PHALANX_KEEPER", str(tmp_path / "keeper"))
    yield tmp_path / "keeper"
    end_keeper(tmp_path / "keeper")


@pytest.mark.campaign
def test_training_goes_on_beside_storage_that_takes_1_mb_a_second(s3_place: Place, keeper: Path) -> None:
    uploads, gate = SlowUploads(keeper), s3_place.gate
    assert gate is not None
    training = Training(s3_place)
    gate.bytes_per_s, gate.watch = BYTES_PER_S, uploads.watch
    while uploads.ended < UPLOADS:
        training.go_on()
        uploads.step_done(training.step)
    gate.watch = lambda method, path: None
    training.go_on(ending=True)
    assert training.checkpoints.status.startswith(f"step-{training.step:08d}")
    training.checkpoints.close()
    require_what_was_left_out_is_counted(training)
    assert uploads.waited_for == []
    assert uploads.at_a_time == 1
    assert max(uploads.snapshots) <= SLOTS
    assert min(uploads.snapshots) > 0
    assert [line for line in training.lines if "becomes durable" not in line] == []
    require_durable(training, s3_place)


def require_what_was_left_out_is_counted(training: Training) -> None:
    durable = [event for event in training.events if event.name]
    assert [event.problem for event in training.events if event.problem] == []
    assert len(durable) >= UPLOADS + 1
    before = 0
    for event in durable[:-1]:
        assert event.skipped == event.step // EVERY - before // EVERY - 1
        before = event.step
    late = durable[1:UPLOADS]
    assert all(event.skipped >= STEPS_MEANWHILE // EVERY - 1 for event in late)
    assert all(event.put_off >= STEPS_MEANWHILE - EVERY for event in late)
    for event in durable[:-1]:
        assert event.durable_s > event.snapshot_bytes / BYTES_PER_S
        assert event.stall_s < event.durable_s / 2


def require_durable(training: Training, place: Place) -> None:
    """The last step is, and comes back from there bit by bit; of those before, each is whole."""
    store = place.open()
    latest = read_latest(store, pytest.fail)
    assert latest is not None
    assert latest.step == training.step
    durable = [event.name for event in training.events if event.name]
    assert store.names() == durable[::-1]
    other = nn.Linear(220, 220)
    lines: list[Any] = []
    options = {"storage_options": place.options, "report": lines.append}
    again = Checkpointer(place.url, model=other, optimizer=torch.optim.AdamW(other.parameters(), lr=0.01), **options)
    try:
        assert again.restore() == training.step
    finally:
        again.close(failed=True)
    pairs = itertools.zip_longest(training.model.parameters(), other.parameters())
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
