"""Traffic of training interfaces: alerts, recoveries, and counters that do not simply grow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.run.judge.interface_traffic import TrafficJudge, TrafficVerdict

GIB = 1 << 30


class Cluster:
    """Hosts whose counters grow every second by what `rate` says; the judge is asked every second."""

    def __init__(self, hosts: int = 4, usual_step_s: float = 1.0) -> None:
        self.names = [f"h{index}" for index in range(hosts)]
        self.judge = TrafficJudge(self.names, 0.0)
        self.usual_step_s = usual_step_s
        self.counters = dict.fromkeys(self.names, 5 * GIB)
        self.now_s = 0.0

    def go(
        self,
        seconds: int,
        rate: Callable[[str], float] = lambda name: 1e9,
        stopped: bool = False,
        is_paused: bool = False,
    ) -> list[TrafficVerdict]:
        began_s, said = self.now_s, []
        for _ in range(seconds):
            self.now_s += 1.0
            for name in self.names:
                self.counters[name] += int(rate(name))
                self.judge.observe(name, self.counters[name] * 3 // 2, self.now_s)
            quiet_s = self.now_s - began_s if stopped else 0.2
            said.append(self.judge.judge(self.now_s, quiet_s, self.usual_step_s, is_paused))
        return said


def kinds(said: list[TrafficVerdict]) -> set[str]:
    return {one.kind for one in said}


def test_usual_traffic_is_usual() -> None:
    cluster = Cluster()
    assert kinds(cluster.go(45)) <= {"unknown", "usual"}
    assert kinds(cluster.go(600)) == {"usual"}


def test_silence_with_no_steps_recovers_after_sixty_seconds() -> None:
    cluster = Cluster()
    cluster.go(120)
    said = cluster.go(90, lambda name: 0, stopped=True)
    first = next(index for index, one in enumerate(said, 1) if one.kind == "silent")
    assert 60 <= first <= 62
    assert said[-1].hosts == ("h0", "h1", "h2", "h3")
    assert "decline" in kinds(said[:first]), "an alert comes before"


def test_long_steps_are_waited_for() -> None:
    cluster = Cluster(usual_step_s=30.0)
    cluster.go(900)
    said = cluster.go(400, lambda name: 0, stopped=True)
    first = next(index for index, one in enumerate(said, 1) if one.kind == "silent")
    assert 300 <= first <= 302


def test_a_link_that_nobody_uses_is_silent_too() -> None:
    cluster = Cluster()
    cluster.go(120)
    assert cluster.go(70, lambda name: 800, stopped=True)[-1].kind == "silent"


def test_silence_while_steps_go_on_is_only_an_alert() -> None:
    cluster = Cluster()
    cluster.go(120)
    assert "silent" not in kinds(said := cluster.go(300, lambda name: 0))
    assert said[-1].kind == "quiet" and "something moves" in said[-1].why


def test_a_decline_is_an_alert_that_names_the_lowest() -> None:
    cluster = Cluster()
    cluster.go(300)
    said = cluster.go(60, lambda name: 1e8 if name == "h2" else 4e8)
    found = [one for one in said if one.kind == "decline"]
    assert found and found[0].hosts == ("h2",)
    assert found[0].share == pytest.approx(0.325, abs=0.02)
    assert "h2" in found[0].why and kinds(said) <= {"usual", "decline"}


def test_one_host_that_is_silent_is_named() -> None:
    cluster = Cluster()
    cluster.go(300)
    said = cluster.go(70, lambda name: 0 if name == "h1" else 1e9)
    assert (said[-1].kind, said[-1].hosts) == ("decline", ("h1",))


def test_a_single_host_is_not_judged() -> None:
    cluster = Cluster(hosts=1)
    assert kinds(cluster.go(300)) == {"unknown"}
    assert kinds(cluster.go(300, lambda name: 0, stopped=True)) == {"unknown"}


def test_interfaces_that_never_carried_anything_are_not_judged() -> None:
    cluster = Cluster()
    assert kinds(cluster.go(300, lambda name: 100)) == {"unknown"}
    assert kinds(cluster.go(300, lambda name: 0, stopped=True)) == {"unknown"}


def test_evaluation_and_checkpoints_are_not_judged() -> None:
    cluster = Cluster()
    cluster.go(120)
    assert kinds(cluster.go(400, lambda name: 0, stopped=True, is_paused=True)) == {"unknown"}
    assert kinds(cluster.go(59, lambda name: 1e9)) == {"usual"}, "nor is what comes just after"


def test_nothing_is_said_before_the_usual_step_is_known() -> None:
    judge = TrafficJudge(["a", "b"], 0.0)
    assert judge.judge(500.0, 500.0, None).kind == "unknown"


def test_counters_that_begin_anew_do_not_count_as_traffic_or_silence() -> None:
    cluster = Cluster()
    cluster.go(120)
    cluster.counters = dict.fromkeys(cluster.names, 0)
    assert kinds(cluster.go(120)) == {"usual"}


REPORTS = st.tuples(
    st.sampled_from(["a", "b", "stranger"]),
    st.integers(),
    st.floats(0, 1e4),
)


@given(st.lists(REPORTS, max_size=40))
def test_no_report_is_too_wild(reports: list[tuple[str, int, float]]) -> None:
    judge, now_s = TrafficJudge(["a", "b"], 0.0), 0.0
    for host, carried_bytes, later_s in reports:
        now_s += later_s
        judge.observe(host, carried_bytes, now_s)
        assert judge.judge(now_s, 0.0, 1.0).kind != "silent", "steps go on"
