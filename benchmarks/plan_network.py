"""The network what-if: how long it takes for how many devices, and how exact its parts are.

    python benchmarks/plan_network.py             # up to 12,288 devices, about a minute
    python benchmarks/plan_network.py --quick     # 1,024 devices, some seconds

Prints the time of all usual what-ifs by number of devices (bar: 12,288 in under 60 s on 2 cores), the distance of the
fluid models from the fixed points that their papers give, and hashes against the closed forms of balls in bins.
"""

from __future__ import annotations

import time

import numpy as np
from support.harness import benchmark_parser
from support.network.fixed_points import dcqcn_rest, swift_rest

from phalanx.plan.hardware.cluster import load_cluster
from phalanx.simulate.congestion import Cases, run_hot_spot
from phalanx.simulate.network_scenario import make_scenario, usual_scenarios
from phalanx.simulate.network_settings import CongestionSettings, Control, network_of
from phalanx.simulate.network_simulation import expected_fullest, expected_share, what_if
from phalanx.simulate.traffic import TrafficLayout, make_traffic

CAPACITY, NIC = 50e9, 25e9
FLOWS = (3, 4, 8, 16, 32, 64)


def main() -> None:
    parser = benchmark_parser(__doc__, quick="1,024 devices and 2 draws, to see that it works")
    parser.add_argument("--devices", type=int, nargs="*", default=[1024, 3072, 6144, 12288])
    parser.add_argument("--draws", type=int, default=8, help="of hashes and places")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.devices, arguments.draws = [1024], 2
    show_times(arguments.devices, arguments.draws)
    show_fixed_points("dcqcn", 0.06)
    show_fixed_points("swift", 0.01)
    show_hashes()


def show_times(devices: list[int], draws: int) -> None:
    """All usual what-ifs for the 175B model, pipeline 8 x tensor 8."""
    print(f"{'devices':>8} {'scenarios':>9} {'draws':>5} {'wall s':>8} {'this network':>13} {'scattered':>10}")
    for count in devices:
        network = network_of(load_cluster("megascale", count))
        layout = TrafficLayout(175e9, 96, 12288, 2048, 6144, tensor=8, pipeline=8, data=count // 64, chunks=6)
        base = make_scenario("this network", network, {})
        start = time.perf_counter()
        # A step's own time only decides how much is hidden; that of the largest is MegaScale's, scaled.
        report = what_if(network, make_traffic(layout, 6.34 * 12288 / count, "175B"), usual_scenarios(base), draws)
        wall_s = time.perf_counter() - start
        longer = {one.scenario.name: f"{one.step_s / report.ideal_step_s - 1:+.2%}" for one in report.outcomes}
        own, scattered = longer["this network"], longer["hosts scattered"]
        print(f"{count:>8} {len(report.outcomes):>9} {draws:>5} {wall_s:>8.1f} {own:>13} {scattered:>10}")


def show_fixed_points(control: Control, span_s: float) -> None:
    """Queue at a hot link at the end, beside the fixed point."""
    counts, same = np.array(FLOWS, float), np.ones(len(FLOWS))
    cases = Cases(
        control=[control] * len(FLOWS),
        hot_flows=counts,
        cold_flows=counts - 1,
        line_rate=NIC * same,
        capacity=CAPACITY * same,
        port_rate=CAPACITY * same,
        hot_links=4 * same,
    )
    trace = run_hot_spot(cases, CongestionSettings(), NIC, span_s)
    found = trace.settled(trace.queue_bytes) / CAPACITY * 1e6
    print(f"\n{control}: µs of queue after {span_s:g} s at most, and at the fixed point")
    for flows, queue in zip(FLOWS, found, strict=True):
        rest = (
            swift_rest(flows, CAPACITY, CongestionSettings())
            if control == "swift"
            else dcqcn_rest(flows, CAPACITY, NIC, CongestionSettings())
        )
        aim = rest.queue_bytes / CAPACITY * 1e6
        print(f"{flows:>6} flows {queue:>8.2f} {aim:>8.2f} {queue / aim - 1:>+8.2%}")


def show_hashes() -> None:
    """What a full ToR's flows get, with uplinks of a NIC's speed, and half as many of twice that."""
    print("\n64 NICs send up, closed forms: mean share, connections on the fullest uplink over what it carries")
    for name, links, speedup in (("64 x 200G", 64, 1.0), ("32 x 400G", 32, 2.0)):
        for pairs in (1, 4):
            flows, carried = 64 * pairs, speedup * pairs
            share, fullest = expected_share(flows, links, carried), expected_fullest(flows, links) / carried
            print(f"{name:>10} uplinks, {pairs} connections each: {share:6.1%} {fullest:6.2f}")


if __name__ == "__main__":
    main()
