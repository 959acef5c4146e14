"""Sentences for people about a recovery: what was seen, and what would be done. Pure; torch-free."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.run.decide import brakes, ladder, user_code
from phalanx.run.decide.state import Failure, State

_NAMES_SHOWN = 5
_SAID_CHARACTERS = 160


def names(hosts: Iterable[str]) -> str:
    """Such as ``a, b, c and 497 more``."""
    every = list(hosts)
    more = len(every) - _NAMES_SHOWN
    return ", ".join(every[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def of_failure(host: str, failure: Failure) -> str:
    """Such as ``rank 3 on node7: killed by SIGKILL (step 12)``."""
    who = f"rank {failure.rank} on {host}" if failure.rank >= 0 else host
    return f"{who}: {failure.summary}" + (f" (step {failure.step})" if failure.step >= 0 else "")


def read_log(rank: int, said: str = "") -> str:
    """What a person should do about a rank that its own script has ended; `said`: its last words, in one line."""
    return f"read the log of rank {rank}{f' ({said[:_SAID_CHARACTERS]})' if said else ''}: phalanx run logs {rank}"


def together(state: State) -> str:
    """What single lines of the report do not say: how many ranks have failed, and how; empty: nothing more."""
    recovery = state.recovery
    if recovery is None:
        return ""
    own = [(host, f) for host, failures in recovery.failures.items() for f in failures if not f.follows]
    follow = sum(f.follows for failures in recovery.failures.values() for f in failures)
    parts = [f"{len(own)} ranks failed by themselves, first {of_failure(*own[0])}"] if len(own) > 1 else []
    parts += [f"{follow} {'rank' if follow == 1 else 'ranks'} failed only because a peer was gone"] if follow else []
    parts += [f"shared by {recovery.group}"] if recovery.group else []
    return "; ".join(parts)


def would_do(state: State) -> str:
    """What would be done now if the policy did more than advise."""
    recovery = state.recovery
    if recovery is None:
        return "nothing would be done"
    ending = user_code.verdict(state) or brakes.verdict(state.policy, brakes.pressed(state))
    if ending is not None:
        return f"all workers would be stopped and the job ended with status {ending.status}: {ending.reason}"
    first = "evidence would be gathered, then " if recovery.cause == "hang" else ""
    plan = ladder.plan(state, recovery)
    return f"{first}all workers would be stopped, and then: {plan.what} ({plan.why})"
