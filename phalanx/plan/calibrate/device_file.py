"""A device's file out of what was measured on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.checks.calibration.contract import Precision, Timing
from phalanx.model.shapes import mean_keys
from phalanx.plan.calibrate.found import Found, at, sizes_of
from phalanx.plan.calibrate.toml_text import marked, source

_HERE = "here"
_BACKWARD_FLOPS = 2.5  # of attention over its forward pass, as `phalanx.plan.work.times` counts
_FORMATS: Mapping[Precision, str] = {"fp32": "fp32", "bf16": "half"}


def device_text(
    found: Found,
    kind: str,
    where: str,
    date: str,
    host_launch_s: float | None = None,
    host_compiled_launch_s: float | None = None,
    ratios: Mapping[str, float] | None = None,
) -> str:
    """The file of one rank's device.

    Args:
        kind: ``gpu`` or ``cpu``.
        where: on what it was measured, in words.
        date: of that.
        host_launch_s: for each kernel of a step; else for an operator by itself.
        host_compiled_launch_s: for each kernel of a compiled layer, where that was measured.
        ratios: by kernel and pass: how much longer it takes than its bytes say.
    """
    host = {"host_launch_s": host_launch_s, "host_compiled_launch_s": host_compiled_launch_s}
    parts = [f'kind = "{kind}"\n', _numbers(found, kind, host), source(_HERE, where, date)]
    parts += [_products(found, precision) for precision in found.precisions]
    parts += [_attention(found, precision) for precision in found.precisions]
    parts.append(_stream(found))
    if ratios:
        lines = [_line(f"{name}_ratio", value) for name, value in ratios.items()]
        parts.append("\n".join(["[stream.ratios]", *lines]) + "\n")
    return "\n".join(parts)


def _line(key: str, value: float | Sequence[float] | Sequence[Sequence[float]]) -> str:
    return marked(key, value, "measured", _HERE)


def _numbers(found: Found, kind: str, host: Mapping[str, float | None]) -> str:
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
    return "\n".join(_line(key, value) for key, value in numbers.items()) + "\n"


def _peak(found: Found, precision: Precision) -> float:
    """The best rate of any product; where a precision is slow, that of the one product that was tried in it."""
    rates = [product_flops(timing) / timing.seconds for timing in found.all("product", precision)]
    return max(rates) if rates else found.answer.numbers[f"{precision}_flops_per_s"]


def _products(found: Found, precision: Precision) -> str:
    products, gradients = (found.all(what, precision) for what in ("product", "weight_gradient"))
    lines = [
        f"[gemm.{_FORMATS[precision]}]",
        _line("tokens", sizes_of(products, "tokens")),
        _line("widths", sizes_of(products, "rows")),
        _line("product_flops_per_s", _rates(products)),
        _line("weight_gradient_flops_per_s", _rates(gradients)),
    ]
    return "\n".join(lines) + "\n"


def _rates(timings: Sequence[Timing]) -> list[list[float]]:
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


def _attention(found: Found, precision: Precision) -> str:
    forward, backward = (found.all(f"attention_{each}", precision) for each in ("forward", "backward"))
    lines = [
        f"[attention.{_FORMATS[precision]}]",
        _line("queries", sizes_of(forward, "queries")),
        _line("head_dims", sizes_of(forward, "head_dim")),
        _line("forward_flops_per_s", _attention_rates(forward, 1.0)),
        _line("backward_flops_per_s", _attention_rates(backward, _BACKWARD_FLOPS)),
    ]
    return "\n".join(lines) + "\n"


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


def _stream(found: Found) -> str:
    """Rates of adding two tensors, by bytes read and written."""
    rates = _sum_rates(found)
    lines = [
        "[stream]",
        _line("bytes_per_s", list(rates.values())[-1]),
        _line("kernel_bytes", list(rates)),
        _line("achieved_bytes_per_s", list(rates.values())),
    ]
    return "\n".join(lines) + "\n"


def _sum_rates(found: Found) -> dict[float, float]:
    """Bytes to rates, ascending; without the host's time, which is counted for each kernel anyway."""
    host_s = found.answer.numbers["host_launch_s"] if found.answer.numbers["kernel_s"] == 0 else 0.0
    rates = {}
    for timing in found.all("sum", "fp32"):
        num_bytes = 12.0 * timing.sizes["tokens"] * timing.sizes["width"]
        rates[num_bytes] = num_bytes / max(timing.seconds - host_s, timing.seconds / 2)
    return dict(sorted(rates.items()))
