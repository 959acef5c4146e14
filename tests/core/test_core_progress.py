"""The progress page: what is written is read, whatever else is on the page, and however it was left."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.progress_pages import read_progress
from support.settled import until_at_rest

from phalanx.core import progress
from phalanx.core.progress import (
    PAGE_BYTES,
    PROGRESS_VARIABLE,
    Progress,
    ProgressReader,
    ProgressWriter,
    create_page,
    own_progress,
    parse_page,
    say_checkpoints,
    say_imported,
    say_restored,
)


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns


def test_the_step_at_which_the_loss_broke_is_kept_until_it_is_a_number_again(tmp_path: Path) -> None:
    page = tmp_path / "page"
    writer = ProgressWriter(page)
    seen = []
    for loss in (1.0, math.nan, math.inf, math.nan, 2.0, math.nan, None):
        writer.step(loss=loss)
        found = read_progress(page)
        assert found is not None
        seen.append(found.broken_step)
    assert seen == [-1, 2, 2, 2, -1, 6, -1]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    clock = Clock()
    writer = ProgressWriter(tmp_path / "page", 3, clock_ns=clock)
    first = read_progress(tmp_path / "page")
    assert first == Progress(os.getpid(), 3, phase_began_ns=1_000)
    clock.now_ns = 2_000
    writer.step()
    clock.now_ns = 2_500
    writer.step(41, busy_ns=300, loss=2.5)
    clock.now_ns = 2_600
    writer.step(42, busy_ns=200, loss=1.5)
    clock.now_ns = 2_700
    writer.phase("checkpoint", expects_s=1.5)
    writer.message("writes to disk")
    found = read_progress(tmp_path / "page")
    assert found == Progress(
        pid=os.getpid(),
        attempt=3,
        step=42,
        steps_here=3,
        step_ended_ns=2_600,
        step_took_ns=100,
        phase="checkpoint",
        phase_began_ns=2_700,
        expects_ns=1_500_000_000,
        busy_ns=200,
        busy_total_ns=500,
        loss=1.5,
        is_absolute=True,
        message="writes to disk",
    )


def test_where_a_training_goes_on_is_known_before_its_first_step(tmp_path: Path) -> None:
    writer = ProgressWriter(tmp_path / "page", 2)
    writer.resume(15)
    found = read_progress(tmp_path / "page")
    assert found is not None
    assert (found.step, found.steps_here, found.step_ended_ns, found.is_absolute) == (15, 0, -1, True)
    writer.step()
    found = read_progress(tmp_path / "page")
    assert found is not None and (found.step, found.steps_here) == (16, 1)


def test_what_was_restored_is_said_beside_whoever_counts_the_steps(tmp_path: Path) -> None:
    page = tmp_path / "page"
    environ = {PROGRESS_VARIABLE: str(page)}
    say_restored(environ, 40)
    assert read_progress(page) is None, "of a rank that has said nothing else"
    counting = ProgressWriter(page, 3)
    counting.step()
    assert read_progress(page) == replace(said(page), restored=40, step=1, is_absolute=False)
    say_restored(environ, 0)
    say_imported(environ, 7)
    counting.step()
    assert (said(page).restored, said(page).step, said(page).imported_ns) == (0, 2, 7)
    create_page(page)
    ProgressWriter(page, 4).step()
    assert said(page).restored == said(page).imported_ns == -1, "each attempt has a page of its own"
    say_restored({}, 7)
    say_restored({PROGRESS_VARIABLE: str(tmp_path / "no" / "page")}, 7)  # nobody reads it, and nothing fails for that


@pytest.mark.parametrize("at", range(1152, 1164))
def test_a_torn_word_of_what_was_restored_is_none(tmp_path: Path, at: int) -> None:
    page = tmp_path / "page"
    ProgressWriter(page).step()
    say_restored({PROGRESS_VARIABLE: str(page)}, 40)
    block = bytearray(page.read_bytes())
    block[at] ^= 0x5A
    page.write_bytes(block)
    assert said(page).restored == -1


def test_what_storage_keeps_up_with_is_said_beside_whoever_counts_the_steps(tmp_path: Path) -> None:
    page = tmp_path / "page"
    environ = {PROGRESS_VARIABLE: str(page)}
    writer = ProgressWriter(page, 3)
    writer.step()
    assert said(page).checkpoints == ""
    say_checkpoints(environ, "a checkpoint takes 4.2s" + "é" * 200)
    say_restored(environ, 40)
    writer.step()
    assert said(page).checkpoints.startswith("a checkpoint takes 4.2s" + "é" * 100)
    assert (said(page).restored, said(page).step) == (40, 2)
    block = bytearray(page.read_bytes())
    block[1216 + 6] ^= 0x5A
    page.write_bytes(block)
    assert said(page).checkpoints == "", "torn"
    say_checkpoints(environ, "")
    assert said(page).checkpoints == ""
    say_checkpoints({PROGRESS_VARIABLE: str(tmp_path / "no" / "page")}, "x")


def said(page: Path) -> Progress:
    found = read_progress(page)
    assert found is not None
    return found


def test_a_loss_of_nan_is_not_an_unknown_one(tmp_path: Path) -> None:
    writer = ProgressWriter(tmp_path / "page")
    writer.step(loss=math.nan)
    found = read_progress(tmp_path / "page")
    assert found is not None
    assert found.loss is not None and math.isnan(found.loss)
    writer.step()
    found = read_progress(tmp_path / "page")
    assert found is not None and found.loss is None


@given(st.text(max_size=200), st.text(max_size=200))
def test_texts_are_cut_to_whole_characters(phase: str, message: str) -> None:
    assert phase.encode(errors="replace").decode().startswith(progress._cut(phase, 31).decode())
    assert len(progress._cut(message, 95)) <= 95
    kept = progress._cut(message, 95).decode()
    rest = message.encode(errors="replace").decode()[len(kept) :]
    assert not rest or len((kept + rest[0]).encode()) > 95


def test_an_absent_page_is_waited_for_without_waiting(tmp_path: Path) -> None:
    reader = ProgressReader(tmp_path / "page")
    assert reader.read() is None
    writer = ProgressWriter(tmp_path / "page")
    assert reader.read() is not None
    writer.step()
    found = reader.read()
    assert found is not None and found.steps_here == 1
    reader.close()


@pytest.mark.parametrize("size", [0, 1, PAGE_BYTES - 1, PAGE_BYTES + 1])
def test_a_page_of_another_size_says_nothing_and_is_set_right_by_a_writer(tmp_path: Path, size: int) -> None:
    (tmp_path / "page").write_bytes(b"x" * size)
    assert read_progress(tmp_path / "page") is None
    ProgressWriter(tmp_path / "page").step()
    found = read_progress(tmp_path / "page")
    assert found is not None and found.steps_here == 1


def test_a_page_cut_off_under_a_reader_says_nothing(tmp_path: Path) -> None:
    ProgressWriter(tmp_path / "page").close()
    reader = ProgressReader(tmp_path / "page")
    assert reader.read() is not None
    os.truncate(tmp_path / "page", 0)
    assert reader.read() is None
    reader.close()


@pytest.mark.parametrize("at", [0, 8, 12], ids=["magic", "version", "layout"])
def test_a_page_of_another_version_says_nothing(tmp_path: Path, at: int) -> None:
    ProgressWriter(tmp_path / "page").close()
    block = bytearray((tmp_path / "page").read_bytes())
    assert parse_page(bytes(block)) is not None
    block[at] += 1
    assert parse_page(bytes(block)) is None


@given(st.integers(0, 1 << 64))
@settings(max_examples=50)
def test_noise_says_nothing(seed: int) -> None:
    block = random.Random(seed).randbytes(PAGE_BYTES)
    assert parse_page(block) is None
    with_header = progress._HEADER.pack(progress._MAGIC, progress.VERSION, progress._BODY.size, 0, 0)
    parsed = parse_page(with_header + block[len(with_header) :])
    assert parsed is None


def test_of_a_write_that_stopped_anywhere_the_one_before_is_read(tmp_path: Path) -> None:
    """Every prefix of the bytes of a step, in the order in which they are written."""
    writer = ProgressWriter(tmp_path / "page")
    writer.step(7)
    before = (tmp_path / "page").read_bytes()
    writer.step(8)
    after = (tmp_path / "page").read_bytes()
    changed = [at for at in range(PAGE_BYTES) if before[at] != after[at]]
    slot = progress._SLOTS_AT + (changed[0] - progress._SLOTS_AT) // progress._SLOT_BYTES * progress._SLOT_BYTES
    for stop in range(slot, slot + progress._SLOT_BYTES + 1):
        torn = bytearray(before)
        torn[slot:stop] = after[slot:stop]
        for odd in (True, False):  # even where the number were there in full before the rest
            if odd:
                torn[slot] |= 1
            found = parse_page(bytes(torn))
            assert found is not None
            assert found.step == 7 or (found.step == 8 and not odd)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=20), st.integers(0, PAGE_BYTES), st.data())
@settings(max_examples=200)
def test_a_mix_of_two_states_is_one_of_them_or_none(steps: list[int], cut: int, data: st.DataObject) -> None:
    """A reader that sees some bytes of an older page and some of a newer one never sees what was never written."""
    path = Path(f"/dev/shm/phalanx-test-{os.getpid()}") if Path("/dev/shm").is_dir() else Path(f"page-{os.getpid()}")
    try:
        writer = ProgressWriter(path)
        states = [path.read_bytes()]
        for step in steps:
            writer.step(step)
            states.append(path.read_bytes())
        first, second = data.draw(st.integers(0, len(steps))), data.draw(st.integers(0, len(steps)))
        found = parse_page(states[first][:cut] + states[second][cut:])
        if found is not None:
            assert (found.steps_here, found.step) in [(0, 0), *enumerate(steps, 1)]
    finally:
        path.unlink(missing_ok=True)


def test_a_reader_beside_a_writer_sees_only_what_was_written(tmp_path: Path) -> None:
    """A thread writes steps whose fields belong together, another reads; numbers never go back."""
    writer = ProgressWriter(tmp_path / "page")
    done = threading.Event()

    def write() -> None:
        for number in range(1, 20_001):
            writer.step(number, busy_ns=number * 3, loss=float(number))
        done.set()

    thread = threading.Thread(target=write)
    reader = ProgressReader(tmp_path / "page")
    thread.start()
    last = 0
    while not done.is_set():
        found = reader.read()
        if found is not None and found.steps_here:
            assert (found.busy_ns, found.loss, found.steps_here) == (found.step * 3, float(found.step), found.step)
            assert found.step >= last
            last = found.step
    thread.join()
    found = reader.read()
    assert found is not None and found.step == 20_000
    reader.close()


WRITER = """
import sys
from phalanx.core.progress import ProgressWriter
writer = ProgressWriter(sys.argv[1])
print("begun", flush=True)
number = 0
while True:
    number += 1
    writer.step(number, busy_ns=number * 3, loss=float(number))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_writer_that_is_cut_off_leaves_a_whole_page(tmp_path: Path, number: signal.Signals) -> None:
    reader = ProgressReader(tmp_path / "page")
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "page")], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            seen = 0
            while seen < 2_000:
                found = reader.read()
                assert found is None or not found.steps_here or found.busy_ns == found.step * 3
                seen = found.step if found is not None else seen
            process.send_signal(number)
            if number == signal.SIGKILL:
                process.wait()
            else:
                until_at_rest(process.pid, "T")
            found = reader.read()
            assert found is not None and found.loss == float(found.step)
        finally:
            process.kill()
    reader.close()


def test_a_new_process_or_attempt_begins_anew_and_a_second_writer_goes_on(tmp_path: Path) -> None:
    ProgressWriter(tmp_path / "page", 1).step(5)
    second = ProgressWriter(tmp_path / "page", 1)
    second.step()
    found = read_progress(tmp_path / "page")
    assert found is not None and (found.step, found.steps_here) == (6, 2)
    ProgressWriter(tmp_path / "page", 2)
    found = read_progress(tmp_path / "page")
    assert found is not None and (found.attempt, found.step, found.steps_here) == (2, 0, 0)


def test_a_script_that_claims_its_page_is_seen_by_the_other_writer(tmp_path: Path) -> None:
    create_page(tmp_path / "page")
    assert read_progress(tmp_path / "page") is None
    hook = ProgressWriter(tmp_path / "page", 4)
    assert not hook.is_claimed
    assert own_progress({}) is None
    own = own_progress({PROGRESS_VARIABLE: str(tmp_path / "page")}, 4)
    assert own is not None and hook.is_claimed
    own.step(100)
    found = read_progress(tmp_path / "page")
    assert found is not None and (found.step, found.steps_here) == (100, 1)
    assert ProgressWriter(tmp_path / "page", 4).is_claimed
    assert not ProgressWriter(tmp_path / "page", 5).is_claimed


def test_no_torch() -> None:
    program = "import sys, phalanx.core.progress; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_own_times_of_the_last_steps_are_kept(tmp_path: Path) -> None:
    writer, reader = ProgressWriter(tmp_path / "page"), ProgressReader(tmp_path / "page")
    for number in range(1, 301):
        writer.step(number, busy_ns=1000 + number)
    found = reader.read()
    assert found is not None and found.is_absolute
    assert reader.busy_since(found, 297) == [1298, 1299, 1300]
    assert reader.busy_since(found, 300) == []
    assert reader.busy_since(found, 0) == list(range(1173, 1301))  # those before are overwritten
    writer.step()
    found = reader.read()
    assert found is not None and reader.busy_since(found, 299) == []  # the last step's is not known


def test_steps_without_numbers_count_from_the_process(tmp_path: Path) -> None:
    path = tmp_path / "page"
    writer = ProgressWriter(path)
    writer.step(busy_ns=5)
    found = read_progress(path)
    assert found is not None and not found.is_absolute
    again = ProgressWriter(path, claims=True)
    again.step(41)
    found = read_progress(path)
    assert found is not None and found.is_absolute and (found.step, found.steps_here) == (41, 2)
    ProgressWriter(path, 1)
    found = read_progress(path)
    assert found is not None and not found.is_absolute
