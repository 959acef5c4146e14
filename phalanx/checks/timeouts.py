"""Timeouts in the environment: does each one that has to wait for another last longer? Pure, over the environment.

A network card that flaps is back after seconds. If NCCL gives up before, the job is lost; if torch's watchdog of the
watchdog ends the process before the collective's own timeout, nobody learns which collective hung.
"""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.checks.contract import Check
from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult, failed, passed

_NAME = "timeouts"

FLAP_S = 10.0
"""A flap "lasts several seconds" (MegaScale, 6.3); links of 400 Gb/s train for some seconds more."""

# NCCL's and torch's own defaults (NCCL 2.28, torch 2.13).
_IB_TIMEOUT, _IB_RETRIES = 20, 7
_HEARTBEAT_S = 480.0
_DUMP_S = 15.0

COLLECTIVE_S = 600.0
"""What torch gives a collective of NCCL, unless init_process_group is told otherwise."""


def run(host: Host) -> CheckResult:
    """Judge the environment that a job would have."""
    return judge_timeouts(host.environment)


def judge_timeouts(
    environment: Mapping[str, str],
    *,
    collective_s: float = COLLECTIVE_S,
    soft_s: float | None = None,
    hard_s: float | None = None,
) -> CheckResult:
    """The verdict on variables of NCCL and torch.

    Args:
        collective_s: for how long a collective may take, as the process group was told.
        soft_s, hard_s: when a job that makes no progress is warned, and when it is ended.
    """
    reader = _Reader(environment)
    found = [*_network(reader, collective_s), *_watchdog(reader)]
    if soft_s is not None and hard_s is not None and soft_s >= hard_s:
        problem = f"the soft timeout of {soft_s:g} s is not below the hard one of {hard_s:g} s"
        found.append((problem, "lower the soft one"))
    problems = reader.problems + [problem for problem, _ in found]
    if problems:
        cures = [cure for _, cure in found] + ["give numbers"] * bool(reader.problems)
        return failed(_NAME, "; ".join(problems), "; ".join(cures))
    waits_s = ib_wait_s(_IB_TIMEOUT, _IB_RETRIES)
    return passed(_NAME, "" if reader.used else f"none is set; by default NCCL waits {waits_s:.0f} s for a link")


def ib_wait_s(timeout: float, retries: float) -> float:
    """For how long NCCL waits for a link: 4.096 us times 2 to the power of the timeout, at each try."""
    return float(4.096e-6 * 2**timeout * (retries + 1))


class _Reader:
    """Numbers of an environment; what is not one is a problem."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.used: list[str] = []
        self.problems: list[str] = []

    def number(self, name: str, default: float) -> float:
        text = self._environment.get(name)
        if text is None:
            return default
        self.used.append(name)
        try:
            return float(text)
        except ValueError:
            self.problems.append(f"{name}={text!r} is no number")
            return default

    def flag(self, name: str, default: bool) -> bool:
        text = self._environment.get(name)
        if text is None:
            return default
        self.used.append(name)
        return text.strip().lower() in ("1", "true", "yes", "y", "t")


def _network(reader: _Reader, collective_s: float) -> list[tuple[str, str]]:
    timeout = reader.number("NCCL_IB_TIMEOUT", _IB_TIMEOUT)
    retries = reader.number("NCCL_IB_RETRY_CNT", _IB_RETRIES)
    if timeout == 0:  # of InfiniBand: wait without end
        problem = "NCCL_IB_TIMEOUT=0 waits without end for a link that never comes back"
        return [(problem, f"set NCCL_IB_TIMEOUT={_IB_TIMEOUT}")]
    waits_s = ib_wait_s(timeout, retries)
    if waits_s < FLAP_S:
        problem = f"NCCL gives a link up after {waits_s:.3g} s, sooner than it is back from a flap ({FLAP_S:g} s)"
        return [(problem, f"set NCCL_IB_TIMEOUT={_IB_TIMEOUT} and NCCL_IB_RETRY_CNT={_IB_RETRIES}")]
    if waits_s > collective_s:
        problem = f"NCCL waits {waits_s:.3g} s for a link, longer than a collective may take ({collective_s:g} s)"
        return [(problem, "lower NCCL_IB_TIMEOUT or raise the timeout of the process group")]
    return []


def _watchdog(reader: _Reader) -> list[tuple[str, str]]:
    found = []
    heartbeat_s = reader.number("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", _HEARTBEAT_S)
    dump_s = reader.number("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", _DUMP_S * 1000) / 1000
    if reader.flag("TORCH_NCCL_ENABLE_MONITORING", True) and heartbeat_s <= dump_s:
        problem = f"torch's monitor ends a process after {heartbeat_s:g} s, before a record of {dump_s:g} s is written"
        found.append((problem, "raise TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC above TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"))
    if reader.number("TORCH_NCCL_ASYNC_ERROR_HANDLING", 3) == 0 and not reader.flag("TORCH_NCCL_BLOCKING_WAIT", False):
        problem = "TORCH_NCCL_ASYNC_ERROR_HANDLING=0: a collective that hangs is never ended"
        found.append((problem, "unset it, or set TORCH_NCCL_BLOCKING_WAIT=1"))
    return found


CHECK = Check(_NAME, "timeouts of NCCL and torch are in order", "passive", run)
