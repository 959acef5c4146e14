"""One of several writers that all want to be in charge; imports little, to be run in processes of its own."""

from __future__ import annotations

from phalanx.checkpoint.storage.checkpoint_store import Store, SupersededError
from phalanx.checkpoint.storage.latest import advance, claim


def contend(store: Store, writer: int, rounds: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Claim, and advance until another one has claimed."""
    claimed, advanced = [], []
    for turn in range(rounds):
        attempt = claim(store)
        claimed.append(attempt)
        for step in range(1, 4):
            unique = writer * 10_000 + turn * 100 + step
            try:
                advance(store, attempt, unique, f"step-{unique:08d}", "")
            except SupersededError:
                break
            advanced.append((attempt, unique))
    return claimed, advanced
