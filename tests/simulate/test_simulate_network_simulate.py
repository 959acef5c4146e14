"""What circumstances do to a step, from 16 devices to 12,288."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.plan.hardware.cluster import load_cluster
from phalanx.simulate.link_loads import measure, shape_of
from phalanx.simulate.network_scenario import changed, make_scenario, read_scenarios, usual_scenarios
from phalanx.simulate.network_settings import NetworkDescription, network_of
from phalanx.simulate.network_simulation import CAUSES, NetworkReport, ScenarioOutcome, expected_fullest, what_if
from phalanx.simulate.traffic import Phase, Traffic, TrafficLayout, make_traffic

RING = Phase("data", "ring", 128, 8, 1e9, exposed_ratio=0.5)


@pytest.fixture(scope="module")
def network() -> NetworkDescription:
    return network_of(load_cluster("megascale", 1024))


def run(
    network: NetworkDescription, *changes: dict[str, object], phase: Phase = RING, draws: int = 2
) -> list[ScenarioOutcome]:
    scenarios = [make_scenario(str(number), network, change) for number, change in enumerate(changes)]
    return list(what_if(network, Traffic((phase,), 1.0, "by hand"), scenarios, draws).outcomes)


def test_nothing_is_lost_on_an_ideal_network(network: NetworkDescription) -> None:
    (outcome,) = run(network, {"hashing": "ideal"})
    assert outcome.step_s == pytest.approx(1.0)
    assert all(seconds == pytest.approx(0, abs=1e-12) for seconds in outcome.lost_s.values())
    assert outcome.why == "nothing is in the way of its messages"


def test_packed_rings_have_no_conflicts(network: NetworkDescription) -> None:
    """MegaScale 3.6: what sends most sits under the same ToRs; one hop of each ring leaves them."""
    packed, scattered = run(network, {}, {"placement": "scattered"})
    assert packed.step_s == pytest.approx(1.0)
    assert scattered.step_s > 1.01
    assert scattered.lost_s["placement"] > 0.9 * (scattered.step_s - 1.0)
    assert "data" in scattered.why


@settings(max_examples=20)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "hashing": st.sampled_from(["ecmp", "polarised", "adaptive", "ideal"]),
            "placement": st.sampled_from(["packed", "scattered", "pipeline_first"]),
            "tor_oversubscription": st.sampled_from([1.0, 2.0, 4.0]),
            "aggregation_oversubscription": st.sampled_from([1.0, 4.0]),
            "uplink_split": st.sampled_from([1, 2]),
            "rail_optimised": st.booleans(),
            "queue_pairs": st.integers(1, 8),
            "flap_s": st.sampled_from([0.0, 0.5, 3.0]),
        },
    )
)
def test_causes_add_up_to_what_a_step_loses(changes: dict[str, object]) -> None:
    network = network_of(load_cluster("megascale", 256))
    layout = TrafficLayout(7e9, 32, 4096, 2048, 128, tensor=8, pipeline=2, data=16, chunks=2)
    traffic = make_traffic(layout, 1.0, "")
    scenario = changed(make_scenario("x", network, {}), "x", {**changes, "congestion": "swift"})
    outcome = what_if(network, traffic, [scenario], draws=2).outcomes[0]
    assert set(outcome.lost_s) == set(CAUSES)
    assert outcome.step_s == pytest.approx(1.0 + sum(outcome.lost_s.values()))
    assert outcome.step_s >= 1.0 - 1e-9
    assert outcome.low_s <= outcome.step_s + 1e-9
    assert outcome.lost_s["oversubscription"] >= -1e-12
    for phase in outcome.phases:
        assert phase.now_s >= phase.ideal_s * (1 - 1e-9)
        assert 0 <= phase.efficiency <= 1


def test_each_of_two_changes_for_the_better_helps(network: NetworkDescription) -> None:
    scattered = {"placement": "scattered"}
    slow, plain, sprayed = run(
        network, {**scattered, "uplink_split": 2}, scattered, {**scattered, "hashing": "ideal"}, draws=4
    )
    one, four = run(network, {**scattered, "queue_pairs": 1}, {**scattered, "queue_pairs": 4}, draws=4)
    assert slow.step_s > plain.step_s > sprayed.step_s == pytest.approx(1.0)
    assert one.step_s > four.step_s


def test_hosts_that_are_scattered_over_a_larger_fabric_share_fewer_tors(network: NetworkDescription) -> None:
    own, wide = run(network, {"placement": "scattered"}, {"placement": "scattered", "hosts": 2048}, draws=4)
    assert wide.lost_s["placement"] < own.lost_s["placement"]
    with pytest.raises(UserError, match="more hosts"):
        run(network, {"hosts": 64})


def test_an_oversubscribed_fabric_takes_its_ratio_longer_where_all_leaves_the_tor() -> None:
    """With sprayed packets and rings whose every hop crosses, a 2:1 fabric halves the rate, exactly."""
    network = network_of(load_cluster("megascale", 1024))
    phase = Phase("data", "ring", 2, 512, 1e9)  # each host with the one 64 further on, in the next ToR group
    (outcome,) = run(network, {"hashing": "ideal", "tor_oversubscription": 2.0, "congestion": "swift"}, phase=phase)
    assert outcome.phases[0].overload == pytest.approx(2.0)
    ideal_s = 1e9 / network.fabric.nic_bytes_per_s
    assert outcome.lost_s["oversubscription"] == pytest.approx(ideal_s)


def test_without_adaptive_routing_half_to_three_quarters_of_the_bandwidth_are_lost() -> None:
    """Meta's bring-up (2410.21680): 50 to 75 % less without adaptive routing; hosts anywhere, few connections."""
    network = network_of(load_cluster("megascale", 4096))
    phase = Phase("data", "ring", 512, 8, 1e9)
    traffic = Traffic((phase,), 10.0, "")
    shape = shape_of(phase, traffic, 4096, 8)
    for pairs, most, least in ((1, 0.8, 0.6), (2, 0.75, 0.5), (4, 0.7, 0.45)):
        lost = []
        for seed in range(4):
            load = measure(shape, network.fabric, "ecmp", "scattered", pairs, seed)
            lost.append(1 - 1 / load.overload)
        assert least < sum(lost) / 4 < most
    sprayed = measure(shape, network.fabric, "ideal", "scattered", 1, 0)
    assert sprayed.overload == pytest.approx(1.0)


def test_the_fullest_of_many_links_is_fuller_than_that_of_one_switch() -> None:
    """The closed form for one ToR is a lower bound for the whole fabric, which has many of them, and the ways down."""
    network = network_of(load_cluster("megascale", 4096))
    phase = Phase("data", "ring", 512, 8, 1e9)
    shape = shape_of(phase, Traffic((phase,), 1.0, ""), 4096, 8)
    fullest = [measure(shape, network.fabric, "ecmp", "scattered", 1, seed).paths for seed in range(6)]
    assert sum(fullest) / 6 > expected_fullest(57, 32)


def test_an_incast_queues_at_its_receiver(network: NetworkDescription) -> None:
    phase = Phase("load", "incast", 64, 8, 1e6)
    dcqcn, swift = run(network, {"congestion": "dcqcn"}, {"congestion": "swift"}, phase=phase)
    for outcome in (dcqcn, swift):
        assert outcome.phases[0].hottest == "ToR to NIC"
        assert outcome.phases[0].overload == pytest.approx(63)
        assert outcome.phases[0].now_s >= 63e6 / network.fabric.nic_bytes_per_s
        assert outcome.lost_s["congestion"] > 0
    assert swift.phases[0].queue_s < dcqcn.phases[0].queue_s


def test_a_flap_holds_the_step_up_or_ends_the_job(network: NetworkDescription) -> None:
    fixed, adaptive, old, uplink = run(
        network,
        {"flap_s": 3.0},
        {"flap_s": 3.0, "adaptive_retransmit": True},
        {"flap_s": 3.0, "retransmit_timeout": 14},
        {"flap_s": 3.0, "flap_link": "uplink", "adaptive_retransmit": True},
    )
    assert fixed.lost_s["flap"] == pytest.approx(4.295, abs=1e-3)
    assert 3.0 <= adaptive.lost_s["flap"] < fixed.lost_s["flap"]
    assert uplink.lost_s["flap"] == pytest.approx(0.1)  # others take over after 50 ms, the next try finds them
    assert old.ends_job
    assert "job ends" in old.why and "a timeout of 17 would outlast it" in old.why
    assert math.isfinite(old.step_s)


def test_the_usual_questions_change_something_each(network: NetworkDescription) -> None:
    base = make_scenario("base", network, {})
    names = [scenario.name for scenario in usual_scenarios(base)]
    assert names[0] == "base"
    assert len(set(names)) == len(names) > 12
    scattered = [scenario.name for scenario in usual_scenarios(changed(base, "base", {"placement": "scattered"}))]
    assert "hosts scattered" not in scattered


def test_a_file_asks_its_own_questions(network: NetworkDescription, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[[scenario]]\nname = "slow timers"\nretransmit_timeout = 22\nflap_s = 1.0\n')
    base = make_scenario("base", network, {"hashing": "adaptive"})
    first, mine = read_scenarios(path, base)
    assert first == base
    assert (mine.name, mine.hashing, mine.retransmit.timeout_exponent) == ("slow timers", "adaptive", 22)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[[scenario]]\nhashing = 'ecmp'\n", "name"),
        ("[scenario]\nname = 'x'\n", "scenario"),
        ("[[scenario]]\nname = 'x'\nhash = 'ecmp'\n", "hash"),
        ("[[scenario]]\nname = 'x'\nhashing = 'md5'\n", "hashing"),
        ("[[scenario]]\nname = 'x'\nqueue_pairs = 'two'\n", "queue_pairs"),
        ("[[scenario]]\nname = 'x'\nqueue_pairs = 2.5\n", "queue_pairs"),
        ("[[scenario]]\nname = 'x'\ncongestion = 'reno'\n", "congestion"),
        ("[[scenario]]\nname = 'x'\nflap_s = -1\n", "flap_s"),
        ("[[scenario]\n", "mine.toml"),
    ],
)
def test_wrong_questions_are_refused(network: NetworkDescription, tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_scenarios(path, make_scenario("base", network, {}))
    assert named in str(caught.value)
    assert caught.value.cure


def test_draws_are_a_number(network: NetworkDescription) -> None:
    with pytest.raises(UserError, match="draws"):
        run(network, {}, draws=0)


@dataclass(frozen=True)
class Timed:
    report: NetworkReport
    cpu_s: float


@pytest.fixture(scope="module")
def timed() -> Timed:
    start = time.process_time()
    network = network_of(load_cluster("megascale", 12288))
    layout = TrafficLayout(175e9, 96, 12288, 2048, 6144, tensor=8, pipeline=8, data=192, chunks=6)
    base = make_scenario("this network", network, {})
    report = what_if(network, make_traffic(layout, 6.34, "175B"), usual_scenarios(base), draws=4, curves=True)
    return Timed(report, time.process_time() - start)


@pytest.fixture(scope="module")
def megascale(timed: Timed) -> NetworkReport:
    return timed.report


@pytest.mark.slow
def test_all_questions_about_12288_devices_are_answered_within_a_minute(timed: Timed) -> None:
    """In time of the processor, as others may be using the machine; it is one thread."""
    assert len(timed.report.outcomes) > 12
    assert timed.cpu_s < 60


@pytest.mark.slow
def test_megascale_s_choices_come_out_as_its_paper_has_them(megascale: NetworkReport) -> None:
    """Section 3.6: fast uplinks and neighbours under one ToR mean few conflicts; both signals at a time few pauses."""
    by_name = {outcome.scenario.name: outcome for outcome in megascale.outcomes}
    own = by_name["this network"]
    assert own.step_s < 1.01 * megascale.ideal_step_s
    for worse in ("uplinks no faster than NICs", "hosts scattered", "all switches hash alike", "ToRs 2:1"):
        assert by_name[worse].step_s > own.step_s
    assert by_name["scattered, DCQCN"].step_s > by_name["hosts scattered"].step_s
    assert by_name["… with NCCL's timeout of old, 14"].ends_job
    assert by_name["… with adaptive retransmission"].step_s < by_name["a NIC's link is down for 3 s"].step_s


@pytest.mark.slow
def test_a_report_is_json(megascale: NetworkReport) -> None:
    tree = json.loads(json.dumps(megascale.as_json(), allow_nan=False))
    assert tree["outcomes"][0]["scenario"]["fabric"]["radix"] == 64
    assert tree["outcomes"][0]["why"]
    assert {curve["control"] for curve in tree["queues"]} == {"dcqcn", "swift", "mixed", "none"}
    assert 0 < tree["conflicts"]["shares"]["lowest"] <= tree["conflicts"]["shares"]["mean"] <= 1


def test_the_slowest_flow_is_as_much_slower_as_the_phase_is_longer(network: NetworkDescription) -> None:
    """Two ways to the same number: fair rates of all flows, and bytes over the fullest link."""
    base = make_scenario("x", network, {"placement": "scattered", "congestion": "none"})
    report = what_if(network, Traffic((RING,), 1.0, ""), [base], draws=2)
    assert report.conflicts is not None
    shape = shape_of(RING, Traffic((RING,), 1.0, ""), 1024, 8)
    overloads = [measure(shape, network.fabric, "ecmp", "scattered", 4, seed).overload for seed in range(2)]
    assert report.conflicts.shares["lowest"] == pytest.approx(1 / max(overloads))


def test_an_unknown_fabric_is_said_to_be_one() -> None:
    network = network_of(load_cluster("selene", 1024))
    report = what_if(network, Traffic((RING,), 1.0, ""), [make_scenario("x", network, {"hashing": "ideal"})], draws=1)
    assert any("selene" in note for note in report.notes)
    megascale = network_of(load_cluster("megascale", 1024))
    assert megascale.described
