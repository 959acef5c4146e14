"""Files of a host's links and of the host as a cluster, out of what was measured on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.checks.calibration.contract import Timing
from phalanx.plan.calibrate.found import Found, at, sizes_of
from phalanx.plan.calibrate.toml_text import marked, quoted, source
from phalanx.plan.types import Mark

_HERE, _NONE = "here", "none"
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_UNKNOWN = "assumed: calibration sees one host, and no storage"
_READ_BYTES_PER_S = 1e9
_ASSUMED_LATENCY_S, _ASSUMED_BYTES_PER_S = 10e-6, 20e9


def links_text(found: Sequence[Found], where: str, date: str) -> str:
    """The file of the links between the ranks of a host.

    Args:
        found: of each number of ranks that was measured, those with one rank left out, ascending; none where there is
            but one device, whose links are assumed then.
    """
    if not found:
        return _assumed_links(date)
    latency_s, bytes_per_s = _send(found[0].all("send"))
    head = [_line("send_latency_s", latency_s), _line("send_bytes_per_s", bytes_per_s)]
    parts = ["\n".join(head) + "\n", source(_HERE, where, date)]
    return "\n".join([*parts, *(_curves(kind, found) for kind in _KINDS)])


def cluster_text(devices: Mapping[int, str], links: str, found: Found, where: str, date: str) -> str:
    """The file of the host as a cluster of one host.

    Args:
        devices: file of the device by ranks that share the host.
        links: file of its links.
        found: with the most ranks.
    """
    numbers, (latency_s, bytes_per_s) = found.answer.numbers, _send(found.all("send"))
    names = ", ".join(f"{count} = {quoted(name)}" for count, name in devices.items())
    head = [
        f"device = {{ {names} }}",
        f"links = {quoted(links)}",
        *(f"{key} = {value}" for key, value in (("devices", found.ranks), ("devices_per_host", found.ranks))),
        "nics_per_host = 1\n",
    ]
    tables: dict[str, list[str]] = {
        "network": [
            _line("nic_bytes_per_s", bytes_per_s, "assumed", _NONE),
            _line("achieved_ratio", 1.0, "assumed", _NONE),
            _line("latency_s", latency_s, "assumed", _NONE),
        ],
        "stragglers": [
            _line("rank_sigma_ratio", found.apart_ratio),
            _line("slow_host_share_ratio", 0.0, "assumed", _NONE),
            _line("slow_host_excess_ratio", 0.0, "assumed", _NONE),
        ],
        "loader": [
            _line("step_s", numbers["loader_step_s"]),
            _line("copy_bytes_per_s", 8 * numbers["loader_tokens_per_s"]),
        ],
        "start_up": [
            _line("process_s", numbers["process_s"]),
            _line("groups_s", numbers["groups_s"]),
            _line("read_bytes_per_s", _READ_BYTES_PER_S, "assumed", _NONE),
        ],
        "price": [_line("usd_per_device_hour", 0.0, "assumed", _NONE)],
    }
    sources = [source(_HERE, where, date), source(_NONE, _UNKNOWN, date)]
    return "\n".join(["\n".join(head), *sources, *("\n".join([f"[{k}]", *v]) + "\n" for k, v in tables.items())])


def _assumed_links(date: str) -> str:
    """Links of which nothing can be measured: those of PCI Express, 16 lanes of its fourth generation."""
    sizes = [256.0 * 16**power for power in range(6)]
    times = [[_ASSUMED_LATENCY_S + 2 * size / _ASSUMED_BYTES_PER_S for size in sizes]]
    lines = [
        _line("send_latency_s", _ASSUMED_LATENCY_S, "assumed", _NONE),
        _line("send_bytes_per_s", _ASSUMED_BYTES_PER_S, "assumed", _NONE),
        "",
        source(_NONE, "assumed: one device, so nothing between devices was measured", date),
    ]
    for kind in _KINDS:
        given = {"message_bytes": sizes, "ranks": [2], "time_s": times}
        lines += [f"[{kind}]", *(marked(key, value, "assumed", _NONE) for key, value in given.items()), ""]
    return "\n".join(lines)


def _line(key: str, value: float, mark: Mark = "measured", name: str = _HERE) -> str:
    return marked(key, value, mark, name)


def _curves(kind: str, found: Sequence[Found]) -> str:
    """Times over the bytes of the whole message, a row for each number of ranks."""
    sizes = sizes_of(found[0].all(kind), "num_bytes")
    rows = [[at(each.all(kind), {"num_bytes": size}).seconds for size in sizes] for each in found]
    lines = [
        f"[{kind}]",
        marked("message_bytes", sizes, "measured", _HERE),
        marked("ranks", [each.ranks for each in found], "measured", _HERE),
        marked("time_s", rows, "measured", _HERE),
    ]
    return "\n".join(lines) + "\n"


def _send(timings: Sequence[Timing]) -> tuple[float, float]:
    """Latency of the smallest message, and bytes per second of the largest beyond that; assumed where there is none."""
    if not timings:
        return _ASSUMED_LATENCY_S, _ASSUMED_BYTES_PER_S
    ordered = sorted(timings, key=lambda timing: timing.sizes["num_bytes"])
    latency_s, last = ordered[0].seconds, ordered[-1]
    return latency_s, last.sizes["num_bytes"] / max(last.seconds - latency_s, last.seconds / 2)
