"""What several hosts say alike: of what they share, of a host that is not among them, and under which name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from phalanx.detect.detection import Detection
from phalanx.detect.logs.log_digest import read_job
from phalanx.detect.logs.log_judge import judge_logs
from phalanx.detect.logs.log_rules import Matcher, load_rules

AT = 1_795_600_800.0
HOSTS = ("gpu01", "gpu02", "gpu03", "gpu04")
DEAD_DISK = (
    "[ 4730.1] I/O error, dev nvme0n1, sector 167431176 op 0x1:(WRITE)",
    "[ 4730.8] Aborting journal on device nvme0n1p1-8.",
)


@pytest.fixture(scope="module")
def matcher() -> Matcher:
    return Matcher(load_rules(of_failed_jobs=True))


def stamp(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]


def write_job(
    folder: Path, said: Mapping[str, Sequence[str]], kernels: Mapping[str, Sequence[str]] | None = None, steps: int = 20
) -> None:
    """A job of a rank a host; what its rank and its kernel say after the last step."""
    for rank, host in enumerate(HOSTS):
        lines = [f"{stamp(AT)} {host}:41:41 [0] NCCL INFO Bootstrap : Using eth0:10.0.7.{10 + rank}<0>"]
        lines += [f"{stamp(AT + n)} step {n} loss 3.1" for n in range(1, steps)]
        lines += [f"{stamp(AT + steps)} {text}" for text in said.get(host, ())]
        (folder / f"{host}_rank{rank}.log").write_text("\n".join(lines) + "\n")
        kernel = folder / f"{host}.kern.log"
        head = f"{datetime.fromtimestamp(AT + steps, UTC).strftime('%b %d %H:%M:%S')} {host} kernel: "
        kernel.write_text("".join(f"{head}{line}\n" for line in (kernels or {}).get(host, ("[1.0] Link up",))))
        os.utime(kernel, (AT + steps,) * 2)


def judged(folder: Path, matcher: Matcher) -> Detection | None:
    verdict = judge_logs(read_job([folder], matcher))
    return verdict.detections[0] if verdict.detections else None


def hosts_of(found: Detection | None) -> set[str]:
    assert found is not None
    return {host for culprit in found.who for host in culprit.hosts}


def test_kernels_of_many_hosts_blame_none(tmp_path: Path, matcher: Matcher) -> None:
    write_job(tmp_path, {}, dict.fromkeys(HOSTS[:3], DEAD_DISK))
    found = judged(tmp_path, matcher)
    assert found is not None
    assert found.what == "storage error"
    assert hosts_of(found) == set()
    assert "3 hosts' kernels say the same: no machine is at fault" in found.why


def test_the_kernel_of_one_host_points_to_it(tmp_path: Path, matcher: Matcher) -> None:
    write_job(tmp_path, {}, {"gpu03": DEAD_DISK})
    assert hosts_of(judged(tmp_path, matcher)) == {"gpu03"}


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("node failure", "ORTE has lost communication with a remote daemon."),
        ("NCCL remote error", "ncclInternalError: Internal check failed."),
    ],
)
def test_who_says_that_another_is_gone_is_there(tmp_path: Path, matcher: Matcher, what: str, line: str) -> None:
    write_job(tmp_path, {host: (line,) for host in HOSTS if host != "gpu02"})
    found = judged(tmp_path, matcher)
    assert found is not None
    assert found.what == what
    assert hosts_of(found) == {"gpu02"}
    assert not any("no machine is at fault" in why for why in found.why)


def test_who_is_named_is_gone_where_all_complain(tmp_path: Path, matcher: Matcher) -> None:
    below = (
        "ncclInternalError: Internal check failed.",
        "Last error:",
        "Net : Connection closed by remote peer gpu04<50260>",
    )
    write_job(tmp_path, dict.fromkeys(HOSTS, below))
    assert hosts_of(judged(tmp_path, matcher)) == {"gpu04"}


def test_nobody_is_blamed_where_all_say_the_same_of_nobody(tmp_path: Path, matcher: Matcher) -> None:
    write_job(tmp_path, dict.fromkeys(HOSTS, ("ncclInternalError: Internal check failed.",)))
    assert hosts_of(judged(tmp_path, matcher)) == set()


def test_an_address_before_a_line_is_a_host_by_its_name(tmp_path: Path, matcher: Matcher) -> None:
    line = "(RayTrainWorker pid=412, ip=10.0.7.12) RuntimeError: CUDA error: an illegal memory access was encountered"
    write_job(tmp_path, {"gpu01": (line,)})
    assert hosts_of(judged(tmp_path, matcher)) == {"gpu03"}


def test_what_will_be_retried_is_no_failure(tmp_path: Path, matcher: Matcher) -> None:
    line = (
        "I tensorflow/core/platform/cloud/retrying_utils.cc:77] The operation failed and will be automatically "
        "retried in 1.49778 seconds (attempt 1 out of 10), caused by: Unavailable: Upload to gs://bucket/ckpt failed"
    )
    write_job(tmp_path, {"gpu01": (line,)})
    assert judged(tmp_path, matcher) is None


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("out of memory", "gpu01:306:307 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'"),
        ("CUDA error", "Error named symbol not found at line 117 in file /opt/lib/csrc/ops.cu"),
        ("storage error", "OSError: [Errno 5] Input/output error"),
        (
            "model loading error",
            "ValueError: Can't find a checkpoint index (model.safetensors.index.json) in out/step-230.",
        ),
    ],
)
def test_words_that_belong_to_a_class(tmp_path: Path, matcher: Matcher, what: str, line: str) -> None:
    write_job(tmp_path, {"gpu01": ("Traceback (most recent call last):", line)})
    found = judged(tmp_path, matcher)
    assert found is not None
    assert found.what == what
