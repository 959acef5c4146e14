"""The campaign: it covers what it must, and the same seed gives the same cases."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from phalanx.faults.campaign import CI_FAMILIES, CLUSTER, STEPS, agenda_of, ci_cases, family_of, generate, healthy
from phalanx.faults.case_manifest import Cluster, parse
from phalanx.faults.fault_schedule import KINDS

CASES = generate(7)

WORKER_FAMILIES = (
    "exception",
    "exception-recurring",
    "exit",
    "sigkill",
    "sigterm",
    "sigstop",
    "segfault",
    "abort",
    "deadlock",
    "sleep",
    "out-of-memory",
    "nan",
    "slow",
)

OTHER_FAMILIES = {
    "exception-all": 1,
    "executor-killed": 3,
    "host-killed": 3,
    "link-down": 3,
    "disk-full": 3,
    "clock-jump": 3,
    "store-host-killed": 1,
    "driver-killed": 1,
    "driver-stopped": 1,
    "link-cut": 2,
    "link-silent": 2,
    "link-delayed": 2,
    "two-ranks": 1,
    "two-hosts": 3,
    "rank-and-host": 1,
    "recovery-rank": 1,
    "recovery-host-killed": 1,
    "recovery-executor-killed": 1,
    "recovery-driver": 1,
    "checkpoint-rank": 2,
    "checkpoint-host": 1,
    "spare-bad": 4,
    "spares-to-spare": 2,
}


def test_all_that_the_bar_names_is_there() -> None:
    counts = Counter(family_of(case) for case in CASES)
    assert counts == dict.fromkeys(WORKER_FAMILIES, 4) | OTHER_FAMILIES
    assert len(CASES) >= 80


@pytest.mark.parametrize("family", WORKER_FAMILIES)
def test_worker_faults_are_on_the_first_second_middle_and_last_rank(family: str) -> None:
    ranks = [case.incidents[0].place.numbers for case in CASES if family_of(case) == family]
    assert ranks == [(0,), (1,), (4,), (7,)]


def test_the_seed_decides() -> None:
    assert generate(7) == CASES
    assert generate(8) != CASES
    assert [case.id for case in generate(8)] == [case.id for case in CASES]
    assert len({case.digest() for case in CASES}) == len({case.id for case in CASES}) == len(CASES)


def test_every_case_can_be_written_and_has_time_to_go_on() -> None:
    for case in CASES:
        assert parse(case.model_dump_json()) == case
        assert all(one.when.step <= STEPS // 2 for one in case.incidents)
        assert len(agenda_of(case).orders) == sum(KINDS[one.kind].is_inside for one in case.incidents)


def test_what_stops_a_job_blames_no_machine_and_what_is_evicted_is_blamed() -> None:
    for case in CASES:
        evicted = {host for response in case.expected.responses for host in response.hosts}
        assert evicted == set(case.expected.blame_hosts)
        if any(response.action == "stop" for response in case.expected.responses):
            assert not case.expected.blame_hosts
            assert bool(case.expected.blame_ranks) == (family_of(case) == "exception-recurring")
            assert not case.expected.goes_on


def test_only_where_there_are_too_few_hosts_the_layout_changes() -> None:
    for case in CASES:
        gone = len(case.expected.blame_hosts)
        if case.expected.goes_on:
            assert case.expected.same_layout == (gone <= case.cluster.spares), case.id


def test_ci_runs_twelve_of_different_families() -> None:
    chosen = ci_cases(CASES)
    assert [family_of(case) for case in chosen] == list(CI_FAMILIES)
    assert len(chosen) == 12
    assert {one.place.what for case in chosen for one in case.incidents} == {"ranks", "hosts", "driver", "links"}


def test_ten_healthy_runs_ask_for_nothing() -> None:
    runs = healthy(7)
    assert len(runs) == len({run.id for run in runs}) == 10
    assert all(not run.expected.responses and run.expected.goes_on and run.expected.same_layout for run in runs)
    kinds = {one.kind for run in runs for one in run.incidents}
    assert kinds == {"evaluation", "log-lines", "cpu-hog", "driver-stopped", "long-checkpoint", "clock-jump"}
    assert healthy(7) == runs


def test_another_cluster() -> None:
    cases = generate(7, Cluster(hosts=2, workers_per_host=1, spares=1))
    assert {
        number for case in cases for one in case.incidents if one.place.what == "ranks" for number in one.place.numbers
    } == {
        0,
        1,
    }


@pytest.mark.parametrize("change", [{"hosts": 1}, {"spares": 0}])
def test_a_cluster_must_have_what_can_fail(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="two hosts and a spare"):
        generate(7, CLUSTER.model_copy(update=change))


def test_the_page_of_faults_is_as_the_code_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert set(rows) == set(KINDS)
    for name, kind in KINDS.items():
        cells = rows[name].split(" | ")
        assert cells[1] in kind.places
        assert all(f"`{setting}`" in rows[name] for setting in kind.settings), name
    example = page.split("```json\n")[1].split("```")[0]
    assert parse(example).incidents[0].settings == {"name": "SIGKILL"}
    assert f"makes {len(CASES)} cases" in page
