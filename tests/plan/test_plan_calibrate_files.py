"""What was measured becomes files from which the same times come back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import plan_calibrate_samples as samples
import pytest

from phalanx.checks.calibration.calibration_messages import LAYERS, TINY, Timing
from phalanx.core.errors import UserError
from phalanx.model.shapes import mean_keys
from phalanx.plan.calibrate.calibration_files import MeasuredMachine, described, quoted, write_cluster
from phalanx.plan.calibrate.measure import Measurements, found_of
from phalanx.plan.calibrate.ratios import _layer, host_launch_s, ratios
from phalanx.plan.hardware.cluster import load_cluster, load_device
from phalanx.plan.hardware.device_model import Device
from phalanx.plan.layer import layer
from phalanx.plan.operations import Attend, local_of, timed
from phalanx.plan.overheads import update_s
from phalanx.plan.predict import predict
from phalanx.plan.types import Job, Model, Software, Strategy

MACHINE = MeasuredMachine('node "7"\\x', "cpu", "2026-11-22")


def one() -> Measurements:
    return found_of([samples.answer()], 4)


def two() -> Measurements:
    return found_of([samples.answer(2, slower=0.99), samples.answer(2, slower=1.01)], 2)


def device_of(found: Measurements, folder: Path) -> Device:
    path = folder / "some.toml"
    path.write_text(described(found, MACHINE), encoding="utf-8")
    return load_device(path)


def test_products_come_back_as_they_were_measured(tmp_path: Path) -> None:
    device = device_of(one(), tmp_path)
    widening, narrowing = device.gemm_s(512, 1024, 384, "fp32"), device.gemm_s(512, 384, 1024, "fp32")
    assert widening == pytest.approx(2 * 512 * 1024 * 384 / samples.PRODUCT_FLOPS_PER_S, rel=1e-3)
    assert narrowing == pytest.approx(2 * widening, rel=1e-3)
    gradient = device.gemm_s(1024, 384, 2048, "fp32", weight_gradient=True)
    assert gradient == pytest.approx(2 * 1024 * 384 * 2048 / samples.GRADIENT_FLOPS_PER_S, rel=1e-3)


def test_attention_memory_and_plain_numbers_come_back(tmp_path: Path) -> None:
    device = device_of(one(), tmp_path)
    assert device.attention_s(1e9, 512, 64, "fp32") == pytest.approx(1e9 / samples.ATTENTION_FLOPS_PER_S, rel=1e-3)
    assert device.attention_s(1e9, 300, 32, "fp32", backward=True) == pytest.approx(0.05, rel=1e-3)
    assert device.stream_s(20e6) == pytest.approx(20e6 / samples.MEMORY_BYTES_PER_S, rel=1e-3)
    # A layer of a model costs the host as much as 100 operators here, and launches fewer.
    assert 2 * samples.HOST_S < device.host_launch_s < 4 * samples.HOST_S
    assert device.memory_bytes == 16e9
    assert device.peak_flops_per_s("fp32") == pytest.approx(samples.PRODUCT_FLOPS_PER_S, rel=1e-3)
    assert device.peak_flops_per_s("bf16") == 1e9


def test_the_host_has_what_whole_layers_take_beside_their_kernels(tmp_path: Path) -> None:
    device, host_s = device_of(one(), tmp_path), 20 * samples.HOST_S
    timings = []
    for sequences, length, width in LAYERS:
        whole = timed(_layer(sequences, length, width), device, "fp32", "none")
        seconds = float(whole.total.total) + host_s * float(whole.launches.total)
        sizes = {"sequences": sequences, "length": length, "width": width}
        timings.append(Timing("layer", sizes, "fp32", seconds))
    assert host_launch_s(with_layers(*timings), device) == pytest.approx(host_s)
    # A layer that takes no longer than its kernels: the host has at least what a tiny one says.
    fast = [replace(timing, seconds=timing.seconds / 100) for timing in timings]
    least_s = host_launch_s(with_layers(), device)
    assert host_launch_s(with_layers(*fast), device) == least_s > samples.HOST_S
    # What is wrong by as many per cent for a short layer counts as much as for a long one.
    short, long = timings if timings[0].seconds < timings[1].seconds else timings[::-1]
    of_short = host_launch_s(with_layers(replace(short, seconds=1.5 * short.seconds), long), device)
    of_long = host_launch_s(with_layers(short, replace(long, seconds=1.5 * long.seconds)), device)
    assert of_short > of_long > host_s
    assert host_launch_s(with_layers(replace(short, seconds=0.0), long), device) == pytest.approx(host_s)


def with_layers(*timings: Timing) -> Measurements:
    answer = samples.answer()
    return found_of([replace(answer, timings=(*answer.timings, *timings))], 4)


def of_gpu(kernel_s: float, compiled_s: float, layer_s: float, compiled_layer_s: float) -> Measurements:
    """What a GPU would answer: each kernel between products takes so long as written, and so long compiled."""
    answer = samples.answer(seconds_of=lambda name: kernel_s)
    sizes = [timing for timing in answer.timings if timing.what.partition("_forward")[0] in COMPILED]
    extra = [
        Timing(f"{kernel}_compiled_{each}", timing.sizes, "fp32", compiled_s)
        for timing in sizes
        for kernel in (timing.what.removesuffix("_forward"),)
        for each in ("forward", "backward")
    ]
    numbers = {"kernel_s": 2e-6, "kernel_gap_s": 0.0, "layer_host_s": layer_s}
    numbers["compiled_layer_host_s"] = compiled_layer_s
    return found_of([replace(answer, timings=(*answer.timings, *extra), numbers=answer.numbers | numbers)], 4)


COMPILED = ("rms_norm", "layer_norm", "swiglu", "gelu", "rotary")
GPU = replace(MACHINE, kind="gpu")


def gpu_of(found: Measurements, folder: Path) -> Device:
    path = folder / "gpu.toml"
    path.write_text(described(found, GPU), encoding="utf-8")
    return load_device(path)


def layer_s(device: Device, *, compiled: bool) -> float:
    """Both passes of the layer in whose size kernels were measured, between its products."""
    software = Software(fused_elementwise=compiled, compiled=compiled)
    tokens, width = samples.SHAPES[-1]
    model = Model(
        layers=1, hidden=width, heads=width // 64, head_dim=64, vocab_rows=1, mlp_width=width, max_sequence=tokens,
        gated=True, position="rotary", norm="rms", bias="none", dropout=False, attention_dropout=False,
        tie_embeddings=False,
    )  # fmt: skip
    local = local_of(Job(model, tokens, 1, "fp32", "adamw", software), Strategy())
    found = timed(layer(local, 0, False), device, "fp32", "none")
    names = ("compute/norm", "compute/rotary", "compute/mlp_activation")
    return sum(float(found.by_path[name].total) for name in names)


def test_compiled_kernels_have_times_of_their_own(tmp_path: Path) -> None:
    """Norms are two, so four kernels in each pass of a layer: what each was measured to take comes back."""
    device = gpu_of(of_gpu(1e-3, 0.25e-3, 1e-3, 1e-4), tmp_path)
    # Ratios are of sums over sizes; so are these.
    assert layer_s(device, compiled=True) < 0.4 * layer_s(device, compiled=False)
    for kernel in COMPILED:
        what = f"one_pass_{kernel}" if kernel in ("swiglu", "gelu") else kernel
        assert device.stream_ratio(f"{what}_compiled_forward") != 1.0
    same = gpu_of(of_gpu(1e-3, 1e-3, 1e-3, 1e-4), tmp_path)
    assert layer_s(same, compiled=True) == pytest.approx(layer_s(same, compiled=False), rel=0.05)


def test_a_kernel_that_was_not_compiled_when_it_was_measured_is_taken_as_written(tmp_path: Path) -> None:
    device = device_of(one(), tmp_path)
    for name in ("rms_norm_forward", "rotary_backward"):
        kernel, _, each = name.rpartition("_")
        assert device.stream_ratio(f"{kernel}_compiled_{each}") == device.stream_ratio(name) != 1.0
    assert device.launching_s(compiled=True) == device.launching_s(compiled=False) == device.host_launch_s


def test_the_host_has_another_time_for_kernels_of_compiled_layers(tmp_path: Path) -> None:
    compiled_s = 2e-6
    launches = float(timed(_layer(*TINY, compiled=True), device_of(one(), tmp_path), "fp32", "none").launches.total)
    device = gpu_of(of_gpu(1e-3, 1e-3, 50e-3, compiled_s * launches), tmp_path)
    assert device.launching_s(compiled=True) == pytest.approx(compiled_s, rel=1e-3)
    assert device.launching_s(compiled=False) > 100e-6


def test_launching_decides_small_models_and_compiling_helps_them_most(tmp_path: Path) -> None:
    numbers = {"kernel_s": 2e-6, "layer_host_s": 50e-3, "compiled_layer_host_s": 2e-3}
    found = of_gpu(1e-3, 0.4e-3, numbers["layer_host_s"], numbers["compiled_layer_host_s"])
    (path,) = [each for each in write_cluster(tmp_path / "gpu.toml", [found], GPU) if each.name == "gpu.toml"]
    cluster = load_cluster(path, 1)

    def step(width: int, *, compiled: bool) -> tuple[float, float]:
        """Seconds of a step, and the share of them in which the device waits for the host."""
        model = Model(
            layers=8, hidden=width, heads=width // 64, head_dim=64, vocab_rows=1024, mlp_width=4 * width,
            max_sequence=512, gated=True, position="rotary", norm="rms", bias="none", dropout=False,
            attention_dropout=False, tie_embeddings=False,
        )  # fmt: skip
        software = Software(fused_elementwise=compiled, compiled=compiled)
        prediction = predict(Job(model, 512, 1, "fp32", "adamw", software), Strategy(), cluster)
        host_s = sum(float(part.seconds) for part in prediction.parts if part.path == "compute/host")
        return float(prediction.step_s), host_s / float(prediction.step_s)

    (small_s, waiting), (small_compiled_s, still) = step(64, compiled=False), step(64, compiled=True)
    (large_s, hardly), (large_compiled_s, _) = step(1024, compiled=False), step(1024, compiled=True)
    assert waiting > 0.3 > still and hardly < 0.01
    assert small_compiled_s < small_s and large_compiled_s < large_s
    assert small_s / small_compiled_s > large_s / large_compiled_s


def test_every_number_says_where_it_was_measured(tmp_path: Path) -> None:
    device = device_of(one(), tmp_path)
    mark, source = device.mark_of("host_launch_s")
    assert mark == "measured"
    assert source == 'phalanx plan calibrate on node "7"\\x, A CPU, torch 2, 1 process of 4 threads (2026-11-22)'
    assert device.mark_of("gemm", "fp32")[1] == source


def test_what_was_not_measured_is_refused_with_a_cure(tmp_path: Path) -> None:
    device = device_of(one(), tmp_path)
    with pytest.raises(UserError, match="no times of bf16") as caught:
        device.gemm_s(512, 512, 512, "bf16")
    assert "train.precision" in str(caught.value)


def test_a_kernel_is_as_much_slower_than_its_bytes_as_it_was_measured(tmp_path: Path) -> None:
    quick = device_of(one(), tmp_path)
    slow = device_of(found_of([samples.answer(seconds_of=lambda name: 3e-3)], 4), tmp_path)
    for kernel in ("rms_norm_forward", "rms_norm_backward", "swiglu_backward", "rotary_forward"):
        host_s = 6 * samples.HOST_S  # launches are counted apart, so they are taken off first
        assert (
            quick.stream_ratio(kernel) * 3
            <= slow.stream_ratio(kernel)
            <= quick.stream_ratio(kernel) * 3 / (1 - host_s / 1e-3)
        )
    assert slow.stream_ratio("came_update") == pytest.approx(3 * quick.stream_ratio("came_update"), rel=1e-3)
    assert slow.stream_ratio("gradient_clear") == 0


def test_ratios_give_the_measured_time_of_a_norm_back(tmp_path: Path) -> None:
    found = one()
    device = device_of(found, tmp_path)
    plain = replace(device, stream=replace(device.stream, ratios={}))
    # A parallel block has one norm a layer: forward it reads and writes every element once, 8 bytes.
    model_s = sum(plain.stream_s(8 * tokens * width) for tokens, width in samples.SHAPES)
    measured_s = 2 * (1e-3 - samples.HOST_S)
    assert ratios(found, plain)["rms_norm_forward"] == pytest.approx(measured_s / model_s, rel=1e-3)


def test_kernels_of_16_bits_have_ratios_of_their_own(tmp_path: Path) -> None:
    device = device_of(found_of([samples.answer(half_s=2e-3)], 1), tmp_path)
    ratio = device.stream_ratio("swiglu_forward", "bf16") / device.stream_ratio("swiglu_forward")
    assert ratio == pytest.approx(2 * 2, rel=0.1)  # twice the time for half the bytes
    assert device.stream_ratio("adamw_update", "bf16") == device.stream_ratio("adamw_update")


def test_ratios_stay_within_what_a_file_may_say(tmp_path: Path) -> None:
    found = found_of([samples.answer(seconds_of=lambda name: 10.0 if name == "came" else 1e-9)], 1)
    device = device_of(found, tmp_path)
    assert device.stream_ratio("came_update") == 99
    assert device.stream_ratio("rms_norm_forward") == 1e-3


def test_a_cluster_has_the_device_of_as_many_ranks_as_are_in_use(tmp_path: Path) -> None:
    path = tmp_path / "this.toml"
    files = write_cluster(path, [one(), two()], MACHINE)
    assert files[-1] == path
    assert sorted(tmp_path.iterdir()) == sorted(files)  # nothing is left of writing aside
    alone, both = load_cluster(path, 1), load_cluster(path)
    assert (alone.device.name, alone.devices) == ("this.1.device", 1)
    assert (both.device.name, both.devices, both.devices_per_host) == ("this.2.device", 2, 2)
    assert both.device.memory_bytes == 8e9  # the host's, shared
    assert both.value("stragglers.rank_sigma_ratio") == pytest.approx(0.0141, rel=0.01)


def test_collectives_come_back_as_they_were_measured(tmp_path: Path) -> None:
    write_cluster(tmp_path / "this.toml", [one(), two()], MACHINE)
    cluster = load_cluster(tmp_path / "this.toml")
    expected_s = samples.LATENCY_S + 2 * (1 << 20) / samples.LINK_BYTES_PER_S
    assert cluster.collective_s("all_reduce", 1 << 20, 2) == pytest.approx(expected_s, rel=1e-3)
    assert cluster.send_s(1e8) == pytest.approx(samples.LATENCY_S + 0.1, rel=0.02)
    assert cluster.collective_s("all_gather", 1 << 20, 1) == 0


def test_one_device_alone_has_assumed_links(tmp_path: Path) -> None:
    write_cluster(tmp_path / "this.toml", [one()], MACHINE)
    cluster = load_cluster(tmp_path / "this.toml")
    assert cluster.devices == 1
    assert cluster.mark_of("all_reduce")[0] == "assumed"


def test_a_step_is_predicted_on_it_and_nothing_hides_behind_computing(tmp_path: Path) -> None:
    write_cluster(tmp_path / "this.toml", [one(), two()], MACHINE)
    model = Model(layers=2, hidden=384, heads=6, vocab_rows=512, max_sequence=256, dropout=False, position="rotary")
    job = Job(model, 256, 8, "fp32")
    alone = predict(job, Strategy(micro_batch=8), load_cluster(tmp_path / "this.toml", 1))
    spread = predict(job, Strategy(context=2, micro_batch=8), load_cluster(tmp_path / "this.toml", 2))
    assert alone.step_s == pytest.approx(sum(part.seconds for part in alone.parts))
    assert 0.4 < spread.step_s / alone.step_s < 1
    assert spread.seconds("context") > 0
    assert not [part for part in spread.hidden if part.path == "context"]


def test_a_folder_that_is_gone_is_an_error_for_people(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        write_cluster(tmp_path / "gone" / "this.toml", [one()], MACHINE)


@pytest.mark.parametrize("text", ['a "b"', "back\\slash", "line\nbreak", "tab\there", "grün"])
def test_any_name_of_a_host_is_a_toml_string(text: str) -> None:
    import tomllib

    assert tomllib.loads(f"x = {quoted(text)}")["x"] == text.replace("\n", " ").replace("\t", " ")


def test_windows_on_a_cpu_are_as_fast_as_sequences_of_their_length(tmp_path: Path) -> None:
    model = Model(layers=1, hidden=384, heads=6, vocab_rows=512, max_sequence=512, windows=(128,), dropout=False)
    job = Job(model, 512, 4, "fp32", software=Software(on_cpu=True))
    operations = layer(local_of(job, Strategy(micro_batch=4)), 128, False)
    (attend,) = (each for each in operations if isinstance(each, Attend))
    assert attend.queries == 128
    on_gpu = local_of(replace(job, software=Software()), Strategy(micro_batch=4))
    (attend,) = (each for each in layer(on_gpu, 128, False) if isinstance(each, Attend))
    assert attend.queries == 2 * mean_keys(512, 128) - 1
    (attend,) = (each for each in layer(on_gpu, 0, False) if isinstance(each, Attend))
    assert attend.queries == 512


def test_muon_multiplies_in_bf16_where_that_is_fast_whatever_layers_do(tmp_path: Path) -> None:
    device = device_of(found_of([samples.answer(half_s=1e-3)], 4), tmp_path)
    assert device.has_times_of("bf16") and not device_of(one(), tmp_path).has_times_of("bf16")
    model = Model(layers=2, hidden=384, heads=6, vocab_rows=300, max_sequence=256)
    jobs = [Job(model, 256, 8, precision, "muon") for precision in ("fp32", "bf16")]
    plain, half = (update_s(job, Strategy(), device, 2 * 12 * 384 * 384) for job in jobs)
    assert plain == half
    # As it was measured, too: a layer of that width takes what it took.
    [timing] = found_of([samples.answer(half_s=1e-3)], 4).all("muon")
    alone = replace(jobs[0], model=replace(model, vocab_rows=0))
    assert update_s(alone, Strategy(), device, timing.sizes["parameters"]) == pytest.approx(timing.seconds, rel=0.01)


def test_muon_leaves_embedding_and_head_to_adamw(tmp_path: Path) -> None:
    device = device_of(one(), tmp_path)
    model = Model(layers=2, hidden=384, heads=6, vocab_rows=30_000, max_sequence=256, tie_embeddings=False)
    job, weights = Job(model, 256, 8, "fp32", "muon"), 2 * 12 * 384 * 384
    blocks_s = update_s(job, Strategy(), device, weights + 2 * 30_000 * 384)
    half = replace(job, model=replace(model, vocab_rows=15_000))
    fewer_words_s = update_s(half, Strategy(), device, weights + 2 * 15_000 * 384)
    moved_s = device.stream_s(2 * 15_000 * 384 * (4 + 8 + 8)) * device.stream_ratio("muon_update")
    assert blocks_s - fewer_words_s == pytest.approx(moved_s, rel=1e-6)  # no products for words
