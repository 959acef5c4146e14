"""What each flow gets of its NIC under max-min fairness, where flows do not wait for each other."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from phalanx.plan.network.fabric import Fabric
from phalanx.plan.network.fairness import Crossings, max_min_rates
from phalanx.plan.network.loads import Shape, place_flows
from phalanx.plan.network.routes import Hashing, choose_paths
from phalanx.plan.network.scenario import Placement

_DRAWS = 2
_MOST_FLOWS = 200_000


def flow_shares(
    shape: Shape, fabric: Fabric, hashing: Hashing, placement: Placement, queue_pairs: int
) -> Mapping[str, float]:
    """Mean, lowest, 1st and 50th percentile of fair rates over what a flow gets alone, of two draws of the hashes.

    A flow alone gets its part of its NIC. Its connections carry equal parts of it, so the slowest sets their pace.
    """
    shares = np.concatenate([_shares(shape, fabric, hashing, placement, queue_pairs, draw) for draw in range(_DRAWS)])
    low, middle = np.percentile(shares, [1, 50])
    return {"mean": float(shares.mean()), "lowest": float(shares.min()), "p1": float(low), "p50": float(middle)}


def _shares(
    shape: Shape, fabric: Fabric, hashing: Hashing, placement: Placement, queue_pairs: int, seed: int
) -> np.ndarray:
    flows = place_flows(shape, fabric, placement, seed)
    if len(flows) * queue_pairs > _MOST_FLOWS:  # whole groups, as many as there is room for
        flows = flows.chosen(flows.group <= np.sort(flows.group)[_MOST_FLOWS // queue_pairs])
    paths = choose_paths(fabric, flows, hashing, queue_pairs, seed)
    crossings = Crossings.of_paths(paths, np.repeat(np.arange(len(flows)), queue_pairs), len(flows), fabric.num_links)
    rates = queue_pairs * max_min_rates(crossings, fabric.capacities())
    on_nic = np.bincount(paths[::queue_pairs, 0], minlength=fabric.num_links)[paths[::queue_pairs, 0]]
    return np.asarray(rates / (fabric.nic_bytes_per_s / on_nic))
