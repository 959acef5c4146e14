"""The system around a job: clock, limits of a process, settings of the kernel, timeouts in the environment.

Timeouts: does each one that has to wait for another last longer? A network card that flaps is back after seconds. If
NCCL gives up before, the job is lost; if the watchdog of torch's watchdog ends the process before the collective's own
timeout, nobody learns which collective hung.
"""

from __future__ import annotations

import re
import resource
from collections import Counter
from collections.abc import Mapping

from phalanx.checks.check_host import Check, CheckResult, Host, failed, passed, skipped
from phalanx.checks.pairwise_tests import Threshold
from phalanx.checks.peer_bandwidth import PeerError, PeerMeasure, measure_peer, read_key
from phalanx.checks.thresholds import given_threshold
from phalanx.core.host import list_folder, read_text

_CLOCK_NAME = "clock"
_CLOCK_ACTION = "set it right: systemctl restart chrony (or systemd-timesyncd), and look why it was not"
_MOST = Threshold(1.0, "what etcd tolerates between its members; stores refuse requests at 900")


def check_clock(host: Host) -> CheckResult:
    """Ask the daemon that keeps the clock, and compare with the peers."""
    synchronised = ask_daemon(host)
    measured, problems = [], []

    def clock_ns() -> int:
        return round(host.unix_s() * 1e9)

    for address in host.peers:
        try:
            key = read_key(host.peer_key) if host.peer_key else None
            limits: dict[str, float] = {"limit_s": 2.0, "within_s": 5.0}
            measured.append(measure_peer(address, transfer_bytes=0, clock_ns=clock_ns, key=key, **limits))
        except (PeerError, ValueError) as error:
            problems.append(str(error))
    if not measured:
        if synchronised is None:
            return skipped(_CLOCK_NAME, "; ".join(problems) or "no peers given, and no daemon tells of it")
        return passed(_CLOCK_NAME, "; ".join(problems) or "kept by NTP" if synchronised else "not synchronised by NTP")
    return judge_clock(measured, synchronised, given_threshold(host, _CLOCK_NAME) or _MOST)


def judge_clock(measured: list[PeerMeasure], synchronised: bool | None, threshold: Threshold) -> CheckResult:
    """The verdict: ours is wrong when it is off from most peers; when it is off from few, they are."""
    off = [each for each in measured if abs(each.clock_ahead_s) - each.clock_error_s > threshold.value]
    worst = max(measured, key=lambda each: abs(each.clock_ahead_s))
    is_ours = 2 * len(off) > len(measured)
    sides = {each.peer: "ahead of us" if each.clock_ahead_s > 0 else "behind us" for each in off}
    bad = {each.peer: f"its clock is {abs(each.clock_ahead_s):.3g} s {sides[each.peer]}" for each in off}
    notes = [f"{peer}: {why}" for peer, why in bad.items()]
    if synchronised is False:
        notes.append("not synchronised by NTP")
    if off and not is_ours:
        notes.append("ours agrees with most")
    return CheckResult(
        _CLOCK_NAME,
        "fail" if is_ours else "pass",
        "; ".join(notes),
        abs(worst.clock_ahead_s),
        "s off",
        threshold.value,
        threshold.source,
        _CLOCK_ACTION if is_ours else "",
        bad,
    )


def ask_daemon(host: Host) -> bool | None:
    """Whether chrony or systemd says that the clock is synchronised; None: neither can be asked."""
    answer = host.run(["chronyc", "-n", "tracking"], 0.5)
    if answer is not None and (match := re.search(r"^Leap status\s*:\s*(.+)$", answer, re.MULTILINE)):
        return match[1].strip() != "Not synchronised"
    answer = host.run(["timedatectl", "show", "--property=NTPSynchronized", "--value"], 0.5)
    return None if answer is None or answer.strip() not in ("yes", "no") else answer.strip() == "yes"


CLOCK = Check(_CLOCK_NAME, "the clock is kept, and agrees with the peers'", "quick", check_clock, limit_s=15.0)


_LIMITS_NAME = "limits"

FEWEST_FILES = 1024
"""What Linux gives by default; loaders, sockets to every peer and checkpoints need at least that."""

FEWEST_PROCESSES = 1024

_CAP_IPC_LOCK = 14


def check_limits(host: Host) -> CheckResult:
    """Read the limits of this process, which a job started from here inherits."""
    read = {
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "processes": resource.getrlimit(resource.RLIMIT_NPROC)[0],
        "pinned": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    }
    pins = bool(list_folder(host.sys / "class/infiniband")) and not may_pin(read_text(host.proc / "self/status") or "")
    return judge_limits(read, has_rdma=pins)


def may_pin(status: str) -> bool:
    """Whether /proc/self/status says that limits of pinned memory do not hold for this process (CAP_IPC_LOCK)."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> _CAP_IPC_LOCK & 1)


def judge_limits(limits: Mapping[str, int], *, has_rdma: bool) -> CheckResult:
    """The verdict on soft limits, of which -1 is none; `has_rdma`: the one of pinned memory matters."""
    bad, cures = [], []
    if 0 <= limits["files"] < FEWEST_FILES:
        bad.append(f"only {limits['files']} open files, fewer than {FEWEST_FILES}")
        cures.append("ulimit -n")
    if 0 <= limits["processes"] < FEWEST_PROCESSES:
        bad.append(f"only {limits['processes']} processes, fewer than {FEWEST_PROCESSES}")
        cures.append("ulimit -u")
    if has_rdma and limits["pinned"] >= 0:
        bad.append(f"only {limits['pinned']} bytes may be pinned, and RDMA pins its buffers")
        cures.append("ulimit -l unlimited")
    if bad:
        return failed(_LIMITS_NAME, "; ".join(bad), f"raise it: {', '.join(cures)}, or /etc/security/limits.conf")
    shown = ", ".join(f"{name} {'unlimited' if value < 0 else value}" for name, value in limits.items())
    return passed(_LIMITS_NAME, shown)


LIMITS = Check(_LIMITS_NAME, "enough open files, processes and pinned memory", "passive", check_limits)


def check_tuning(host: Host) -> CheckResult:
    """Read governor, huge pages and NUMA balancing: notes, no verdict, since a host may have its reasons."""
    notes = []
    folders = list_folder(host.sys / "devices/system/cpu")
    read = (read_text(folder / "cpufreq/scaling_governor") for folder in folders if folder.name.startswith("cpu"))
    governors = Counter(filter(None, read))
    if set(governors) - {"performance"}:
        named = ", ".join(f"{count} cores {name}" for name, count in sorted(governors.items()))
        notes.append(f"CPU governor: {named}; steady steps want performance (cpupower frequency-set -g performance)")
    match = re.search(r"\[(\w+)\]", read_text(host.sys / "kernel/mm/transparent_hugepage/enabled") or "")
    if match:
        notes.append(f"transparent huge pages: {match[1]}")
    nodes = [each for each in list_folder(host.sys / "devices/system/node") if re.fullmatch(r"node\d+", each.name)]
    if len(nodes) > 1 and read_text(host.proc / "sys/kernel/numa_balancing") not in (None, "0"):
        notes.append(
            "the kernel moves pages between NUMA nodes; ranks that are bound gain without: kernel.numa_balancing=0"
        )
    return passed("tuning", "; ".join(notes))


TUNING = Check("tuning", "note: CPU governor, huge pages, NUMA balancing", "passive", check_tuning)


_TIMEOUTS_NAME = "timeouts"

FLAP_S = 10.0
"""A flap "lasts several seconds" (MegaScale, 6.3); links of 400 Gb/s train for some seconds more."""

# NCCL's and torch's own defaults (NCCL 2.28, torch 2.13).
_IB_TIMEOUT, _IB_RETRIES = 20, 7
_HEARTBEAT_S = 480.0
_DUMP_S = 15.0

COLLECTIVE_S = 600.0
"""What torch gives a collective of NCCL, unless init_process_group is told otherwise."""


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
        return failed(_TIMEOUTS_NAME, "; ".join(problems), "; ".join(cures))
    note = f"none is set; by default NCCL waits {ib_wait_s(_IB_TIMEOUT, _IB_RETRIES):.0f} s for a link"
    return passed(_TIMEOUTS_NAME, "" if reader.used else note)


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


def _check_timeouts(host: Host) -> CheckResult:
    return judge_timeouts(host.environment)  # that a job would have


TIMEOUTS = Check(_TIMEOUTS_NAME, "timeouts of NCCL and torch are in order", "passive", _check_timeouts)
