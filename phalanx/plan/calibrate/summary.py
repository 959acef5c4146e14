"""What was measured, in a few lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.plan.calibrate.device_file import attention_flops, product_flops
from phalanx.plan.calibrate.found import Found

_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


@dataclass(frozen=True)
class Line:
    """One line: a figure with its unit, or the lowest and the highest of several.

    Attributes:
        value: in `unit`; of several, the highest.
        text: for people.
    """

    name: str
    value: float
    unit: str
    text: str


def summary(found: Found) -> list[Line]:
    """The lines of one number of ranks; each is per rank."""
    return list(_lines(found))


def _lines(found: Found) -> Iterator[Line]:
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
