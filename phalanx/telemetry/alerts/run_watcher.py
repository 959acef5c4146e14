"""The watcher of a run: a process of its own that looks at it once a second, reports trouble, answers Prometheus.

It outlives whatever becomes of the ranks: rank 0 starts it in a session of its own and says on its stdin what to watch
and, at last, how the run ended. Where rank 0 dies without a word, that is what it reports. It ends with the run.
"""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from phalanx.core.errors import UserError
from phalanx.ipc.processes import identity_of, name_process
from phalanx.ipc.stop_request import STOP_SIGNALS
from phalanx.telemetry.alerts.alert_config import AlertsConfig, Kind
from phalanx.telemetry.alerts.alert_episodes import FOLDER, Alert, AlertLog, Episodes, Subject
from phalanx.telemetry.alerts.alert_receivers import Outbox, receivers_of
from phalanx.telemetry.alerts.alert_rules import EndSeen, Limits, Seen, Verdict, judge
from phalanx.telemetry.alerts.observed_run import RunWatch, WatchedRun, newest_written_s
from phalanx.telemetry.alerts.run_metrics import MetricsServer, TrainingFigures, figures_of
from phalanx.telemetry.alike_ranks import LEAST_RANKS
from phalanx.telemetry.run_list import is_locked, read_culprit, read_tail

if TYPE_CHECKING:
    from phalanx.telemetry.alerts.rank_paces import RankPaces

EVERY_S = 1.0
_LAST_WORD_S = 60.0
_SETTLE_S = 0.3
_LAUNCHER_S = 2.0
"""So long the launcher of several ranks may take to say which one was killed, after rank 0 has ended because of it."""
_LOG = "watcher.log"

_KEEPS_SPANS: tuple[Kind, ...] = ("stall", "not_finite", "loss_spike", "gradient_spike", "throughput", "slow_rank")

Ending = Literal["failed", "stopped", "finished"]


def limits_of(config: AlertsConfig) -> Limits:
    """For the rules."""
    return Limits(**{name: getattr(config, name) for name in Limits.__dataclass_fields__})


class Alerts:
    """From verdicts to messages: what begins is kept, and sent to all receivers."""

    def __init__(self, config: AlertsConfig, subject: Subject, outbox: Outbox[Alert], log: AlertLog) -> None:
        self._on, self._limits, self._subject = set(config.on), limits_of(config), subject
        self._outbox, self._log = outbox, log
        self.episodes = Episodes(subject.folder)

    def is_on(self, kind: Kind) -> bool:
        """Whether trouble of this kind is reported."""
        return kind in self._on

    def look(self, seen: Seen, now_s: float, but: Sequence[Kind] = ()) -> None:
        """Judge what was seen, and report what begins; `but`: kinds that somebody else judges."""
        verdicts = {kind: v for kind, v in judge(seen, self._limits).items() if kind in self._on and kind not in but}
        self.report(verdicts, now_s)

    def report(self, verdicts: dict[Kind, Verdict], now_s: float, *, each: bool = False) -> None:
        """Report the verdicts that begin an episode; `each`: one is no return of what was over just before."""
        for number, kind, verdict in self.episodes.begun(verdicts, now_s, each=each):
            alert = self._subject.alert(number, kind, verdict, now_s)
            self._log.raised(alert)
            self._outbox.send(alert)
            if kind in _KEEPS_SPANS:
                _keep_spans(self._subject.folder / "telemetry", kind, alert.title, alert.step, now_s)

    def close(self, within_s: float, *, hurries: bool = False) -> None:
        """Let what waits be sent, for so long at most; where it `hurries`, without long pauses between tries."""
        self._outbox.close(within_s, hurries=hurries)


def _keep_spans(telemetry: Path, kind: Kind, title: str, step: int | None, now_s: float) -> None:
    """Where spans are recorded, those of this time are kept, and it is an incident of the run for whoever asks."""
    if telemetry.is_dir():
        from phalanx.telemetry.span_writer import note_incident  # it imports Arrow

        with suppress(OSError):
            note_incident(telemetry, kind, int(now_s * 1e9), step=step, title=title)


def make_alerts(config: AlertsConfig, run: str, folder: Path) -> Alerts:
    """The alerts of a run.

    Raises:
        UserError: a receiver cannot be; see `receivers_of`.
    """
    log = AlertLog(folder)
    outbox = Outbox(receivers_of(config, os.environ), log.delivered)
    return Alerts(config, Subject(run, folder, platform.node(), config.link), outbox, log)


class Watcher:
    """What the process does, once a second."""

    def __init__(self, run: WatchedRun, config: AlertsConfig, restarts: int) -> None:
        self._watch, self._restarts = RunWatch(run), restarts
        self.alerts = make_alerts(config, run.name, Path(run.folder)) if config.is_on else None
        self.figures: TrainingFigures | None = None
        self._saved_s = newest_written_s(run.checkpoints) or time.time()
        self._last_step: tuple[int | None, float] = (None, time.time())
        self._paces = self._paces_of(run, config)

    def _paces_of(self, run: WatchedRun, config: AlertsConfig) -> RankPaces | None:
        """What compares the ranks, where that is asked for and there are enough of them; it imports Arrow."""
        if self.alerts is None or not self.alerts.is_on("slow_rank") or run.world_size < LEAST_RANKS:
            return None
        from phalanx.telemetry.alerts.rank_paces import RankPaces

        folder = Path(run.folder) / "telemetry"
        return RankPaces(folder, config.slow_rank_for_s, config.slow_rank_excess, since_s=time.time())

    def look(self, end: EndSeen | None = None) -> None:
        """Look at the run, judge it, and publish its figures."""
        now_s = time.time()
        seen = self._watch.look(end)
        if self._paces is not None and end is None:
            seen = replace(seen, paces=self._paces.look())
        if seen.step != self._last_step[0]:
            self._last_step = seen.step, now_s - (seen.quiet_s or 0.0 if seen.phase == "step" else 0.0)
        if self.alerts is not None:
            self.alerts.look(seen, now_s)
        self.figures = self._figures(seen)

    def end_without_word(self) -> EndSeen | None:
        """How the run ended where its process is gone; None: it lives."""
        if self._watch.is_alive:
            return None
        who = f"process {self._watch.run.pid} of rank 0"
        return EndSeen("failed", f"{who} is gone without a word: it was killed, or it crashed")

    def _figures(self, seen: Seen) -> TrainingFigures:
        history, alerts = self._watch.history, self.alerts
        return figures_of(
            self._watch.run.name,
            history,
            step=seen.step,
            total_steps=seen.total_steps,
            last_step_s=self._last_step[1] if seen.steps_here else None,
            checkpoint_s=history.saved_at_s if history.counts["checkpoints"] else self._saved_s,
            restarts=self._restarts,
            disks=seen.disks,
            alerts=None if alerts is None else dict(alerts.episodes.counts),
            active={} if alerts is None else dict(alerts.episodes.active),
            ended="" if seen.end is None else seen.end.kind,
        )


def watch(source: IO[bytes]) -> int:
    """Watch the run that the first line of `source` describes, until it has ended."""
    given = json.loads(source.readline())
    run = WatchedRun(**given["run"])
    config = AlertsConfig.model_validate(given["alerts"])
    watcher = Watcher(run, config, given["restarts"])
    server = None
    if given["listen_fd"] is not None:
        server = MetricsServer(socket.socket(fileno=given["listen_fd"]), lambda: watcher.figures)
    orders = _Orders(source.fileno())
    end: EndSeen | None = None
    while end is None:
        watcher.look()
        end = _heard(orders, watcher, EVERY_S)
    end = _as_its_launcher_has_it(run, end, given["restarts"] + 1)
    # The last lines of its figures may be under way.
    watcher.look()
    watcher.look(end)
    until_s = time.monotonic() + _LAST_WORD_S
    if watcher.alerts is not None:
        watcher.alerts.close(_LAST_WORD_S)
    if server is not None:
        _linger(Path(run.folder), until_s)
    return 0


def _heard(orders: _Orders, watcher: Watcher, within_s: float) -> EndSeen | None:
    """How the run ended, if it does so within so long: by its own word, or without one."""
    if (end := orders.wait(within_s)) is not None:
        return end
    gone = watcher.end_without_word()
    # It may have spoken, and ended, since the pipe was read: what it said before its end is there by now.
    return None if gone is None else orders.wait(0.0) or gone


def _as_its_launcher_has_it(run: WatchedRun, end: EndSeen, start: int) -> EndSeen:
    """The rank that was killed, where the launcher knows of one: what rank 0 says came of that."""
    until_s = time.monotonic() + (_LAUNCHER_S if run.ranks > 1 and end.kind == "failed" else 0.0)
    while run.ranks > 1:
        culprit = read_culprit(Path(run.folder))
        if culprit is not None and culprit.start == start:
            return EndSeen("failed", culprit.why, (culprit.why,))
        if time.monotonic() >= until_s:
            break
        time.sleep(0.05)
    return end


def _linger(run: Path, until_s: float) -> None:
    """Prometheus is to read how the run ended; but when its folder is taken again, the next start wants the port."""
    was_free = False
    while time.monotonic() < until_s:
        is_taken = is_locked(run)
        if is_taken and was_free:
            return
        was_free = was_free or not is_taken
        time.sleep(_SETTLE_S)


class _Orders:
    """Lines on stdin after the first: how the run ended."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._text, self._is_open = descriptor, b"", True

    def wait(self, seconds: float) -> EndSeen | None:
        """For so long at most."""
        if not self._is_open:  # its end is seen by its process then
            time.sleep(min(seconds, _SETTLE_S))
            return None
        readable, _, _ = select.select([self._descriptor], [], [], seconds)
        if not readable:
            return None
        block = os.read(self._descriptor, 1 << 16)
        self._is_open = bool(block)
        self._text += block
        with suppress(ValueError, TypeError, KeyError):
            line, newline, self._text = self._text.partition(b"\n")
            if newline:
                said = json.loads(line)
                return EndSeen(said["kind"], said["why"])
            self._text = line
        return None


class WatcherProcess:
    """The side of rank 0, which starts the watcher and tells it the end; nothing here waits for it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def end(self, kind: Ending, why: str) -> None:
        """Say how the run ended; the watcher goes on by itself until that is reported."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write((json.dumps({"kind": kind, "why": why}) + "\n").encode())
            self._process.stdin.close()
        # It ends some time later; where this process goes on, as in a notebook, it is not to stay as a zombie.
        threading.Thread(target=self._process.wait, name="watcher", daemon=True).start()


def start_watcher(run: WatchedRun, config: AlertsConfig, restarts: int, server: socket.socket | None) -> WatcherProcess:
    """Start the watcher of a run, in a session of its own, with what it says in ``RUN/alerts/watcher.log``.

    Args:
        restarts: of the run, before now.
        server: listens for Prometheus; closed here.

    Raises:
        OSError: it cannot be started.
    """
    given: dict[str, Any] = {"run": asdict(run), "alerts": plain_settings(config), "restarts": restarts}
    given["listen_fd"] = None if server is None else server.fileno()
    path = os.pathsep.join(str(Path(part).absolute()) for part in sys.path if part)
    folder = Path(run.folder) / FOLDER
    folder.mkdir(exist_ok=True)
    with (folder / _LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": path},
            pass_fds=() if server is None else (server.fileno(),),
            start_new_session=True,
        )
    if server is not None:
        server.close()
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already, and its log says why
        process.stdin.write((json.dumps(given) + "\n").encode())
        process.stdin.flush()
    return WatcherProcess(process)


def plain_settings(config: AlertsConfig) -> dict[str, Any]:
    """Settings with their addresses, for another process of this user, and for no file."""
    tree = config.model_dump()
    tree["webhook"] = config.webhook.get_secret_value()
    tree["urls"] = [url.get_secret_value() for url in config.urls]
    return tree


def own_run(folder: Path, name: str, **known: Any) -> WatchedRun:
    """The run of this process, which is its rank 0, before it makes a step."""
    identity = identity_of(os.getpid())
    ticks = identity.started_ticks if identity else 0
    newest = read_tail(folder / "metrics.jsonl").step.get("step", -1)
    return WatchedRun(name, str(folder.absolute()), os.getpid(), ticks, newest_step=newest, **known)


def main() -> int:
    """Entry point of the process."""
    # A scheduler that ends the job asks every process of it; how the run takes that is what is waited for.
    for number in (*STOP_SIGNALS, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    name_process("phalanx-watcher")
    try:
        with open(0, "rb", buffering=0, closefd=False) as source:  # nothing is to be read ahead
            return watch(source)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
