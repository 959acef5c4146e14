"""What the judges say, as the driver's events want it. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.run.decide.actions import ranks_of
from phalanx.run.decide.events import Fault, SuspectsNamed
from phalanx.run.decide.state import State
from phalanx.run.judge.rules import Matcher
from phalanx.run.judge.suspects import Suspects, find_suspects, place_of, waits_of
from phalanx.run.messages import RankEvidence, WorkerEnded

_WAITS, _WAIT_CHARACTERS = 3, 300
"""Of what ranks do so much is told; the stacks of all are beside the page."""


def class_of(matcher: Matcher, ended: WorkerEnded) -> Fault | None:
    """The class of the fault that ended a rank, by the last of its lines that a rule knows; None: there is none."""
    for line in reversed([*ended.text.splitlines(), ended.summary]):
        rule = matcher.find(line, "output")
        if rule is not None and rule.severity != "note" and rule.fault != "unknown":
            return rule.fault
    return None


def by_its_end(ended: WorkerEnded) -> Fault:
    """The same, where nothing else tells, by how it ended.

    A Python exception is taken for the program's; the decision needs more than that to blame it.
    """
    return "user" if ended.kind in ("user", "syntax", "raised") else "process"


def suspects_named(state: State, evidence: Sequence[RankEvidence], at_s: float) -> SuspectsNamed:
    """Who holds up the others, by the evidence."""
    per_host = state.job.workers_per_host
    host_of = {rank: host for place, host in enumerate(state.placement) for rank in ranks_of(place, per_host)}
    found = find_suspects(evidence, host_of)
    ranks, members = ((), found.ranks) if found.is_group else (found.ranks, ())
    group = "ranks that share a fault" if found.is_group else ""
    is_proven = _is_proven(found, evidence)
    waits = tuple(str(wait)[:_WAIT_CHARACTERS] for wait in waits_of(evidence)[:_WAITS])
    place = place_of(evidence)
    return SuspectsNamed(at_s, state.attempt, ranks, found.why, group, members, is_proven, place, waits)


def _is_proven(found: Suspects, evidence: Sequence[RankEvidence]) -> bool:
    """Whether more than that they stand still tells against these ranks."""
    if found.by == "state":  # one that waits in the kernel may do so for a disk that is slow, or for a debugger
        return all(one.state in ("T", "Z", "X") for one in evidence if one.rank in found.ranks)
    return found.by in ("silence", "collective")
