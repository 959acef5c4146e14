"""Lines that stand beside a failure and did not bring it about, and those that say why only in the second line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from phalanx.detect.detection import Detection
from phalanx.detect.logs.line_heads import LineHeads
from phalanx.detect.logs.log_rules import Matcher, load_rules
from phalanx.detect.logs.run_logs import judge_places

AT = 1_795_600_800.0
HOSTS = ("gpu01", "gpu02", "gpu03", "gpu04")
STEPS = 20
PEER_GONE = "RuntimeError: [..] remote process exited or there was a network error, NCCL version 2.20.5"
REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
MATCHER = Matcher(load_rules(of_failed_jobs=True))


def write_job(folder: Path, last: Mapping[int, Sequence[str]], kernel: str = "", scheduler: Sequence[str] = ()) -> Path:
    """A job of 8 ranks on 4 hosts that stops after 20 of 1,000 steps; 2 s later ranks say their `last` lines."""
    for rank in range(8):
        lines = [f"{stamp(AT + step)} INFO step {step}/1000 loss 2.{step}" for step in range(1, STEPS + 1)]
        lines += [f"{stamp(AT + STEPS + 2)} {text}" for text in last.get(rank, ())]
        (folder / f"{HOSTS[rank // 2]}_rank{rank}.log").write_text("\n".join(lines) + "\n")
    if kernel:
        path = folder / "gpu03_kern.log"
        at = datetime.fromtimestamp(AT + STEPS, UTC).strftime("%b %d %H:%M:%S")
        path.write_text(f"{at} gpu03 kernel: {kernel}\n")
        os.utime(path, (AT, AT))
    if scheduler:
        text = "".join(f"{stamp(AT + STEPS + 30)} {line}\n" for line in scheduler)
        (folder / "scheduler.log").write_text(text)
    return folder


def stamp(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def only(folder: Path) -> Detection:
    (found,) = judge_places([folder]).detections
    return found


def others_complain(text: str = PEER_GONE) -> dict[int, list[str]]:
    """All but the two ranks of gpu03."""
    return {rank: [text] for rank in range(8) if rank // 2 != 2}


@pytest.mark.parametrize(
    "line",
    [
        "Memory cgroup out of memory: Killed process 63214 (uwsgi) total-vm:3149468kB, anon-rss:164992kB",
        "Out of memory: Killed process 15925 ((resolved)) total-vm:168424kB, anon-rss:4064kB",
        "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task_memcg=/system.slice/cron.service,task=copy,pid=7,uid=0",
        "oom_reaper: reaped process 345646 (node_exporter), now anon-rss:0kB",
        "java invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=986",
    ],
)
def test_a_process_that_is_none_of_the_jobs_is_no_cause(tmp_path: Path, line: str) -> None:
    found = only(write_job(tmp_path, others_complain(), kernel=line))
    assert found.what == "NCCL remote error"
    assert {host for who in found.who for host in who.hosts} == {"gpu03"}, "its ranks are silent all the same"


@pytest.mark.parametrize("name", ["python3", "pt_main_thread", "torchrun", "train.bin", "ray::Worker", "vector_train"])
def test_what_may_be_of_the_job_is_its_cause(tmp_path: Path, name: str) -> None:
    line = f"Out of memory: Killed process 3127 ({name}) total-vm:500000000kB, anon-rss:200000000kB"
    found = only(write_job(tmp_path, others_complain(), kernel=line))
    assert found.what == "out of memory" and {host for who in found.who for host in who.hosts} == {"gpu03"}


@pytest.mark.parametrize(
    "line",
    [
        "Could not cache a file. Will ignore error and continue. Error: [Errno 13] Permission denied: '/x'",
        "'(MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /x\"), "
        "'(Request ID: 1)')' thrown while requesting HEAD https://huggingface.co/x/config.json",
        "UserWarning: cloud_tpu_init failed: ConnectionError(MaxRetryError('Max retries exceeded with url: /x'))",
        "gpu01:1:2 [0] NCCL INFO NET/Plugin : Plugin load (libnccl-net.so) returned 2 : libnccl-net.so: cannot open "
        "shared object file: No such file or directory",
        "gpu01:1:2 [0] NCCL INFO socketPollConnect: connect returned No route to host, retrying (1/34) after sleep",
        "Using default MoE config. Performance might be sub-optimal! Config file not found at /home/u/E=160.json",
    ],
)
def test_a_program_that_goes_on_after_a_line_did_not_fail_by_it(tmp_path: Path, line: str) -> None:
    assert judge_places([write_job(tmp_path / "", {3: [line]})]).detections == ()
    found = only(write_job(tmp_path, {3: [line], 5: ["IndexError: index out of range in self"]}))
    assert found.what == "index error"


def test_the_line_below_a_notice_that_says_why(tmp_path: Path) -> None:
    why = "NET/OFI Request 0x7f14 completed with error. RC: 113. Error: 2 (UNDELIVERABLE). Completed length: 0"
    found = only(write_job(tmp_path, {5: [REMOTE, "Last error:", why]}))
    assert found.what == "network error" and found.who[0].hosts == ("gpu03",) and "UNDELIVERABLE" in found.sentence


def test_a_notice_that_only_one_host_has_points_to_it(tmp_path: Path) -> None:
    line = "RuntimeError: retrieving ncclUniqueId via c10d key-value store got error: Connection reset by peer"
    found = only(write_job(tmp_path, {4: [line]}))
    assert (found.what, found.who[0].hosts) == ("connection error", ("gpu03",)) and found.confidence <= 0.5


@pytest.mark.parametrize(
    "lines",
    [
        ["gpu03   1     main*       down*   12   12:1:1  64267        0      1   (null) Not responding"],
        [
            "PRTE has lost communication with a remote daemon.",
            "  HNP daemon   : [prterun-login1-7@0,0] on node login1",
            "  Remote daemon: [prterun-login1-7@0,1] on node gpu03",
        ],
        ["slurmctld: error: Nodes gpu03 not responding, setting DOWN"],
    ],
)
def test_who_started_the_job_says_which_host_is_gone(tmp_path: Path, lines: list[str]) -> None:
    found = only(write_job(tmp_path, others_complain(), scheduler=lines))
    assert (found.what, found.advice) == ("node failure", "exclude") and found.who[0].hosts == ("gpu03",)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("train.py: error: Couldn't parse config file: expected '<document start>'", "argument error"),
        ("urllib.error.HTTPError: HTTP Error 503: Slow Down", "storage error"),
        ("ValueError: Size mismatch between saved torch.Size([2, 4]) and torch.Size([8])", "model loading error"),
        ("A process or daemon was unable to complete a TCP connection to another process:", "connection error"),
        (
            "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='x.co', port=443): Max retries exceeded "
            "(Caused by NewConnectionError('[Errno 101] Network is unreachable'))",
            "connection error",
        ),
        ("gpu03:1:2 [0] NCCL WARN Net : Connect to 10.0.7.13<5> failed : No route to host", "network error"),
    ],
)  # fmt: skip
def test_families_of_words(line: str, kind: str) -> None:
    rule = MATCHER.find(line, "output")
    assert rule is not None and rule.kind == kind


def test_the_head_of_ray_may_stand_behind_others() -> None:
    line = LineHeads().parse("[rank3]: 2026-11-25 10:00:00,123 (Actor pid=37875, ip=10.0.0.7) ValueError: no")
    assert (line.rank, line.host, line.text) == (3, "10.0.0.7", "ValueError: no")
