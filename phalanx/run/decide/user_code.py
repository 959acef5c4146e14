"""Whether the user's own code is at fault, so that neither another attempt nor another host helps. Pure; torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator

from phalanx.run.decide.state import Ending, Failure, LastWord, State

_OWN_WORD = ("user", "syntax", "raised", "status", "usage", "start", "loss", "left")
_NOT_BY_ITSELF = ("host", "network", "storage")
_ERRORS = ("SIGSEGV", "SIGFPE", "SIGSYS")
"""What a program does to itself: other signals come from outside, or from a machine that differs."""

_DIFFERENT_WORDS = 64
_DIFFERS_BY_RANK = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)


def words_of(failure: Failure) -> str:
    """What a failure says, without what differs from rank to rank: numbers, addresses, a last line."""
    if failure.kind == "usage":
        return failure.kind
    return f"{failure.kind}: {_DIFFERS_BY_RANK.sub('#', failure.summary)}"[:300]


def speaks_of_itself(failure: Failure) -> bool:
    """Whether a rank speaks of itself, of something that no host can be blamed for."""
    is_of_a_host = failure.fault in _NOT_BY_ITSELF and failure.kind != "loss"  # which would come at another step
    return failure.kind in _OWN_WORD and not failure.follows and not is_of_a_host


def counted(words: dict[str, int], failure: Failure, ranks: int) -> dict[str, int]:
    """Counts of what ranks say of themselves with this failure, which speaks for so many of them."""
    if failure.kind == "loss" or not speaks_of_itself(failure):
        return words
    said = words_of(failure)
    if said not in words and len(words) >= _DIFFERENT_WORDS:
        return words
    return {**words, said: words.get(said, 0) + ranks}


def most_say_the_same(state: State) -> Failure | None:
    """A failure that more than half of all ranks have with the same words."""
    counts = state.recovery.words if state.recovery is not None else {}
    words = max(counts, key=lambda said: counts[said], default="")
    if 2 * counts.get(words, 0) <= state.world_size:
        return None
    return next((failure for failure in _own(state) if words_of(failure) == words), None)


def verdict(state: State) -> Ending | None:
    """How the job has to end because of its own code; None: it is not that, as far as can be seen."""
    common = most_say_the_same(state)
    if common is not None and common.kind == "syntax":
        return of_one(state, common) or Ending(1, f"the source is wrong on most ranks: {common.summary}")
    if common is not None and common.kind in ("user", "start", "usage"):
        return Ending(2, f"bad input: {common.summary}")
    if common is not None:
        return Ending(1, f"most ranks ended alike, which no other host would change: {common.summary}")
    return next((ending for failure in failures_of(state) if (ending := of_one(state, failure)) is not None), None)


def of_one(state: State, failure: Failure) -> Ending | None:
    """What follows from one failure, whatever the other ranks say."""
    if failure.kind == "syntax" and has_never_run(state):
        return Ending(1, f"the source is wrong, whichever host runs it: {failure.summary}")
    if failure.kind == "signal" and failure.fault == "process" and any(name in failure.summary for name in _ERRORS):
        is_again = state.progress.done >= 0 and came_before(state, failure)
        return _again(failure) if is_again else None
    if not speaks_of_itself(failure):
        return None
    if failure.kind == "user" and has_never_run(state):
        return Ending(2, f"bad input: rank {failure.rank} said so before the first step: {failure.summary}")
    if not _is_again(state.last_word, failure):
        return None
    return _again(failure)


def _again(failure: Failure) -> Ending:
    where = f"step {failure.step}" if failure.step >= 0 else "the beginning"
    return Ending(1, f"it came back in the next attempt at the same place, {where}: {failure.summary}")


def step_mark(failure: Failure) -> str:
    """Key of the history for where a rank has died."""
    return f"rank {failure.rank} at step {failure.step}"


def came_before(state: State, failure: Failure) -> bool:
    """Whether a rank has died where it has died before.

    That of two attempts none came beyond its first step says nothing: on a bad host it is so too.
    """
    return failure.step > max(state.progress.base, 0) + 1 and state.count(step_mark(failure)) > 0


def last_word(state: State) -> LastWord | None:
    """What to compare the next recovery with."""
    own = [failure for failure in _own(state) if failure.kind != "start"]
    first = min(own, key=lambda failure: failure.rank, default=None)
    return None if first is None else LastWord(words_of(first), first.step, first.kind)


def first_own(state: State) -> Failure | None:
    """The first rank that says something of itself for which no host can be blamed, other than a broken loss."""
    own = (failure for failure in _own(state) if failure.kind not in ("start", "loss") and failure.rank >= 0)
    return next(own, None)


def has_never_run(state: State) -> bool:
    """No attempt has ever made a step."""
    return not state.progress.has_run


def _is_again(last: LastWord | None, failure: Failure) -> bool:
    return last is not None and last.step == failure.step and last.words == words_of(failure)


def failures_of(state: State) -> Iterator[Failure]:
    """All that are known of the recovery."""
    recovery = state.recovery
    for failures in recovery.failures.values() if recovery is not None else ():
        yield from failures


def _own(state: State) -> Iterator[Failure]:
    return filter(speaks_of_itself, failures_of(state))
