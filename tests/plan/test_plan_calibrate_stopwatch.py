"""Cases take turns; the median counts; operands come from more memory than the caches hold."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from phalanx.checks.calibration import calibration_worker, kernel_cases
from phalanx.checks.calibration.calibration_messages import Task
from phalanx.checks.calibration.kernel_cases import both_ways
from phalanx.checks.calibration.stopwatch import Case, Pool, Stopwatch
from phalanx.parallel.group import Group, Work

CPU = torch.device("cpu")


class Machine:
    """A clock that only work moves, and who worked when."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.order: list[str] = []

    def clock(self) -> float:
        return self.now_s

    def work(self, name: str, seconds: list[float]) -> Callable[[], None]:
        """Takes the next of `seconds`, the last of them for ever."""

        def run() -> None:
            self.order.append(name)
            self.now_s += seconds.pop(0) if len(seconds) > 1 else seconds[0]

        return run


def watch(machine: Machine, rounds: int = 5) -> Stopwatch:
    return Stopwatch(CPU, Group.alone(), rounds, clock=machine.clock)


def test_cases_take_turns_and_the_first_run_of_each_does_not_count() -> None:
    machine = Machine()
    cases = [Case(name, {}, "fp32", machine.work(name, [1.0, 0.01])) for name in "ab"]
    timings = watch(machine, rounds=3).measure(cases)
    assert "".join(machine.order) == "ab" + "ababab"  # a first run of a second is long enough to know its length
    assert [timing.seconds for timing in timings] == pytest.approx([0.01, 0.01])


def test_the_median_of_the_turns_counts_and_their_spread_is_told() -> None:
    machine = Machine()
    slow_once = [0.02, 0.02, 0.02, 0.02, 0.9, 0.02, 0.02]
    (timing,) = watch(machine).measure([Case("a", {}, "fp32", machine.work("a", slow_once))])
    assert timing.seconds == pytest.approx(0.02)
    assert timing.spread > 1


def test_short_cases_are_repeated_and_long_ones_seen_three_times() -> None:
    machine = Machine()
    short, long = (Case(name, {}, "fp32", machine.work(name, [s])) for name, s in (("s", 1e-4), ("l", 0.2)))
    watch(machine).measure([short, long])
    assert machine.order.count("s") == 2 + 5 * 30  # three milliseconds a turn
    assert machine.order.count("l") == 1 + 3


class Gpu:
    """A GPU in front of which kernels queue up, as `torch.cuda` shows it: its clock is not the host's."""

    def __init__(self) -> None:
        self.host_s = self.free_s = 0.0

    def kernel(self, seconds: float, host_s: float) -> None:
        """The host launches it; it begins when it is launched and the one before has ended."""
        self.host_s += host_s
        self.free_s = max(self.free_s, self.host_s) + seconds

    def synchronize(self, _device: object = None) -> None:
        self.host_s = max(self.host_s, self.free_s)

    def _sleep(self, cycles: int) -> None:
        self.kernel(cycles / 2e9, 0.0)

    def Event(self, **_options: object) -> Gpu._Event:  # noqa: N802
        return self._Event(self)

    class _Event:
        def __init__(self, gpu: Gpu) -> None:
            self.gpu, self.at_s = gpu, 0.0

        def record(self) -> None:
            self.gpu.kernel(0.0, 0.0)
            self.at_s = self.gpu.free_s

        def synchronize(self) -> None:
            self.gpu.synchronize()

        def elapsed_time(self, later: Gpu._Event) -> float:
            return (later.at_s - self.at_s) * 1e3


@pytest.mark.parametrize(("kernel_s", "host_s"), [(3e-6, 12e-6), (200e-6, 12e-6), (1e-3, 1e-6)])
def test_a_kernel_that_is_shorter_than_its_launch_is_timed_without_it(
    kernel_s: float, host_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu()
    monkeypatch.setattr(torch, "cuda", gpu)

    class Alone(Stopwatch):
        def _of_first_rank(self, seconds: float) -> float:
            return seconds

    watch = Alone(torch.device("cuda", 0), Group.alone(), rounds=5, clock=lambda: gpu.host_s)
    (timing,) = watch.measure([Case("small", {}, "fp32", lambda: gpu.kernel(kernel_s, host_s))])
    assert timing.seconds == pytest.approx(kernel_s, rel=0.01)


def test_kernels_are_compiled_for_the_larger_shapes_under_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: made.append(function) or function)
    pool = Pool(CPU, torch.float32, 1 << 16)
    plain = kernel_cases.streams_cases(((8, 64), (16, 64)), "fp32", pool, pool)
    assert not made
    found = kernel_cases.streams_cases(((8, 64), (16, 64)), "fp32", pool, pool, compiled=True)
    extra = [case for case in found if "_compiled_" in case.what]
    assert len(found) == len(plain) + len(extra) and {case.sizes["tokens"] for case in extra} == {16}
    kinds = {case.what.partition("_compiled_")[0] for case in extra}
    assert kinds == {"rms_norm", "layer_norm", "swiglu", "gelu", "rotary"}
    for case in extra:
        case.run()


def test_what_a_case_does_several_times_is_divided() -> None:
    machine = Machine()
    (timing,) = watch(machine).measure([Case("a", {}, "fp32", machine.work("a", [0.02]), calls_each=2)])
    assert timing.seconds == pytest.approx(0.01)


def test_a_rank_runs_a_case_as_often_as_the_first_whatever_it_takes_there() -> None:
    """A case may be a collective: one run more or less would leave the ranks waiting for each other for ever."""

    class Second(Group):
        """Hears from rank 0 how long it took there."""

        def broadcast(self, tensor: torch.Tensor, *_: object) -> Work:
            return Group.alone().broadcast(tensor.fill_(told.pop(0)))

    orders = []
    for mine in (1e-4, 0.7):
        machine, told = Machine(), [0.01, 0.01]
        second = copy.copy(Group.alone())
        second.__class__ = Second
        stopwatch = Stopwatch(CPU, second, 5, long_s=0.5, clock=machine.clock)
        stopwatch.measure([Case("a", {}, "fp32", machine.work("a", [mine]))])
        assert not told
        orders.append(machine.order)
    assert orders[0] == orders[1] == ["a"] * (2 + 5)


def test_operands_are_views_of_one_block_and_go_round() -> None:
    pool = Pool(CPU, torch.float32, 1000)
    first, second = pool.take(10, 20), pool.take(400)
    assert first.shape == (10, 20)
    assert second.data_ptr() - first.data_ptr() == 4 * 208  # whole cache lines
    assert pool.take(500).data_ptr() == first.data_ptr()  # no room behind


def test_products_are_those_of_a_layer() -> None:
    pool = Pool(CPU, torch.float32, 1 << 12)
    cases = kernel_cases.products_cases((8,), (4, 16), "fp32", pool)
    assert [case.what for case in cases] == ["product", "weight_gradient"] * 4
    shapes = {tuple(case.sizes.values()): case.run() for case in cases if case.what == "product"}
    assert shapes[8, 16, 4].shape == (8, 16)
    assert shapes[8, 4, 16].shape == (8, 4)
    assert len(shapes[8, 4, 4]) == 2  # a square weight is used both ways
    gradients = {tuple(case.sizes.values()): case.run() for case in cases if case.what == "weight_gradient"}
    assert gradients[8, 16, 4].shape == (16, 4)


def test_both_passes_of_a_function_are_cases_of_their_own() -> None:
    made = []

    def make() -> list[torch.Tensor]:
        made.append(torch.full((3,), 2.0))
        return made[-1:]

    forward, backward = both_ways("cube", {"width": 3}, "fp32", lambda x: x**3, make)
    assert (forward.what, backward.what) == ("cube_forward", "cube_backward")
    assert forward.run().tolist() == [8.0] * 3
    for _ in range(3):  # as often as one likes
        (gradient,) = backward.run()
        assert gradient.tolist() == [12.0] * 3
    assert len(made) > 1  # small operands take turns


def test_one_thread_is_timed_by_what_it_has_of_its_core() -> None:
    task = Task("store", 0, 1, 1, (), "cpu", (), False, 1, 0.0)
    assert calibration_worker._clock(task) is time.process_time
    assert calibration_worker._clock(replace(task, threads=2)) is time.perf_counter
    assert calibration_worker._clock(replace(task, device="cuda")) is time.perf_counter
