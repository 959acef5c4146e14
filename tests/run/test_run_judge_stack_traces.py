"""What counts as a sign of life of a rank that makes no step, and what does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judge_helpers import py_spy

from phalanx.detect.hangs.python_stacks import Frame, main_stack
from phalanx.detect.hangs.stack_traces import LOOK_S, RankStillness, Sample

Change = Callable[[int, Sample], Sample]


def frames(*lines: str) -> tuple[Frame, ...]:
    return main_stack(py_spy(*lines))


SLEEPS = frames("wait (train.py:30)", "main (train.py:40)")
WAITS = frames("all_reduce (torch/distributed/distributed_c10d.py:2501)", "main (train.py:40)")
BACKWARD = frames("_engine_run_backward (torch/autograd/graph.py:824)", "backward (torch/_tensor.py:581)")
OWN_BACKWARD = frames("backward (layers.py:9)", "_engine_run_backward (torch/autograd/graph.py:824)")
OWN_SEND = frames("send (train.py:9)", "main (train.py:40)")
REQUESTS = frames("send (requests/adapters.py:9)", "main (train.py:40)")
SAVES = frames("write (torch/serialization.py:960)", "save (train.py:80)")


def still_s(
    change: Change = lambda _, sample: sample,
    looks: int = 30,
    native: str | None = "",
    first: Sample | None = None,
) -> float:
    """After so many looks five seconds apart; `change` says how the one of each number differs from the first."""
    rank = RankStillness(lambda: native)
    base = first or Sample(0.0, frames=SLEEPS)
    for number in range(looks):
        rank.observe(replace(change(number, base), at_s=number * LOOK_S))
    return rank.still_s


def grown(field: str, per_look: float, **given: object) -> Change:
    return lambda number, sample: replace(sample, **{field: type(getattr(sample, field))(per_look * number)}, **given)  # type: ignore[arg-type]


def at(*places: tuple[Frame, ...], **given: object) -> Change:
    """The stacks come in turn, with so much CPU time as goes by."""
    turn = grown("main_cpu_s", LOOK_S)
    return lambda number, sample: replace(turn(number, sample), frames=places[number % len(places)], **given)  # type: ignore[arg-type]


def lines(*numbers: int, function: str = "count") -> list[tuple[Frame, ...]]:
    return [frames(f"{function} (train.py:{number})", "main (train.py:40)") for number in numbers]


EVALUATES = [
    frames(f"{f} (model.py:{n})", f"forward (model.py:{m})") for n, f in enumerate("abcdef") for m in (1, 2, 3)
]


@pytest.mark.parametrize(
    ("name", "change", "native"),
    [
        ("sleeps, or waits for a lock", lambda _, sample: sample, "libc.so.6"),
        ("waits in a collective", lambda _, sample: replace(sample, frames=WAITS), ""),
        ("waits in a collective and prints that it does", grown("output_bytes", 100, frames=WAITS), ""),
        (
            "waits in backward, where threads of torch wake up now and then",
            grown("main_cpu_s", 0.02, frames=BACKWARD),
            "",
        ),
        ("goes round in one line", at(*lines(31)), ""),
        ("goes round in a layer's own backward", at(OWN_BACKWARD), ""),
        ("goes round in what a user calls send", at(OWN_SEND), ""),
        ("is deadlocked beside a thread that polls", grown("threads_cpu_s", 0.3), "libc.so.6"),
        ("waits in a collective, and its threads wake up", grown("threads_cpu_s", 0.3, frames=WAITS), "libc.so.6"),
        (
            "waits, and others use the RDMA ports",
            lambda n, s: replace(s, frames=WAITS, rdma_bytes=10**8 * n, threads_cpu_s=0.05 * n),
            "",
        ),
        ("sleeps, and a watchdog asks the store", grown("socket_bytes", 5_000), "libc.so.6"),
        ("is asked for its figures now and then", lambda n, s: replace(s, socket_bytes=n // 3 * 200_000), "libc.so.6"),
        ("waits in a collective, and a thread sends figures", grown("socket_bytes", 500_000, frames=WAITS), ""),
        ("waits for a pipe that nobody writes", lambda _, s: replace(s, waits_for="pipe"), "libc.so.6"),
        (
            "hears a word from a pipe now and then",
            lambda n, s: replace(s, waits_for="pipe", main_read_bytes=100 * (n // 2)),
            "libc.so.6",
        ),
        ("sleeps, and reads a file of figures again", grown("main_read_bytes", 4096), "libc.so.6"),
        ("waits for a socket, and is looked at", grown("main_turns", 8, waits_for="socket"), "libc.so.6"),
        ("waits for a lock that other threads poll", grown("main_turns", 500), "libc.so.6"),
        ("is stopped while others send to it", grown("socket_bytes", 4e6, state="T"), ""),
        ("goes round in three lines of a function", at(*lines(31, 32, 33)), ""),
        ("goes round, as Python is a library", at(*lines(31, 32)), "libpython3.11.so.1.0"),
        ("polls here and there, and sleeps in between", lambda n, s: replace(s, frames=lines(1, 2, 3)[n % 3]), ""),
        ("polls in two functions", lambda n, s: replace(s, frames=[*lines(1), *lines(1, function="ask")][n % 2]), ""),
        ("spins for a GPU that waits for a peer", at(*lines(31), uses_gpu=True, is_gpu_active=False), "libcuda.so.1"),
        ("a thread of NCCL spins", grown("threads_cpu_s", 5.0, uses_gpu=True, is_gpu_active=False), "libc.so.6"),
        ("spins in a collective of a GPU", at(WAITS, uses_gpu=True, is_gpu_active=False), "libnccl.so.2"),
        ("others use the RDMA ports of its host", grown("rdma_bytes", 1e9), ""),
        ("others use the disk of its host", grown("disk_bytes", 1e9), ""),
        ("is stopped, whatever its children do", grown("children_cpu_s", 50, state="T"), ""),
        ("another user's process of which nothing is known", lambda _, sample: replace(sample, frames=None), None),
    ],
)
def test_it_stands_still(name: str, change: Change, native: str | None) -> None:
    assert still_s(change, native=native) >= 25 * LOOK_S, name


@pytest.mark.parametrize(
    ("name", "change", "native"),
    [
        ("evaluates", at(*EVALUATES), ""),
        ("evaluates on a busy machine", lambda n, s: replace(at(*EVALUATES)(n, s), main_cpu_s=0.3 * n), ""),
        ("one call of numpy takes minutes", at(*lines(31)), "libscipy_openblas64_-32a4b2a6.so"),
        ("computes a backward pass on CPUs", at(BACKWARD), "libtorch_cpu.so"),
        ("computes, and nobody may look at its stack", at(None), None),  # type: ignore[arg-type]
        ("computes in one place, and nobody can tell what", at(*lines(31)), None),
        ("waits for a GPU that works", at(*lines(31), uses_gpu=True, is_gpu_active=True), "libcuda.so.1"),
        ("waits for a GPU of which nothing is known", at(*lines(31), uses_gpu=True), "libcuda.so.1"),
        ("prints", grown("output_bytes", 10), ""),
        ("reads or writes a file", grown("file_bytes", 1e6), ""),
        ("what it holds grows", grown("rss_bytes", 1e7), ""),
        ("its data loaders compute", grown("children_cpu_s", 1.0), ""),
        ("a compiler that it has started computes", grown("children_cpu_s", 4.0), ""),
        ("waits for a disk that works", grown("disk_bytes", 1e8, state="D"), ""),
        (
            "moves bytes in a collective by RDMA",
            lambda n, s: replace(s, frames=WAITS, uses_gpu=True, rdma_bytes=10**8 * n, threads_cpu_s=0.3 * n),
            "",
        ),
        ("moves bytes in a collective by its sockets", grown("socket_bytes", 1e7, frames=WAITS), ""),
        ("downloads into a hash", grown("socket_bytes", 4e6), "libc.so.6"),
        ("downloads from a slow server", grown("socket_bytes", 160_000), "libc.so.6"),
        ("reads what its child prints", grown("main_read_bytes", 5_000, waits_for="pipe"), "libc.so.6"),
        ("receives datagrams", grown("main_turns", 500, waits_for="socket"), "libc.so.6"),
        ("is in one collective, then in the next", lambda n, s: replace(s, frames=WAITS[:1] * (1 + n)), ""),
        ("saves beside a collective", grown("main_cpu_s", 4.0, frames=WAITS), ""),
        ("gets no core at all", lambda n, s: replace(s, frames=BACKWARD, main_wants_core=True), ""),
        ("sleeps until its own threads have computed", grown("threads_cpu_s", 2.0), "libc.so.6"),
        ("downloads to a file", grown("file_bytes", 4.5e6, frames=REQUESTS), ""),
        ("its threads compute a part of backward", grown("threads_cpu_s", 0.4, frames=BACKWARD), "libc.so.6"),
        ("its children get no core", lambda n, s: replace(s, children_want_core=True), ""),
        ("is in backward, and hardly gets a core", grown("main_cpu_s", 0.4, frames=BACKWARD), ""),
        ("saves to a file system that nobody can see", lambda _, sample: replace(sample, frames=SAVES), ""),
    ],
)
def test_it_moves(name: str, change: Change, native: str | None) -> None:
    assert still_s(change, native=native) <= LOOK_S, name


def test_a_save_may_not_take_for_ever() -> None:
    assert still_s(lambda _, sample: replace(sample, frames=SAVES), looks=800) > 60


def test_an_endless_loop_after_an_evaluation_is_found() -> None:
    there = [*EVALUATES, *lines(31) * 40]
    assert still_s(lambda n, s: replace(at(there[min(n, len(there) - 1)])(n, s)), looks=len(there)) >= 25 * LOOK_S


@pytest.mark.parametrize(
    ("name", "untold"),
    [("its stack", lambda n, s: replace(s, frames=None) if n % 3 == 2 else s), ("the library", lambda n, s: s)],
)
def test_a_look_that_fails_on_a_busy_machine_is_no_movement_and_no_stillness(name: str, untold: Change) -> None:
    natives = iter(("", "", None) * 100)
    rank = RankStillness(lambda: next(natives) if name == "the library" else "")
    for number in range(30):
        rank.observe(untold(number, replace(at(*lines(31))(number, Sample(0.0)), at_s=number * LOOK_S)))
    assert 18 * LOOK_S <= rank.still_s <= 21 * LOOK_S


def test_what_was_seen_late_counts_for_one_look_only() -> None:
    """On a busy machine the looks are late; and nobody has seen what happened between them."""
    rank = RankStillness()
    for at_s in (0.0, 5.0, 100.0, 105.0):
        rank.observe(Sample(at_s, frames=SLEEPS))
    assert rank.still_s == 15.0


def test_who_looks_late_takes_no_heartbeat_for_a_stream() -> None:
    rank = RankStillness()
    for number in range(10):  # one word a second
        rank.observe(Sample(30.0 * number, frames=SLEEPS, waits_for="socket", main_turns=30 * number))
    assert rank.still_s == 9 * LOOK_S


def test_movement_is_asked_for_once_it_is_needed() -> None:
    asked: list[int] = []

    def native() -> str:
        asked.append(1)
        return ""

    rank = RankStillness(native)
    for number in range(20):
        rank.observe(Sample(number * LOOK_S, main_cpu_s=number * LOOK_S, frames=EVALUATES[number % 7]))
    assert not asked
    for number in range(20, 40):
        rank.observe(Sample(number * LOOK_S, main_cpu_s=number * LOOK_S, frames=SLEEPS))
    assert 0 < len(asked) <= 20


SAMPLES = st.builds(
    Sample,
    st.floats(0, 1e6),
    st.sampled_from(["R", "S", "D", "T", "t", "Z", "?"]),
    *[st.floats(0, 1e6), st.booleans()] * 3,
    *[st.integers(0, 10**12)] * 6,
    st.booleans(),
    st.sampled_from([None, True, False]),
    st.sampled_from([None, (), WAITS, BACKWARD, SLEEPS, SAVES]),
    st.sampled_from(["", "pipe", "socket"]),
    *[st.integers(0, 10**12)] * 2,
)


@given(st.lists(SAMPLES, max_size=20), st.sampled_from([None, "", "libcuda.so", "libx.so"]))
def test_no_look_is_too_wild(samples: Sequence[Sample], native: str | None) -> None:
    rank = RankStillness(lambda: native)
    for sample in sorted(samples, key=lambda sample: sample.at_s):
        rank.observe(sample)
        assert 0 <= rank.still_s <= LOOK_S * 2 * len(samples)
