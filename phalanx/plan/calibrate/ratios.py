"""How much longer each kernel takes than the bytes that the cost model counts for it.

The model counts what a program without waste moves; kernels differ in how near they come to that, and exponentials take
their own time. So each kernel that was measured is set beside the model's time of the same operation on the same
device, in the same sizes; what the host needs to launch it, which the model counts apart, is taken off first.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from phalanx.checks.calibration.calibration_messages import TINY, Precision, Timing
from phalanx.optim.config import Kind as Optimizer
from phalanx.plan.calibrate.measure import Measurements, at
from phalanx.plan.hardware.device_model import Device
from phalanx.plan.layer import embedding, head, layer
from phalanx.plan.operations import Local, Operation, Stream, local_of, timed
from phalanx.plan.overheads import norm_s, update_s
from phalanx.plan.types import Job, Model, Software, Strategy

_HEAD_DIM = 64
_BETWEEN = ("rms_norm", "layer_norm", "swiglu", "gelu", "rotary", "rows")
_ONE_PASS = ("swiglu", "gelu")  # where they are compiled
_OPTIMIZERS: tuple[Optimizer, ...] = ("adamw", "lamb", "came", "muon")
_LEAST, _MOST = 1e-3, 99.0  # what a device's file may say; tiny kernels can take none of their bytes' time, or all

_Pair = tuple[str, float, float]  # name, seconds as measured, seconds as the model has them without a ratio


def ratios(found: Measurements, device: Device) -> dict[str, float]:
    """Ratios by kernel and pass, out of the sums over all sizes, so that long ones count most.

    Those of bf16 have names that end in ``_half``, as files of devices call it.

    Args:
        device: made of the same measurements, without ratios.
    """
    measured: dict[str, float] = defaultdict(float)
    modelled: dict[str, float] = defaultdict(float)
    for name, seconds, model_s in _pairs(found, device):
        measured[name] += max(seconds, 0.0)
        modelled[name] += model_s
    raw = {name: measured[name] / modelled[name] for name in measured if modelled[name]}
    # Between steps gradients are let go of, not set to zero: see `phalanx.train.trainer`.
    return {**{name: min(max(ratio, _LEAST), _MOST) for name, ratio in raw.items()}, "gradient_clear": 0.0}


def _pairs(found: Measurements, device: Device) -> Iterator[_Pair]:
    for precision in found.precisions:
        suffix = "_half" if precision == "bf16" else ""
        for name, seconds, model_s in _of_layers(found, device, precision):
            yield name + suffix, seconds, model_s
    yield from _updates(found, device)


def _of_layers(found: Measurements, device: Device, precision: Precision) -> Iterator[_Pair]:
    for kernel, compiled in itertools.product(_BETWEEN, (False, True)):
        what = f"{kernel}_compiled" if compiled else kernel
        for timing in found.all(f"{what}_forward", precision):
            backward = at(found.all(f"{what}_backward", precision), timing.sizes)
            operations = layer(_local(timing, kernel, compiled), 0, False)
            name = f"one_pass_{what}" if compiled and kernel in _ONE_PASS else what
            yield from _both(name, operations, found, device, timing, backward)
    for timing in found.all("embedding_forward", precision):
        backward = at(found.all("embedding_backward", precision), timing.sizes)
        yield from _both("embedding", embedding(_local(timing)), found, device, timing, backward)
    yield from _losses(found, device, precision)


def _both(
    kernel: str, operations: Sequence[Operation], found: Measurements, device: Device, forward: Timing, backward: Timing
) -> Iterator[_Pair]:
    one = _named(operations, kernel)
    passes = timed([one], device, forward.precision, "none").total
    host_s = _host_s(found, device)
    yield f"{kernel}_forward", forward.seconds - host_s * one.forward_launches, float(passes.forward)
    yield f"{kernel}_backward", backward.seconds - host_s * one.backward_launches, float(passes.backward_input)


def _losses(found: Measurements, device: Device, precision: Precision) -> Iterator[_Pair]:
    """The head without its products: both passes have one ratio, since gradients are made in the forward pass."""
    for timing in found.all("head", precision):
        products_s = at(found.all("head_products", precision), timing.sizes).seconds
        one = _named(head(_local(timing)), "loss")
        model_s = float(timed([one], device, precision, "none").total.total)
        launches_s = _host_s(found, device) * (one.forward_launches + one.backward_launches)
        for each in ("forward", "backward"):
            yield f"loss_{each}", (timing.seconds - products_s - launches_s) / 2, model_s / 2


def _updates(found: Measurements, device: Device) -> Iterator[_Pair]:
    for kind in _OPTIMIZERS:
        for timing in found.all(kind):
            job, weights = _job(timing, optimizer=kind), timing.sizes["parameters"]
            yield f"{kind}_update", timing.seconds, float(update_s(job, Strategy(), device, weights))
    for timing in found.all("gradient_norm"):
        job, weights = _job(timing), timing.sizes["parameters"]
        yield "gradient_norm", timing.seconds, float(norm_s(job, Strategy(), device, weights))


def _named(operations: Sequence[Operation], kernel: str) -> Stream:
    return next(each for each in operations if isinstance(each, Stream) and each.kernel == kernel)


def _host_s(found: Measurements, device: Device) -> float:
    return found.answer.numbers["host_launch_s"] if device.kind == "cpu" else 0.0


def host_launch_s(found: Measurements, device: Device) -> float:
    """Seconds of the host for each kernel that the model counts: what whole layers take beside their kernels.

    Of several layers, it is what leaves the least relative squared error in the time of all. At least the host's time
    for a layer that is next to nothing, and for an operator by itself.

    Args:
        device: with ratios.
    """
    numbers = found.answer.numbers
    tiny = timed(_layer(*TINY), device, "fp32", "none")
    least_s = max(numbers["host_launch_s"], numbers["layer_host_s"] / float(tiny.launches.total))
    products = squares = 0.0
    for timing in found.all("layer"):
        if not timing.seconds:  # lost in other work on the host
            continue
        sizes = (int(timing.sizes[name]) for name in ("sequences", "length", "width"))
        whole = timed(_layer(*sizes), device, "fp32", "none")
        launches = float(whole.launches.total) / timing.seconds
        products += launches * (1.0 - float(whole.total.total) / timing.seconds)
        squares += launches**2
    return max(least_s, products / squares) if squares else least_s


def host_compiled_launch_s(found: Measurements, device: Device) -> float | None:
    """The same for each kernel of a compiled layer, which one call of the host launches; None: not measured."""
    layer_s = found.answer.numbers.get("compiled_layer_host_s")
    if layer_s is None:
        return None
    return layer_s / float(timed(_layer(*TINY, compiled=True), device, "fp32", "none").launches.total)


def _layer(sequences: int, length: int, width: int, *, compiled: bool = False) -> list[Operation]:
    job = replace(_layer_job(length, width, "swiglu", "fp32", compiled), global_batch=sequences)
    return layer(local_of(job, Strategy(micro_batch=sequences)), 0, False)


def _local(timing: Timing, kernel: str = "", compiled: bool = False) -> Local:
    return local_of(_job(timing, kernel, compiled=compiled), Strategy())


def _job(timing: Timing, kernel: str = "", optimizer: Optimizer = "adamw", *, compiled: bool = False) -> Job:
    """A job whose one layer has the kernel in the size in which it was measured; a parallel block has one norm."""
    tokens, width = int(timing.sizes.get("tokens", 1)), int(timing.sizes["width"])
    job = _layer_job(tokens, width, kernel, timing.precision, compiled)
    model = replace(job.model, block="parallel", vocab_rows=int(timing.sizes.get("words", 1)))
    return replace(job, model=model, optimizer=optimizer)


def _layer_job(tokens: int, width: int, kernel: str, precision: Precision, compiled: bool) -> Job:
    model = Model(
        layers=1,
        hidden=width,
        heads=max(1, width // _HEAD_DIM),
        head_dim=_HEAD_DIM,
        vocab_rows=1,
        mlp_width=width,
        max_sequence=tokens,
        gated=kernel == "swiglu",
        position="rotary",
        norm="layer" if kernel == "layer_norm" else "rms",
        bias="none",
        dropout=False,
        attention_dropout=False,
        tie_embeddings=False,
    )
    software = Software(fused_elementwise=compiled, compiled=compiled)
    return Job(model, tokens, 1, precision, "adamw", software)
