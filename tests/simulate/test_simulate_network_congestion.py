"""Congestion control as fluid: against published fixed points, closed forms and bytes that must add up."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.network.fixed_points import dcqcn_rest, swift_rest

from phalanx.simulate.congestion import Cases, HotLink, HotLinkTable, QueueTrace, run_hot_spot
from phalanx.simulate.network_settings import CongestionSettings, Control, Dcqcn, Ecn, Pfc, Swift

CAPACITY, NIC = 50e9, 25e9
FLOWS = (3, 4, 8, 16, 32, 64)


def make_cases(control: Control, flows: tuple[int, ...], *, hot_links: float = 4.0, line: float = NIC) -> Cases:
    counts = np.array(flows, float)
    same = np.ones(len(flows))
    return Cases(
        [control] * len(flows), counts, np.maximum(counts - 1, 1), line * same, CAPACITY * same, CAPACITY * same,
        hot_links * same,
    )  # fmt: skip


@pytest.fixture(scope="module")
def dcqcn() -> QueueTrace:
    return run_hot_spot(make_cases("dcqcn", FLOWS), CongestionSettings(), NIC, span_s=0.06)


@pytest.fixture(scope="module")
def swift() -> QueueTrace:
    return run_hot_spot(make_cases("swift", FLOWS), CongestionSettings(), NIC, span_s=0.01)


@pytest.fixture(scope="module")
def pauses_only() -> QueueTrace:
    return run_hot_spot(make_cases("none", FLOWS[:4]), CongestionSettings(), NIC, span_s=0.02)


@pytest.mark.slow
def test_dcqcn_comes_to_rest_at_its_published_fixed_point(dcqcn: QueueTrace) -> None:
    """Zhu et al. 2016, theorem 1: the queue, and with it the marks, depend on the number of flows alone."""
    for place, flows in enumerate(FLOWS):
        rest = dcqcn_rest(flows, CAPACITY, NIC, CongestionSettings())
        assert dcqcn.settled(dcqcn.queue_bytes)[place] == pytest.approx(rest.queue_bytes, rel=0.01)
        assert dcqcn.settled(dcqcn.marked_ratio)[place] == pytest.approx(rest.marked, rel=0.08)


def dcqcn_marked(senders: int, capacity: float, adapter_rate: float, settings: CongestionSettings) -> float:
    control, mtu = settings.dcqcn, settings.mtu_bytes
    rate, increase = capacity / senders / mtu, control.increase_ratio * adapter_rate / mtu
    often = mtu / control.increase_counter_bytes + 1 / (control.increase_timer_s * rate)
    return float((increase / (control.alpha_timer_s * rate**2) * often**2) ** (1 / 3))


def test_dcqcn_s_fixed_point_has_the_published_closed_form_for_few_marks() -> None:
    """``p = cbrt(R_AI N²/(τ' C²) (1/B + N/(T C))²)`` (Zhu et al. 2016): first order in p τ R, so best for few marks."""
    ratios = []
    for increase in (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8):
        slow = replace(CongestionSettings(), dcqcn=replace(Dcqcn(), increase_ratio=increase))
        ratios.append(dcqcn_marked(8, CAPACITY, NIC, slow) / dcqcn_rest(8, CAPACITY, NIC, slow).marked)
    assert all(a > b > 0.99 for a, b in itertools.pairwise(ratios))
    assert ratios[-1] == pytest.approx(1.0, abs=0.03)


def test_dcqcn_of_the_paper_s_own_settings() -> None:
    """40 Gb/s, K 5 and 200 KB, 1 % of marks at most, R_AI 40 Mb/s, packets of 1 KB: as in Zhu et al. 2015 and 2016."""
    capacity = 5e9
    paper = CongestionSettings(mtu_bytes=1000, ecn=Ecn(5e3 / capacity, 200e3 / capacity, 0.01))
    rests = [dcqcn_rest(flows, capacity, capacity, paper) for flows in (2, 8, 10, 64)]
    queues = [rest.queue_bytes for rest in rests]
    assert queues == sorted(queues)
    for flows, rest in zip((2, 8, 10), rests, strict=False):
        packets = capacity / 1000
        often = 1 / 10_000 + flows / (55e-6 * packets)
        closed = (5e3 * flows**2 / (55e-6 * packets**2) * often**2) ** (1 / 3)  # R_AI: 40 Mb/s are 5,000 packets/s
        assert rest.marked == pytest.approx(closed, rel=0.25)  # to first order in p τ R
        assert rest.queue_bytes == pytest.approx(5e3 + rest.marked / 0.01 * 195e3)
    assert 5e3 < queues[0] < 60e3
    assert queues[2] < 200e3


def test_more_flows_than_marks_can_hold_back_have_no_fixed_point() -> None:
    few_marks = replace(CongestionSettings(), ecn=Ecn(mark_ratio=1e-4))
    assert dcqcn_rest(64, CAPACITY, NIC, few_marks).queue_bytes == float("inf")


@pytest.mark.slow
def test_swift_comes_to_rest_at_its_target_delay(swift: QueueTrace) -> None:
    for place, flows in enumerate(FLOWS):
        rest = swift_rest(flows, CAPACITY, CongestionSettings())
        assert swift.settled(swift.queue_bytes)[place] == pytest.approx(rest.queue_bytes, rel=0.01)


def test_swift_s_target_is_what_its_algorithm_says() -> None:
    """Windows above `flow_high` are allowed base and hops; below it up to `flow_range_s` more, by 1/√window."""
    wide = swift_rest(2, CAPACITY, CongestionSettings())
    aim = 20e-6 + 5 * 3.05e-6
    assert wide.queue_bytes == pytest.approx(CAPACITY * (aim - 12e-6))
    narrow = swift_rest(1_000_000, CAPACITY, CongestionSettings())
    assert narrow.queue_bytes == pytest.approx(CAPACITY * (aim + 100e-6 - 12e-6))
    middle = swift_rest(64, CAPACITY, CongestionSettings())
    delay = middle.queue_bytes / CAPACITY + 12e-6
    window = CAPACITY * delay / 64 / 4096
    slope = 100e-6 / (0.1**-0.5 - 100**-0.5)
    assert delay == pytest.approx(aim + slope * (window**-0.5 - 0.1))


@pytest.mark.slow
def test_nothing_is_lost_or_made(dcqcn: QueueTrace, swift: QueueTrace, pauses_only: QueueTrace) -> None:
    for trace in (dcqcn, swift, pauses_only):
        arrived = trace.delivered_bytes[..., -1] + trace.left_bytes
        assert arrived == pytest.approx(trace.sent_bytes, rel=1e-9)
        span = trace.sample_s * trace.delivered_bytes.shape[-1]
        cases = trace.cases
        assert (trace.delivered_bytes[0, :, -1] * cases.hot_flows <= cases.capacity * span * (1 + 1e-9)).all()
        assert (np.diff(trace.delivered_bytes, axis=-1) >= 0).all()
        assert trace.queue_bytes.min() >= 0


@pytest.mark.slow
def test_pauses_alone_hold_bystanders_down_to_the_pace_of_the_hot_flows(pauses_only: QueueTrace) -> None:
    """Head-of-line blocking in closed form: behind a first-in-first-out port both go at C/N, where C/V would be fair.

    And ports stand still in all the time that they could have sent more: 1 - 2 C/N / C of it.
    """
    cases = pauses_only.cases
    assert pauses_only.efficiency(1.0)[0] == pytest.approx(np.ones(4), rel=1e-3)
    assert pauses_only.efficiency(1.0)[1] == pytest.approx(cases.cold_flows / cases.hot_flows, rel=0.01)
    assert pauses_only.settled(pauses_only.paused_ratio) == pytest.approx(1 - 2 / cases.hot_flows, abs=0.01)


def packets_through_fifo_ports(flows: int, cold: int, slots: int) -> tuple[float, float]:
    """The same with single packets, one a slot: what hot flows and bystanders get of a link, each.

    `flows` ports with endless first-in-first-out queues of packets for the hot link and for a cold one; links have
    short buffers; a port whose first packet finds its buffer full waits, and all behind it.
    """
    rng = np.random.default_rng(0)
    first = rng.integers(0, 2, flows)  # 0: for the hot link
    groups = np.arange(flows) // cold  # bystanders of so many ports share a cold link
    held = np.zeros(1 + groups.max() + 1, dtype=int)
    sent = np.zeros(2)
    for _ in range(slots):
        for port in rng.permutation(flows):
            link = 0 if first[port] == 0 else 1 + groups[port]
            if held[link] < 4:
                held[link] += 1
                sent[first[port]] += 1
                first[port] = rng.integers(0, 2)
        held = np.maximum(held - 1, 0)
    return float(sent[0] / slots / flows), float(sent[1] / slots / flows)


@pytest.mark.slow
def test_single_packets_are_blocked_as_the_fluid_is(pauses_only: QueueTrace) -> None:
    """Behind full buffers, bystanders go at the pace of the hot flows, though their own links are half empty."""
    for place, flows in enumerate(FLOWS[1:3], start=1):
        hot, cold = packets_through_fifo_ports(flows, 2, 4000)
        assert hot == pytest.approx(1 / flows, rel=0.03)
        assert cold == pytest.approx(hot, rel=0.06)
        fluid = pauses_only.efficiency(1.0)[:, place] * pauses_only.cases.fair[:, place] / CAPACITY
        assert fluid == pytest.approx([hot, cold], rel=0.06)


@pytest.mark.slow
def test_congestion_control_spares_bystanders_and_pauses(
    dcqcn: QueueTrace, swift: QueueTrace, pauses_only: QueueTrace
) -> None:
    for trace in (dcqcn, swift):
        assert trace.settled(trace.paused_ratio).max() == 0
        assert trace.efficiency(10.0)[1].min() > 0.99
    assert pauses_only.efficiency(10.0)[1].min() < 0.7


@pytest.mark.slow
def test_both_together_pause_no_longer_than_either_alone() -> None:
    """MegaScale 3.6: both signals, to keep pauses from all-to-all rare while links stay full."""
    flows = (16, 48, 128)
    effects = {}
    for control in ("dcqcn", "swift", "mixed"):
        trace = run_hot_spot(make_cases(control, flows, hot_links=16), CongestionSettings(), NIC, span_s=0.01)
        effects[control] = trace.paused_s(0.01), trace.efficiency(0.01)[0]
    assert (effects["mixed"][0] <= effects["swift"][0] + 1e-9).all()
    assert (effects["mixed"][0] < effects["dcqcn"][0]).all()
    assert effects["mixed"][1].min() > 0.99
    assert (effects["mixed"][1] >= effects["dcqcn"][1]).all()


def test_a_link_that_carries_all_has_no_queue() -> None:
    trace = run_hot_spot(make_cases("dcqcn", (2, 4), line=12e9), CongestionSettings(), NIC, span_s=0.005)
    assert trace.queue_bytes.max() < 1e-3 * CAPACITY * 1e-6
    assert trace.efficiency(0.005) == pytest.approx(np.ones((2, 2)), rel=1e-3)


@settings(max_examples=15)
@given(
    st.sampled_from(["dcqcn", "swift", "mixed", "none"]),
    st.integers(2, 300),
    st.floats(1e-3, 1.0),
    st.integers(1, 32),
    st.floats(1e6, 1e8),
)
def test_whatever_the_case_bytes_add_up_and_shares_are_shares(
    control: Control, flows: int, line: float, hot_links: int, buffer_bytes: float
) -> None:
    switches = replace(CongestionSettings(), pfc=Pfc(buffer_bytes=buffer_bytes))
    trace = run_hot_spot(
        make_cases(control, (flows,), hot_links=hot_links, line=line * NIC), switches, NIC, span_s=2e-3
    )
    arrived = trace.delivered_bytes[..., -1] + trace.left_bytes
    assert arrived == pytest.approx(trace.sent_bytes, rel=1e-9)
    assert (trace.queue_bytes >= 0).all()
    assert np.isfinite(trace.queue_bytes).all()
    assert ((trace.paused_ratio >= 0) & (trace.paused_ratio <= 1)).all()
    assert ((trace.marked_ratio >= 0) & (trace.marked_ratio <= 1)).all()
    for duration in (1e-5, 1e-3, 1.0):
        assert ((trace.efficiency(duration) >= 0) & (trace.efficiency(duration) <= 1)).all()
        assert (trace.mean_queue_s(duration) >= 0).all()


def test_cases_side_by_side_are_as_they_are_alone() -> None:
    together = run_hot_spot(make_cases("swift", (4, 20)), CongestionSettings(), NIC, span_s=1e-3)
    alone = run_hot_spot(make_cases("swift", (20,)), CongestionSettings(), NIC, span_s=1e-3)
    common = min(alone.queue_bytes.shape[1], together.queue_bytes.shape[1])  # one of them may settle sooner
    assert together.only(1).queue_bytes[:, :common] == pytest.approx(alone.queue_bytes[:, :common])
    assert together.only(1).efficiency(5e-4) == pytest.approx(alone.efficiency(5e-4))


@pytest.mark.slow
def test_a_table_has_each_link_once() -> None:
    links = [HotLink.of("swift", 8, 2.0, CAPACITY, 3.0), HotLink.of("dcqcn", 8, 2.0, CAPACITY, 3.0)]
    assert links[0].line_rate == pytest.approx(2 * CAPACITY / 8)
    table = HotLinkTable(links, replace(CongestionSettings(), swift=Swift()), NIC)
    effects = [table.effect(link, 0.02) for link in links]
    assert effects[0].efficiency > effects[1].efficiency
    assert effects[0].stretch == pytest.approx(1 / effects[0].efficiency)
    assert table.trace(links[1]).cases.control == ["dcqcn"]
