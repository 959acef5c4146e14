"""Writes what was measured as files of a device, of a host's links and of the host as a cluster.

`write_cluster` writes the cluster's file, its links', and a device's for each number of ranks that shared the host;
every number has its mark and its source, as `phalanx.plan.hardware` reads them. `summary` says the same in a few lines.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from phalanx.checks.calibration.calibration_messages import Precision, Timing
from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes
from phalanx.model.shapes import mean_keys
from phalanx.plan.calibrate.measure import Measurements, at, sizes_of
from phalanx.plan.calibrate.ratios import host_compiled_launch_s, host_launch_s, ratios
from phalanx.plan.hardware.cluster import load_cluster, load_device
from phalanx.plan.hardware.device_model import Device
from phalanx.plan.types import Mark


@dataclass(frozen=True)
class MeasuredMachine:
    """What was measured, in words for the sources of numbers."""

    host: str
    kind: str
    date: str

    def where(self, found: Measurements) -> str:
        """The source of numbers."""
        texts = found.answer.texts
        ranks = "1 process" if found.ranks == 1 else f"{found.ranks} processes at once"
        threads = "1 thread" if found.threads == 1 else f"{found.threads} threads"
        name = f"{texts['device']}, torch {texts['torch']}"
        return f"phalanx plan calibrate on {self.host}, {name}, {ranks} of {threads}"


def write_cluster(path: Path, found: Sequence[Measurements], machine: MeasuredMachine) -> list[Path]:
    """Write the file of the cluster to `path` and the others beside it; each takes the place of an older one at once.

    Args:
        found: for different numbers of ranks, ascending.

    Returns:
        All files; the cluster's comes last, so that it never names one that is not there.
    """
    stem = path.name.removesuffix(".toml")
    devices = {each.ranks: f"{stem}.{each.ranks}.device.toml" for each in found}
    links, together = f"{stem}.links.toml", [each for each in found if each.ranks > 1]
    texts = {devices[each.ranks]: described(each, machine) for each in found}
    where = machine.where(found[-1])
    texts[links] = links_text(together, where, machine.date)
    texts[path.name] = cluster_text(devices, links, found[-1], where, machine.date)
    try:
        for name, text in texts.items():
            write_bytes(path.with_name(name), text.encode())
    except OSError as error:
        cure = "give --output another name, in a folder that is there"
        raise UserError(f"cannot be written: {error.strerror}", cure=cure, field=str(path)) from error
    for each in found:
        load_cluster(path, each.ranks)  # what was written can be read
    return [path.with_name(name) for name in texts]


def described(found: Measurements, machine: MeasuredMachine) -> str:
    """The text of a device's file."""
    where = machine.where(found)
    plain = _loaded(device_text(found, machine.kind, where, machine.date))
    known = ratios(found, plain)
    kernels = _loaded(device_text(found, machine.kind, where, machine.date, ratios=known))
    host = host_launch_s(found, kernels), host_compiled_launch_s(found, kernels)
    return device_text(found, machine.kind, where, machine.date, *host, known)


def _loaded(text: str) -> Device:
    with tempfile.TemporaryDirectory(prefix="phalanx-device-") as folder:
        path = Path(folder) / "plain.toml"
        path.write_text(text, encoding="utf-8")
        return load_device(path)


Value: TypeAlias = "float | Sequence[float] | Sequence[Sequence[float]]"


_HERE, _NONE = "here", "none"  # sources: what was measured, and what could not be


def marked(key: str, value: Value, mark: Mark = "measured", source: str = _HERE) -> str:
    """A line ``key = { value = .., mark = .., source = .. }``; `source` names one of `sources`."""
    return f'{key} = {{ value = {_text(value)}, mark = "{mark}", source = "{source}" }}'


def _table(name: str, numbers: Mapping[str, Value], mark: Mark = "measured", source: str = _HERE) -> str:
    return "\n".join([f"[{name}]", *(marked(key, value, mark, source) for key, value in numbers.items())]) + "\n"


def source(name: str, text: str, date: str) -> str:
    """What a source stands for."""
    return f"[sources.{name}]\ntext = {quoted(text)}\ndate = {quoted(date)}\n"


def quoted(text: str) -> str:
    """A TOML string."""
    plain = "".join(character if character >= " " else " " for character in text)
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _text(value: Value) -> str:
    if isinstance(value, Sequence):
        return "[" + ", ".join(_text(each) for each in value) + "]"
    return f"{value:.5g}" if value != int(value) or abs(value) >= 1e15 else str(int(value))


_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_UNKNOWN = "assumed: calibration sees one host, and no storage"
_READ_BYTES_PER_S = 1e9
_ASSUMED_LATENCY_S, _ASSUMED_BYTES_PER_S = 10e-6, 20e9


def links_text(found: Sequence[Measurements], where: str, date: str) -> str:
    """The file of the links between the ranks of a host.

    Args:
        found: of each number of ranks that was measured, those with one rank left out, ascending; none where there is
            but one device, whose links are assumed then.
    """
    if not found:
        return _assumed_links(date)
    latency_s, bytes_per_s = _send(found[0].all("send"))
    head = [marked("send_latency_s", latency_s), marked("send_bytes_per_s", bytes_per_s)]
    parts = ["\n".join(head) + "\n", source(_HERE, where, date)]
    return "\n".join([*parts, *(_curves(kind, found) for kind in _KINDS)])


def cluster_text(devices: Mapping[int, str], links: str, found: Measurements, where: str, date: str) -> str:
    """The file of the host as a cluster of one host. `devices`: file of the device by ranks that share the host."""
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
            marked("nic_bytes_per_s", bytes_per_s, "assumed", _NONE),
            marked("achieved_ratio", 1.0, "assumed", _NONE),
            marked("latency_s", latency_s, "assumed", _NONE),
        ],
        "stragglers": [
            marked("rank_sigma_ratio", found.apart_ratio),
            marked("slow_host_share_ratio", 0.0, "assumed", _NONE),
            marked("slow_host_excess_ratio", 0.0, "assumed", _NONE),
        ],
        "loader": [
            marked("step_s", numbers["loader_step_s"]),
            marked("copy_bytes_per_s", 8 * numbers["loader_tokens_per_s"]),
        ],
        "start_up": [
            marked("process_s", numbers["process_s"]),
            marked("groups_s", numbers["groups_s"]),
            marked("read_bytes_per_s", _READ_BYTES_PER_S, "assumed", _NONE),
        ],
        "price": [marked("usd_per_device_hour", 0.0, "assumed", _NONE)],
    }
    sources = [source(_HERE, where, date), source(_NONE, _UNKNOWN, date)]
    return "\n".join(["\n".join(head), *sources, *("\n".join([f"[{k}]", *v]) + "\n" for k, v in tables.items())])


def _assumed_links(date: str) -> str:
    """Links of which nothing can be measured: those of PCI Express, 16 lanes of its fourth generation."""
    sizes = [256.0 * 16**power for power in range(6)]
    times = [[_ASSUMED_LATENCY_S + 2 * size / _ASSUMED_BYTES_PER_S for size in sizes]]
    lines = [
        marked("send_latency_s", _ASSUMED_LATENCY_S, "assumed", _NONE),
        marked("send_bytes_per_s", _ASSUMED_BYTES_PER_S, "assumed", _NONE),
        "",
        source(_NONE, "assumed: one device, so nothing between devices was measured", date),
    ]
    given: dict[str, Value] = {"message_bytes": sizes, "ranks": [2], "time_s": times}
    return "\n".join([*lines, *(_table(kind, given, "assumed", _NONE) for kind in _KINDS)])


def _curves(kind: str, found: Sequence[Measurements]) -> str:
    """Times over the bytes of the whole message, a row for each number of ranks."""
    sizes = sizes_of(found[0].all(kind), "num_bytes")
    rows = [[at(each.all(kind), {"num_bytes": size}).seconds for size in sizes] for each in found]
    return _table(kind, {"message_bytes": sizes, "ranks": [each.ranks for each in found], "time_s": rows})


def _send(timings: Sequence[Timing]) -> tuple[float, float]:
    """Latency of the smallest message, and bytes per second of the largest beyond that; assumed where there is none."""
    if not timings:
        return _ASSUMED_LATENCY_S, _ASSUMED_BYTES_PER_S
    ordered = sorted(timings, key=lambda timing: timing.sizes["num_bytes"])
    latency_s, last = ordered[0].seconds, ordered[-1]
    return latency_s, last.sizes["num_bytes"] / max(last.seconds - latency_s, last.seconds / 2)


_BACKWARD_FLOPS = 2.5  # of attention over its forward pass, as `phalanx.plan.operations` counts
_FORMATS: Mapping[Precision, str] = {"fp32": "fp32", "bf16": "half"}


def device_text(
    found: Measurements,
    kind: str,
    where: str,
    date: str,
    host_launch_s: float | None = None,
    host_compiled_launch_s: float | None = None,
    ratios: Mapping[str, float] | None = None,
) -> str:
    """The file of one rank's device.

    Args:
        host_launch_s: for each kernel of a step; else for an operator by itself.
        host_compiled_launch_s: for each kernel of a compiled layer, where that was measured.
        ratios: by kernel and pass: how much longer it takes than its bytes say.
    """
    host = {"host_launch_s": host_launch_s, "host_compiled_launch_s": host_compiled_launch_s}
    parts = [f'kind = "{kind}"\n', _numbers(found, kind, host), source(_HERE, where, date)]
    parts += [_products(found, precision) for precision in found.precisions]
    parts += [_attention(found, precision) for precision in found.precisions]
    rates = _sum_rates(found)  # of adding two tensors
    parts.append(
        _table(
            "stream",
            {
                "bytes_per_s": list(rates.values())[-1],
                "kernel_bytes": list(rates),
                "achieved_bytes_per_s": list(rates.values()),
            },
        )
    )
    if ratios:
        parts.append(_table("stream.ratios", {f"{name}_ratio": value for name, value in ratios.items()}))
    return "\n".join(parts)


def _numbers(found: Measurements, kind: str, host: Mapping[str, float | None]) -> str:
    """Plain numbers; a CPU launches nothing ahead, so the host's time is all that a kernel takes beside its work."""
    numbers = {
        "memory_bytes": found.answer.numbers["memory_bytes"] / (found.ranks if kind == "cpu" else 1),
        "memory_bytes_per_s": max(_sum_rates(found).values()),
        "peak_half_flops_per_s": _peak(found, "bf16"),
        "peak_fp32_flops_per_s": _peak(found, "fp32"),
        "kernel_s": found.answer.numbers["kernel_s"],
        "kernel_gap_s": found.answer.numbers["kernel_gap_s"],
        "host_launch_s": found.answer.numbers["host_launch_s"],
        **{key: value for key, value in host.items() if value},
    }
    return "\n".join(marked(key, value) for key, value in numbers.items()) + "\n"


def _peak(found: Measurements, precision: Precision) -> float:
    """The best rate of any product; where a precision is slow, that of the one product that was tried in it."""
    rates = [product_flops(timing) / timing.seconds for timing in found.all("product", precision)]
    return max(rates) if rates else found.answer.numbers[f"{precision}_flops_per_s"]


def _products(found: Measurements, precision: Precision) -> str:
    products, gradients = (found.all(what, precision) for what in ("product", "weight_gradient"))
    numbers: dict[str, Value] = {
        "tokens": sizes_of(products, "tokens"),
        "widths": sizes_of(products, "rows"),
        "product_flops_per_s": _device_rates(products),
        "weight_gradient_flops_per_s": _device_rates(gradients),
    }
    return _table(f"gemm.{_FORMATS[precision]}", numbers)


def _device_rates(timings: Sequence[Timing]) -> list[list[float]]:
    """A row of columns for each of tokens and of rows."""
    widths = sizes_of(timings, "rows")
    found = []
    for tokens in sizes_of(timings, "tokens"):
        for rows in widths:
            row = [at(timings, {"tokens": tokens, "rows": rows, "columns": columns}) for columns in widths]
            found.append([product_flops(timing) / timing.seconds for timing in row])
    return found


def product_flops(timing: Timing) -> float:
    """Of a product, or of a weight gradient."""
    return 2.0 * timing.sizes["tokens"] * timing.sizes["rows"] * timing.sizes["columns"]


def _attention(found: Measurements, precision: Precision) -> str:
    forward, backward = (found.all(f"attention_{each}", precision) for each in ("forward", "backward"))
    numbers: dict[str, Value] = {
        "queries": sizes_of(forward, "queries"),
        "head_dims": sizes_of(forward, "head_dim"),
        "forward_flops_per_s": _attention_rates(forward, 1.0),
        "backward_flops_per_s": _attention_rates(backward, _BACKWARD_FLOPS),
    }
    return _table(f"attention.{_FORMATS[precision]}", numbers)


def _attention_rates(timings: Sequence[Timing], passes: float) -> list[list[float]]:
    """A row over queries for each head size."""
    queries, sizes = sizes_of(timings, "queries"), sizes_of(timings, "head_dim")
    rows = [[at(timings, {"queries": length, "head_dim": size}) for length in queries] for size in sizes]
    return [[passes * attention_flops(timing) / timing.seconds for timing in row] for row in rows]


def attention_flops(timing: Timing) -> float:
    """Of a forward pass: both products, over the keys that are seen."""
    sizes = timing.sizes
    rows = sizes["batch"] * sizes["queries"] * sizes["heads"] * sizes["head_dim"]
    return 4.0 * rows * mean_keys(int(sizes["queries"]), None)


def _sum_rates(found: Measurements) -> dict[float, float]:
    """Bytes to rates, ascending; without the host's time, which is counted for each kernel anyway."""
    host_s = found.answer.numbers["host_launch_s"] if found.answer.numbers["kernel_s"] == 0 else 0.0
    rates = {}
    for timing in found.all("sum", "fp32"):
        num_bytes = 12.0 * timing.sizes["tokens"] * timing.sizes["width"]
        rates[num_bytes] = num_bytes / max(timing.seconds - host_s, timing.seconds / 2)
    return dict(sorted(rates.items()))


_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


@dataclass(frozen=True)
class Line:
    """One line: a figure with its unit, or the lowest and the highest of several."""

    name: str
    value: float
    unit: str
    text: str


def summary(found: Measurements) -> list[Line]:
    """The lines of one number of ranks; each is per rank."""
    return list(_lines(found))


def _lines(found: Measurements) -> Iterator[Line]:
    for precision in found.precisions:
        for what in ("product", "weight_gradient"):
            rates = [product_flops(timing) / timing.seconds for timing in found.all(what, precision)]
            yield _rates(f"{what.replace('_', ' ')}s, {precision}", rates)
        for each, passes in (("forward", 1.0), ("backward", 2.5)):
            timings = found.all(f"attention_{each}", precision)
            rates = [passes * attention_flops(timing) / timing.seconds for timing in timings]
            yield _rates(f"attention {each}, {precision}", rates)
    sums = [12.0 * t.sizes["tokens"] * t.sizes["width"] / t.seconds for t in found.all("sum", "fp32")]
    yield _rates("memory, adding", sums, "bytes/s", "GB/s")
    for kind in ("adamw", "lamb", "came", "muon"):
        rates = [timing.sizes["parameters"] / timing.seconds for timing in found.all(kind)]
        yield _rates(f"{kind} update", rates, "parameters/s", "M parameters/s", 1e6)
    host_s = found.answer.numbers["host_launch_s"]
    yield Line("host, per operator", host_s, "s", f"{host_s * 1e6:.1f} µs")
    layer_s = found.answer.numbers["layer_host_s"]
    yield Line("host, per layer", layer_s, "s", f"{layer_s * 1e6:.0f} µs")
    compiled_s = found.answer.numbers.get("compiled_layer_host_s")
    if compiled_s is not None:
        yield Line("host, per compiled layer", compiled_s, "s", f"{compiled_s * 1e6:.0f} µs")
    for kind in _COLLECTIVES:
        rates = [timing.sizes["num_bytes"] / timing.seconds for timing in found.all(kind)]
        if rates:
            yield _rates(f"{kind.replace('_', '-')}, whole message", rates, "bytes/s", "GB/s")


def _rates(name: str, rates: Sequence[float], unit: str = "FLOP/s", shown: str = "GFLOP/s", scale: float = 1e9) -> Line:
    low, high = min(rates) / scale, max(rates) / scale
    return Line(name, max(rates), unit, f"{_number(low)} to {_number(high)} {shown}")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
