"""Why a job failed, by the lines of its ranks: cause and victims, host and class, and healthy jobs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx.cli.detect_command import command
from phalanx.core.errors import UserError
from phalanx.detect.detection import JudgeVerdict
from phalanx.detect.logs.failure_classes import FAILURE_CLASSES
from phalanx.detect.logs.learnt_rules import LabelledIncident, learn_rules, pattern_of, read_labels, write_rules
from phalanx.detect.logs.line_templates import masked
from phalanx.detect.logs.log_judge import LogPolicy
from phalanx.detect.logs.log_rules import Matcher, load_rules
from phalanx.detect.logs.run_logs import judge_places, judge_run

AT = 1_795_600_800.0
HOSTS = ("gpu01", "gpu02", "gpu03", "gpu04")
RANKS = 8

Said = Mapping[int, Sequence[tuple[float, str]]]


def stamp(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]


def write_job(
    folder: Path,
    said: Said,
    *,
    kernel: Mapping[str, Sequence[tuple[float, str]]] | None = None,
    skew: Mapping[str, float] | None = None,
    steps: int = 10,
    after: int = 0,
) -> None:
    """A job of 8 ranks on 4 hosts that makes 10 steps, a second each, says what it says, and makes `after` more."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(RANKS):
        host = HOSTS[rank // 2]
        ahead = (skew or {}).get(host, 0.0)
        lines = [(AT + step, f"step: {step} loss 2.{step}") for step in range(1, steps + 1)]
        lines += [(AT + steps + at, text) for at, text in said.get(rank, ())]
        lines += [(AT + steps + 100 + step, f"step: {steps + step} loss 2.1") for step in range(1, after + 1)]
        text = "".join(f"{stamp(at + ahead)} {line}\n" for at, line in lines)
        (folder / f"{host}_rank{rank}.log").write_text(text)
    for host, lines in (kernel or {}).items():
        path = folder / f"{host}.kern.log"
        path.write_text(
            "".join(
                f"{datetime.fromtimestamp(AT + steps + at, UTC).strftime('%b %d %H:%M:%S')} {host} kernel: {line}\n"
                for at, line in lines
            )
        )
        os.utime(path, (AT, AT))


def judged(folder: Path) -> JudgeVerdict:
    return judge_places([folder])


RESET = "ConnectionResetError: [Errno 104] Connection reset by peer"
WATCHDOG = "[Rank {rank}] Watchdog caught collective operation timeout: " + (
    "WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600060 milliseconds before timing out."
)


def test_the_cause_and_not_its_victims(tmp_path: Path) -> None:
    said = {rank: [(1.0 + 0.1 * rank, RESET)] for rank in range(RANKS)} | {
        5: [(0.0, "RuntimeError: CUDA error: an illegal memory access was encountered")]
    }
    write_job(tmp_path, said)
    verdict = judged(tmp_path)
    (found,) = verdict.detections
    assert found.what == "CUDA error" and found.who[0].name == "gpu03" and found.who[0].ranks == (5,)
    assert found.figures["victims"] == 7 and found.advice == "check" and verdict.blamed_hosts == ("gpu03",)
    assert found.since.step == 10 and found.since.unix_s == pytest.approx(AT + 10)


def test_a_clock_that_is_behind_does_not_make_a_victim_the_cause(tmp_path: Path) -> None:
    said = {rank: [(1.0, RESET)] for rank in range(RANKS)} | {5: [(0.0, "ValueError: bad sample")]}
    write_job(tmp_path, said, skew={"gpu01": -40.0})
    (found,) = judged(tmp_path).detections
    assert found.what == "value error" and found.who[0].name == "gpu03" and found.advice == "program"
    assert judged(tmp_path).blamed_hosts == ()


def test_a_clock_that_nobody_can_compare_hides_no_victim(tmp_path: Path) -> None:
    for rank in range(1, RANKS):
        line = "ncclRemoteError: A call failed possibly due to a network error"
        (tmp_path / f"{HOSTS[rank // 2]}_rank{rank}.log").write_text(f"{stamp(AT - 20)} {line}\n" if rank > 1 else "")
    steps = "".join(f"{stamp(AT + step)} step: {step} loss 2.{step}\n" for step in range(1, 11))
    (tmp_path / "gpu01_rank0.log").write_text(steps)
    (found,) = judged(tmp_path).detections
    assert found.what == "NCCL remote error" and found.who[0].name == "gpu01"


def test_the_kernel_explains_what_a_rank_says(tmp_path: Path) -> None:
    said = {3: [(0.0, "RuntimeError: CUDA error: unspecified launch failure")]}
    kernel = {
        "gpu02": [
            (
                -1.0,
                "NVRM: Xid (PCI:0000:3b:00): 48, pid=1, An uncorrectable double bit error",
            )
        ]
    }
    write_job(tmp_path, said, kernel=kernel)
    (found,) = judged(tmp_path).detections
    assert found.what == "ECC error" and found.who[0].name == "gpu02" and found.advice == "exclude"


def test_an_alarm_of_one_kernel_tells_what_its_victims_cannot(tmp_path: Path) -> None:
    said = {rank: [(2.0, RESET)] for rank in range(RANKS)}
    write_job(tmp_path, said, kernel={"gpu02": [(1.0, "Out of memory: Killed process 4242 (python3)")]})
    (found,) = judged(tmp_path).detections
    assert found.what == "out of memory" and found.who[0].name == "gpu02"
    early = {"gpu02": [(-900.0, "Out of memory: Killed process 4242 (python3)")]}
    write_job(tmp_path / "early", said, kernel=early)
    (found,) = judged(tmp_path / "early").detections
    assert found.what == "connection error"


def test_a_dead_node_that_nobody_names_is_who_is_silent(tmp_path: Path) -> None:
    said = {rank: [(2.0 + rank, RESET)] for rank in range(RANKS) if rank not in (2, 3)}
    write_job(tmp_path, said)
    line = "The node with client ID 5c1d has been marked dead because the monitor has missed too many heartbeats."
    (tmp_path / "scheduler.log").write_text(f"{stamp(AT + 20)} {line}\n")
    (found,) = judged(tmp_path).detections
    assert (found.what, found.who[0].name) == ("node failure", "gpu02")


def test_an_address_of_a_server_elsewhere_is_no_host_of_the_job(tmp_path: Path) -> None:
    line = (
        "ConnectTimeout: HTTPSConnectionPool(host='hub.example.com', port=443): Max retries exceeded with url: /x "
        "(Caused by ConnectTimeoutError('Connection to 10.0.0.2 timed out.'))"
    )
    said = {rank: [(1.0, line)] for rank in range(RANKS)}
    write_job(tmp_path, said)
    using = "NCCL INFO Bootstrap : Using eth0:10.0.0.2<0>"
    path = tmp_path / "gpu02_rank2.log"
    path.write_text(f"{stamp(AT)} {using}\n" + path.read_text())
    (found,) = judged(tmp_path).detections
    assert found.what == "connection error" and not found.who


def test_what_all_ranks_say_blames_no_machine(tmp_path: Path) -> None:
    write_job(tmp_path, {rank: [(0.1 * rank, "KeyError: 'input_ids'")] for rank in range(RANKS)})
    (found,) = judged(tmp_path).detections
    assert (
        found.what == "key error"
        and found.who == ()
        and found.advice == "program"
        and "no machine is at fault" in " ".join(found.why)
    )


def test_who_is_silent_while_all_others_wait(tmp_path: Path) -> None:
    write_job(
        tmp_path, {rank: [(600 + 0.1 * rank, WATCHDOG.format(rank=rank, seq=77))] for rank in range(RANKS) if rank != 6}
    )
    (found,) = judged(tmp_path).detections
    assert found.what == "NCCL timeout" and found.who[0].name == "gpu04" and found.who[0].ranks == (6,)


def test_who_stands_a_collective_behind(tmp_path: Path) -> None:
    write_job(
        tmp_path, {rank: [(600.0, WATCHDOG.format(rank=rank, seq=76 if rank == 2 else 77))] for rank in range(RANKS)}
    )
    (found,) = judged(tmp_path).detections
    assert (
        found.who[0].name == "gpu02"
        and found.who[0].ranks == (2,)
        and "rank 2 was at collective 76, the others at 77" in found.why
    )


def test_whom_the_others_name_by_address(tmp_path: Path) -> None:
    said: dict[int, list[tuple[float, str]]] = {}
    for rank in range(RANKS):
        host = HOSTS[rank // 2]
        said[rank] = [(-9.5, f"{host}:1:1 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.{rank // 2}<0>")]
        if host != "gpu02":
            said[rank].append(
                (
                    1.0,
                    "NCCL WARN NET/IB : Got completion from peer 10.0.0.1<4242> with error 12, opcode 0, len 0",
                )
            )
    write_job(tmp_path, said)
    (found,) = judged(tmp_path).detections
    assert found.what == "network error" and found.who[0].name == "gpu02"


def test_a_scheduler_names_the_host(tmp_path: Path) -> None:
    write_job(
        tmp_path,
        {
            rank: [
                (
                    3.0,
                    "ncclRemoteError: A call failed possibly due to a network error",
                )
            ]
            for rank in range(6)
        },
    )
    (tmp_path / "scheduler.log").write_text(f"{stamp(AT + 30)} srun: error: Node failure on gpu04\n")
    (found,) = judged(tmp_path).detections
    assert found.what == "node failure" and found.who[0].name == "gpu04"


@pytest.mark.parametrize(
    "line",
    [
        "INFO error_rate=0 errors=0",
        "WARNING Failed to load optional module 'apex'",
        "WARNING Connection reset by peer, retrying (1/5)",
        "wandb: Network error (ConnectionError), entering retry loop.",
        "INFO CUDA errors: 0, ECC errors: 0",
        "NCCL timeout is 600 s (Timeout(ms)=600000)",
    ],
)
def test_scary_words_of_a_healthy_job(tmp_path: Path, line: str) -> None:
    write_job(tmp_path, {rank: [(0.5, line)] for rank in range(3)})
    verdict = judged(tmp_path)
    assert verdict.detections == () and verdict.exit_status == 0


def test_what_a_job_outlives_is_no_failure(tmp_path: Path) -> None:
    said = {2: [(0.5, "RuntimeError: Timed out waiting 1800ms for recv operation"), (0.6, "ValueError: bad sample")]}
    write_job(tmp_path / "lives", said, after=5)
    assert judged(tmp_path / "lives").detections == ()
    write_job(tmp_path / "dies", said)
    assert judged(tmp_path / "dies").detections


def test_lines_of_healthy_jobs_are_no_news(tmp_path: Path) -> None:
    line = "RuntimeError: shutdown of the profiler failed"
    write_job(tmp_path / "calm", {0: [(0.5, line)]}, after=9)
    write_job(tmp_path / "failed", {0: [(0.5, line)], 5: [(2.0, "IndexError: list index out of range")]})
    without = judge_places([tmp_path / "failed"]).detections[0]
    known = judge_places([tmp_path / "failed"], healthy=[tmp_path / "calm"]).detections[0]
    assert known.what == "index error" and known.who[0].name == "gpu03"
    assert (without.what, known.what) == ("index error", "index error") or without.what == "runtime error"


def test_an_end_that_no_rule_explains(tmp_path: Path) -> None:
    write_job(tmp_path, {4: [(0.5, "Traceback (most recent call last):"), (0.5, "something nobody knows")]})
    (found,) = judged(tmp_path).detections
    assert found.what == "unknown failure" and found.confidence < 0.5 and found.advice == "watch"


def test_a_run_without_logs_is_not_judged(tmp_path: Path) -> None:
    verdict = judge_run(tmp_path)
    assert verdict.abstains and verdict.exit_status == 3


def test_every_rule_names_a_class_of_the_table() -> None:
    rules = load_rules(of_failed_jobs=True)
    assert {rule.kind for rule in rules if rule.kind} == set(FAILURE_CLASSES) and len(FAILURE_CLASSES) == 33
    matcher = Matcher(rules)
    for rule in rules:
        for line in rule.matches:
            found = matcher.find(line, "kernel" if rule.where == "kernel" else "output")
            assert found is not None and found.kind == rule.kind, (rule.name, found.name)


def test_the_command(tmp_path: Path) -> None:
    write_job(tmp_path / "job", {5: [(0.0, "ZeroDivisionError: division by zero")]})
    done = CliRunner().invoke(command, ["logs", str(tmp_path / "job"), "--json"])
    tree = json.loads(done.output)
    assert done.exit_code == 1 and tree["detections"][0]["what"] == "zero division error"
    assert tree["tables"]["lines"][0]["rank"] == 5
    with pytest.raises(UserError, match="no logs are given"):
        CliRunner().invoke(command, ["logs"], catch_exceptions=False)


def test_rules_are_learnt_from_labelled_incidents(tmp_path: Path) -> None:
    labels = []
    for number in range(18):
        kind = ("storage error", "node failure", "value error")[number % 3]
        line = {
            "storage error": f"petrel client: bucket {number} answered 7 times with code 59",
            "node failure": f"bmc of tray {number} lost",
            "value error": "cannot go on",
        }[kind]
        said = {rank: [(1.0, RESET), (1.0, "we all leave now together")] for rank in range(RANKS)} | {
            number % RANKS: [(0.0, line)]
        }
        write_job(tmp_path / str(number), said)
        labels.append({"logs": str(number), "class": kind, "host": HOSTS[number % RANKS // 2]})
    write_job(tmp_path / "calm", {0: [(0.1, "cannot go on")]}, after=9)
    labels.append({"logs": "calm", "class": "healthy"})
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labels))
    rules = tmp_path / "learnt.toml"
    done = CliRunner().invoke(command, ["logs", "--learn", str(tmp_path / "labels.jsonl"), "--out", str(rules)])
    assert done.exit_code == 0, done.output
    kinds = {rule.kind for rule in load_rules([rules]) if rule.name.startswith("learnt-")}
    assert kinds == {"storage error", "node failure"}  # the third also stands in a healthy job
    assert "leave now" not in rules.read_text()
    write_job(tmp_path / "new", {3: [(0.0, "petrel client: bucket 99 answered 12 times with code 59")]})
    assert judge_places([tmp_path / "new"]).detections == ()
    (found,) = judge_places([tmp_path / "new"], rules=[rules]).detections
    assert found.what == "storage error" and found.who[0].name == "gpu02"


def test_a_template_has_to_earn_its_place(tmp_path: Path) -> None:
    for number in range(4):
        write_job(tmp_path / str(number), {1: [(0.0, "quota daemon says no")]})
    twice = [
        LabelledIncident(tmp_path / str(number), ("storage error", "value error")[number % 2], "gpu01")
        for number in range(4)
    ]
    assert learn_rules(twice) == []
    elsewhere = [LabelledIncident(tmp_path / str(number), "storage error", "gpu03") for number in range(4)]
    assert learn_rules(elsewhere) == []
    write_rules(tmp_path / "none.toml", [])
    assert load_rules([tmp_path / "none.toml"]) == load_rules()


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "is no label"),
        ('{"logs": "x", "class": "bad luck"}', "is no class"),
        ('{"logs": "x", "class": "healthy"}', "is not there"),
    ],
)
def test_labels_that_are_wrong_are_named(tmp_path: Path, row: str, problem: str) -> None:
    (tmp_path / "labels.jsonl").write_text(row)
    with pytest.raises(UserError, match=problem):
        read_labels(tmp_path / "labels.jsonl")


def test_patterns_of_templates_match_lines_like_theirs() -> None:
    line = "bucket 17 at s3://b/x (node gpu03) said 'a|b' 4.5 times [1]"
    pattern = pattern_of(masked(line))
    assert Matcher(load_rules()).find(line, "output") is None
    import re

    assert (
        re.search(pattern, line)
        and re.search(pattern, line.replace("17", "9"))
        and not re.search(pattern, "bucket of 17")
    )


def test_a_window_is_a_setting() -> None:
    with pytest.raises(UserError):
        LogPolicy(window_s=-1)


def write_storage_incidents(folder: Path, failed: int, healthy: int) -> Path:
    labels = []
    for number in range(failed):
        text = f"ERROR blobfs volume 7{number} lost its lease token"
        write_job(folder / f"bad{number}", {number % RANKS: [(1.0, text)]})
        labels.append({"logs": f"bad{number}", "class": "storage error", "host": HOSTS[number % RANKS // 2]})
    for number in range(healthy):
        write_job(folder / f"good{number}", {})
        labels.append({"logs": f"good{number}", "class": "healthy"})
    path = folder / "labels.jsonl"
    path.write_text("".join(json.dumps(label) + "\n" for label in labels))
    return path


def test_one_class_beside_healthy_jobs_is_learnt(tmp_path: Path) -> None:
    labels = write_storage_incidents(tmp_path, failed=3, healthy=3)
    done = CliRunner().invoke(command, ["logs", "--learn", str(labels), "--out", str(tmp_path / "rules.toml")])
    assert done.exit_code == 0 and done.output.startswith("1 rule of 1 class learnt from 6 labelled jobs"), done.output


@pytest.mark.parametrize(
    ("failed", "healthy", "reason"),
    [
        (2, 4, "occur in too few incidents: a rule needs 3"),
        (4, 0, "may fall on one class by chance: label more healthy"),
    ],
)
def test_it_says_why_nothing_is_learnt(tmp_path: Path, failed: int, healthy: int, reason: str) -> None:
    labels = write_storage_incidents(tmp_path, failed, healthy)
    rules = tmp_path / "rules.toml"
    done = CliRunner().invoke(command, ["logs", "--learn", str(labels), "--out", str(rules)])
    assert done.exit_code == 3 and reason in done.output and not rules.exists(), done.output


def write_unfinished(folder: Path, last: Mapping[int, Sequence[str]], steps: int = 20, total: int = 1000) -> Path:
    folder.mkdir()
    for rank in range(RANKS):
        lines = [f"{stamp(AT + step)} INFO step {step}/{total} loss 2.{step}" for step in range(1, steps + 1)]
        lines += [f"{stamp(AT + steps + 1)} {text}" for text in last.get(rank, ())]
        (folder / f"{HOSTS[rank // 2]}_rank{rank}.log").write_text("\n".join(lines) + "\n")
    return folder


def test_an_error_at_the_end_of_an_unfinished_run_is_told(tmp_path: Path) -> None:
    (found,) = judge_places([write_unfinished(tmp_path / "nan", {0: ["ERROR loss is nan, aborting"]})]).detections
    assert (found.what, found.advice, found.blamed_hosts) == ("loss not finite", "program", ())
    (found,) = judge_places([write_unfinished(tmp_path / "own", {3: ["ERROR the moon is wrong"]})]).detections
    assert found.what == "unknown failure" and "step 20 of 1,000" in found.why[0] and not found.blamed_hosts


def test_an_error_of_a_run_that_made_all_its_steps_is_none(tmp_path: Path) -> None:
    last = {0: ["ERROR the moon is wrong"]}
    assert judge_places([write_unfinished(tmp_path / "done", last, 20, total=20)]).exit_status == 0
    last = {0: ["ERROR upload failed, retrying (1/5)"]}
    assert judge_places([write_unfinished(tmp_path / "again", last)]).exit_status == 0


def test_an_interrupt_blames_nobody(tmp_path: Path) -> None:
    ends = ["ERROR Traceback (most recent call last):", "KeyboardInterrupt"]
    (found,) = judge_places([write_unfinished(tmp_path / "all", dict.fromkeys(range(RANKS), ends))]).detections
    assert found.what == "stopped by a person" and "interrupted (KeyboardInterrupt) on all 8 ranks" in found.sentence
    assert not found.who and found.advice == "watch"
    (found,) = judge_places([write_unfinished(tmp_path / "one", {2: ends})]).detections
    assert "on 1 of 8 ranks" in found.sentence and not found.who


def test_who_interrupts_a_job_that_hangs_is_not_its_cause(tmp_path: Path) -> None:
    hung = "[rank{0}]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE)"
    said = {rank: [(1.0, hung.format(rank)), (60.0, "KeyboardInterrupt")] for rank in range(1, RANKS)}
    write_job(tmp_path, said | {0: [(60.0, "KeyboardInterrupt")]})
    (found,) = judge_places([tmp_path]).detections
    assert found.what == "NCCL timeout"


def test_random_bytes_are_no_log(tmp_path: Path) -> None:
    (tmp_path / "b.log").write_bytes(bytes(range(256)) * 40)
    verdict = judge_places([tmp_path])
    assert verdict.exit_status == 3 and "no text" in verdict.abstains[0]
