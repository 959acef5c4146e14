"""What a worker can do to itself, by the name of its kind. A new one needs a line here and one in `faults.kinds`."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.faults.injectors.base import Injector
from phalanx.faults.injectors.ends import abort, exception, leave, segfault, send_signal
from phalanx.faults.injectors.load import cpu_hog, evaluation, log_lines, long_checkpoint
from phalanx.faults.injectors.memory import out_of_memory
from phalanx.faults.injectors.numbers import corruption, nan
from phalanx.faults.injectors.slow import slow
from phalanx.faults.injectors.stalls import busy_loop, deadlock, pause, sleep

INJECTORS: Mapping[str, Injector] = {
    "exception": exception,
    "exit": leave,
    "signal": send_signal,
    "pause": pause,
    "segfault": segfault,
    "abort": abort,
    "deadlock": deadlock,
    "sleep": sleep,
    "busy-loop": busy_loop,
    "out-of-memory": out_of_memory,
    "nan": nan,
    "corruption": corruption,
    "slow": slow,
    "evaluation": evaluation,
    "log-lines": log_lines,
    "cpu-hog": cpu_hog,
    "long-checkpoint": long_checkpoint,
}
