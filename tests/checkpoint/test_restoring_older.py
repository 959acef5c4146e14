"""A copy that is damaged costs that snapshot, not older copies of the same shard in the same memory."""

from __future__ import annotations

from restoring_helpers import Host, restore_all, some_tensors, take

from phalanx.core.layout import Layout


def test_an_older_snapshot_in_the_same_memory_is_used() -> None:
    layout, tensors, host = Layout(replicate=2), some_tensors(seed=1), Host("a")
    take(tensors, layout, 1, [host])
    newest = take(tensors, layout, 2, [host])
    host.copies[newest, 1].memory[0] ^= 1
    outcomes = restore_all(tensors, layout, [host])
    assert all(outcome.restored is not None and outcome.restored.step == 1 for outcome in outcomes)
    assert "step 2: the copy of rank 1 in memory of host a is refused" in outcomes[0].lines[0]
