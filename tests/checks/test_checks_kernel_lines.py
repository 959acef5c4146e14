"""Lines of the kernel's log: real ones, all formats, and their times."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import pytest
from checks_helpers import recorded

from phalanx.checks.kernel_lines import KernelLine, parse_line, parse_lines, read_kernel_lines


@pytest.mark.parametrize(
    ("name", "lines", "level", "words"),
    [
        ("kmsg_kmsg.1.log", 47, 6, "nvidia-nvswitch2: open (major=510)"),
        ("kmsg_kmsg.2.peermem.log", 8, 6, "nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context"),
        ("memory_dmesg.decode.iso.log", 24, 4, "NVRM: Xid (PCI:0000:38:00): 13, pid='<unknown>'"),
        ("nccl_dmesg.decode.iso.log", 2, 4, "pt_main_thread[2536443]: segfault at 7f797fe00000"),
        ("xid_dmesg-with-xid-119.log", 43, 6, "NVRM: GPU at PCI:0000:9b:00: GPU-509665ad"),
        ("pstore_dmesg-erst.txt", 39, 6, "sysrq: SysRq : Trigger a crash"),
    ],
)
def test_every_line_of_real_logs_is_read(name: str, lines: int, level: int, words: str) -> None:
    records = [parse_line(line) for line in recorded(f"gpud-kmsg/{name}").read_text(errors="replace").splitlines()]
    assert len(records) == lines
    first = records[0]
    assert first is not None and None not in records
    assert first.text.startswith(words) and (first.level, first.is_kernel) == (level, True)


def test_of_a_crash_dump_the_headings_only_are_no_lines() -> None:
    lines = recorded("gpud-kmsg/pstore_7530486857247_dmesg.txt").read_text(errors="replace").splitlines()
    left_out = [line for line in lines if parse_line(line) is None]
    assert len(lines) == 415 and len(left_out) == 4
    assert all(line.startswith(("dmesg-erst", "Panic#")) for line in left_out)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("3,12,34,-;a;b, c\n SUBSYSTEM=pci\n DEVICE=+pci:0\n", KernelLine("a;b, c", 3, True, 12)),
        ("12,12,34,-,caller=T1;said \\x5cby\\x0a one", KernelLine("said \\by\n one", 4, False, 12)),
        ("kern  :err   : [Mon Jan  1 00:00:01 2024] text", KernelLine("text", 3)),
        ("user  :info  : 2026-11-21T21:27:16,890134+00:00 text", KernelLine("text", 6, False)),
        ("2026-11-21T21:27:16.890134Z text", KernelLine("text")),
        ("[Mon Jan  1 00:00:01 2024] text", KernelLine("text")),
        ("[   12.345678] node7 kernel: text: more", KernelLine("text: more")),
        ("[   12.345678][T1] text", KernelLine("text")),
        ("<14>[   12.345678] text", KernelLine("text", 6, False)),
        ("<4>[   12.345678]", KernelLine("", 4)),
        ("", None),
        ("-- Journal begins at Mon --", None),
    ],
)
def test_formats(content: str, expected: KernelLine | None) -> None:
    assert parse_line(content) == expected


@pytest.mark.parametrize(
    ("content", "age_s"),
    [
        ("3,12,2500000,-;text", 7.5),
        ("<4>[    2.500000] text", 7.5),
        ("[    2.500000] node7 kernel: text", 7.5),
        ("kern  :err   : 2024-01-01T00:00:01,500000+01:00 text", 8.5),
        ("2023-12-31T23:00:01Z text", 9.0),
        ("[lun. 1 janv. 00:00:01 2024] text", None),
        ("2024-13-01T00:00:01Z text", None),
    ],
)
def test_the_age_of_a_line_is_counted_from_the_clock_that_it_was_written_by(content: str, age_s: float | None) -> None:
    now_s = datetime.fromisoformat("2024-01-01T00:00:10+01:00").timestamp()
    line = parse_line(content, uptime_s=10.0, now_s=now_s)
    assert line is not None and (line.text, line.age_s) == ("text", age_s)
    without = parse_line(content)
    assert without is not None and without.age_s is None


def test_a_readable_date_is_one_of_this_host() -> None:
    line = parse_line("kern  :err   : [Mon Jan  1 00:00:01 2024] text", now_s=datetime(2024, 1, 1, 0, 0, 3).timestamp())
    assert line == KernelLine("text", 3, age_s=2.0)


def test_of_many_lines_those_in_no_known_format_are_taken_as_they_are() -> None:
    assert parse_lines(["", "[    2.5] one\n", "two: three\n", " \n"]) == [KernelLine("one"), KernelLine("two: three")]


def test_all_that_the_device_has_is_read_and_none_where_there_is_no_device(tmp_path: Path) -> None:
    assert read_kernel_lines(tmp_path) is None
    os.mkfifo(tmp_path / "kmsg")
    reader = os.open(tmp_path / "kmsg", os.O_RDONLY | os.O_NONBLOCK)  # a pipe stands for it
    writer = os.open(tmp_path / "kmsg", os.O_WRONLY)
    os.write(writer, b"6,1,2000000,-;one\n DEVICE=+pci:0\n")
    lines = read_kernel_lines(tmp_path)
    for descriptor in (reader, writer):
        os.close(descriptor)
    assert lines is not None and [line.text for line in lines] == ["one"]
    assert lines[0].age_s is not None
