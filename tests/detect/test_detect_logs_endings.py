"""How a run ends by its lines: after all its steps, by its loss, by the kernel; and what was not the matter."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from phalanx.detect.detection import Detection
from phalanx.detect.logs.negations import without_negations
from phalanx.detect.logs.run_logs import judge_places

AT = 1_795_600_800.0
RANKS = 4
LOST = (
    "[c10d] recvValue failed on SocketImpl(fd=85, addr=[gpu01]:35362, remote=[gpu00]:29500): Connection reset by peer"
)
NO_DUMP = (
    '[PG ID 0 PG GUID 0 Rank 2] Failed to check the "should dump" flag on TCPStore, (maybe TCPStore server has '
    "shut down too early), with error: Connection reset by peer"
)
HUNG = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE) ran for 600029 ms"
GONE = "DistBackendError: NCCL error, remote process exited or there was a network error, NCCL version 2.20.5"
KILLED = "Out of memory: Killed process 3127 (python) total-vm:500000000kB, anon-rss:200000000kB"


def torch_line(level: str, place: str, text: str) -> str:
    return f"[{level}{datetime.fromtimestamp(AT + 30, UTC).strftime('%m%d %H:%M:%S')}.123456789 {place}] {text}"


def write_ending(folder: Path, last: Mapping[int, Sequence[str]], steps: int = 20, total: int = 20) -> Path:
    """A job of 4 ranks on 2 hosts: its steps, a second each, and the last lines of ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(RANKS):
        lines = [f"{stamp(AT + step)} INFO step {step}/{total} loss 2.{step}" for step in range(1, steps + 1)]
        (folder / f"gpu0{rank // 2}_rank{rank}.log").write_text("\n".join([*lines, *last.get(rank, ())]) + "\n")
    return folder


def stamp(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def only(folder: Path) -> Detection:
    (found,) = judge_places([folder]).detections
    return found


def raised(text: str) -> list[str]:
    return ["Traceback (most recent call last):", '  File "/app/train.py", line 180, in main', "    step()", text]


@pytest.mark.parametrize(
    "line",
    [
        torch_line("W", "TCPStore.cpp:125", LOST),
        torch_line("W", "ProcessGroupNCCL.cpp:1662", NO_DUMP),
        "[W] TCPStore.cpp:106 sendBytes failed on SocketImpl(fd=3): Broken pipe",
        "W1125 10:02:11.000000 1234 torch/distributed/elastic/rendezvous/dynamic_rendezvous.py:1348] The node "
        "'gpu01_1_0' has failed to send a keep-alive heartbeat to the rendezvous 'x' due to a RendezvousClosedError.",
        "GPU memory errors checked: 0 uncorrectable ECC errors, 0 retired pages",
        "dcgmi health: GPU 3 PASS: no network error, no node failure",
        "node gpu01 drained: 0 failed",
        "Health summary: 0 NCCL timeouts, 0 node failures, 0 storage errors",
        "Bye. CUDA error count: 0",
    ],
)
def test_a_run_that_made_all_its_steps_did_not_fail(tmp_path: Path, line: str) -> None:
    verdict = judge_places([write_ending(tmp_path, {2: [line]})])
    assert verdict.detections == () and verdict.exit_status == 0


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        (raised("OSError: [Errno 28] No space left on device: '/ckpt/step20'"), "OS error"),
        (
            raised("RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:1"),
            "connection error",
        ),
        ([torch_line("E", "ProcessGroupNCCL.cpp:616", HUNG)], "NCCL timeout"),
        (["RuntimeError: CUDA error: uncorrectable ECC error encountered"], "ECC error"),
    ],
)
def test_what_fails_after_the_last_step_is_told(tmp_path: Path, lines: list[str], what: str) -> None:
    assert only(write_ending(tmp_path, {2: lines})).what == what


def test_an_evaluation_that_is_over_or_an_epoch_is_not_the_end_of_the_run(tmp_path: Path) -> None:
    gone = "gpu00:1:2 [0] socket.cc:58 NCCL WARN socketProgress: Connection closed by remote peer gpu01.cluster<35112>"

    def said(*lines: str) -> dict[int, list[str]]:
        return {rank: [*lines, gone] if rank < 2 else list(lines) for rank in range(RANKS)}

    found = only(write_ending(tmp_path / "eval", said("INFO eval step 30/30"), total=1000))
    assert found.what == "NCCL remote error"
    found = only(write_ending(tmp_path / "epoch", said("INFO epoch 1/3 step 30/30"), total=30))
    assert found.what == "NCCL remote error"
    done = write_ending(tmp_path / "done", said("INFO saved step 20", "INFO eval step 3/30"))
    assert judge_places([done]).detections == ()


def test_what_torch_only_warns_of_blames_nobody(tmp_path: Path) -> None:
    found = only(write_ending(tmp_path, {2: [torch_line("W", "TCPStore.cpp:125", LOST)]}, total=1000))
    assert not found.who and not found.blamed_hosts


@pytest.mark.parametrize(
    "line",
    [
        "post-run diagnostics: 0 uncorrectable ECC errors, exit status 0",
        "checkpoint uploaded to s3://bucket/x without storage error",
        "summary: CUDA errors: 0, ECC uncorrectable errors: 0, NVLink failures: none",
        "dcgmi diag: NVLink errors: Pass",
    ],
)
def test_counts_of_zero_in_a_run_that_goes_on(tmp_path: Path, line: str) -> None:
    assert judge_places([write_ending(tmp_path, {2: [line]}, total=1000)]).detections == ()


@pytest.mark.parametrize(
    "line",
    [
        "GPU 0 uncorrectable ECC errors",
        "rank 0 failed",
        "rank: 0 failed to connect",
        "10 errors",
        "errors: 0x1f",
        "KeyError: 0",
        "OSError: [Errno 28] No space left on device",
        "RuntimeError: CUDA error: no CUDA-capable device is detected",
        "CUDA error: no kernel image is available",
        "terminate called without an active exception",
        "error: 0.5",
        "ZeroDivisionError: division by zero",
        "Connect to 10.0.0.7 failed : No route to host",
        "Error: No such option: --stpes",
        "PASS: 3 tests, FAIL: 1",
        "got completion with error: 00000000",
    ],
)
def test_what_only_looks_like_none(line: str) -> None:
    assert without_negations(line) == line


def test_what_is_there_beside_what_is_not(tmp_path: Path) -> None:
    line = "no network errors; RuntimeError: CUDA error: uncorrectable ECC error encountered"
    assert only(write_ending(tmp_path, {2: [line]}, total=1000)).what == "ECC error"


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: loss is nan",
        "FloatingPointError: Loss is NaN, stopping training",
        "RuntimeError: loss is nan at step 60, stopping",
        "AssertionError: non-finite loss",
        "RuntimeError: gradient norm is inf",
    ],
)
def test_a_run_that_ends_because_its_loss_is_not_finite(tmp_path: Path, line: str) -> None:
    last = [f"{stamp(AT + 21)} INFO step 21/1000 loss nan", *raised(line)]
    found = only(write_ending(tmp_path / "all", dict.fromkeys(range(RANKS), last), total=1000))
    assert (found.what, found.advice, found.who) == ("loss not finite", "program", ()) and line in found.sentence
    one = write_ending(tmp_path / "one", {0: last}, total=1000)
    assert only(one).what == "loss not finite" and not only(one).blamed_hosts


def test_an_exception_that_no_rule_explains_is_quoted(tmp_path: Path) -> None:
    found = only(write_ending(tmp_path / "named", {1: raised("acme.OutOfLuck: the moon is wrong")}, total=1000))
    assert '"acme.OutOfLuck: the moon is wrong"' in found.sentence and "Traceback" not in found.sentence
    found = only(write_ending(tmp_path / "cut", {1: raised("")[:3]}, total=1000))
    assert "before it names the exception" in found.sentence and "Traceback" not in found.sentence


@pytest.mark.parametrize(
    ("name", "what", "confidence"),
    [("SIGKILL", "out of memory", 0.6), ("SIGSEGV", "runtime error", 0.9), ("SIGBUS", "dataloader killed", 0.9)],
)
def test_a_rank_whose_end_only_the_launcher_saw_is_named_before_those_that_notice(
    tmp_path: Path, name: str, what: str, confidence: float
) -> None:
    """As `phalanx train` writes it into the log of that rank; a peer's connection broke milliseconds before."""
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:24722: Connection reset by peer"
    last = {
        0: [f"{stamp(AT + 12.1)} ERROR [rank 0 start 1] {lost}"],
        2: [f"{stamp(AT + 12.2)} ERROR [rank 2 start 1] ended: killed by {name}; the launcher ends the other ranks"],
        1: [f"{stamp(AT + 12.5)} WARNING [rank 1 start 1] ended: by the launcher, since rank 2 was killed by {name}"],
    }
    (found,) = judge_places([write_ending(tmp_path / "logs", last, steps=12)]).detections
    assert (found.what, found.confidence) == (what, confidence)
    assert [one.ranks for one in found.who] == [(2,)]


def test_a_process_that_the_kernel_killed_explains_what_the_others_notice(tmp_path: Path) -> None:
    write_ending(tmp_path, {rank: [f"{stamp(AT + 22)} [rank{rank}]: {GONE}"] for rank in range(3)}, total=1000)
    path = tmp_path / "gpu01_kern.log"
    path.write_text(f"{datetime.fromtimestamp(AT + 20, UTC).strftime('%b %d %H:%M:%S')} gpu01 kernel: {KILLED}\n")
    os.utime(path, (AT, AT))
    found = only(tmp_path)
    assert found.what == "out of memory" and "Killed process 3127 (python)" in found.sentence and not found.blamed_hosts


@pytest.mark.parametrize(
    ("line", "kernel"),
    [
        ("RuntimeError: CUDA error: device-side assert triggered", ""),
        (
            "Indexing.cu:1290: indexSelectLargeIndex: block: [12,0,0], thread: [0,0,0] Assertion "
            "`srcIndex < srcSelectDimSize` failed.",
            "",
        ),
        (
            "RuntimeError: CUDA error: an illegal memory access was encountered",
            "NVRM: Xid (PCI:0000:41:00): 31, pid=3127, name=python, Ch 00000008, MMU Fault: ENGINE GRAPHICS faulted",
        ),
    ],
)
def test_a_kernel_that_refuses_its_input_is_the_programs_fault(tmp_path: Path, line: str, kernel: str) -> None:
    write_ending(tmp_path, {2: [f"{stamp(AT + 22)} ERROR uncaught", *raised(line)]}, total=1000)
    if kernel:
        path = tmp_path / "gpu01_kern.log"
        path.write_text(f"{datetime.fromtimestamp(AT + 21, UTC).strftime('%b %d %H:%M:%S')} gpu01 kernel: {kernel}\n")
        os.utime(path, (AT, AT))
    found = only(tmp_path)
    assert (found.what, found.advice, found.blamed_hosts) == ("CUDA error", "program", ())
    assert not any("phalanx check" in step for step in found.then)


def test_a_fatal_error_of_python_is_quoted_as_a_whole(tmp_path: Path) -> None:
    last = {3: ["Fatal Python error: Segmentation fault", "", "Current thread 0x00007f (most recent call first):"]}
    assert '"Fatal Python error: Segmentation fault"' in only(write_ending(tmp_path, last, total=1000)).sentence
