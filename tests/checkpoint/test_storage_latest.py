"""The pointer: numbers are given once, higher attempts win, and what is damaged or late does no harm."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_contender import contend
from storage_helpers import Place, flipped, place_fixture, s3_place_fixture, s3_server_fixture  # noqa: F401
from support.odd_files import ODD_FILES

from phalanx.checkpoint.storage import latest as pointer
from phalanx.checkpoint.storage.checkpoint_store import Store, SupersededError
from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.checkpoint.storage.latest import Latest, advance, claim, read_latest
from phalanx.core.errors import UserError


def now(store: Store) -> tuple[int, int, str]:
    latest = read_latest(store, pytest.fail)
    assert latest is not None
    return latest.attempt, latest.step, latest.name


def test_claiming_and_advancing(place: Place) -> None:
    store = place.open()
    assert read_latest(store) is None
    assert claim(store) == 1
    assert now(store) == (1, -1, "")
    advance(store, 1, 10, "step-00000010", "ab")
    assert claim(store) == 2
    assert now(store) == (2, 10, "step-00000010")
    latest = read_latest(store)
    assert latest is not None
    assert latest.manifest_sha256 == "ab"
    assert claim(store, at_least=7) == 8
    assert claim(store, at_least=3) == 9
    for attempt in (1, 2, 8):
        with pytest.raises(SupersededError, match=f"attempt 9 is in charge .* not attempt {attempt}"):
            advance(store, attempt, 20, "step-00000020", "cd")
    assert now(store) == (9, 10, "step-00000010")
    advance(store, 9, 5, "step-00000005", "cd")
    assert now(store) == (9, 5, "step-00000005")


def test_an_attempt_that_never_claimed_may_advance_while_none_is_higher(place: Place) -> None:
    store = place.open()
    advance(store, 3, 1, "step-00000001", "")
    assert now(store) == (3, 1, "step-00000001")
    assert claim(store) == 4


def test_old_entries_go_and_no_number_comes_twice(place: Place) -> None:
    store = place.open()
    for step in range(20):
        advance(store, 1, step, f"step-{step:08d}", "")
    assert store.keys("latest-") == [f"latest-{number:08d}.json" for number in range(5, 21)]
    assert claim(store) == 2
    assert store.keys("latest-")[-1] == "latest-00000021.json"


@pytest.mark.parametrize("place", ["folder", "memory"], indirect=True)
@pytest.mark.parametrize("harm", ["flipped", "truncated", "empty", "other", "list", "renamed"])
def test_a_damaged_entry_is_passed_over_saying_so(place: Place, harm: str) -> None:
    store = place.open()
    for step in (1, 2):
        advance(store, 5, step, f"step-{step:08d}", "")
    changes: dict[str, Any] = {
        "flipped": lambda content: flipped(content, 25),
        "truncated": lambda content: content[:40],
        "empty": lambda content: b"",
        "other": lambda content: b'{"attempt": 99}',
        "list": lambda content: b"[]",
        "renamed": lambda content: store.get("latest-00000001.json"),
    }
    place.change("", "latest-00000002.json", changes[harm])
    told: list[str] = []
    latest = read_latest(store, told.append)
    assert latest is not None
    assert (latest.attempt, latest.step) == (5, 1)
    assert len(told) == 1
    assert "latest-00000002.json" in told[0]
    assert "cannot be read" in told[0]
    assert claim(store) == 7, "the damaged entry may have been the claim of attempt 6"
    assert store.keys("latest-")[-1] == "latest-00000003.json"


@pytest.mark.parametrize("rows", [1, 18])
def test_a_writer_that_slept_meanwhile_does_not_count(place: Place, rows: int) -> None:
    """It looked, slept, and writes into the row, or into the gap that clearing up has left."""
    store = place.open()
    advance(store, 1, 1, "step-00000001", "")
    seen = pointer._look(store, pytest.fail)
    for step in range(2, 2 + rows):
        advance(store, 1, step, f"step-{step:08d}", "")
    before = store.keys("latest-")
    assert not pointer._append(store, seen, 9, (99, "step-00000099", ""))
    assert store.keys("latest-") == before
    assert now(store) == (1, 1 + rows, f"step-{1 + rows:08d}")


class Forgetful:
    """A store whose answers to `create` get lost on the way back."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create(self, key: str, content: bytes) -> bool:
        self._store.create(key, content)
        return False


def test_a_lost_answer_does_not_make_two_entries(place: Place) -> None:
    store: Any = Forgetful(place.open())
    assert claim(store) == 1
    advance(store, 1, 1, "step-00000001", "")
    assert store.keys("latest-") == ["latest-00000001.json", "latest-00000002.json"]


class Failing:
    """A store that cannot read the newest entry for now."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        if key == self._store.keys("latest-")[-1]:
            raise OSError(5, "Input/output error", key)
        return self._store.get(key)


def test_storage_that_fails_is_not_taken_for_damage_by_writers(place: Place) -> None:
    """Or a leftover could pass over the claim of the attempt in charge."""
    store = place.open()
    advance(store, 1, 1, "step-00000001", "")
    claim(store)
    failing: Any = Failing(store)
    with pytest.raises(OSError, match="Input/output error"):
        advance(failing, 1, 2, "step-00000002", "")
    told: list[str] = []
    latest = read_latest(failing, told.append)
    assert latest is not None
    assert latest.attempt == 1
    assert "Input/output error" in told[0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ODD_FILES)
def test_whatever_lies_at_the_newest_place_is_passed_over_saying_so(tmp_path: Path, kind: str) -> None:
    """It may have been the claim of an attempt; no writer waits for it to go away, and none removes it."""
    store = LocalStore(tmp_path)
    advance(store, 5, 1, "step-00000001", "")
    make, words = ODD_FILES[kind]
    odd = tmp_path / "latest-00000002.json"
    make(odd)
    told: list[str] = []
    latest = read_latest(store, told.append)
    assert latest is not None and (latest.attempt, latest.step) == (5, 1)
    assert len(told) == 1 and odd.name in told[0] and words in told[0] and "remove it" in told[0]
    assert claim(store, report=told.append) == 7
    assert told[1:] == told[:1]
    advance(store, 7, 2, "step-00000002", "")
    assert now(store) == (7, 2, "step-00000002")
    assert os.path.lexists(odd)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name", ["latest-000000002.json", "latest-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0662.json"]
)
def test_a_name_that_no_writer_gives_is_no_entry(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    store = LocalStore(tmp_path)
    assert claim(store) == 1
    assert read_latest(store, pytest.fail) is not None


class Stuck:
    """A store in which nothing can be made and nothing is to be seen, as no storage should be."""

    url = "/stuck"

    def __init__(self, listed: list[str]) -> None:
        self.listed = listed

    def keys(self, prefix: str) -> list[str]:
        return self.listed

    def create(self, key: str, content: bytes) -> bool:
        return False

    def get(self, key: str) -> bytes:
        raise FileNotFoundError(2, "No such file or directory", key)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("listed", [[], ["latest-00000001.json"]])
def test_no_writer_tries_for_ever(listed: list[str]) -> None:
    pauses: list[float] = []
    store: Any = Stuck(listed)
    with pytest.raises(UserError, match=r"latest-0000000.\.json.*look at what lies there") as refused:
        claim(store, pause=pauses.append)
    assert refused.value.field == "/stuck"
    with pytest.raises(UserError):
        advance(store, 1, 1, "step-00000001", "", pause=pauses.append)
    assert 5 < sum(pauses) / 2 < 30, "as long as a listing may lag behind, no longer"


@pytest.fixture(name="wide_row")
def wide_row_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All entries stay, to be looked at."""
    monkeypatch.setattr(pointer, "_KEPT", 10_000)
    yield


def row_of(store: Store) -> list[Latest]:
    entries = [Latest.from_bytes(store.get(key), number) for number, key in enumerate(store.keys("latest-"), 1)]
    assert all(right.after == left.mark for left, right in itertools.pairwise(entries))
    return entries


def check_row(entries: list[Latest], claimed: list[int], advanced: list[tuple[int, int]]) -> None:
    """What the writers were told is what the row says, and no attempt wrote after a higher one."""
    attempts = [entry.attempt for entry in entries]
    assert attempts == sorted(attempts)
    assert len(set(claimed)) == len(claimed)
    former = [Latest(0, 0), *entries]
    claims = [e.attempt for f, e in zip(former, entries, strict=False) if (f.step, f.name) == (e.step, e.name)]
    assert sorted(claims) == sorted(claimed)
    moved = [(e.attempt, e.step) for f, e in zip(former, entries, strict=False) if (f.step, f.name) != (e.step, e.name)]
    assert sorted(moved) == sorted(advanced)


@pytest.mark.usefixtures("wide_row")
def test_threads_that_all_want_to_be_in_charge(place: Place) -> None:
    stores = [place.open() for _ in range(4)]
    together = threading.Barrier(4)

    def work(number: int) -> tuple[list[int], list[tuple[int, int]]]:
        together.wait(60)
        return contend(stores[number], number, 2)

    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(work, range(4)))
    claimed, advanced = [c for t in told for c in t[0]], [a for t in told for a in t[1]]
    assert len(claimed) == 8
    check_row(row_of(stores[0]), claimed, advanced)


CONTENDER = """
import json, sys
sys.path[:0] = json.loads(sys.argv[4])
from phalanx.checkpoint.storage import latest
from phalanx.checkpoint.storage.location import open_store
from storage_contender import contend
latest._KEPT = 10_000
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps(contend(open_store(sys.argv[1], json.loads(sys.argv[2])), int(sys.argv[3]), 3)))
"""


@pytest.mark.campaign(but=("folder",))
@pytest.mark.slow
@pytest.mark.parametrize("place", ["folder", "s3"], indirect=True)
def test_processes_that_all_want_to_be_in_charge(place: Place) -> None:
    path = json.dumps([str(Path(__file__).parent)])
    commands = [
        [sys.executable, "-W", "ignore", "-c", CONTENDER, place.url, json.dumps(place.options), str(number), path]
        for number in range(3)
    ]
    processes = [subprocess.Popen(c, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for c in commands]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        told = []
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            output, _ = process.communicate(timeout=60)
            assert process.returncode == 0
            told.append(json.loads(output))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    claimed = [c for t in told for c in t[0]]
    advanced = [(attempt, step) for t in told for attempt, step in t[1]]
    assert len(claimed) == 9
    check_row(row_of(place.open()), claimed, advanced)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["claim", "advance", "damage"]), st.integers(0, 6)), max_size=40))
def test_any_sequence_goes_like_the_model(actions: list[tuple[str, int]]) -> None:
    """Model: one attempt and one target, and attempts only grow."""
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        attempt, target, highest = 0, -1, 0
        for action, number in actions:
            if action == "claim":
                made = claim(store, number)
                assert made > max(attempt, number)
                attempt = made
            elif action == "advance" and number >= attempt:
                advance(store, number, number, f"step-{number:08d}", "")
                attempt, target = number, number
            elif action == "advance":
                with pytest.raises(SupersededError):
                    advance(store, number, number, f"step-{number:08d}", "")
                continue
            elif not (keys := store.keys("latest-")):
                continue
            else:
                old = keys[number % len(keys)]
                if old != keys[-1]:  # the newest one is another test's matter
                    (Path(folder) / old).write_bytes(b"{}")
                continue
            numbers = [int(key[7:15]) for key in store.keys("latest-")]
            assert max(numbers) == highest + 1
            highest += 1
            latest = read_latest(store, pytest.fail)
            assert latest is not None
            assert (latest.attempt, latest.step) == (attempt, target)
