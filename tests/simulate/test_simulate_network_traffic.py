"""What a step sends: phases by hand, of a file, of a layout, of a prediction; and networks by their files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.plan.hardware.cluster import load_cluster
from phalanx.plan.predict import predict
from phalanx.plan.types import Job, Model, Strategy
from phalanx.simulate.network_scenario import make_scenario
from phalanx.simulate.network_settings import network_of
from phalanx.simulate.network_simulation import what_if
from phalanx.simulate.traffic import Phase, Traffic, TrafficLayout, make_traffic, read_traffic, traffic_of

RING = Phase("data", "ring", 8, 8, 1e9)
TOML = """
step_s = 2.5
[[phase]]
name = "data"
pattern = "ring"
ranks = 16
stride = 8
rank_bytes = 3e9
times = 4
exposed_ratio = 0.25
[[phase]]
name = "experts"
pattern = "all_to_all"
ranks = 8
stride = 8
rank_bytes = 100_000_000
cover_s = 0.1
"""


@given(st.floats(0, 1), st.floats(0, 10), st.floats(1, 50), st.one_of(st.none(), st.floats(0, 20)))
def test_what_is_exposed_grows_with_the_phase_and_never_beyond_it(
    share: float, ideal_s: float, stretch: float, cover_s: float | None
) -> None:
    phase = Phase("data", "ring", 8, 8, 1.0, exposed_ratio=share, cover_s=cover_s)
    now_s = stretch * ideal_s
    assert share * now_s <= phase.exposed_s(ideal_s, now_s) * (1 + 1e-9) + 1e-12
    assert phase.exposed_s(ideal_s, now_s) <= now_s * (1 + 1e-9)
    assert phase.exposed_s(ideal_s, now_s) <= phase.exposed_s(ideal_s, 2 * now_s) + 1e-12
    if cover_s is None:  # no slack: what is longer shows in full
        longer = phase.exposed_s(ideal_s, now_s) - phase.exposed_s(ideal_s, ideal_s)
        assert longer == pytest.approx(now_s - ideal_s, abs=1e-9)


def test_work_that_is_left_over_hides_more() -> None:
    tight, loose = Phase("", "ring", 2, 8, 1.0, 1, 0.5), Phase("", "ring", 2, 8, 1.0, 1, 0.5, cover_s=3.0)
    assert tight.exposed_s(1.0, 4.0) == pytest.approx(3.5)
    assert loose.exposed_s(1.0, 4.0) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"pattern": "star"},
        {"ranks": 0},
        {"stride": 0},
        {"rank_bytes": -1.0},
        {"rank_bytes": float("nan")},
        {"times": 0},
        {"exposed_ratio": 1.5},
        {"cover_s": -1.0},
    ],
)
def test_phases_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    fields = {"name": "x", "pattern": "ring", "ranks": 4, "stride": 8, "rank_bytes": 1.0, **wrong}
    with pytest.raises(UserError) as caught:
        Phase(**fields)  # type: ignore[arg-type]
    assert next(iter(wrong)) in str(caught.value.field)


def test_devices_have_to_fill_the_groups() -> None:
    traffic = Traffic((Phase("data", "ring", 24, 8, 1.0),), 1.0, "")
    traffic.check(384)
    with pytest.raises(UserError, match="multiple of 192"):
        traffic.check(256)


def test_more_pairs_than_can_be_looked_at_are_refused() -> None:
    with pytest.raises(UserError, match="at most"):
        Traffic((Phase("experts", "all_to_all", 1536, 8, 1.0),), 1.0, "").check(12288)


def test_a_file_says_the_same_as_values(tmp_path: Path) -> None:
    path = tmp_path / "traffic.toml"
    path.write_text(TOML)
    traffic = read_traffic(path)
    assert traffic.step_s == 2.5
    assert traffic.phases == (
        Phase("data", "ring", 16, 8, 3e9, 4, 0.25),
        Phase("experts", "all_to_all", 8, 8, 1e8, cover_s=0.1),
    )


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("step_s = 2.5", "", "step_s"),
        ("step_s = 2.5", 'step_s = "long"', "step_s"),
        ("step_s = 2.5", "step_s = 2.5\nsteps = 3", "steps"),
        ("ranks = 16", "ranks = 16.5", "phase[0].ranks"),
        ("ranks = 16", "", "ranks"),
        ("times = 4", "time = 4", "time"),
        ("rank_bytes = 3e9", "rank_bytes = true", "rank_bytes"),
        ("step_s", "step_s = = 3", "traffic.toml"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, before: str, after: str, named: str) -> None:
    path = tmp_path / "traffic.toml"
    path.write_text(TOML.replace(before, after, 1))
    with pytest.raises(UserError) as caught:
        read_traffic(path)
    assert named in str(caught.value)


def test_a_layout_s_rings_take_as_long_as_bytes_over_a_nic() -> None:
    """175B over 12,288 devices: 2.73e9 weights a rank, (d - 1)/d of them four bytes each, over 200 Gb/s."""
    layout = TrafficLayout(175e9, 96, 12288, 2048, 6144, tensor=8, pipeline=8, data=192, chunks=6)
    reduce, gather, pipeline = make_traffic(layout, 6.3, "").phases
    assert reduce.rank_bytes == pytest.approx(175e9 / 64 * 4 * 191 / 192)
    assert gather.rank_bytes == pytest.approx(reduce.rank_bytes / 2)
    assert pipeline.rank_bytes == pytest.approx(32 * 6 * 2048 * 12288 * 2 / 8)
    assert pipeline.exposed_ratio == pytest.approx(7 / 192)
    network = network_of(load_cluster("megascale", 12288))
    traffic = Traffic((reduce,), 6.3, "")
    ideal = make_scenario("ideal", network, {"hashing": "ideal"})
    (outcome,) = what_if(network, traffic, [ideal], draws=1).outcomes
    latency_s = 6 * 191 * network.latency_s
    assert outcome.phases[0].ideal_s == pytest.approx(reduce.rank_bytes / network.fabric.nic_bytes_per_s + latency_s)
    assert outcome.step_s == pytest.approx(6.3)


def test_one_rank_of_each_kind_sends_nothing() -> None:
    with pytest.raises(UserError, match="nothing is sent"):
        make_traffic(TrafficLayout(1e9, 8, 512, 512, 8, tensor=8, pipeline=1, data=1), 1.0, "")


def test_an_ideal_network_takes_as_long_as_predicted() -> None:
    """Time of the data-parallel exchange, predicted by formulas for collectives, comes back from links and flows."""
    cluster = load_cluster("megascale", 512)
    model = Model(layers=32, hidden=4096, heads=32, vocab_rows=64000, max_sequence=2048)
    for shape in ({"shard": 64}, {"shard": 16, "pipeline": 4, "chunks": 2, "schedule": "interleaved_1f1b"}):
        strategy = Strategy(tensor=8, zero=1, bucket_bytes=0, **shape)  # type: ignore[arg-type]
        prediction = predict(Job(model, 2048, 512), strategy, cluster)
        traffic = traffic_of(prediction, cluster)
        network = network_of(cluster)
        base = make_scenario("ideal", network, {"hashing": "ideal"})
        outcome = what_if(network, traffic, [base], draws=1).outcomes[0]
        data = next(phase for phase in outcome.phases if phase.name == "data")
        total_s = sum(p.seconds for p in (*prediction.parts, *prediction.hidden) if p.path.startswith("data"))
        assert data.ideal_s == pytest.approx(total_s, rel=1e-6)
        exposed_s = sum(p.seconds for p in prediction.parts if p.path.startswith("data"))
        assert data.ideal_exposed_s == pytest.approx(exposed_s, rel=1e-6)
        assert outcome.step_s == pytest.approx(prediction.step_s)


def test_what_stays_inside_hosts_is_no_traffic() -> None:
    cluster = load_cluster("megascale", 8)
    model = Model(layers=8, hidden=1024, heads=8, vocab_rows=32000, max_sequence=1024)
    prediction = predict(Job(model, 1024, 64), Strategy(shard=4, tensor=2, bucket_bytes=0), cluster)
    with pytest.raises(UserError, match="inside hosts; take more devices"):
        traffic_of(prediction, cluster)


def test_megascale_s_network_is_that_of_its_paper_and_says_what_is_assumed() -> None:
    network = network_of(load_cluster("megascale", 12288))
    assert network.fabric.hosts_per_group == 64
    assert network.numbers["fabric.port_bytes_per_s"].mark == "measured"
    assert network.numbers["fabric.queue_pairs"].mark == "assumed"
    assert all(number.source for number in network.numbers.values())


def test_a_file_may_change_some_numbers_and_the_rest_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        "layers = 2\n[fabric]\n"
        'tor_oversubscription_ratio = { value = 2, mark = "assumed", source = "me", date = "2026" }\n'
    )
    network = network_of(load_cluster("megascale", 512), path)
    assert (network.fabric.layers, network.fabric.tor_oversubscription) == (2, 2.0)
    assert network.fabric.radix == 64
    assert network.numbers["fabric.tor_oversubscription_ratio"].source == "me (2026)"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("layer = 2\n", "layer"),
        ("[fabric]\nradix = 3\n", "radix"),
        ("[fabric]\nqueue_pairs = 3\n", "queue_pairs"),
        ('layers = "two"\n', "layers"),
        ('[ecn]\nlow_s = { value = 32, mark = "guessed", source = "me", date = "2026" }\n', "mark"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        network_of(load_cluster("megascale", 512), path)
    assert named in str(caught.value)


def test_several_nics_of_one_device_count_as_one_fast_one() -> None:
    cluster = load_cluster("megascale", 512)
    plain = network_of(cluster).fabric
    merged = network_of(replace(cluster, devices_per_host=4)).fabric
    assert (merged.nics_per_host, merged.hosts) == (4, 2 * plain.hosts)
    assert merged.nic_bytes_per_s == pytest.approx(2 * plain.nic_bytes_per_s)
