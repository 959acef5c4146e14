"""Heads of lines, layouts of log files, templates: who said what, when."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.detect.logs.line_heads import LineHeads
from phalanx.detect.logs.line_templates import TemplateLimits, Templates, masked
from phalanx.detect.logs.log_sources import find_log_files, read_lines
from phalanx.detect.logs.run_logs import judge_places

AT = 1_795_600_800.0  # 2026-11-25 10:00:00 UTC


@pytest.mark.parametrize(
    ("raw", "text", "unix_s", "rank", "host", "level"),
    [
        ("2026-11-25T10:00:00.500Z INFO [rank 3 start 1] step 12", "step 12", AT + 0.5, 3, "", "INFO"),
        ("2026-11-25T10:00:00.500Z [rank 3] step 12", "step 12", AT + 0.5, 3, "", ""),
        (
            "[rank12]:[E1125 10:00:00.250000000 ProcessGroupNCCL.cpp:607] late",
            "ProcessGroupNCCL.cpp:607] late",
            AT + 0.25,
            12,
            "",
            "ERROR",
        ),
        (
            "2026-11-25 10:00:00,123 - megatron - WARNING - slow",
            "megatron - WARNING - slow",
            AT + 0.123,
            None,
            "",
            "WARNING",
        ),
        ("2026-11-25T12:00:00+02:00 text", "text", AT, None, "", ""),
        ("2026-11-25T10:00:00.500Z [rank 3] [rank3]: KeyError: 1", "KeyError: 1", AT + 0.5, 3, "", ""),
        ("7: hello", "hello", None, 7, "", ""),
        ("gpu03: hello", "hello", None, None, "gpu03", ""),
        ("[default5]:hello", "hello", None, 5, "", ""),
        ("[1,9]<stderr>:hello", "hello", None, 9, "", ""),
        ("(RayTrainWorker pid=4, ip=10.0.0.4) ValueError: no", "ValueError: no", None, None, "10.0.0.4", ""),
        ("Nov 25 10:00:00 gpu03 kernel: [ 1.5] NVRM: Xid", "[ 1.5] NVRM: Xid", AT, None, "gpu03", ""),
        ("[Wed Nov 25 10:00:00 2026] NVRM: Xid", "NVRM: Xid", AT, None, "", ""),
        ("KeyError: 'input_ids'", "KeyError: 'input_ids'", None, None, "", ""),
        ("step: 12 loss 3", "step: 12 loss 3", None, None, "", ""),
        ("ip-10-0-0-1.ec2.internal: hello", "hello", None, None, "ip-10-0-0-1.ec2.internal", ""),
        ("boto3.exceptions.S3UploadFailedError: no", "boto3.exceptions.S3UploadFailedError: no", None, None, "", ""),
        ("oss2.exceptions.RequestError: no", "oss2.exceptions.RequestError: no", None, None, "", ""),
        ("mount.nfs4: Connection timed out", "mount.nfs4: Connection timed out", None, None, "", ""),
        ("unhandled system error (NCCL_DEBUG=INFO)", "unhandled system error (NCCL_DEBUG=INFO)", None, None, "", ""),
    ],
)
def test_the_head_of_a_line(raw: str, text: str, unix_s: float | None, rank: int | None, host: str, level: str) -> None:
    line = LineHeads(year=2026).parse(raw)
    assert (line.text, line.rank, line.host, line.level) == (text, rank, host, level)
    assert line.unix_s == (unix_s if unix_s is None else pytest.approx(unix_s, abs=1e-3))


def test_a_line_without_a_head_belongs_to_the_one_above() -> None:
    heads = LineHeads("gpu01")
    heads.parse("[rank3]: 2026-11-25 10:00:00 Traceback (most recent call last):")
    line = heads.parse("ValueError: no")
    assert (line.rank, line.host, line.unix_s) == (3, "gpu01", AT)


@given(st.text())
def test_wild_lines_come_as_they_are(raw: str) -> None:
    LineHeads(year=2026).parse(raw)
    assert len(masked(raw)) <= 6 * 400


def test_layouts_of_logs(tmp_path: Path) -> None:
    files = {
        "run/logs/rank-3.gpu01.log": ("output", 3, "gpu01"),
        "run/logs/train.log": ("output", 0, ""),
        "job/logs/gpu02/rank-5/attempt-0002.0001.log": ("output", 5, "gpu02"),
        "torchrun/gpu04/none_1/attempt_0/2/stderr.log": ("output", None, "gpu04"),
        "alone/none_1/attempt_0/2/stdout.log": ("output", 2, ""),
        "plain/node-3_rank12.log": ("output", 12, "node-3"),
        "plain/slurm-77-gpu09.out": ("output", None, "gpu09"),
        "plain/gpu09.kern.log": ("kernel", None, "gpu09"),
    }
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("hello\n")
    (tmp_path / "run/telemetry").mkdir()
    (tmp_path / "job/job.json").write_text(json.dumps({"logs": "logs"}))
    (tmp_path / "plain/figure.png").write_text("no log")
    for folder in ("run", "job", "torchrun", "alone", "plain"):
        found = {
            str(file.path.relative_to(tmp_path)): (file.source, file.rank, file.host)
            for file in find_log_files([tmp_path / folder])
        }
        assert found == {name: whose for name, whose in files.items() if name.startswith(folder)}


def test_only_the_newest_attempt_counts_and_rotated_files_come_in_order(tmp_path: Path) -> None:
    for attempt in (1, 2):
        (tmp_path / "rank-0").mkdir(exist_ok=True)
        (tmp_path / f"rank-0/attempt-000{attempt}.0001.log").write_text(
            f"2026-11-25T10:00:00.000Z [rank 0] try {attempt}\n"
        )
    assert [line.text for _, line in read_lines(find_log_files([tmp_path]))] == ["try 2"]
    run = tmp_path / "run"
    run.mkdir()
    (run / "train.log").write_text("new\n")
    (run / "train.log.1").write_text("old\n")
    with gzip.open(run / "gpu01_rank7.log.gz", "wt") as file:
        file.write("packed\n")
    texts = [(file.rank, line.text) for file, line in read_lines(find_log_files([run]))]
    assert texts == [(7, "packed"), (0, "old"), (0, "new")]
    with pytest.raises(UserError, match="neither a file nor a folder"):
        find_log_files([tmp_path / "nowhere"])


def test_without_times_stderr_comes_after_stdout(tmp_path: Path) -> None:
    folder = tmp_path / "none_1/attempt_0/0"
    folder.mkdir(parents=True)
    (folder / "stderr.log").write_text("[rank0]: KeyError: 'input_ids'\n")
    (folder / "stdout.log").write_text("".join(f"step: {step} loss 2.1\n" for step in range(1, 9)))
    assert [line.text for _, line in read_lines(find_log_files([tmp_path]))][-1] == "KeyError: 'input_ids'"
    (found,) = judge_places([tmp_path]).detections
    assert found.what == "key error" and found.who[0].ranks == (0,)


def test_endless_lines_take_no_memory(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"x" * 100_000 + b"\nsecond\n\xff\xfe third\n")
    lines = [line.text for _, line in read_lines(find_log_files([tmp_path]))]
    assert len(lines) == 3 and len(lines[0]) < 20_000 and lines[1] == "second"


def test_what_varies_is_masked() -> None:
    line = "loss 2.31 at step 120 of 10.0.0.4:29500, shard /data/a/part-7.bin, 0x7f1a, s3://bucket/x, gpu03"
    assert masked(line) == "loss <N> at step <N> of <ADDR>, shard <PATH>, <HEX>, <URL>, <HOST>"


def test_templates_are_few_and_bounded() -> None:
    templates = Templates(TemplateLimits(most_templates=20, cached_lines=10))
    numbers = {templates.add(f"step {step} loss {step / 7:.3f}") for step in range(500)}
    assert len(numbers) == 1 and templates.asked == 1
    for number in range(500):
        templates.add(" ".join(f"w{chr(97 + (number * k) % 26)}{chr(97 + (number + k) % 26)}" for k in range(2, 12)))
    assert len(templates) <= 20


def test_words_that_vary_are_found_by_drain() -> None:
    pytest.importorskip("drain3")
    templates = Templates()
    names = {
        templates.add(f"worker finished reading shard called {name} without problems") for name in ("ada", "bob", "eve")
    }
    assert len(names) == 1 and "<*>" in templates.text(names.pop())


def test_harmless_lines_that_all_differ_are_not_looked_at_without_end() -> None:
    templates = Templates()
    numbers = [templates.add_masked(f"{one}{two} {two}{one}", most_asked=5) for one in "abcd" for two in "efgh"]
    assert templates.asked == 5
    assert numbers[5:] == [-1] * 11
    assert templates.add_masked("ae ea", most_asked=5) == numbers[0], "one that was seen is still known"
    assert templates.add_masked("an error of another kind") > 0, "others are"
