"""The fault campaign: all cases of the bar, each with its right answer, the same for the same seed.

What is drawn from the seed is what must not matter: at which step, with which status or exception, in what order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from phalanx.faults.case_manifest import ActionName, Cluster, Expected, Incident, Lasts, Manifest, Place, Response, When
from phalanx.faults.fault_schedule import KINDS, Agenda, Clock, Order, PlaceKind

CLUSTER = Cluster(hosts=4, workers_per_host=2, spares=1)
STEPS = 60
SLOW_STEPS = 300
"""Of cases in which a rank is slow: slowness has to be seen in the noise first."""

_FOREVER = Lasts(unit="forever", amount=1)

# Name, kind, settings, how long, retrigger, what is right: a process that ends or hangs once costs no host.
_WORKER_FAULTS: tuple[tuple[str, str, dict[str, Any], Lasts, str, tuple[ActionName, ...]], ...] = (
    ("exception", "exception", {}, Lasts(), "once", ("restart",)),
    ("exception-recurring", "exception", {"error": "IndexError"}, Lasts(), "attempt", ("restart", "stop")),
    ("exit", "exit", {}, Lasts(), "once", ("restart",)),
    ("sigkill", "signal", {"name": "SIGKILL"}, Lasts(), "once", ("restart",)),
    ("sigterm", "signal", {"name": "SIGTERM"}, Lasts(), "once", ("restart",)),
    ("sigstop", "pause", {}, _FOREVER, "once", ("restart",)),
    ("segfault", "segfault", {}, Lasts(), "once", ("restart",)),
    ("abort", "abort", {}, Lasts(), "once", ("restart",)),
    ("deadlock", "deadlock", {}, _FOREVER, "once", ("restart",)),
    ("sleep", "sleep", {}, _FOREVER, "once", ("restart",)),
    ("out-of-memory", "out-of-memory", {"limit_mb": 64}, Lasts(), "once", ("restart",)),
    ("nan", "nan", {}, _FOREVER, "attempt", ("restart", "stop")),
    ("slow", "slow", {"factor": 3.0, "burn": 1}, _FOREVER, "host", ("evict",)),
)

_HOST_FAULTS = ("executor-killed", "host-killed", "link-down", "disk-full", "clock-jump")

_LINK_FAULTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("link-cut", {}),
    ("link-silent", {}),
    ("link-delayed", {"delay_s": 3.0}),
)

CI_FAMILIES = (
    "sigkill",
    "deadlock",
    "exception-all",
    "exception-recurring",
    "slow",
    "host-killed",
    "driver-killed",
    "link-cut",
    "store-host-killed",
    "two-ranks",
    "recovery-rank",
    "checkpoint-rank",
)
"""Of each of these, CI runs one case."""


@dataclass
class _Builder:
    """Makes cases and counts them."""

    seed: int
    cluster: Cluster
    cases: list[Manifest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        machines = self.cluster.hosts
        self.hosts = sorted({0, machines // 2, machines - 1})
        ranks = self.cluster.ranks
        self.ranks = sorted({0, min(1, ranks - 1), ranks // 2, ranks - 1})
        self.spare = machines

    def step(self) -> int:
        """At which something happens: late enough for a checkpoint before it, early enough to see training go on."""
        return self.random.randint(STEPS // 4, STEPS // 2)

    def add(self, name: str, incidents: list[Incident], expected: Expected, steps: int = STEPS, **cluster: Any) -> None:
        """One more case."""
        case = Manifest(
            id=f"{len(self.cases) + 1:03d}-{name}",
            seed=self.random.getrandbits(32),
            cluster=self.cluster.model_copy(update=cluster),
            steps=steps,
            incidents=tuple(incidents),
            expected=expected,
        )
        self.cases.append(case)


def generate(seed: int, cluster: Cluster = CLUSTER) -> list[Manifest]:
    """All cases for this seed, in the order of their numbers.

    Raises:
        ValueError: there are too few hosts to have faults on two, or no spare.
    """
    if cluster.hosts < 2 or cluster.spares < 1:
        raise ValueError(f"generate(cluster={cluster!r}): needs at least two hosts and a spare")
    builder = _Builder(seed, cluster)
    for singles in (_worker_cases, _host_cases, _driver_cases):
        singles(builder)
    for pairs in (_double_cases, _recovery_cases, _checkpoint_cases, _spare_cases):
        pairs(builder)
    return builder.cases


def ci_cases(cases: list[Manifest]) -> list[Manifest]:
    """Those that CI runs: one of each of `CI_FAMILIES`, with ranks and hosts that differ."""
    chosen = []
    for number, family in enumerate(CI_FAMILIES):
        members = [case for case in cases if family_of(case) == family]
        chosen.append(members[number % len(members)])
    return chosen


def family_of(case: Manifest) -> str:
    """The name of its kind: the id without number and place."""
    return case.id.split("-", 1)[1].split("--")[0]


def healthy(seed: int, cluster: Cluster = CLUSTER, steps: int = STEPS) -> list[Manifest]:
    """Runs with innocent disturbances, of which nothing must come: ten, one of each, with none and with all twice."""
    draw = random.Random(seed)
    everyone = tuple(range(cluster.ranks))
    wholes = [
        _incident("evaluation", "ranks", everyone, When(step=steps // 4), lasts=Lasts(unit="seconds", amount=20)),
        _incident("log-lines", "ranks", everyone, When(step=2), lasts=_FOREVER),
        _incident("cpu-hog", "ranks", everyone[:1], When(step=steps // 3), lasts=Lasts(unit="seconds", amount=30)),
        _incident("driver-stopped", "driver", (), When(step=steps // 2), lasts=Lasts(unit="seconds", amount=15)),
        _incident(
            "long-checkpoint",
            "ranks",
            everyone,
            When(step=steps // 4, phase="checkpoint"),
            lasts=Lasts(unit="seconds", amount=20),
        ),
        _incident("clock-jump", "hosts", (cluster.hosts - 1,), When(step=steps // 2), settings={"offset_s": 3600.0}),
    ]
    runs = [[], *([one] for one in wholes), wholes, [], wholes]
    names = ["quiet", *(one.kind for one in wholes), "all", "quiet-again", "all-again"]
    return [
        Manifest(
            id=f"healthy-{name}", seed=draw.getrandbits(32), cluster=cluster, steps=steps, incidents=tuple(incidents)
        )
        for name, incidents in zip(names, runs, strict=True)
    ]


def _worker_cases(builder: _Builder) -> None:
    for name, kind, settings, lasts, retrigger, actions in _WORKER_FAULTS:
        for rank in builder.ranks:
            drawn = {"status": builder.random.choice([1, 2, 3, 70, 137])} if kind == "exit" else {}
            when = When(step=builder.step())
            one = _incident(kind, "ranks", (rank,), when, lasts=lasts, retrigger=retrigger, settings=settings | drawn)
            steps = SLOW_STEPS if kind == "slow" else STEPS
            builder.add(f"{name}--rank-{rank}", [one], _after_worker(builder.cluster, kind, rank, actions), steps)
    everyone = tuple(range(builder.cluster.ranks))
    when = When(step=builder.step())
    one = _incident("exception", "ranks", everyone, when, retrigger="attempt", settings={"error": "KeyError"})
    stop = Expected(responses=(Response(action="stop"),), goes_on=False, same_layout=False)
    builder.add("exception-all", [one], stop)


def _after_worker(cluster: Cluster, kind: str, rank: int, actions: tuple[ActionName, ...]) -> Expected:
    """Nobody's machine is to blame for what comes back at the same step; a host that is evicted stands for its ranks.

    A loss that is the average of all ranks is not a number on all of them at once, so that none of them is named.
    """
    host = cluster.host_of(rank)
    responses = tuple(Response(action=name, hosts=(host,) if name == "evict" else ()) for name in actions)
    if "evict" in actions:
        return Expected(responses=responses, blame_hosts=(host,))
    goes_on, named = "stop" not in actions, () if kind == "nan" else (rank,)
    return Expected(responses=responses, blame_ranks=named, goes_on=goes_on, same_layout=goes_on)


def _host_cases(builder: _Builder) -> None:
    for kind in _HOST_FAULTS:
        for host in builder.hosts:
            settings = {"offset_s": builder.random.choice([-86_400.0, -5.0, 3600.0])} if kind == "clock-jump" else {}
            one = _incident(kind, "hosts", (host,), When(step=builder.step()), lasts=_FOREVER, settings=settings)
            expected = Expected() if kind == "clock-jump" else _evicted(host)
            builder.add(f"{kind}--host-{host}", [one], expected)
    one = _incident("host-killed", "hosts", (0,), When(step=builder.step()))
    builder.add("store-host-killed", [one], _evicted(0))


def _driver_cases(builder: _Builder) -> None:
    for kind, lasts in (("driver-killed", Lasts()), ("driver-stopped", Lasts(unit="seconds", amount=10))):
        one = _incident(kind, "driver", (), When(step=builder.step()), lasts=lasts)
        builder.add(kind, [one], Expected())
    for kind, settings in _LINK_FAULTS:
        for host in (builder.hosts[0], builder.hosts[-1]):
            lasts = Lasts(unit="seconds", amount=10)
            one = _incident(kind, "links", (host,), When(step=builder.step()), lasts=lasts, settings=settings)
            builder.add(f"{kind}--host-{host}", [one], Expected())


def _double_cases(builder: _Builder) -> None:
    last, when = builder.ranks[-1], When(step=builder.step())
    builder.add("two-ranks", [_killed(0, when), _killed(last, when)], _restarted(0, last))
    when = When(step=builder.step())
    one, other = builder.hosts[0], builder.hosts[-1]
    both = [_incident("host-killed", "hosts", (one, other), when)]
    evict = Response(action="evict", hosts=(one, other))
    named: dict[str, Any] = {"blame_hosts": (one, other)}
    waits = Expected(responses=(evict, Response(action="wait")), goes_on=False, same_layout=False, **named)
    builder.add("two-hosts--wait", both, waits)
    shrinks = Expected(responses=(evict, Response(action="shrink")), same_layout=False, **named)
    builder.add("two-hosts--shrink", both, shrinks, may_shrink=True)
    builder.add("two-hosts--two-spares", both, Expected(responses=(evict,), **named), spares=2)
    when = When(step=builder.step())
    mixed = [_killed(0, when), _incident("host-killed", "hosts", (other,), when)]
    builder.add("rank-and-host", mixed, Expected(responses=_evict(other), blame_ranks=(0,), blame_hosts=(other,)))


def _recovery_cases(builder: _Builder) -> None:
    last, again = builder.ranks[-1], When(phase="recovery", attempt=2)
    twice = Expected(responses=(Response(action="restart"),) * 2, blame_ranks=(0, last))
    builder.add("recovery-rank", [_killed(0, When(step=builder.step())), _killed(last, again)], twice)
    host = builder.hosts[-1]
    for kind in ("host-killed", "executor-killed"):
        pair = [_killed(0, When(step=builder.step())), _incident(kind, "hosts", (host,), again)]
        then = Expected(responses=(Response(action="restart"), *_evict(host)), blame_ranks=(0,), blame_hosts=(host,))
        builder.add(f"recovery-{kind}", pair, then)
    pair = [_killed(last, When(step=builder.step())), _incident("driver-killed", "driver", (), again)]
    builder.add("recovery-driver", pair, _restarted(last))


def _checkpoint_cases(builder: _Builder) -> None:
    for rank in (0, builder.ranks[-1]):
        when = When(step=builder.step(), phase="checkpoint")
        builder.add(f"checkpoint-rank--rank-{rank}", [_killed(rank, when)], _restarted(rank))
    host, when = builder.hosts[-1], When(step=builder.step(), phase="checkpoint")
    builder.add("checkpoint-host", [_incident("host-killed", "hosts", (host,), when)], _evicted(host))


def _spare_cases(builder: _Builder) -> None:
    host, spare = builder.hosts[1], builder.spare
    for how, lasts in (("dies", Lasts()), ("stops", _FOREVER)):
        pair = [
            _incident("host-killed", "hosts", (host,), When(step=builder.step())),
            _incident(
                "spare-bad", "spares", (spare,), When(phase="recovery", attempt=2), lasts=lasts, settings={"how": how}
            ),
        ]
        responses = (*_evict(host), *_evict(spare))
        named: dict[str, Any] = {"blame_hosts": (host, spare)}
        builder.add(f"spare-bad--{how}-another", pair, Expected(responses=responses, **named), spares=2)
        shrunk = Expected(responses=(*responses, Response(action="shrink")), same_layout=False, **named)
        builder.add(f"spare-bad--{how}-alone", pair, shrunk, may_shrink=True)
    when = When(step=builder.step())
    one = _incident("host-killed", "hosts", (host,), when)
    builder.add("spares-to-spare--host", [one], _evicted(host), spares=3)
    builder.add("spares-to-spare--rank", [_killed(0, when)], _restarted(0), spares=3)


def _incident(
    kind: str,
    what: PlaceKind,
    numbers: tuple[int, ...],
    when: When,
    *,
    lasts: Lasts = Lasts(),  # noqa: B008  frozen
    retrigger: Any = "once",
    settings: dict[str, Any] | None = None,
) -> Incident:
    return Incident(
        kind=kind,
        place=Place(what=what, numbers=numbers),
        when=when,
        lasts=lasts,
        retrigger=retrigger,
        safety="cluster_destructive" if len(numbers) > 1 and what == "hosts" else KINDS[kind].safety,
        settings=settings or {},
    )


def _killed(rank: int, when: When) -> Incident:
    return _incident("signal", "ranks", (rank,), when, settings={"name": "SIGKILL"})


def _restarted(*ranks: int) -> Expected:
    return Expected(responses=(Response(action="restart"),), blame_ranks=ranks)


def _evict(host: int) -> tuple[Response, ...]:
    return (Response(action="evict", hosts=(host,)),)


def _evicted(host: int) -> Expected:
    return Expected(responses=_evict(host), blame_hosts=(host,))


def agenda_of(manifest: Manifest, clock: Clock = "optimizer") -> Agenda:
    """What workers have to do to themselves in this case, and nothing of the right answer; the rest is done outside."""
    orders = []
    for number, incident in enumerate(manifest.incidents):
        if KINDS[incident.kind].is_inside:
            when, lasts = incident.when, incident.lasts
            order = Order(
                number=number,
                kind=incident.kind,
                ranks=list(incident.place.numbers),
                step=when.step,
                phase=when.phase,
                attempt=when.attempt,
                delay_s=when.delay_s,
                unit=lasts.unit,
                amount=lasts.amount,
                retrigger=incident.retrigger,
                settings=dict(incident.settings),
            )
            orders.append(order)
    return Agenda(manifest.seed, clock, orders)
