"""Alerts of a job, and the figures of what it trains for Prometheus: looked at once a second beside the driver.

What the driver knows (steps, incidents, how the job ended) is joined with what `phalanx train` writes in its run
folder, where that can be read here. Nothing here decides anything, and whatever fails here leaves the job alone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.detect.detection import named
from phalanx.run.config import RunConfig
from phalanx.run.decide.actions import STOPPED, TIME_SHORT, Finish, KeepDetection
from phalanx.run.incidents.incident_pages import load
from phalanx.run.reports.recent_events import Overview
from phalanx.run.reports.training_settings import training_folder
from phalanx.telemetry.alerts.alert_config import Kind
from phalanx.telemetry.alerts.alert_rules import CLEAR, CheckpointSeen, DiskSeen, EndSeen, Seen, Verdict
from phalanx.telemetry.alerts.metrics_history import MetricsHistory
from phalanx.telemetry.alerts.observed_run import disk_of
from phalanx.telemetry.alerts.run_metrics import TrainingFigures, figures_of
from phalanx.telemetry.alerts.run_watcher import Alerts, make_alerts
from phalanx.telemetry.run_list import read_config

_log = logging.getLogger(__name__)

EVERY_S = 1.0
_LAST_WORD_S = 10.0
_CONFIG_S = 30.0
_SLOW = ("slow rank", "slow host")  # as judges call them
_SIGNAL = 128  # and its number: the status of what ended for one

Look = Callable[[], tuple[Overview, Finish | None]]
"""The job now, and how it has ended; None: it has not."""


class JobWatch:
    """Looks at a job; files are read in a thread, one look after the other.

    Raises:
        UserError: a receiver of alerts cannot be.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        disk_usage: Callable[[str], DiskSeen | None] = disk_of,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._disk_usage, self._unix_s = folder, disk_usage, unix_s
        self._training = training_folder(config, folder)
        self._history = None if self._training is None else MetricsHistory(self._training / "metrics.jsonl")
        self._alerts: Alerts | None = None
        if config.alerts.is_on:
            self._alerts = make_alerts(config.alerts, config.job_name, folder)
        self._name = config.job_name
        self._began_s, self._lock = unix_s(), threading.Lock()
        self._intervals = (0, 0.0)
        self._intervals_at_s = float("-inf")
        self._last_step: tuple[int, float] = (-1, 0.0)
        self._incidents_seen: int | None = None
        self._detections_seen: int | None = None
        self._reports_closed = False
        self.figures: TrainingFigures | None = None

    async def watch(self, look: Look) -> None:
        """Look at the job again and again, until cancelled."""
        while True:
            await self.look(look)
            await asyncio.sleep(EVERY_S)

    async def look(self, look: Look) -> None:
        """Look at the job once; what goes wrong is logged."""
        try:
            await asyncio.to_thread(self._look_alone, *look())
        except Exception as error:
            _log.warning("the job could not be looked at for alerts: %s: %s", type(error).__name__, error)

    async def close(self, look: Look) -> None:
        """Look for a last time, and let alerts be sent, for some seconds at most."""
        await self.look(look)
        if self._alerts is not None:
            await asyncio.to_thread(self._alerts.close, _LAST_WORD_S, hurries=True)

    def _look_alone(self, now: Overview, finish: Finish | None) -> None:
        with self._lock:  # a look that nobody waits for any more may still go on
            self._look(now, finish)

    def _look(self, now: Overview, finish: Finish | None) -> None:
        now_s = self._unix_s()
        new = 0 if self._history is None else self._history.take()
        if now.step > self._last_step[0]:
            self._last_step = now.step, now_s
        seen = self._seen(now, new, finish)
        if self._alerts is not None:
            self._alerts.look(seen, now_s)
            self._report_detections(self._alerts, now, now_s)
        if self._history is not None:
            self.figures = self._figures(now, seen)

    def _seen(self, now: Overview, new: int, finish: Finish | None) -> Seen:
        history = self._history
        paths = dict.fromkeys(map(str, (self._folder, self._training or self._folder)))
        is_running = now.phase == "running" and now.quiet_s >= 0 and now.limit_s >= 0
        return Seen(
            steps=() if history is None else tuple(history.steps),
            new=0 if history is None else min(new, len(history.steps)),
            stretches=() if history is None else tuple(history.stretches),
            step=now.step if now.step >= 0 else None,
            quiet_s=now.quiet_s if is_running else None,
            steps_here=max(now.step, 0) if is_running and now.step_age_s >= 0 else 0,
            # The driver's limit heeds what ranks say of themselves; it looks into the job then.
            phase="the job" if is_running else "",
            expects_s=max(now.limit_s, 0.0),
            disks=[found for path in paths if (found := self._disk_usage(path)) is not None],
            checkpoint=self._checkpoint(),
            incident=self._incident(now),
            end=None if finish is None else _end(finish),
        )

    def _incident(self, now: Overview) -> tuple[int, str] | None:
        """The one that is open, or one that began and was over between two looks, by its report."""
        if self._incidents_seen is None:  # those before this driver, as far as it does not deal with one still
            self._incidents_seen = now.incidents
        if now.incident is not None:
            if now.incident.why:
                self._incidents_seen = max(self._incidents_seen, now.incident.number)
            return now.incident.number, now.incident.why
        after_another, self._reports_closed = self._reports_closed, False
        if self._incidents_seen >= now.incidents or after_another:  # each is one of its own
            return None
        for number in range(self._incidents_seen + 1, now.incidents + 1):
            with suppress(UserError):  # its report is not written yet
                why = load(self._folder, number).title
                self._incidents_seen, self._reports_closed = number, True
                return number, why
        return now.incidents, ""

    def _report_detections(self, alerts: Alerts, now: Overview, now_s: float) -> None:
        """What judges have found since the last look, where something is to be done about it; what belongs to an
        incident is reported with that."""
        newest = now.detections[-1].number if now.detections else 0
        if self._detections_seen is None:  # an earlier driver has reported those before
            self._detections_seen = newest
        for kept in now.detections:
            is_news = kept.number > self._detections_seen and not kept.incident
            kind: Kind = "slow_rank" if kept.found.what in _SLOW else "detection"
            if is_news and kept.found.advice not in ("none", "watch") and alerts.is_on(kind):
                # each is of another rank or host: none goes on or comes back
                alerts.report({kind: Verdict("firing", kept.found.sentence, _evidence(kept))}, now_s, each=True)
                alerts.report({kind: CLEAR}, now_s)
        self._detections_seen = max(newest, self._detections_seen)

    def _checkpoint(self) -> CheckpointSeen | None:
        history = self._history
        if history is None or self._training is None:
            return None
        made = history.counts["checkpoints"] > 0
        every_steps, every_s = self._asked_for(self._training)
        return CheckpointSeen(
            step=history.saved_step or 0,
            age_s=max(time.time() - history.saved_at_s if made else self._unix_s() - self._began_s, 0.0),
            num_bytes=history.saved_bytes,
            problem=history.problem,
            every_steps=every_steps,
            every_s=every_s,
        )

    def _asked_for(self, training: Path) -> tuple[int, float]:
        """How often a checkpoint is asked for, in steps and in seconds; 0: not by that, or not known."""
        if time.monotonic() - self._intervals_at_s >= _CONFIG_S:
            self._intervals_at_s = time.monotonic()
            with suppress(UserError, LookupError, TypeError, ValueError):
                settings: dict[str, Any] = read_config(training)["checkpoint"]
                self._intervals = int(settings["every_steps"]), float(settings["every_s"])
        return self._intervals

    def _figures(self, now: Overview, seen: Seen) -> TrainingFigures:
        assert self._history is not None
        episodes = None if self._alerts is None else self._alerts.episodes
        return figures_of(
            self._name,
            self._history,
            step=seen.step,
            last_step_s=self._last_step[1] or None,
            checkpoint_s=self._history.saved_at_s if self._history.saved_step is not None else None,
            restarts=now.recoveries,
            disks=seen.disks,
            alerts=None if episodes is None else dict(episodes.counts),
            active={} if episodes is None else dict(episodes.active),
            ended="" if seen.end is None else seen.end.kind,
        )


def _evidence(kept: KeepDetection) -> dict[str, Any]:
    found = kept.found
    return {
        "step": found.since.step,
        "judge": kept.judge,
        "what": found.what,
        "who": [one.name for one in found.who],
        "hosts": list(named(found, "hosts")),
        "confidence": found.confidence,
        "why": list(found.why),
        "advice": found.advice,
        "then": list(found.then),
    }


def _end(finish: Finish) -> EndSeen:
    if finish.status == 0:
        return EndSeen("finished", "")
    is_asked = finish.status in (STOPPED, TIME_SHORT) or finish.status > _SIGNAL
    return EndSeen("stopped" if is_asked else "failed", finish.reason)
