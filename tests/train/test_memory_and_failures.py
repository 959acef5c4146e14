"""What a run says about memory and about refusals of the system."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from train_helpers import begin, configured

from phalanx.core.errors import UserError
from phalanx.launch.cores import ignored_threads
from phalanx.train import start
from phalanx.train.config import RunConfig, TrainConfig
from phalanx.train.derived import memory_needs
from phalanx.train.derived.memory_needs import host_available_bytes, require_memory, standing_bytes
from phalanx.train.derived.run_numbers import check_early
from phalanx.train.device import choose_device
from phalanx.train.system_errors import explained, out_of_memory


@pytest.mark.parametrize(
    ("optimizer", "bits"), [("adamw", 32), ("adamw", 16), ("adamw", 8), ("lamb", 32), ("came", 32), ("muon", 32)]
)
def test_standing_memory_is_what_a_run_holds(tmp_path: Path, optimizer: str, bits: int) -> None:
    run = begin(configured(tmp_path, {"optim.name": optimizer, "optim.state_bits": bits}))
    run.folder.release()
    told = standing_bytes(run.trainer.model_config, run.config.optim)
    weights = sum(parameter.nbytes for parameter in run.trainer.parameters.values())
    state = sum(t.nbytes for name, t in run.optimizer.state_tensors().items() if not name.endswith(".step"))
    assert told["weights"] == told["gradients"] == weights
    # CAME's factors are rows and columns, which in matrices of 32 columns are not yet next to nothing
    assert state == pytest.approx(told[f"{optimizer} state"], rel=0.35 if optimizer == "came" else 1e-9)


def test_a_model_that_cannot_fit_is_refused_with_its_parts() -> None:
    needed = {"weights": 2**30, "gradients": 2**30, "adamw state": 2**31}
    require_memory(needed, 2**32, "the host")
    require_memory(needed, None, "the host")
    with pytest.raises(UserError) as refusal:
        require_memory(needed, 2**32 - 1, "the host")
    for words in (
        "weights 1.00 GiB",
        "gradients 1.00 GiB",
        "adamw state 2.00 GiB",
        "the host",
        "optim.name=came",
        "optim.state_bits=8",
    ):
        assert words in str(refusal.value)


LIMITED = """
import resource
from pathlib import Path
from phalanx.train.derived.memory_needs import host_available_bytes

used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
print(host_available_bytes())
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
print(host_available_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_available_memory_minds_the_host_and_the_limit_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True).stdout
    unlimited, limited = map(int, shown.split())
    assert 0 < limited < 72 << 20  # with what the heap holds already without using it
    assert limited <= unlimited < 2**50
    monkeypatch.setattr(memory_needs, "available_bytes", lambda: 2**20)  # of the host and its control groups
    assert host_available_bytes() == 2**20


def test_memory_that_is_not_there_is_said_in_one_line() -> None:
    says = r"no memory left for weights 1 GiB \(.*allocate.*\); be modest"
    with pytest.raises(UserError, match=says) as refusal, explained("weights 1 GiB", "be modest"):
        torch.empty(2**55, dtype=torch.uint8)
    assert "\n" not in str(refusal.value)
    assert not str(refusal.value).startswith("[enforce")
    assert out_of_memory(MemoryError())
    with pytest.raises(RuntimeError, match="something else"), explained("x", "y"):
        raise RuntimeError("something else")


@pytest.mark.parametrize(
    ("number", "cure"), [(errno.ENOSPC, "free some space"), (errno.EROFS, "writable"), (errno.EACCES, "writable")]
)
def test_refusals_of_the_system_name_the_file_and_the_cure(number: int, cure: str) -> None:
    says = f"'/some/file': cannot be read or written .*; .*{cure}"
    with pytest.raises(UserError, match=says), explained("x", "y"):
        raise OSError(number, "No", "/some/file")
    with pytest.raises(BrokenPipeError), explained("x", "y"):
        raise BrokenPipeError(errno.EPIPE, "closed")


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), BlockingIOError(errno.EAGAIN, "try again")])
def test_threads_that_cannot_be_started_are_no_lack_of_memory(error: Exception) -> None:
    assert not out_of_memory(error)
    says = r"no more threads or processes .*for the run .*ulimit -u"
    with pytest.raises(UserError, match=says) as refusal, explained("the run", "set train.micro_batch lower"):
        raise error
    assert "micro_batch" not in str(refusal.value)


@pytest.mark.parametrize("field", ["train.threads", "OMP_NUM_THREADS"])
def test_more_threads_than_any_machine_has_use_for(field: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)

    def config(threads: int) -> RunConfig:
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        return configured(tmp_path, {"train.threads": threads if field == "train.threads" else 0})

    check_early(config(32))
    with pytest.raises(UserError, match=rf"{field} = 33: is more than 16 times the 2 CPUs.*set it to 2 or less"):
        check_early(config(33))


@pytest.mark.parametrize("refusal", [lambda: torch.empty(2**55, dtype=torch.uint8), lambda: bytearray(2**55)])
def test_a_step_that_does_not_fit_says_what_to_set(tmp_path: Path, refusal: Callable[[], object]) -> None:
    run = begin(configured(tmp_path))
    run.folder.release()
    run.trainer.model.forward = lambda *_args, **_details: refusal()  # type: ignore[method-assign,assignment]
    says = r"train.micro_batch = 2: 2 x 16 tokens at once do not fit.*set train.micro_batch=1 or train.recompute=full"
    with pytest.raises(UserError, match=says):
        run.accumulate_gradients(run.loader.batch(0, 4))


@pytest.mark.parametrize("said", ["junk", "0", "-2", "2.5", "4x", ",2"])
def test_a_number_of_threads_that_is_none(said: str) -> None:
    expected = f"OMP_NUM_THREADS = {said!r} is no number of threads and is ignored"
    assert ignored_threads({"OMP_NUM_THREADS": said}) == expected


@pytest.mark.parametrize("said", ["", " ", "3", "3,2", " 4 "])
def test_a_number_of_threads_that_is_one_or_none_at_all(said: str) -> None:
    assert ignored_threads({"OMP_NUM_THREADS": said}) == ignored_threads({}) == ""


def test_threads_that_are_ignored_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, and before ranks are started, each of which is given a number."""
    monkeypatch.setenv("OMP_NUM_THREADS", "junk")
    notes: list[str] = []
    before = torch.get_num_threads()
    try:
        begin(configured(tmp_path, {"train.threads": 0}), notes).folder.release()
    finally:
        torch.set_num_threads(before)
    (line,) = [note for note in notes if "OMP_NUM_THREADS" in note]
    assert line == (
        "OMP_NUM_THREADS = 'junk' is no number of threads and is ignored "
        f"({len(os.sched_getaffinity(0))} here); set it to a whole number from 1, or unset it"
    )
    begin(configured(tmp_path, {"train.threads": 1}, "told"), notes).folder.release()
    assert [note for note in notes if "OMP_NUM_THREADS" in note] == [line]
    out = io.StringIO()
    monkeypatch.setattr(start, "launch_local", lambda *args, **options: 0)
    monkeypatch.setattr(start, "resolve_layout", lambda config, *args: config)
    start.start_ranks(configured(tmp_path), Path("tiny.toml"), Console(file=out, width=200))
    assert "OMP_NUM_THREADS = 'junk' is no number of threads and is ignored (each rank has" in out.getvalue()


@pytest.mark.parametrize(("said", "setting", "expected"), [("1", 0, 1), ("3,2", 0, 3), ("3", 2, 2), ("many", 0, None)])
def test_a_single_process_computes_with_as_many_threads_as_it_is_told(
    monkeypatch: pytest.MonkeyPatch, said: str, setting: int, expected: int | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    before = torch.get_num_threads()
    try:
        device = choose_device(TrainConfig(steps=1, device="cpu", threads=setting))
        assert device.threads == torch.get_num_threads() == (expected or len(os.sched_getaffinity(0)))
    finally:
        torch.set_num_threads(before)
