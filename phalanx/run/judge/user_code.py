"""Whether the program is at fault, and no machine: then another attempt, or another host, helps nobody."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from phalanx.run.messages import WorkerEnded

_NOT_THE_PROGRAM = frozenset({"host", "network", "storage"})
_NUMBER = re.compile(
    r"0x[0-9a-fA-F]+|(?<![A-Za-z])[0-9a-fA-F]{8}(?:-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}|\d+(?:\.\d+)?"
)
_LONGEST = 500


@dataclass(frozen=True)
class UserCode:
    """The verdict.

    Attributes:
        is_user_code: whether the program is at fault.
        why: one line.
        summary: of the exception that decided it; empty: none did.
    """

    is_user_code: bool
    why: str
    summary: str = ""


def judge_user_code(
    ends: Iterable[WorkerEnded],
    world_size: int,
    previous: Iterable[WorkerEnded] = (),
    fault_of: Callable[[str], str | None] = lambda summary: None,
) -> UserCode:
    """Whether exceptions that ended an attempt come from the program.

    They do when most ranks raised the same one, or when the attempt before ended at the same step with the same one.
    Numbers and addresses in a summary do not count. What only follows from the end of a peer, what was killed by us,
    and deaths without an exception say nothing of the program.

    Args:
        ends: how the ranks of this attempt ended, as far as is known.
        world_size: of this attempt.
        previous: how those of the attempt before ended.
        fault_of: the class of fault of a summary by the rules for logs; what all ranks say of storage, a network or a
            host (a full disk, say) is not the program's.
    """
    raised = _own_exceptions(ends)
    if not raised:
        return UserCode(False, "no rank raised an exception of its own")
    counts = Counter(normalise(end.summary) for end in raised)
    common, count = counts.most_common(1)[0]
    first = next(end for end in raised if normalise(end.summary) == common)
    if (fault := fault_of(first.summary)) in _NOT_THE_PROGRAM:
        return UserCode(False, f"{count} of {world_size} ranks raised it, but it is about {fault}", first.summary)
    ranks = len({end.rank for end in raised if normalise(end.summary) == common})
    if 2 * ranks > world_size:
        return UserCode(True, f"{ranks} of {world_size} ranks raised the same exception", first.summary)
    before = {(normalise(end.summary), end.step) for end in _own_exceptions(previous)}
    for end in raised:
        if (normalise(end.summary), end.step) in before and fault_of(end.summary) not in _NOT_THE_PROGRAM:
            where = f"at step {end.step}" if end.step >= 0 else "before its first step"
            return UserCode(True, f"the attempt before ended with the same exception {where}", end.summary)
    return UserCode(False, f"{ranks} of {world_size} ranks raised it, for the first time", first.summary)


def _own_exceptions(ends: Iterable[WorkerEnded]) -> Sequence[WorkerEnded]:
    return [end for end in ends if end.kind in ("raised", "user") and not end.follows and not end.by_us]


def normalise(summary: str) -> str:
    """A summary without numbers, addresses and identifiers, so that it is the same for all ranks and attempts."""
    return " ".join(_NUMBER.sub("#", summary[:_LONGEST]).split())
