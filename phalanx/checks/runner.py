"""Runs the checks side by side where they do not disturb each other; none takes the others down or keeps them waiting.

`CHECKS` holds them all in the order in which they are shown. To add one: write a file with a `CHECK`, and name it here.

A check that only reads files of the kernel runs in a thread, any other in a process of its own. A check that crashes or
does not answer within its limit has failed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from phalanx.checks import cpu, disks, gpu, leftover_processes, memory, network, nic, system_settings
from phalanx.checks.check_host import LEVELS, Check, CheckResult, Host, Level, failed
from phalanx.checks.isolated_check import LOOK_AT_WHAT_HANGS, run_isolated
from phalanx.core.errors import UserError

CHECKS: tuple[Check, ...] = (
    cpu.CORES,
    cpu.GEMM,
    cpu.GEMM_REPEAT,
    memory.SIZE,
    memory.ERRORS,
    memory.BANDWIDTH,
    memory.SWAP,
    gpu.COUNT,
    gpu.MEMORY,
    gpu.ECC,
    gpu.ROWS,
    gpu.THROTTLE,
    gpu.NVLINK,
    gpu.XID,
    gpu.COPY,
    gpu.PRODUCTS,
    nic.LINK,
    nic.RATE,
    nic.FLAPS,
    nic.ERRORS,
    network.LOOPBACK,
    network.PEERS,
    network.ALL_TO_ALL,
    disks.SPACE,
    disks.DISK,
    disks.STORAGE,
    system_settings.CLOCK,
    leftover_processes.CHECK,
    system_settings.TIMEOUTS,
    memory.SHM,
    system_settings.LIMITS,
    system_settings.TUNING,
)


def named(names: Iterable[str], checks: tuple[Check, ...] = CHECKS) -> list[Check]:
    """The checks of these names, in their order; raises `UserError` for a name that none has."""
    names = list(names)
    known = [check.name for check in checks]
    for name in names:
        if name not in known:
            raise UserError("there is no such check", cure=f"one of {', '.join(known)}", value=name)
    return [check for check in checks if check.name in names]


_ISOLATION_S = 3.0  # to start a process and, if need be, to kill it

OnResult = Callable[[CheckResult], None]


def choose(checks: Iterable[Check], level: Level) -> list[Check]:
    """Those of a set: it contains the smaller sets."""
    return [check for check in checks if LEVELS.index(check.level) <= LEVELS.index(level)]


def waves(checks: Iterable[Check]) -> list[list[Check]]:
    """Checks that may run at the same time, wave after wave: each goes into the first where nothing it uses is taken.

    What reads only goes first, before anything keeps the host busy.
    """
    readers = [check for check in checks if not check.uses]
    found: list[list[Check]] = [readers]
    for check in checks:
        if not check.uses:
            continue
        for wave in found[1:]:
            if not any(check.uses & other.uses for other in wave):
                wave.append(check)
                break
        else:
            found.append([check])
    return [wave for wave in found if wave]


def run_checks(checks: Sequence[Check], host: Host, on_result: OnResult | None = None) -> list[CheckResult]:
    """Run all of them, and return what they found in their order. It blocks; it raises nothing that a check raises.

    Args:
        on_result: called with each result as soon as it is there.
    """
    found: dict[str, CheckResult] = {}
    for wave in waves(checks):
        for result in _run_wave(wave, host):
            found[result.name] = result
            if on_result:
                on_result(result)
    return [found[check.name] for check in checks]


def _run_wave(wave: list[Check], host: Host) -> Iterable[CheckResult]:
    answers: queue.Queue[CheckResult] = queue.Queue()
    began = time.monotonic()
    waiting = {check.name: check for check in wave}
    for check in wave:
        work = run_isolated if check.isolated else run_guarded
        # Daemons: Python must not wait at its end for one that hangs.
        threading.Thread(
            target=lambda check=check, work=work: answers.put(work(check, host)),
            name=f"check {check.name}",
            daemon=True,
        ).start()
    while waiting:
        deadline = began + min(_limit_s(check) for check in waiting.values())
        try:
            result = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            for late in [check for check in waiting.values() if time.monotonic() >= began + _limit_s(check)]:
                del waiting[late.name]
                yield failed(late.name, f"no answer within {late.limit_s:g} s", LOOK_AT_WHAT_HANGS)
            continue
        if waiting.pop(result.name, None):
            yield result


def _limit_s(check: Check) -> float:
    return check.limit_s + (_ISOLATION_S if check.isolated else 0.0)


def run_guarded(check: Check, host: Host) -> CheckResult:
    """Run a check here; what it raises is a failure."""
    try:
        return replace(check.run(host), name=check.name)
    except Exception as error:
        reason = f"the check crashed: {type(error).__name__}: {error}"
        return failed(check.name, reason, "report this; look at the host")
