"""What a person may choose of how a job is kept running, and what the job is."""

from __future__ import annotations

from typing import Literal

import msgspec

from phalanx.core.errors import UserError
from phalanx.run.decide.events import CheckKind


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How recoveries are decided. Every duration is in seconds."""

    advise_only: bool = False  # faults lead to alerts about what would be done, and nothing is done
    # Without a replacement for a host, ``wait`` for one, or ``shrink`` to fewer hosts.
    when_missing: Literal["wait", "shrink"] = "wait"
    replace_wait_s: float = 300.0  # with ``shrink``, how long a replacement is waited for first
    give_up_s: float = 1800.0  # how long the job waits for hosts before it ends with status 3; 0: for ever
    grow: bool = True  # a job that has shrunk restarts with more hosts when they are there and steps have been made
    # A host that is found slow is replaced when a spare is ready; else there is only an alert.
    replace_slow: bool = False
    slow_factor: float = 1.1  # from how many times the usual step time on it is replaced
    # A host that the judge of machines advises to evict is replaced when a spare is ready; else there is only an alert.
    replace_faulty: bool = False
    faulty_per_hour: int = 2  # so many of them in an hour; of more there is an alert
    joining_check: CheckKind = "quick"  # what a host has to pass before it may take part
    active_check: Literal["quick", "full"] = "quick"  # what a suspect has to pass before it may take part again
    # How long the first failure's own report is waited for, when one may only follow from another's.
    settle_s: float = 0.4
    # How long the other ranks are waited for where one refuses its input (exit status 2) before any step: what all
    # refuse is bad input, what one refuses may be its host's.
    refusal_s: float = 10.0
    evidence_s: float = 3.0  # how long evidence and its judgement are waited for before workers that hang are killed
    store_s: float = 10.0  # limit for opening a rendezvous store
    start_s: float = 120.0  # limit for the start of an attempt's processes
    stop_s: float = 15.0  # limit for their end, with device memory given back
    unknown_stop_s: float = 3.0  # the same for a host that has not been heard of for a while
    # How long an end, or a check of a recovery, is waited for where most hosts do not answer at once: that is rather
    # the driver's own network.
    cut_off_s: float = msgspec.field(default=300.0, name="together_stop_s")  # what journals call it
    grace_s: float = 30.0  # between SIGTERM and SIGKILL when a person stops the job, or its time is short
    passive_check_s: float = 5.0  # limit for the answer of a check, as the next two
    quick_check_s: float = 30.0
    full_check_s: float = 600.0
    max_restarts_without_step: int = 3  # restarts in a row without progress before the job ends with status 4
    # An attempt that has made steps for so long is not a crash loop, where neither its steps nor checkpoints tell how
    # far it got.
    healthy_s: float = 1200.0
    max_restarts: int = 0  # recoveries in all before it does; 0: no limit
    backoff_s: float = 2.0  # pause before the second restart without progress; doubles with each; the first has none
    backoff_limit_s: float = 60.0  # to which the pause grows
    fault_window_s: float = 6 * 3600.0  # how long a fault of a host, a place or a group counts against it

    def __post_init__(self) -> None:
        for name in _LIMITS:
            _at_least(name, getattr(self, name), 0.05, "a limit of zero would pass before any answer")
        for name in _FROM_ZERO:
            _at_least(name, getattr(self, name), 0, "it cannot be negative")
        _at_least("faulty_per_hour", self.faulty_per_hour, 1, "no host would be replaced; replace_faulty says so")
        _at_least("max_restarts_without_step", self.max_restarts_without_step, 1, "a job must be able to restart once")
        _at_least("slow_factor", self.slow_factor, 1.01, "a usual step would be slow")
        _at_least("backoff_limit_s", self.backoff_limit_s, self.backoff_s, "it is below backoff_s")


_LIMITS = (
    *("evidence_s", "store_s", "start_s", "stop_s", "unknown_stop_s", "cut_off_s", "fault_window_s", "healthy_s"),
    *("passive_check_s", "quick_check_s", "full_check_s"),
)
_FROM_ZERO = ("replace_wait_s", "give_up_s", "settle_s", "refusal_s", "grace_s", "max_restarts", "backoff_s")


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to run."""

    name: str
    hosts: int  # how many take part
    workers_per_host: int = 1  # ranks on each
    spares: int = 0  # hosts that are kept ready beside those
    # Smaller numbers of hosts that it may shrink to; empty: every divisor of `hosts`.
    allowed_hosts: tuple[int, ...] = ()
    # An earlier version of the code to go back to, in words of whoever starts it; empty: none.
    previous_version: str = ""

    def __post_init__(self) -> None:
        _at_least("hosts", self.hosts, 1, "a job needs a host")
        _at_least("workers_per_host", self.workers_per_host, 1, "a host needs a worker")
        _at_least("spares", self.spares, 0, "it cannot be negative")
        for count in self.allowed_hosts:
            if not 1 <= count <= self.hosts:
                cure = f"name numbers from 1 to {self.hosts} (hosts)"
                raise UserError("no number of hosts to shrink to", cure=cure, field="allowed_hosts", value=count)

    def sizes(self) -> tuple[int, ...]:
        """Every number of hosts that it may run on, the largest first."""
        smaller = self.allowed_hosts or [n for n in range(1, self.hosts) if self.hosts % n == 0]
        return tuple(sorted({self.hosts, *smaller}, reverse=True))


def _at_least(field: str, value: float, least: float, problem: str) -> None:
    # Written so that NaN is refused too.
    if not value >= least:
        raise UserError(problem, cure=f"set it to at least {least:g}", field=field, value=value)
