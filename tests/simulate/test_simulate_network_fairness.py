"""Max-min fair rates against the definition, an exact slow algorithm, and a textbook."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.simulate.fabric import Fabric, choose_paths, link_bytes
from phalanx.simulate.link_loads import Crossings, max_min_rates
from phalanx.simulate.traffic import Phase, make_flows

Network = tuple[list[int], list[dict[int, int]]]
"""Capacities, and for each item how often it crosses which link."""


def crossings_of(items: list[dict[int, int]]) -> Crossings:
    rows = [(link, item, weight) for item, links in enumerate(items) for link, weight in links.items()]
    link, item, weight = (np.array(column) for column in zip(*rows, strict=True))
    return Crossings(link, item, weight.astype(float), len(items))


def slow_rates(capacities: list[int], items: list[dict[int, int]]) -> list[Fraction]:
    """Progressive filling, one link after the other, in exact fractions."""
    left = [Fraction(capacity) for capacity in capacities]
    rates: dict[int, Fraction] = {}
    while len(rates) < len(items):
        going = [item for item in range(len(items)) if item not in rates]
        load = [sum(items[item].get(link, 0) for item in going) for link in range(len(left))]
        level = min(left[link] / load[link] for link in range(len(left)) if load[link])
        full = {link for link in range(len(left)) if load[link] and left[link] / load[link] == level}
        for item in going:
            if full & set(items[item]):
                rates[item] = level
                for link, weight in items[item].items():
                    left[link] -= weight * level
    return [rates[item] for item in range(len(items))]


@st.composite
def networks(draw: st.DrawFn) -> Network:
    links = draw(st.integers(1, 8))
    capacities = draw(st.lists(st.integers(1, 40), min_size=links, max_size=links))
    crossed = st.dictionaries(st.integers(0, links - 1), st.integers(1, 4), min_size=1, max_size=links)
    return capacities, draw(st.lists(crossed, min_size=1, max_size=12))


@given(networks())
def test_rates_are_those_of_slow_exact_filling(network: Network) -> None:
    capacities, items = network
    rates = max_min_rates(crossings_of(items), np.array(capacities, float))
    assert rates == pytest.approx([float(rate) for rate in slow_rates(capacities, items)])


@given(networks())
def test_every_item_has_a_full_link_on_which_nobody_is_faster(network: Network) -> None:
    """The definition (Bertsekas and Gallager 6.5.2): feasible, and each item has such a bottleneck."""
    capacities, items = network
    rates = max_min_rates(crossings_of(items), np.array(capacities, float))
    used = [
        sum(rates[item] * links.get(link, 0) for item, links in enumerate(items)) for link in range(len(capacities))
    ]
    assert all(use <= capacity * (1 + 1e-9) for use, capacity in zip(used, capacities, strict=True))
    for item, links in enumerate(items):
        bottlenecks = [
            link
            for link in links
            if used[link] >= capacities[link] * (1 - 1e-9)
            and all(rates[other] <= rates[item] * (1 + 1e-9) for other in range(len(items)) if link in items[other])
        ]
        assert bottlenecks


def test_a_network_worked_out_by_hand() -> None:
    """Three links of capacity 1: one session over all, one more on the first and the second, two more on the third."""
    items = [{0: 1, 1: 1, 2: 1}, {0: 1}, {2: 1}, {2: 1}, {1: 1}]
    rates = max_min_rates(crossings_of(items), np.ones(3))
    assert rates == pytest.approx([1 / 3, 2 / 3, 1 / 3, 1 / 3, 2 / 3])


def test_a_parking_lot() -> None:
    """One long flow over n links, each with one short flow: half of each link, whatever n."""
    items = [dict.fromkeys(range(9), 1), *({link: 1} for link in range(9))]
    assert max_min_rates(crossings_of(items), np.ones(9)) == pytest.approx([0.5] * 10)


def test_many_levels_are_filled_one_after_the_other() -> None:
    items: list[dict[int, int]] = [{0: 1, link: 1} for link in range(1, 6)]
    rates = max_min_rates(crossings_of(items), np.array([100.0, 1, 2, 3, 4, 50]))
    assert rates == pytest.approx([1, 2, 3, 4, 50])


def test_paths_of_one_item_are_counted_together() -> None:
    paths = np.array([[0, 1, -1], [0, 2, -1], [2, -1, -1]])
    crossings = Crossings.of_paths(paths, np.array([0, 0, 1]), 2, 3)
    assert sorted(zip(crossings.link, crossings.item, crossings.weight, strict=True)) == [
        (0, 0, 2.0),
        (1, 0, 1.0),
        (2, 0, 1.0),
        (2, 1, 1.0),
    ]


@pytest.mark.parametrize("pairs", [1, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_last_flow_ends_when_the_fullest_link_is_done(pairs: int, seed: int) -> None:
    """What `loads` rests on: flows of equal bytes, shared fairly and again whenever one ends, by their completions."""
    fabric = Fabric(64, 2, 1.0, 2.0, radix=8)
    flows = make_flows(Phase("data", "ring", 8, 2, 1.0), 128, 2, 2)
    flows = flows.moved(np.random.default_rng(seed).permutation(64))
    paths = choose_paths(fabric, flows, "ecmp", pairs, seed)
    left = np.full(len(paths), 1.0 / pairs)
    now, going = 0.0, np.arange(len(paths))
    while len(going):
        crossings = Crossings.of_paths(paths[going], np.arange(len(going)), len(going), fabric.num_links)
        rates = max_min_rates(crossings, fabric.capacities())
        step = (left[going] / rates).min()
        now += step
        left[going] -= step * rates
        going = going[left[going] > 1e-9]
    fullest = (link_bytes(fabric, flows, "ecmp", pairs, seed) / fabric.capacities()).max()
    assert now == pytest.approx(fullest)


def test_rings_at_the_pace_of_their_slowest_hop_end_no_sooner() -> None:
    """Coupled or not, the slowest flows are those of the fullest link."""
    fabric = Fabric(1536, 8, 25e9, 50e9)
    flows = make_flows(Phase("data", "ring", 192, 8, 1.0), 12288, 8, 8)
    flows = flows.moved(np.random.default_rng(0).permutation(1536))
    paths = choose_paths(fabric, flows, "ecmp", 4, 0)
    free = max_min_rates(
        Crossings.of_paths(paths, np.arange(len(paths)), len(paths), fabric.num_links), fabric.capacities()
    )
    rings = Crossings.of_paths(paths, np.repeat(flows.group, 4), 64, fabric.num_links)
    coupled = max_min_rates(rings, fabric.capacities())
    fullest = (link_bytes(fabric, flows, "ecmp", 4, 0) / fabric.capacities()).max()
    assert free.min() == pytest.approx(coupled.min()) == pytest.approx(0.25 / fullest)
