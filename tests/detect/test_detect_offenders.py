"""Hosts that fail again and again: against chance, against a fleet, from jobs and from tables."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cli.detect_command import command
from phalanx.core.errors import UserError
from phalanx.detect.incident_history import DAY_S, HostIncident, read_histories, signal_of
from phalanx.detect.offenders import FleetHistory, OffenderPolicy, fit_fleet, judge_offenders, rate_hosts
from phalanx.run.incidents.report import Incident, IncidentOutcome, Lost, Seen, to_json

TRACE = Path(__file__).parents[3] / "shared" / "data" / "faults" / "infinitehbd-fault-trace" / "fault_trace.json"
POLICY = OffenderPolicy()


def fleet(
    rng: random.Random, hosts: int, days: int, per_day: float, lemons: int = 0, times: float = 20.0
) -> list[HostIncident]:
    found = []
    for host in range(hosts):
        at = 0.0
        rate = per_day * (times if host < lemons else 1.0)
        while (at := at + rng.expovariate(rate)) < days:
            found.append(HostIncident(f"h{host}", at * DAY_S, rng.choice(("gpu", "nic", "disk"))))
    return found


def judged(incidents: list[HostIncident], hosts: int, days: int) -> tuple[str, ...]:
    return judge_offenders(FleetHistory(tuple(incidents), hosts, 0.0, days * DAY_S)).blamed_hosts


def test_lemons_are_found_and_nobody_else() -> None:
    rng = random.Random(1)
    assert set(judged(fleet(rng, 300, 200, 0.003, lemons=4), 300, 200)) == {"h0", "h1", "h2", "h3"}


def test_bad_luck_is_no_lemon() -> None:
    rng = random.Random(2)
    blamed = [host for _ in range(10) for host in judged(fleet(rng, 300, 200, 0.005), 300, 200)]
    assert blamed == []


def test_old_incidents_count_less() -> None:
    others = [HostIncident(f"h{number}", number * DAY_S, "gpu") for number in range(2, 60)]
    long_ago = [HostIncident("old", (number * 3 + 1) * DAY_S, "gpu") for number in range(8)]
    lately = [HostIncident("new", (1000 - number * 3) * DAY_S, "gpu") for number in range(8)]
    rates = {
        rate.host: rate
        for rate in rate_hosts(FleetHistory((*others, *long_ago, *lately), 100, 0.0, 1001 * DAY_S), POLICY)
    }
    assert rates["new"].sure > 0.95 > 0.1 > rates["old"].sure


def test_repetitions_and_common_causes_count_little() -> None:
    flapping = [HostIncident("flap", DAY_S + 60 * number, "link down") for number in range(50)]
    switch = [HostIncident(f"h{number}", 30 * DAY_S, "switch") for number in range(40)]
    rates = {rate.host: rate for rate in rate_hosts(FleetHistory((*flapping, *switch), 100, 0.0, 60 * DAY_S), POLICY)}
    assert rates["flap"].count == 1 and rates["h7"].weight < 0.05


def test_a_repair_ends_a_history() -> None:
    others = [HostIncident(f"h{number}", number * DAY_S, "gpu") for number in range(2, 60)]
    bad = [HostIncident(host, (10 + 3 * number) * DAY_S, "gpu") for number in range(8) for host in ("mended", "bad")]
    repair = HostIncident("mended", 40 * DAY_S, "replaced by the vendor")
    verdict = judge_offenders(FleetHistory((*others, *bad, repair), 100, 0.0, 90 * DAY_S))
    assert verdict.blamed_hosts == ("bad",)


def test_a_short_history_says_nothing() -> None:
    incidents = (
        HostIncident("h1", 0.0, "gpu"),
        HostIncident("h1", 2 * DAY_S, "gpu"),
        HostIncident("h1", 4 * DAY_S, "nic"),
    )
    verdict = judge_offenders(FleetHistory(incidents, 100))
    assert verdict.exit_status == 3 and "do not tell a bad host from bad luck" in verdict.abstains[0]
    assert judge_offenders(FleetHistory(())).exit_status == 3


def test_metas_signals_stand_beside_it() -> None:
    rng = random.Random(3)
    incidents = fleet(rng, 200, 100, 0.004)
    incidents += [HostIncident("h9", (99 - number) * DAY_S, "Xid 79") for number in range(3)]
    incidents += [HostIncident("h9", (99.5 - number) * DAY_S, "drained", signal="out_count") for number in range(3)]
    verdict = judge_offenders(FleetHistory(tuple(incidents), 200, 0.0, 100 * DAY_S))
    found = next(found for found in verdict.detections if found.who[0].name == "h9")
    assert any("xid_cnt 3" in reason and "out_count 3" in reason for reason in found.why)
    assert signal_of(HostIncident("h", 0, "single-node NODE_FAIL")) == "single_node_node_fails"


def test_equal_hosts_look_equal() -> None:
    rng = random.Random(4)
    counts = [float(sum(rng.random() < 0.02 for _ in range(100))) for _ in range(400)]
    fleet_rates = fit_fleet(counts, 100.0, POLICY)
    assert fleet_rates.shape >= 3 and fleet_rates.per_day == pytest.approx(0.02, rel=0.2)
    assert fleet_rates.share.sum() == pytest.approx(1)


def test_offenders_do_not_make_the_fleet_look_worse() -> None:
    fleet_rates = fit_fleet([1.0] * 100 + [0.0] * 280 + [30.0] * 20, 100.0, POLICY)
    assert fleet_rates.per_day < 0.012  # the mean of all is 0.0175


@given(st.lists(st.floats(0, 200), min_size=8, max_size=40))
def test_any_counts_have_rates(counts: list[float]) -> None:
    fleet_rates = fit_fleet(counts, 30.0, POLICY)
    assert fleet_rates.per_day > 0 and math.isfinite(fleet_rates.per_day) and (fleet_rates.share >= 0).all()


def test_incidents_of_jobs_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "job" / "incidents"
    folder.mkdir(parents=True)
    seen = Seen(unix_s=100.0, by="executor", what="killed by SIGBUS", host="h3", rank=5, is_own=True)
    echo = Seen(unix_s=101.0, by="executor", what="connection lost", host="h4", rank=7)
    outcome = IncidentOutcome(unix_s=110.0, result="recovered", summary="h3 was replaced")
    first = Incident(number=1, job="pretrain", attempt=1, facts=[seen, echo, Lost(unix_s=105.0, what="h3"), outcome])
    alarm = Incident(
        number=2,
        job="pretrain",
        attempt=1,
        facts=[seen, IncidentOutcome(unix_s=120.0, result="false alarm", summary="nothing")],
    )
    (folder / "0001.json").write_text(to_json(first))
    (folder / "0002.json").write_text(to_json(alarm))
    telemetry = tmp_path / "run" / "telemetry"
    telemetry.mkdir(parents=True)
    (telemetry / "incidents.jsonl").write_text(
        '{"kind": "hang", "at_ns": 5000000000, "host": "h8"}\n{"kind": "x", "at_n'
    )
    found = read_histories([tmp_path])
    assert [(one.host, one.kind, signal_of(one)) for one in found] == [
        ("h8", "hang", ""), ("h3", "killed by SIGBUS", ""), ("h3", "taken out of the job", "out_count"),
    ]  # fmt: skip


def test_tables_of_a_site_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("node,time,reason,job_id,signal\nn1,2026-11-25T10:00:00Z,Xid 79,7,xid_cnt\n")
    (tmp_path / "b.jsonl").write_text('{"host": "n2", "unix_s": 5, "kind": "fan"}\n')
    found = read_histories([tmp_path / "a.csv", tmp_path / "b.jsonl"])
    assert [(one.host, one.unix_s, one.kind, one.job) for one in found] == [
        ("n2", 5.0, "fan", ""), ("n1", 1795600800.0, "Xid 79", "7"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("host,time\nn1,soon\n", "has no time"),
        ("a,b\n1,2\n", "a=1, b=2.*has no host"),
        ("host,time\nn1,nan\n", "host=n1, time=nan.*has no time"),
        ("host\n", "has no rows"),
        ("host,time,signal\nn1,5,luck\n", "is no signal"),
    ],
)
def test_tables_that_are_wrong_are_named(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError, match=problem):
        read_histories([tmp_path / "a.csv"])
    with pytest.raises(UserError, match="neither"):
        read_histories([tmp_path / "nowhere"])


def test_the_command(tmp_path: Path) -> None:
    rows = [
        {"host": one.host, "unix_s": one.unix_s, "kind": one.kind}
        for one in fleet(random.Random(1), 300, 200, 0.003, lemons=2)
    ]
    (tmp_path / "history.json").write_text(json.dumps(rows))
    done = CliRunner().invoke(command, ["offenders", str(tmp_path / "history.json"), "--hosts", "300", "--json"])
    tree = json.loads(done.output)
    assert done.exit_code == 1 and {found["who"][0]["name"] for found in tree["detections"]} == {"h0", "h1"}
    assert tree["detections"][0]["advice"] == "exclude"


@pytest.mark.skipif(not TRACE.exists(), reason="there is no ../shared/data/faults")
def test_a_year_of_real_faults() -> None:
    verdict = judge_offenders(FleetHistory(tuple(read_histories([TRACE])), 400))
    assert verdict.blamed_hosts[0].startswith("e7b02619") and len(verdict.blamed_hosts) < 8


@pytest.mark.parametrize("per_s", [1e3, 1e6, 1e9])
def test_times_of_any_unit_are_seconds(tmp_path: Path, per_s: float) -> None:
    (tmp_path / "a.csv").write_text(f"host,unix_s\nn1,{1_795_600_800 * int(per_s)}\n")
    assert read_histories([tmp_path / "a.csv"])[0].unix_s == 1_795_600_800


def test_a_time_after_now_hides_no_offender() -> None:
    incidents = fleet(random.Random(1), 300, 200, 0.003, lemons=2)
    later = HostIncident("h9", 40_000 * DAY_S, "gpu")
    verdict = judge_offenders(FleetHistory((*incidents, later), 300, now_unix_s=200 * DAY_S))
    assert set(verdict.blamed_hosts) == {"h0", "h1"}
    assert any("1 incident has a time after now (host h9, 2079-07-08)" in reason for reason in verdict.abstains)


def test_errors_of_programs_blame_no_host() -> None:
    incidents = fleet(random.Random(1), 300, 200, 0.003)
    for kind in ("KeyError in train.py", "out of memory", "ImportError: No module named 'x'"):
        own = [HostIncident("h1", number * 3 * DAY_S, kind) for number in range(50)]
        verdict = judge_offenders(FleetHistory((*incidents, *own), 300, 0.0, 200 * DAY_S))
        assert verdict.exit_status == 0 and f"50 incidents are errors of programs ({kind})" in verdict.looked_at
    for kind in ("gpu", "ECC error", "RuntimeError: CUDA error: uncorrectable ECC error encountered"):
        own = [HostIncident("h1", number * 3 * DAY_S, kind) for number in range(50)]
        assert judge_offenders(FleetHistory((*incidents, *own), 300, 0.0, 200 * DAY_S)).blamed_hosts == ("h1",)


def test_fewer_hosts_than_the_history_has_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("host,time\nn1,5\nn2,6\n")
    done = CliRunner().invoke(command, ["offenders", str(tmp_path / "a.csv"), "--hosts", "1"])
    assert isinstance(done.exception, UserError) and "fewer than the 2 hosts" in str(done.exception)
