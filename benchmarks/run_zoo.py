"""Scripts of others under `phalanx run`: healthy ones are left alone, hangs are found; see docs/benchmarks/run_zoo.md.

Healthy scripts run in turn, several at once, until their jobs have run so many minutes all together; whatever the
driver takes for a fault is an alarm, and none is right. With --hangs a DDP loop is stopped in many ways instead, each
of which has to be found in time, with nobody blamed who is innocent. Each job leaves a JSON file; what was interrupted
goes on with --resume. Exit status 1: something was not right.

    python benchmarks/run_zoo.py --quick                                       # a few minutes of each
    python benchmarks/run_zoo.py --minutes 600 --at-once 3 --resume            # ten hours of jobs
    python benchmarks/run_zoo.py --minutes 10 --only nanogpt sleep --burn 2    # two of them, on a busy machine
    python benchmarks/run_zoo.py --hangs                                       # and again with --burn 4
    python benchmarks/run_zoo.py --list
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table
from support.harness import benchmark_parser, write_json
from support.leaving import nothing_left
from support.zoo.cases import HANGS, HEALTHY, LEFT_OUT, ROOT, Choice, Hang, Healthy, choose
from support.zoo.turns import Result, Turn, forget_pages, read_results

QUICK = ("rank0-validates", "single", "garbage")
QUICK_HANGS = ("stopped", "killed")
QUICK_MINUTES = 6.0
WIDTH = 160
"""Of tables, where nobody watches a terminal."""

_POLL_S = 0.2
_BROKEN_MOST = 2
"""A case that was broken so often is not begun again."""
_EACH_S = 600.0
"""After so long a job that is run once is ended, whatever it does."""


def read_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = benchmark_parser(__doc__, quick="a few cases only, healthy ones and hangs", as_json=True)
    parser.add_argument("--hangs", action="store_true", help="hangs instead of healthy scripts")
    parser.add_argument("--minutes", type=float, default=60.0, help="that healthy jobs run, all together")
    parser.add_argument("--turn", type=float, default=8.0, help="minutes after which a job makes place for the next")
    parser.add_argument("--at-once", type=int, default=2, metavar="K", help="jobs side by side")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="times that each hang is run")
    parser.add_argument("--burn", type=int, default=0, metavar="N", help="processes that keep it busy meanwhile")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these cases; --list has all")
    parser.add_argument("--resume", action="store_true", help="count what the folder has results of")
    parser.add_argument("--folder", type=Path, default=Path("zoo-results"), help="of the results")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings for phalanx run")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the jobs")
    parser.add_argument("--list", action="store_true", help="name all cases and end")
    return parser.parse_args(words)


def main() -> int:
    options = read_options()
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    if options.list:
        console.print(listing())
        return 0
    try:
        chosen = choices(options)
    except ValueError as error:
        console.print(f"error: {error}", markup=False)
        return 2
    left_out = {name: why for one in chosen for name, why in one.left_out.items()}
    for name, why in (left_out if options.only or options.hangs else LEFT_OUT | left_out).items():
        console.print(f"left out: {name}: {why}", highlight=False, markup=False, soft_wrap=True)
    before = read_results(options.folder) if options.resume else []
    with nothing_left(forget_pages, keep=options.keep) as work, busy(options.burn):
        campaign = Campaign(options, work, before, console)
        for choice in chosen:
            campaign.run_healthy([case for case in choice.cases if isinstance(case, Healthy)])
            campaign.run_each([case for case in choice.cases if isinstance(case, Hang)])
    results = [*before, *campaign.results]
    for table in tables(results):
        console.print(table)
    write_json(options.json, [*summary(results)])
    return int(any(result.outcome != "right" for result in results))


def choices(options: argparse.Namespace) -> list[Choice]:
    if options.quick:
        options.minutes = min(options.minutes, QUICK_MINUTES)
        return [choose(options.only or QUICK, hangs=False), choose(QUICK_HANGS, hangs=True)]
    return [choose(options.only, hangs=options.hangs)]


class Campaign:
    """Jobs one after another and side by side, and what became of them.

    Attributes:
        results: of this time; each is kept in the folder at once.
    """

    def __init__(
        self, options: argparse.Namespace, work: Path, before: Sequence[Result], console: Console | None = None
    ) -> None:
        self._options, self._work, self._before = options, work, before
        self._console = console or Console(quiet=True)
        self._commit = _commit()
        self._numbers = itertools.count(1)
        self.results: list[Result] = []

    def run_healthy(self, cases: Sequence[Healthy]) -> None:
        """Whichever has had least of the time comes next, until the time is up."""
        names, wanted_s = {case.name for case in cases}, self._options.minutes * 60
        running: list[Turn] = []
        while True:
            mine = [result for result in (*self._before, *self.results) if result.case in names]
            spent_s = sum(result.seconds for result in mine) + sum(turn.seconds for turn in running)
            is_time = spent_s < wanted_s
            able = [case for case in cases if not _is_given_up(case, mine)]
            if is_time and able and len(running) < self._options.at_once:
                had_s = dict.fromkeys(names, 0.0)
                for one in (*mine, *running):
                    had_s[one.case if isinstance(one, Result) else one.case.name] += max(one.seconds, 1.0)
                running.append(self._begin(min(able, key=lambda case: had_s[case.name]), self._options.turn * 60))
            if not running:
                return
            for turn in [*running]:
                turn.look()
                if not is_time and not turn.is_stopping:
                    turn.stop()
                if turn.is_over:
                    running.remove(turn)
                    self._end(turn, is_cut=not is_time and not turn.has_begun)
            time.sleep(_POLL_S)

    def run_each(self, cases: Sequence[Healthy | Hang]) -> None:
        """Each once, or as often as is wanted."""
        done = [(result.case, result.is_busy) for result in self._before]
        is_busy = self._options.burn > 0
        wanted = {case.name: self._options.repeat - done.count((case.name, is_busy)) for case in cases}
        todo = [case for number in range(self._options.repeat) for case in cases if number < wanted[case.name]]
        running: list[Turn] = []
        while todo or running:
            if todo and len(running) < self._options.at_once:
                running.append(self._begin(todo.pop(0), _EACH_S))
            for turn in [*running]:
                turn.look()
                if turn.is_over:
                    running.remove(turn)
                    self._end(turn)
            time.sleep(_POLL_S)

    def _begin(self, case: Healthy | Hang, limit_s: float) -> Turn:
        more = [word for setting in self._options.set for word in ("--set", setting)]
        folder = self._work / f"job-{next(self._numbers)}"
        is_busy = self._options.burn > 0
        return Turn(case, folder, limit_s=limit_s, commit=self._commit, more=more, is_busy=is_busy)

    def _end(self, turn: Turn, *, is_cut: bool = False) -> None:
        """Keep what became of a job; of one that was cut off before it had begun there is nothing to say."""
        result = turn.close()
        if is_cut:
            turn.forget(keep=self._options.keep)
            return
        result.keep(self._options.folder)
        if result.outcome != "right":
            turn.explain(self._options.folder / "explained" / f"{result.case}-{int(result.began_unix_s * 1000)}")
        self.results.append(result)
        words = f"{result.case}: {result.outcome}, {result.seconds:.0f} s, {result.steps} steps"
        if result.kind == "hang" and result.verdict_s is not None:
            words += f", {result.verdict} after {result.verdict_s:.1f} s, named {result.named}"
        self._console.print("; ".join([words, *result.problems]), soft_wrap=True, highlight=False, markup=False)
        turn.forget(keep=self._options.keep)


def _is_given_up(case: Healthy, results: Sequence[Result]) -> bool:
    return [result.outcome for result in results if result.case == case.name].count("broken") >= _BROKEN_MOST


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many cores busy."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def summary(results: Sequence[Result]) -> Iterator[dict[str, object]]:
    """A row for each case."""
    for (kind, name, is_busy), mine in _by_case(results).items():
        row: dict[str, object] = {
            "case": name,
            "kind": kind,
            "busy": is_busy,
            "jobs": len(mine),
            "right": sum(result.outcome == "right" for result in mine),
            "broken": sum(result.outcome == "broken" for result in mine),
            "hours": sum(result.seconds for result in mine) / 3600,
            "steps": sum(result.steps for result in mine),
            "alarms": sum(len(result.alarms) for result in mine if result.outcome != "broken"),
            "pause_s": max(result.pause_s for result in mine),
            "status": sorted({result.status for result in mine}, key=str),
            "problems": [problem for result in mine for problem in result.problems],
        }
        if kind == "hang":
            found = [result.verdict_s for result in mine if result.verdict_s is not None]
            row |= {
                "found": len(found),
                "verdict_s": max(found, default=None),
                "verdict": sorted({result.verdict for result in mine}),
                "named": [result.named for result in mine],
                "resumed_s": max((r.resumed_s for r in mine if r.resumed_s is not None), default=None),
            }
        yield row


def _by_case(results: Sequence[Result]) -> dict[tuple[str, str, bool], list[Result]]:
    found: dict[tuple[str, str, bool], list[Result]] = {}
    for result in results:
        key = result.kind, result.case, result.is_busy and result.kind == "hang"
        found.setdefault(key, []).append(result)
    return found


def tables(results: Sequence[Result]) -> Iterator[Table]:
    rows = [*summary(results)]
    if healthy := [row for row in rows if row["kind"] == "healthy"]:
        table = Table("script", "jobs", "hours", "steps", "alarms", "status", "greatest pause", "what was wrong")
        for row in healthy:
            status = ", ".join(map(str, row["status"]))  # type: ignore[call-overload]
            cells = (row["case"], row["jobs"], f"{row['hours']:.2f}", row["steps"], row["alarms"], status)
            broken = f"{row['broken']} broken: " if row["broken"] else ""
            table.add_row(*map(str, cells), f"{row['pause_s']:.0f} s", broken + _first(row["problems"]))
        hours, alarms = (sum(row[name] for row in healthy) for name in ("hours", "alarms"))  # type: ignore[misc]
        table.caption = f"{hours:.2f} hours, {alarms} alarms"
        yield table
    if hangs := [row for row in rows if row["kind"] == "hang"]:
        table = Table("hang", "busy", "jobs", "found", "longest", "by", "named", "resumed after", "what was wrong")
        for row in hangs:
            named = " ".join(map(str, row["named"]))  # type: ignore[call-overload]
            by = ", ".join(row["verdict"])  # type: ignore[arg-type]
            cells = (row["case"], "yes" if row["busy"] else "", row["jobs"], row["found"], _seconds(row["verdict_s"]))
            table.add_row(*map(str, cells), by, named, _seconds(row["resumed_s"]), _first(row["problems"]))
        yield table


def _seconds(value: object) -> str:
    return "" if value is None else f"{value:.1f} s"


def _first(problems: object) -> str:
    assert isinstance(problems, list)
    return f"{problems[0][:120]}{f' … {len(problems) - 1} more' if len(problems) > 1 else ''}" if problems else ""


def listing() -> Table:
    table = Table("case", "runs", "without a step, most", "cannot run here")
    for case in HEALTHY:
        table.add_row(case.name, " ".join(case.command), f"{case.pause_s:.0f} s", case.missing())
    for hang in HANGS:
        what = hang.script.command[0] if hang.script is not None else "hanging.py"
        runs = f"{what}, {hang.kind}, {hang.hosts}x{hang.workers} ranks"
        table.add_row(hang.name, runs, "for ever", hang.missing())
    return table


def _commit() -> str:
    words = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
