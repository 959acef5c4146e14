"""Collisions of hashes: closed forms against counting, and hashes against closed forms."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.simulate.fabric import Fabric, choose_paths
from phalanx.simulate.network_simulation import expected_fullest, expected_share, free_probability, fullest_probability
from phalanx.simulate.traffic import Phase, make_flows


@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from([1.0, 2.0, 2.5]))
def test_closed_forms_are_those_of_all_throws(flows: int, links: int, speedup: float) -> None:
    """Every way in which n balls fall into m bins, counted."""
    shares, free, fullest = [], 0, []
    for throw in itertools.product(range(links), repeat=flows):
        counts = np.bincount(throw, minlength=links)
        shares += [min(1.0, speedup / counts[link]) for link in throw]
        free += sum(counts[link] <= speedup for link in throw)
        fullest.append(counts.max())
    assert expected_share(flows, links, speedup) == pytest.approx(np.mean(shares))
    assert free_probability(flows, links, speedup) == pytest.approx(free / len(shares))
    assert expected_fullest(flows, links) == pytest.approx(np.mean(fullest))
    for most in range(flows + 1):
        assert fullest_probability(flows, links, most) == pytest.approx(np.mean(np.array(fullest) <= most), abs=1e-9)


def test_as_many_flows_as_links_get_the_known_share() -> None:
    """m (1 - (1 - 1/m)^n) / n bins are hit on average, and each gives its whole rate: 1 - 1/e in the limit."""
    assert expected_share(64, 64) == pytest.approx(64 * (1 - (1 - 1 / 64) ** 64) / 64)
    assert expected_share(5000, 5000) == pytest.approx(1 - 1 / math.e, abs=1e-3)


def test_uplinks_of_twice_the_speed_collide_less() -> None:
    """MegaScale 3.6: with 400G split into 2 x 200G downwards, the bandwidth up being the same."""
    slow, fast = expected_share(64, 64), expected_share(64, 32, speedup=2)
    assert fast > slow + 0.09
    assert free_probability(64, 32, 2) > free_probability(64, 64) + 0.03
    # The fullest link decides how long a ring takes.
    assert expected_fullest(64, 32) / 2 < 0.7 * expected_fullest(64, 64)


@pytest.mark.parametrize(("flows", "links"), [(64, 64), (64, 32), (256, 32)])
def test_the_expected_fullest_is_what_throwing_shows(flows: int, links: int) -> None:
    throws = np.random.default_rng(0).integers(0, links, (4000, flows))
    counts = np.stack([np.bincount(throw, minlength=links).max() for throw in throws])
    error = counts.std() / math.sqrt(len(counts))
    assert abs(counts.mean() - expected_fullest(flows, links)) < 5 * error


def test_hashes_fall_like_balls_into_bins() -> None:
    """All NICs of scattered hosts send up; the closed form holds at ToRs, over many seeds."""
    fabric = Fabric(512, 8, 25e9, 50e9)
    flows = make_flows(Phase("data", "ring", 512, 8, 1.0), 4096, 8, 8)
    flows = flows.moved(np.random.default_rng(1).permutation(512))
    fullest, share = [], []
    for seed in range(30):
        paths = choose_paths(fabric, flows, "ecmp", 1, seed)
        links = paths[:, 1][paths[:, 1] >= 0] - fabric.offsets[2]
        counts = np.bincount(links, minlength=fabric.tors * 32).reshape(fabric.tors, 32)
        fullest.append(counts.max(axis=1).mean())
        share.append(np.minimum(1, 2 / counts.ravel()[links]).mean())
    sent = len(links) / fabric.tors  # a few flows stay below their ToR
    expected = np.interp(sent, [56, 64], [expected_fullest(56, 32), expected_fullest(64, 32)])
    assert np.mean(fullest) == pytest.approx(expected, rel=0.02)
    expected = np.interp(sent, [56, 64], [expected_share(56, 32, 2), expected_share(64, 32, 2)])
    assert np.mean(share) == pytest.approx(expected, rel=0.02)


def test_ways_are_equally_likely() -> None:
    """Pearson's chi-square over ToR and aggregation uplinks, many seeds: neither too uneven nor too even."""
    fabric = Fabric(1536, 8, 25e9, 50e9)
    flows = make_flows(Phase("pipeline", "neighbours", 8, 1536, 1.0), 12288, 8, 8)
    up, core = [], []
    for seed in range(10):
        paths = choose_paths(fabric, flows, "ecmp", 1, seed)
        up.append(np.bincount((paths[:, 1] - fabric.offsets[2]) % 32, minlength=32))
        leaving = paths[:, 2][paths[:, 2] >= 0]
        core.append(np.bincount((leaving - fabric.offsets[4]) % 32, minlength=32))
    for counts in (np.sum(up, axis=0), np.sum(core, axis=0)):
        mean = counts.sum() / 32
        chi_square = ((counts - mean) ** 2 / mean).sum()
        assert 10 < chi_square < 65  # 31 degrees of freedom: 1e-4 to 0.9997
