"""Whether the user's own code is at fault, so that neither another attempt nor another host helps. Pure; torch-free."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from phalanx.run.decide.state import Ending, Failure, LastWord, State

_OWN_WORD = ("user", "raised", "status", "start", "loss")
_NOT_BY_ITSELF = ("host", "network", "storage")
_DIFFERS_BY_RANK = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)


def words_of(failure: Failure) -> str:
    """What a failure says, without what differs from rank to rank: numbers and addresses."""
    return f"{failure.kind}: {_DIFFERS_BY_RANK.sub('#', failure.summary)}"[:300]


def own_words(state: State) -> list[Failure]:
    """Failures of this recovery in which a rank speaks of itself, and that no host can be blamed for."""
    return [
        failure
        for failure in _failures(state)
        if failure.kind in _OWN_WORD and not failure.follows and failure.fault not in _NOT_BY_ITSELF
    ]


def most_say_the_same(state: State) -> Failure | None:
    """A failure that more than half of all ranks have with the same words."""
    own = own_words(state)
    counts = Counter(words_of(failure) for failure in own for _ in range(_ranks(state, failure)))
    if not counts:
        return None
    words, count = counts.most_common(1)[0]
    return next(f for f in own if words_of(f) == words) if 2 * count > state.world_size else None


def verdict(state: State) -> Ending | None:
    """How the job has to end because of its own code; None: it is not that, as far as can be seen."""
    common = most_say_the_same(state)
    if common is not None and common.kind in ("user", "start"):
        return Ending(2, f"bad input: {common.summary}")
    if common is not None and common.kind != "loss":
        return Ending(1, f"most ranks ended alike, which no other host would change: {common.summary}")
    bad_input = next((f for f in own_words(state) if f.kind == "user" and _has_never_run(state)), None)
    if bad_input is not None:
        return Ending(2, f"bad input: rank {bad_input.rank} said so before its first step: {bad_input.summary}")
    again = next((failure for failure in own_words(state) if _is_again(state.last_word, failure)), None)
    if again is None:
        return None
    where = f"step {again.step}" if again.step >= 0 else "the beginning"
    return Ending(1, f"it came back in the next attempt at the same place, {where}: {again.summary}")


def last_word(state: State) -> LastWord | None:
    """What to compare the next recovery with."""
    own = [failure for failure in own_words(state) if failure.kind != "start"]
    first = min(own, key=lambda failure: failure.rank, default=None)
    return None if first is None else LastWord(words_of(first), first.step, first.kind)


def _has_never_run(state: State) -> bool:
    """No attempt has ever made a step."""
    return state.progress.done < 0 and state.progress.best < 0 and state.progress.last_done < 0


def _is_again(last: LastWord | None, failure: Failure) -> bool:
    return last is not None and last.step == failure.step and last.words == words_of(failure)


def _ranks(state: State, failure: Failure) -> int:
    """How many ranks it speaks for."""
    if failure.kind == "loss":
        return 0
    return state.job.workers_per_host if failure.rank < 0 else 1


def _failures(state: State) -> Iterator[Failure]:
    recovery = state.recovery
    for failures in recovery.failures.values() if recovery is not None else ():
        yield from failures
