"""What all judges say of runs: made in a process of its own, one run at a time, and kept until the run's files change.

Judges read much and compute; a page does not wait for them. It shows what is known, and the rest when it comes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.detect.judges import JUDGES, Judge

BOUND_S = 120.0
"""For all judges of a run; what has not come then is given up."""

_REST_S = 15.0
"""Of a run that goes on, judges rest for so long between two looks, and at least as long as they took."""

_MOST_KEPT = 32
_COMMAND = (sys.executable, "-m", "phalanx.detect.judges")


@dataclass(frozen=True)
class Findings:
    """What is known now.

    Attributes:
        verdicts: by judge, as `phalanx.detect.detection.JudgeVerdict.as_json`.
        pending: judges that have not said anything of this run yet.
        made_unix_s: when the newest look began; None: none has.
        is_judging: whether one goes on, or waits for its turn.
    """

    verdicts: Mapping[str, Mapping[str, Any]]
    pending: tuple[Judge, ...]
    made_unix_s: float | None
    is_judging: bool

    @property
    def wrong(self) -> list[Mapping[str, Any]]:
        """Detections of all judges, each with its ``judge``; those that blame a machine first, then the surest."""
        found = [
            {**one, "judge": verdict["judge"]} for verdict in self.verdicts.values() for one in verdict["detections"]
        ]
        return sorted(found, key=lambda one: (one["advice"] not in ("evict", "exclude", "check"), -one["confidence"]))

    def of_host(self, name: str, ranks: Sequence[int]) -> list[Mapping[str, Any]]:
        """Those of `wrong` in which a host or its ranks are to blame."""
        return [
            one
            for one in self.wrong
            if any(name in who["hosts"] or set(ranks) & set(who["ranks"]) for who in one["who"])
        ]


@dataclass
class _Look:
    """One run, looked at now or last."""

    stamp: object = None
    began_unix_s: float | None = None
    ended_s: float = 0.0
    took_s: float = 0.0
    is_on: bool = False
    verdicts: dict[str, Mapping[str, Any]] = field(default_factory=dict)


class RunFindings:
    """Findings by run folder; may be used from several threads.

    Args:
        command: the process that writes a line of JSON for each judge; the run folder is added.
        bound_s: after which it is killed.
    """

    def __init__(
        self,
        unix_s: Callable[[], float] = time.time,
        command: Sequence[str] = _COMMAND,
        bound_s: float = BOUND_S,
    ) -> None:
        self._unix_s, self._command, self._bound_s = unix_s, tuple(command), bound_s
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._looks: OrderedDict[Path, _Look] = OrderedDict()

    def known(self, run: Path) -> Findings:
        """What is known without asking anybody."""
        with self._lock:
            return self._told(self._looks.get(run, _Look()))

    def asked(self, run: Path, stamp: object) -> Findings:
        """What is known; judges are asked where the run's files have changed since.

        Args:
            run: its folder.
            stamp: equal while its files are the same.
        """
        with self._lock:
            look = self._looks.setdefault(run, _Look())
            self._looks.move_to_end(run)
            while len(self._looks) > _MOST_KEPT:
                self._looks.popitem(last=False)
            rested = time.monotonic() - look.ended_s >= max(_REST_S, look.took_s)
            if not look.is_on and (look.began_unix_s is None or (look.stamp != stamp and rested)):
                look.is_on, look.stamp, look.began_unix_s = True, stamp, self._unix_s()
                threading.Thread(target=self._judge, args=(run, look), name="judges", daemon=True).start()
            return self._told(look)

    def _told(self, look: _Look) -> Findings:
        pending = tuple(judge for judge in JUDGES if judge.name not in look.verdicts)
        return Findings(dict(look.verdicts), pending, look.began_unix_s, look.is_on)

    def _judge(self, run: Path, look: _Look) -> None:
        with self._turn:  # one run at a time: the host has other things to do
            began_s = time.monotonic()
            heard, problem = set(), ""
            try:
                for verdict in self._lines(run):
                    heard.add(verdict["judge"])
                    with self._lock:
                        look.verdicts[verdict["judge"]] = verdict
            except (OSError, ValueError, UserError) as error:
                problem = f"the judges could not be asked ({error})"
            took_s = time.monotonic() - began_s
            if took_s >= self._bound_s:
                problem = f"the judges took longer than {self._bound_s:.0f} s"
            with self._lock:
                for judge in JUDGES:
                    if judge.name not in heard:
                        why = f"{problem or 'it ended without a word'}; ask it alone: phalanx detect {judge.name} {run}"
                        look.verdicts[judge.name] = _silent(judge, why)
                look.is_on, look.ended_s, look.took_s = False, time.monotonic(), took_s

    def _lines(self, run: Path) -> Any:
        """Verdicts as they come; what is written besides is not read."""
        with subprocess.Popen(
            [*self._command, str(run)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            ends = threading.Timer(self._bound_s, process.kill)
            ends.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    yield json.loads(line)
            finally:
                ends.cancel()
                process.kill()


def _silent(judge: Judge, why: str) -> dict[str, Any]:
    """The verdict of one that said nothing."""
    from phalanx.detect.detection import JudgeVerdict

    return JudgeVerdict(judge.name, abstains=(why,)).as_json()
