"""A check in a process of its own: asked through stdin, answering through stdout, killed at its limit."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict

from phalanx.checks.check_host import Check, CheckResult, Host, failed, host_from_settings
from phalanx.ipc.processes import die_with_parent, name_process

_KILL_S = 1.0

LOOK_AT_WHAT_HANGS = "look at what hangs: dmesg, ps -eo pid,stat,wchan"


def run_isolated(check: Check, host: Host) -> CheckResult:
    """Run a check in another process, and give up on it at its limit even if the kernel does not let go of it."""
    request = {
        "module": check.run.__module__,
        "function": check.run.__qualname__,
        "host": host.settings(),
        "parent": os.getpid(),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **host.environment},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(json.dumps(request).encode(), timeout=check.limit_s)
    except subprocess.TimeoutExpired:
        _kill_group(process.pid)
        reason = f"no answer within {check.limit_s:g} s"
        try:
            process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            reason += f"; process {process.pid} is stuck in the kernel"
        return failed(check.name, reason, LOOK_AT_WHAT_HANGS)
    _kill_group(process.pid)  # what it may have left behind
    with contextlib.suppress(ValueError, TypeError):
        return CheckResult(**{**json.loads(output), "name": check.name})
    # Without an answer it has crashed.
    status, lines = process.returncode, errors.decode(errors="replace").strip().splitlines()
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    reason = f"the check {how}" + (f": {lines[-1]}" if lines else "")
    return failed(check.name, reason, "report this; look at the host")


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def main() -> None:
    """Answer one request. What the check prints goes to stderr, so that it cannot be taken for the answer."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    die_with_parent(request["parent"])
    name_process("phalanx check")
    run = getattr(importlib.import_module(request["module"]), request["function"])
    result: CheckResult = run(host_from_settings(request["host"]))
    answer.write(json.dumps(asdict(result)))
    answer.flush()
    os._exit(0)  # libraries that hang, or crash, at their end are not what is tested


if __name__ == "__main__":
    main()
