"""Hosts of an attempt held against each other: whose own time is longer, and what the training interfaces carry.

Soft state of the driver: only what is found becomes an event.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.run.clock import Now
from phalanx.run.decide.events import Event, SlowHost, TrafficSilent
from phalanx.run.judge.interface_traffic import Traffic, TrafficConfig, TrafficJudge
from phalanx.run.judge.step_limits import Standing
from phalanx.run.judge.stragglers import SlowConfig, SlowJudge
from phalanx.run.messages import Heartbeat

SETTLING_S = 10.0
"""From the first reports on, until it is known how many steps go into one heartbeat."""

AGAIN_S = 600.0
"""The same host is not called slow, and less traffic is not told, again within this time."""

SILENT_AGAIN_S = 60.0
"""Silence is told again if nothing was decided."""

_LATE_ROUNDS = 2
"""A round is over when another host is so many rounds further: heartbeats come up to one apart."""


@dataclass(frozen=True)
class PeersConfig:
    """How hosts are held against each other."""

    slow: SlowConfig = field(default_factory=SlowConfig)
    traffic: TrafficConfig = field(default_factory=TrafficConfig)
    heartbeat_s: float = 1.0


class SlowWatch:
    """Own times of the hosts of one attempt, from heartbeats.

    Where several steps go into a heartbeat it carries the median over them, and they are one *round*; else a round is
    a step. Blocks of the judge are as many rounds as its number of steps needs.

    Args:
        attempt: its number.
        hosts: of the attempt.
    """

    def __init__(self, attempt: int, hosts: Sequence[str], config: SlowConfig, heartbeat_s: float) -> None:
        self._attempt, self._hosts, self._config, self._heartbeat_s = attempt, hosts, config, heartbeat_s
        self._rows: dict[int, dict[str, float]] = {}
        self._done = -1
        self._newest = -1
        self._first: tuple[float, int] | None = None
        self._judge: SlowJudge | None = None
        self._per_round = 1
        self._told_s: dict[str, float] = {}

    def on_heartbeat(self, host: str, beat: Heartbeat, now: Now) -> None:
        """What the ranks of one host report."""
        longest_s, steps = beat.busy_s, beat.steps_here
        if longest_s <= 0 or steps <= 0:  # a script that does not report it
            return
        if self._judge is None:
            self._settle(steps, now)
            return
        number = steps // self._per_round
        if number > self._done:
            row = self._rows.get(number)
            if row is None:
                row = self._rows[number] = {}
                self._newest = max(self._newest, number)
            row[host] = longest_s

    def look(self, now: Now) -> list[Event]:
        """Who has been found slow; called about once a heartbeat."""
        judge, told = self._judge, list[Event]()
        if judge is None:
            return told
        for number in sorted(self._rows):
            if number > self._newest - _LATE_ROUNDS and len(self._rows[number]) < len(self._hosts):
                break
            self._done = number
            for found in judge.observe(number, self._rows.pop(number)):
                if now.monotonic_s - self._told_s.get(found.name, -math.inf) >= AGAIN_S:
                    self._told_s[found.name] = now.monotonic_s
                    since = found.since_step * self._per_round
                    why = f"by its own time, since about step {since} of this attempt"
                    told.append(SlowHost(now.unix_s, self._attempt, found.name, round(found.ratio, 3), why))
        return told

    def _settle(self, steps: int, now: Now) -> None:
        """Learn how many steps go into one heartbeat."""
        if self._first is None:
            self._first = (now.monotonic_s, steps)
            return
        elapsed_s = now.monotonic_s - self._first[0]
        if elapsed_s < min(SETTLING_S, 10 * self._heartbeat_s) or steps <= self._first[1]:
            return
        per_s = (steps - self._first[1]) / elapsed_s
        self._per_round = max(1, round(per_s * self._heartbeat_s))
        config = self._config
        rounds = math.ceil(config.block_steps / self._per_round)
        per_steps = max(config.per_steps // self._per_round, rounds)
        config = config.model_copy(update={"block_steps": rounds, "per_steps": per_steps})
        self._judge = SlowJudge(self._hosts, config=config)
        self._done = self._newest = steps // self._per_round


class Peers:
    """The hosts of one attempt held against each other.

    Args:
        attempt: its number.
        machines: of its hosts, such as the identity of the boot.
    """

    def __init__(self, attempt: int, machines: Mapping[str, str], config: PeersConfig, now: Now) -> None:
        self._attempt, self._machines = attempt, machines
        self._slow = SlowWatch(attempt, list(machines), config.slow, config.heartbeat_s)
        self._traffic = TrafficWatch(attempt, machines, config.traffic, now)

    def on_heartbeat(self, host: str, beat: Heartbeat, now: Now) -> None:
        """What one host reports."""
        if beat.attempt == self._attempt and host in self._machines:
            self._slow.on_heartbeat(host, beat, now)
            if beat.carried_bytes >= 0 and not self._traffic.is_off:
                self._traffic.observe(host, beat.carried_bytes, now.monotonic_s)

    def look(self, standing: Standing, is_paused: bool, now: Now) -> list[Event]:
        """What has been found."""
        return [*self._slow.look(now), *self._traffic.look(standing, is_paused, now)]


class TrafficWatch:
    """Bytes of the training interfaces of the hosts of one attempt.

    Args:
        attempt: its number.
        hosts: of the attempt, with the machine that each is on: on one machine there is nothing to see.
    """

    def __init__(self, attempt: int, hosts: Mapping[str, str], config: TrafficConfig, now: Now) -> None:
        self._attempt, self._config = attempt, config
        self._judge = TrafficJudge(hosts, now.monotonic_s, config)
        self.observe = self._judge.observe
        self.is_off = len(set(hosts.values())) < 2
        self._told: dict[str, float] = {}
        self._next_s = -math.inf

    def look(self, standing: Standing, is_paused: bool, now: Now) -> list[Event]:
        """What has to be told; judged once a second at most."""
        if self.is_off or now.monotonic_s < self._next_s:
            return []
        self._next_s = now.monotonic_s + 1.0
        traffic = self._judge.judge(now.monotonic_s, standing.quiet_s, standing.usual_s, is_paused)
        again_s = {"decline": AGAIN_S, "quiet": AGAIN_S, "silent": SILENT_AGAIN_S}.get(traffic.kind)
        if again_s is None or now.monotonic_s - self._told.get(traffic.kind, -math.inf) < again_s:
            return []
        self._told[traffic.kind] = now.monotonic_s
        return [self._event(traffic, standing, now)]

    def _event(self, traffic: Traffic, standing: Standing, now: Now) -> Event:
        is_total = traffic.kind != "decline"
        within_s = max(self._config.silence_s, self._config.silence_steps * (standing.usual_s or 0.0))
        seconds = within_s if is_total or traffic.share is None else 2 * self._config.window_s
        return TrafficSilent(now.unix_s, self._attempt, traffic.hosts, seconds, is_total, traffic.kind == "silent")
