"""What a person at a terminal sees of a job; and what no log line and no terminal can do to it."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import re
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace
from reports_helpers import HOSTILE, Played, detection, host, job, open_incident, told, with_links, wrote
from rich.console import Console

from phalanx.cli.run_watch import show_status
from phalanx.run.api.job import Metrics, Reading
from phalanx.run.clock import read_clocks
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.decide.state import initial
from phalanx.run.driver.job_status import Known, overview
from phalanx.run.messages import VERSION, Interface
from phalanx.run.reports import live_view
from phalanx.run.reports.job_page import page
from phalanx.run.reports.live_view import Panel, show
from phalanx.run.reports.terminal_text import Ranks, harmless

STYLES = re.compile(r"\x1b\[[0-9;]*[mKAhl]|\x1b\[\?25[lh]")


def terminal(width: int = 80, height: int = 24) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system="standard")


def file() -> Console:
    return Console(file=io.StringIO(), width=80)


def seen(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def drawn(panel: Panel, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(panel)
    return seen(console).splitlines()


MANY = [host(n) for n in range(250)] + [host(250, "spare"), host(251, "evicted", why="at fault again")]


@pytest.mark.parametrize("height", [2, 3, 5, 7, 8, 12, 24, 60])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_panel_has_never_more_lines_or_columns_than_the_terminal(width: int, height: int) -> None:
    for hosts in (MANY, MANY[:3], []):
        panel = Panel(job(hosts, incident=open_incident()), [told(1, "x" * 300)], "cannot be reached")
        lines = drawn(panel, width, height)
        assert 0 < len(lines) < height
        assert max(map(len, lines)) <= width


def test_of_many_hosts_those_in_trouble_come_first_and_the_others_are_counted() -> None:
    lines = drawn(Panel(job(MANY)), 80, 24)
    assert "train · running · attempt 2" in lines[0]
    assert "step 120, 18.2 steps/s" in lines[1] and "1 recovery" in lines[1] and "1 spare ready" in lines[1]
    assert lines[2].split() == ["host", "state", "ranks", "step", "s/step", "heard", "cpu", "mem", "doing"]
    assert lines[3].split()[:2] == ["host-251", "evicted"] and "at fault again" in lines[3]
    assert lines[4].split()[:5] == ["host-0", "active", "0-1", "120", "0.051"]
    assert "252 hosts: 250 active, 1 spare, 1 evicted" in lines[-1]


def test_few_hosts_are_all_shown_with_the_incident_and_the_last_events() -> None:
    hosts = [
        host(0),
        host(1, "unknown", why="nothing has been heard of it", silent_s=7.25),
        host(2, "spare", why="ready"),
    ]
    text = "\n".join(drawn(Panel(job(hosts, incident=open_incident()), [told(3, "said lately")]), 80, 40))
    assert "incident 1, open for 1.2s: rank 1 on host-0: killed by SIGKILL" in text
    assert text.index("host-1") < text.index("host-0 active") < text.index("host-2")
    assert "7.2s" in text and "nothing has been heard of it" in text
    assert "ready" in text.partition("host-2")[2].partition("\n")[0]
    assert "said lately" in text


@pytest.mark.parametrize(("moved_s", "is_told"), [(15.0, True), (300.0, False)])
def test_the_last_step_is_no_movement_and_the_last_movement_no_step(moved_s: float, is_told: bool) -> None:
    now = job([host(0)], step_age_s=300.0, quiet_s=moved_s, limit_s=60.0)
    console = file()
    show_status(now, console)
    status, panel, web = " ".join(seen(console).split()), "\n".join(drawn(Panel(now), 200, 24)), page(now, [], [])
    assert "last step 5m" in status and ("last movement 15.0s ago" in status) == is_told
    assert "last 5m" in panel and ("movement 15.0s ago" in panel) == is_told
    assert "<dt>last step</dt><dd>5m" in web and ("<dt>last movement</dt><dd>15.0s ago" in web) == is_told
    read = Metrics(lambda: Reading(now, 1, None, 1.0, 1.0)).text().decode()
    assert "\nphalanx_run_last_step_age_seconds 300.0\n" in read
    assert f"\nphalanx_run_last_movement_age_seconds {moved_s}\n" in read


def test_what_was_wrong_with_links_stands_beside_what_a_host_is_about() -> None:
    calm, down = Interface("eth0", 5, 5), Interface("eth1", 5, 5, is_up=False, flaps=1)
    noisy = Interface("ib0", 5, 5, errors=1200, flaps=3)
    hosts = [
        with_links(host(0), calm),
        with_links(host(1), calm, noisy),
        with_links(host(2), down),
        with_links(host(3), *[replace(noisy, name=f"ib{n}", flaps=0) for n in range(4)]),
    ]
    lines = drawn(Panel(job(hosts)), 120, 40)[3:]
    assert [line.split()[0] for line in lines] == ["host-2", "host-0", "host-1", "host-3"]
    found = [line.partition("step")[2] for line in lines]
    assert found[0].strip() == "; eth1: down, went down once"
    assert found[1].strip() == ""
    assert found[2].strip() == "; ib0: went down 3 times, 1,200 errors"
    assert found[3].strip() == "; ib0: 1,200 errors; ib1: 1,200 errors; 2 more links"
    status = Console(file=io.StringIO(), width=120)
    show_status(job(hosts), status)
    for words in ("ib0: went down 3 times, 1,200 errors", "eth1: down, went down once"):
        assert words in seen(status)
        assert words in page(job(hosts), [], [])


def test_status_says_what_storage_keeps_up_with() -> None:
    line = "a checkpoint takes 4.2s; every_steps = 5 asks for one every 1.1s: about every 19th step becomes durable"
    for now, is_told in ((job([host(0)]), False), (job([host(0)], checkpoints=line + HOSTILE), True)):
        console = file()
        show_status(now, console)
        shown = " ".join(seen(console).split())
        assert (line in shown) == is_told
        assert "\x1b" not in shown and "\u202e" not in shown


def test_status_says_that_an_executor_of_another_version_is_refused_and_what_to_do() -> None:
    known = Known(initial(Policy(), Job("train", 1, 1)), other_versions={"10.0.0.7": 2, "10.0.0.8": 3})
    console = file()
    show_status(overview(known, read_clocks()), console)
    shown = " ".join(seen(console).split())
    assert f"an executor at 10.0.0.8 and at 1 more speaks version 3 of the wire, this driver {VERSION}" in shown
    assert "install the same phalanx on both" in shown
    assert overview(dataclasses.replace(known, other_versions={}), read_clocks()).refused == ""


def test_where_there_is_little_room_columns_go_and_what_a_host_is_about_stays() -> None:
    heads = drawn(Panel(job(MANY[:3])), 48, 24)[2].split()
    assert heads[:2] == ["host", "state"] and heads[-1] == "doing" and "mem" not in heads


def test_what_ranks_write_can_neither_control_a_terminal_nor_be_markup() -> None:
    assert harmless(HOSTILE) == "[bold]<script>alert(1)</script> & back [/bold]"
    hosts = [host(0, name=HOSTILE, why=HOSTILE, leaves=HOSTILE)]
    for console in (terminal(), file()):
        items = [wrote(1, 0, HOSTILE), told(2, HOSTILE, host=HOSTILE), told(3, HOSTILE, by=HOSTILE, incident=4)]
        end = job(hosts, status=1, ended=HOSTILE, incident=open_incident(HOSTILE))
        asyncio.run(show(Played(items, end), console))
        text = STYLES.sub("", seen(console))
        assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text and "\x9b" not in text
        assert "[rank 0] [bold]<script>" in text


@pytest.mark.parametrize(("ranks", "shown"), [("0", [0]), ("all", [0, 1]), ("none", [])])
def test_lines_of_those_ranks_are_shown_that_were_asked_for(ranks: Ranks, shown: list[int]) -> None:
    console = file()
    asyncio.run(show(Played([wrote(1, 0, "a"), wrote(2, 1, "b")], job([host(0)], status=0)), console, ranks=ranks))
    assert [int(number) for number in re.findall(r"\[rank (\d)\]", seen(console))] == shown


def test_the_last_line_says_how_it_ended_and_what_to_read(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    done, failed = file(), file()
    asyncio.run(show(Played([], job([host(0)], status=0)), done, folder=tmp_path))
    last = seen(done).splitlines()
    assert last[0] == "done after 12m04s: 120 steps, 1 recovery, effective training time 96.7 %"
    assert "".join(last[1:]) == f"incident: {tmp_path}/incidents/0001.md"
    traceback = told(1, "rank 3 has ended with this:\nTraceback:\n  KeyError: 'x'", level="error")
    end = job([host(0)], status=1, ended="KeyError at postgres://ann:hunter2@db", incidents=3)
    asyncio.run(show(Played([traceback], end), failed, folder=tmp_path))
    text = seen(failed)
    assert text.index("Traceback:\n  KeyError: 'x'\n") < text.index("ended with status 1 after 12m04s: KeyError")
    assert "hunter2" not in text
    assert f"incidents/0003.md, all 3 in {tmp_path}/incidents" in text and f"logs: {tmp_path}/logs" in text


def test_what_judges_have_found_is_said_before_the_end(tmp_path: Path) -> None:
    ended = file()
    found = (*(detection(number) for number in range(2, 14)), detection(14, HOSTILE, incident=3))
    asyncio.run(
        show(Played([], job([host(0)], status=0, detections=found, detection_count=14)), ended, folder=tmp_path)
    )
    lines = seen(ended).splitlines()
    assert lines[0] == "judges have found 4 more before:"
    assert lines[1].endswith("judge of stragglers: host-1 is slow (90% sure; advice: check)")
    assert "incident 3)" in lines[10] and "\x1b" not in "".join(lines) and "\u202e" not in "".join(lines)
    assert lines[11].startswith("done after ") and lines[12].startswith("incident: ") and len(lines) == 13


def test_of_a_script_that_makes_no_steps_nothing_is_said_of_training() -> None:
    for step, status, says in ((-1, 0, "done after 12m04s"), (0, 1, "ended with status 1 after 12m04s: it broke")):
        console = file()
        end = job([host(0)], status=status, step=step, recoveries=0, incidents=0, ended="it broke")
        asyncio.run(show(Played([], end), console))
        assert seen(console) == f"{says}\n"


def test_words_of_a_rank_are_quoted_where_its_lines_are_not_shown() -> None:
    said = [wrote(1, 0, "error: no such layer"), told(2, "rank 0 has ended with this:\nerror: no such layer", quotes=0)]
    for ranks, times in (("0", 1), ("all", 1), ("none", 1)):
        console = file()
        asyncio.run(show(Played(said, job([host(0)], status=2)), console, ranks=ranks))
        assert seen(console).count("error: no such layer") == times
    console = file()
    asyncio.run(show(Played([replace(said[1], quotes=3)], job([host(0)], status=2)), console, ranks="0"))
    assert "no such layer" in seen(console)


def test_into_a_file_the_state_is_told_now_and_then_if_it_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_view, "STATUS_S", 0.0)
    monkeypatch.setattr(live_view, "REFRESH_S", 0.01)
    console = file()

    async def play() -> None:
        source = Played([], job([host(0)]))
        source.may_end.clear()
        showing = asyncio.create_task(show(source, console))
        for step in (120, 121):
            source.end = job([host(0)], step=step)
            while f"step {step}," not in seen(console):
                await asyncio.sleep(0.01)
        for _ in range(5):
            await asyncio.sleep(0.01)
        source.may_end.set()
        await showing

    asyncio.run(play())
    lines = [line for line in seen(console).splitlines() if "running, attempt 2;" in line]
    assert [re.findall(r"step (\d+)", line) for line in lines[:2]] == [["120"], ["121"]]
    assert "\x1b" not in seen(console) and len(lines) == 3  # the third says that the driver was lost


def test_without_colours_where_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = terminal()
    asyncio.run(show(Played([told(1, "bad", level="error")], job([host(0)], status=0)), console))
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", seen(console))


def test_a_driver_that_is_gone_is_told() -> None:
    console = file()
    asyncio.run(show(Played([], job([host(0)]), error=ConnectionResetError("reset")), console))
    assert "the driver cannot be reached: reset" in seen(console)
    assert "the driver is not heard of any more; the job was running, attempt 2" in seen(console)


class Stuck(io.StringIO):
    """A terminal that takes nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_let_go = threading.Event()

    def write(self, text: str) -> int:
        self.is_let_go.wait()
        return super().write(text)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_that_takes_nothing_holds_up_nobody(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "_STUCK_S", 0.05)
    stuck = Stuck()
    console = Console(file=stuck, force_terminal=is_terminal, width=80, height=24)
    items = [wrote(number, 0, "x" * 80) for number in range(6000)]

    async def play() -> int:
        beats = 0
        showing = asyncio.create_task(show(Played(items, job([host(0)], status=0)), console))
        while not showing.done():
            await asyncio.sleep(0.001)
            beats += 1
        return beats

    try:
        assert asyncio.run(asyncio.wait_for(play(), 60)) > 0
    finally:
        stuck.is_let_go.set()
