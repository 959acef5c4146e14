"""What a simulation of months assumes: the work, the failures, what follows them, checkpoints and hosts.

Every value is checked when it is made: a `UserError` says which field is wrong and what to do. Failure classes come
from TOML files, those beside this module or a user's own:

source = "who counted them"

[[class]]
name = "GPU"
failures_per_1000_host_days = 2.22
effect = "stops"              # or "slow", "taken out"
repair_median_s = 73440.0     # and repair_p90_s; or repair_fixed_s, repair_mean_s (without memory), repair_values_s
repair_p90_s = 1183680.0
detection_s = 60.0            # else what the command line says
memory_survives = true        # what other hosts hold in memory
mark = "measured"             # or "derived", "assumed"
source = "…"
date = "2024-07"

[lemons]                      # may be left out
share_ratio = 0.012
rate_ratio = 12.5             # failures of a lemon over those of a usual host
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

from phalanx.core.config import read_toml
from phalanx.core.errors import UserError

DAY_S = 86_400.0
HOUR_S = 3_600.0
_P90 = NormalDist().inv_cdf(0.9)
_MOST = 1e12

Effect = Literal["stops", "slow", "taken out"]
"""What a job notices of a bad host: it stands still; its steps take longer; nothing, but an operator wants it out."""
EFFECTS: tuple[Effect, ...] = ("stops", "slow", "taken out")


def require(name: str, value: float, least: float = 0.0, most: float = _MOST) -> None:
    """Refuse what is not a number from `least` to `most`."""
    if not least <= value <= most:
        cure = f"give a number from {least:g} to {most:g}"
        raise UserError("it is out of range", cure=cure, field=name, value=value)


@dataclass(frozen=True)
class Duration:
    """How long something takes, seconds: always the same, or at random."""

    # ``fixed``, ``exponential`` (both have `mean_s`), ``lognormal`` or ``observed``.
    kind: Literal["fixed", "exponential", "lognormal", "observed"]
    mean_s: float
    # Of a lognormal duration, at most nine in ten are as long as `p90_s`.
    median_s: float = 0.0
    p90_s: float = 0.0
    values_s: tuple[float, ...] = ()  # what was observed; one of them is drawn

    def __post_init__(self) -> None:
        require("mean_s", self.mean_s)

    @classmethod
    def fixed(cls, seconds: float) -> Duration:
        """Always so long."""
        return cls("fixed", seconds)

    @classmethod
    def exponential(cls, mean_s: float) -> Duration:
        """Without memory."""
        return cls("exponential", mean_s)

    @classmethod
    def lognormal(cls, median_s: float, p90_s: float) -> Duration:
        """Skewed, as repairs are: many are short, some take weeks."""
        require("median_s", median_s, 1e-3)
        require("p90_s", p90_s, median_s)
        return cls("lognormal", median_s * math.exp(_sigma(median_s, p90_s) ** 2 / 2), median_s, p90_s)

    @classmethod
    def observed(cls, values_s: tuple[float, ...]) -> Duration:
        """One of these, each as likely as the others."""
        if not values_s:
            raise UserError("nothing was observed", cure="give one value at least", field="values_s")
        for value in values_s:
            require("values_s", value)
        return cls("observed", math.fsum(values_s) / len(values_s), values_s=tuple(values_s))

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm, of a lognormal duration."""
        return _sigma(self.median_s, self.p90_s)


def _sigma(median_s: float, p90_s: float) -> float:
    return math.log(p90_s / median_s) / _P90


@dataclass(frozen=True)
class FailureClass:
    """One kind of failure."""

    name: str
    per_host_day: float  # how often on one host and day, on average over all hosts
    effect: Effect = "stops"  # what the job notices
    # How long the host is away; 0: it stays, and the job restarts in place.
    repair: Duration = field(default_factory=lambda: Duration.fixed(0.0))
    # From the failure until it is noticed (with ``slow``: until the host is found), instead of `Recovery.detection_s`
    # or `Recovery.find_slow_s`.
    detection_s: float | None = None
    slowdown: float = 1.1  # how many times as long steps take with such a host (``slow``), ratio
    survives: bool = True  # what is in the memory of hosts outlives it (the host's partner has a copy)

    def __post_init__(self) -> None:
        require(f"per_host_day of {self.name}", self.per_host_day, 0, 1e6)
        require(f"slowdown of {self.name}", self.slowdown, 1, 1e6)
        if self.detection_s is not None:
            require(f"detection_s of {self.name}", self.detection_s)
        if self.effect not in EFFECTS:
            cure = f"choose one of {', '.join(EFFECTS)}"
            raise UserError("there is no such effect", cure=cure, field=f"effect of {self.name}", value=self.effect)


@dataclass(frozen=True)
class Failures:
    """What fails, and how often."""

    classes: tuple[FailureClass, ...]
    lemon_share: float = 0.0  # of hosts that fail far more often than others, ratio
    # How many times as often as a usual host, ratio. The mean over all hosts stays as the classes say.
    lemon_times: float = 1.0
    evict_after: int = 0  # stops after which a host is taken for a lemon and replaced for good; 0: never
    replace_s: float = 3 * DAY_S  # until another host stands in for one that is replaced for good
    idle_ratio: float = 1.0  # how often spares fail, over hosts of the job
    source: str = "given"  # where the rates come from, for people

    def __post_init__(self) -> None:
        require("lemon_share", self.lemon_share, 0, 1)
        require("lemon_times", self.lemon_times, 1, 1e6)
        require("evict_after", self.evict_after, 0, 100)
        require("replace_s", self.replace_s)
        require("idle_ratio", self.idle_ratio, 0, 1)

    def per_host_day(self, effect: Effect | None = None) -> float:
        """Failures of one host and day, of one effect or of all."""
        return math.fsum(c.per_host_day for c in self.classes if effect in (None, c.effect))

    @property
    def usual_ratio(self) -> float:
        """How often a host that is no lemon fails, over the mean of all hosts."""
        return 1 / (1 + self.lemon_share * (self.lemon_times - 1))

    def scaled(self, per_host_day: float) -> Failures:
        """The same classes in the same shares, with another rate of all of them together."""
        from dataclasses import replace

        now = self.per_host_day()
        if now == 0:
            raise UserError("there are no failures to scale", cure="give classes with a rate", field="failures")
        classes = tuple(replace(c, per_host_day=c.per_host_day * per_host_day / now) for c in self.classes)
        return replace(self, classes=classes)


@dataclass(frozen=True)
class Recovery:
    """What follows a failure, seconds."""

    detection_s: float = 60.0  # from the failure until it is noticed and its host is known
    restart_s: float = 300.0  # from then until steps are done again: stopping, checks, processes, groups, warming up
    load_s: float = 0.0  # of a durable checkpoint, beside that
    memory_load_s: float = 0.0  # of a checkpoint in memory, beside that
    queue_s: float = 0.0  # the scheduler's, before each start
    find_slow_s: float = 1_000.0  # from when a host gets slow until it is replaced
    spread: float = 0.0  # standard deviation over mean of the times above, ratio; 0: they are always the same
    saves_first: bool = True  # a checkpoint is taken before stops that can wait for one (planned ones, a slow host's)
    planned_per_day: float = 0.0  # planned interruptions
    planned_s: float = 0.0  # how long one takes, without the restart

    def __post_init__(self) -> None:
        for name in ("detection_s", "restart_s", "load_s", "memory_load_s", "queue_s", "find_slow_s", "planned_s"):
            require(name, getattr(self, name))
        require("spread", self.spread, 0, 10)
        require("planned_per_day", self.planned_per_day, 0, 1e6)


@dataclass(frozen=True)
class Checkpoints:
    """When state is saved, and what that costs."""

    interval_s: float = 1_800.0  # of training between two durable checkpoints
    stall_s: float = 5.0  # by which one holds training up
    persist_s: float = 0.0  # after which it is durable; training goes on meanwhile. At most `interval_s`: one at a time
    memory_interval_s: float = 0.0  # of training between two snapshots in memory of the hosts; 0: none
    memory_stall_s: float = 0.0  # by which one of those holds training up

    def __post_init__(self) -> None:
        require("interval_s", self.interval_s, 1e-3)
        for name in ("stall_s", "persist_s", "memory_interval_s", "memory_stall_s"):
            require(name, getattr(self, name))
        if self.persist_s > self.interval_s:
            cure = f"save no more often than every {self.persist_s:g} s, or persist faster"
            raise UserError(
                "the one before is not durable by then", cure=cure, field="interval_s", value=self.interval_s
            )
        if self.memory_interval_s > self.interval_s:
            cure = "save in memory more often than durably, or set it to 0"
            raise UserError("it is of no use", cure=cure, field="memory_interval_s", value=self.memory_interval_s)
        if self.memory_interval_s and self.memory_interval_s < 1e-3:
            raise UserError("it is too short", cure="give a millisecond at least, or 0", field="memory_interval_s")

    @property
    def memory_ratio(self) -> float:
        """The share of running time that snapshots in memory leave for training."""
        if not self.memory_interval_s:
            return 1.0
        return self.memory_interval_s / (self.memory_interval_s + self.memory_stall_s)


@dataclass(frozen=True)
class Pool:
    """Hosts beside those of the job, and what is done without enough of them."""

    spares: int = 0  # hosts that wait, ready
    cold: int = 0  # hosts that may be asked for
    provision_s: float = 0.0  # until a cold host, or one that was repaired, is ready
    when_missing: Literal["wait", "shrink"] = "wait"  # wait for hosts, or go on with fewer
    shrink_by: int = 1  # hosts by which the job shrinks: a multiple of them is missing (one copy of the model, say)
    smallest_hosts: int = 0  # the fewest that it goes on with; 0: half of them
    patience_s: float = 0.0  # how long a host is waited for before the job shrinks

    def __post_init__(self) -> None:
        for name in ("spares", "cold", "smallest_hosts"):
            require(name, getattr(self, name), 0, 10_000_000)
        require("shrink_by", self.shrink_by, 1, 10_000_000)
        for name in ("provision_s", "patience_s"):
            require(name, getattr(self, name))
        if self.when_missing not in ("wait", "shrink"):
            raise UserError(
                "there is no such choice", cure="wait or shrink", field="when_missing", value=self.when_missing
            )


@dataclass(frozen=True)
class Work:
    """What is to be done, and by how many."""

    hosts: int  # that the job needs
    devices_per_host: int = 8
    step_s: float = 1.0  # one step of training with all of them, healthy
    steps: int = 0  # that are to be made; 0: as many as there are in `days`
    days: float = 30.0  # how long it is watched. With `steps`: after which a run that has not finished is given up
    price_per_device_hour: float = 0.0  # in whatever money

    def __post_init__(self) -> None:
        require("hosts", self.hosts, 1, 10_000_000)
        require("devices_per_host", self.devices_per_host, 1, 10_000)
        require("step_s", self.step_s, 1e-6, 1e9)
        require("steps", self.steps, 0)
        require("days", self.days, 1e-6, 36_525)
        require("price_per_device_hour", self.price_per_device_hour)

    @property
    def goal_s(self) -> float:
        """Training that has to be done, seconds with all hosts; infinite: as much as there is time for."""
        return self.steps * self.step_s if self.steps else math.inf


@dataclass(frozen=True)
class FailureScenario:
    """All of it together."""

    work: Work
    failures: Failures
    recovery: Recovery = field(default_factory=Recovery)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    pool: Pool = field(default_factory=Pool)

    def __post_init__(self) -> None:
        if self.pool.smallest_hosts > self.work.hosts:
            cure = f"name a number up to {self.work.hosts}"
            raise UserError(
                "the job is not so large", cure=cure, field="smallest_hosts", value=self.pool.smallest_hosts
            )

    @property
    def all_hosts(self) -> int:
        """Of the job, and beside it."""
        return self.work.hosts + self.pool.spares + self.pool.cold

    @property
    def smallest_hosts(self) -> int:
        """The fewest hosts that the job goes on with."""
        return self.pool.smallest_hosts or math.ceil(self.work.hosts / 2)


FOLDER = Path(__file__).with_name("failures")
_KEYS = {
    *("name", "failures_per_1000_host_days", "effect", "detection_s", "slowdown_ratio", "memory_survives"),
    *(
        "repair_fixed_s",
        "repair_mean_s",
        "repair_median_s",
        "repair_p90_s",
        "repair_values_s",
        "mark",
        "source",
        "date",
    ),
}
_MARKS = ("measured", "derived", "assumed")


def known() -> list[str]:
    """Names of the files that come with the planner."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_failures(name: str) -> Failures:
    """The failures of a file that comes with the planner, or of a person's."""
    if name not in known() and not name.endswith(".toml"):
        cure = f"choose one of {', '.join(known())}, or name a .toml file"
        raise UserError("there are no such failures", cure=cure, field="failures", value=name)
    path = FOLDER / f"{name}.toml" if name in known() else Path(name)
    content = read_toml(path)
    try:
        return _failures(content)
    except UserError as error:
        where = str(error).removesuffix(f": {error.problem}; {error.cure}")
        raise UserError(error.problem, cure=error.cure, field=f"{path.name}: {where}") from None


def _failures(content: Mapping[str, Any]) -> Failures:
    _refuse_unknown(content, {"source", "class", "lemons"}, "")
    tables, lemons = content.get("class"), content.get("lemons", {})
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise _says_too_little("class", "write [[class]] with its keys below, once for each kind of failure")
    if not isinstance(lemons, dict):
        raise _says_too_little("lemons", "write [lemons] with share_ratio and rate_ratio below")
    _refuse_unknown(lemons, {"share_ratio", "rate_ratio", "mark", "source", "date"}, "lemons.")
    return Failures(
        tuple(_class(table) for table in tables),
        lemon_share=_number(lemons, "share_ratio", "lemons.", 0.0),
        lemon_times=_number(lemons, "rate_ratio", "lemons.", 1.0),
        source=_text(content, "source", ""),
    )


def _class(table: Mapping[str, Any]) -> FailureClass:
    name = _text(table, "name", "class: ")
    where = f"{name}: "
    _refuse_unknown(table, _KEYS, where)
    if (mark := _text(table, "mark", where)) not in _MARKS:
        cure = f"choose one of {', '.join(_MARKS)}"
        raise UserError("there is no such mark", cure=cure, field=f"mark of {name}", value=mark)
    survives = table.get("memory_survives", True)
    if not isinstance(survives, bool):
        cure = "write true or false"
        raise UserError("is neither", cure=cure, field=f"{where}memory_survives", value=survives)
    return FailureClass(
        name,
        _number(table, "failures_per_1000_host_days", where) / 1000,
        table.get("effect", ""),
        _repair(table, where),
        _number(table, "detection_s", where) if "detection_s" in table else None,
        _number(table, "slowdown_ratio", where, 1.1),
        survives,
    )


_REPAIRS = ({"repair_values_s"}, {"repair_median_s", "repair_p90_s"}, {"repair_mean_s"}, {"repair_fixed_s"})


def _repair(table: Mapping[str, Any], where: str) -> Duration:
    given = {key for key in table if key.startswith("repair_")}
    if not given:
        return Duration.fixed(0.0)
    if given not in _REPAIRS:
        cure = "write repair_median_s with repair_p90_s, or one of repair_fixed_s, repair_mean_s, repair_values_s"
        raise UserError("are no one way to repair", cure=cure, field=f"{where}{', '.join(sorted(given))}")
    if "repair_values_s" in given:
        values = table["repair_values_s"]
        if not isinstance(values, list):
            cure = "write it as [.., ..]"
            raise UserError("is no list", cure=cure, field=f"{where}repair_values_s", value=values)
        return Duration.observed(tuple(_plain(value, f"{where}repair_values_s") for value in values))
    if "repair_median_s" in given:
        return Duration.lognormal(*(_number(table, f"repair_{which}_s", where) for which in ("median", "p90")))
    if "repair_mean_s" in given:
        return Duration.exponential(_number(table, "repair_mean_s", where))
    return Duration.fixed(_number(table, "repair_fixed_s", where))


def _number(table: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    if key not in table and default is not None:
        return default
    if key not in table:
        raise _says_too_little(f"{where}{key}", f"add it, as {FOLDER / 'llama3.toml'} has it")
    return _plain(table[key], f"{where}{key}")


def _plain(value: object, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError("is no number", cure="write it as one", field=field, value=value)
    return float(value)


def _text(table: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(table.get(key), str):
        raise _says_too_little(f"{where}{key}", f"add it in quotes, as {FOLDER / 'llama3.toml'} has it")
    return str(table[key])


def _says_too_little(field: str, cure: str) -> UserError:
    return UserError("the file says too little", cure=cure, field=field)


def _refuse_unknown(table: Mapping[str, Any], known_keys: set[str], prefix: str) -> None:
    for key in table:
        if key not in known_keys:
            cure = f"known are {', '.join(sorted(known_keys))}"
            raise UserError("there is no such key", cure=cure, field=f"{prefix}{key}")
