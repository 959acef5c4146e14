"""States that are whole and not to be trusted: passed over in memory and storage, never kept before good ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from restoring_helpers import Host, restore_all, save_durable, some_tensors, take

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.format.checkpoint_files import is_suspect
from phalanx.checkpoint.format.manifest import Meta
from phalanx.checkpoint.storage.folder import candidates
from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.checkpoint.storage.retention import prune
from phalanx.core.layout import Layout
from phalanx.detect.corruption.digest_file import SuspectSpan

LAYOUT = Layout(replicate=3)
GOOD, CORRUPT = some_tensors(seed=1), some_tensors(seed=2)  # `restore_all` holds what is restored against the good ones
FOUND = SuspectSpan(1, 10, 20, None)


def steps(folder: Path) -> list[int]:
    return [candidate.step for candidate in candidates(folder)]


@pytest.mark.parametrize("late", [11, 15, 19, 20])
def test_whichever_snapshots_are_left_in_memory_none_from_after_the_agreement_is_taken(late: int) -> None:
    host = Host("a")
    take(GOOD, LAYOUT, 10, [host])
    for step in {late, 14}:
        take(CORRUPT, LAYOUT, step, [host])
    outcomes = restore_all(GOOD, LAYOUT, [host], distrust=FOUND.cause)
    assert all(one.restored is not None and one.restored.step == 10 for one in outcomes)
    passed = [line for line in outcomes[0].lines if "passed over (silent corruption was found at step 20" in line]
    assert len(passed) == 2 and all(not one.lines for one in outcomes[1:])


def test_a_snapshot_that_the_next_attempt_takes_is_not_suspect() -> None:
    host = Host("a")
    take(CORRUPT, LAYOUT, 19, [host])
    take(GOOD, LAYOUT, 12, [host], attempt=2)
    (outcome, *_) = restore_all(GOOD, LAYOUT, [host], distrust=FOUND.cause)
    assert outcome.restored is not None and (outcome.restored.attempt, outcome.restored.step) == (2, 12)


def test_nor_is_one_taken_from_storage_where_memory_has_none(tmp_path: Path) -> None:
    save_durable(tmp_path, GOOD, LAYOUT, 10, Meta(attempt=1))
    save_durable(tmp_path, CORRUPT, LAYOUT, 15, Meta(attempt=1))
    host = Host("a")
    take(CORRUPT, LAYOUT, 17, [host])
    (outcome, *_) = restore_all(GOOD, LAYOUT, [host], tmp_path, distrust=FOUND.cause)
    assert outcome.restored is not None and (outcome.restored.step, outcome.restored.source) == (10, "durable")
    assert "step 17 in memory is passed over" in outcome.lines[0] and "step-00000015" in outcome.lines[1]


def test_no_rule_keeps_a_suspect_one_in_place_of_a_good_one(tmp_path: Path) -> None:
    save_durable(tmp_path, GOOD, LAYOUT, 10, Meta(attempt=1))
    save_durable(tmp_path, CORRUPT, LAYOUT, 15, Meta(attempt=1))
    rules = CheckpointConfig(keep_last=2)
    assert prune(tmp_path, rules) == [] and steps(tmp_path) == [15, 10]
    restore_all(GOOD, LAYOUT, (), tmp_path, distrust=FOUND.cause)
    store = LocalStore(tmp_path)
    assert [is_suspect(store.at(name)) for name in store.names()] == [True, False]
    save_durable(tmp_path, GOOD, LAYOUT, 18, Meta(attempt=2))
    prune(tmp_path, rules)
    assert steps(tmp_path) == [18, 10]


def test_where_all_are_suspect_nothing_is_marked(tmp_path: Path) -> None:
    """A person has to decide then."""
    save_durable(tmp_path, CORRUPT, LAYOUT, 15, Meta(attempt=1))
    with pytest.raises(Exception, match="no good state is left"):
        restore_all(GOOD, LAYOUT, (), tmp_path, distrust=FOUND.cause)
    assert not is_suspect(LocalStore(tmp_path).at("step-00000015"))
