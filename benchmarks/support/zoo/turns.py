"""One job of the zoo from its start to its result: a healthy script that is left alone, or one that something stops."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from phalanx.core.errors import UserError
from phalanx.core.files import write_json
from phalanx.run.executor.page_folder import PREFIX
from phalanx.run.journal import JournalError, read_journal
from support.progress_pages import read_progress
from support.recovery.job import Job
from support.zoo.cases import ROOT, Hang, Healthy, own
from support.zoo.signs import STOPPED, Signs

PAGES = PREFIX
"""How the folder of a host's progress pages is called; it is in memory, and a host that is killed leaves it."""

_RANK = "phalanx rank"
"""How processes of ranks are called."""

_LOOK_S = 2.0
"""Between looks at the journal, and for ranks that are new."""
_AHEAD = 15
"""Steps from when a script is told to hang until it does: no rank has come so far when the word is there."""
_PAUSE_S = 5.0
"""Without a step: a pause has begun."""
_RESUME_S = 150.0
_STOP_S = 60.0


@dataclass(frozen=True)
class Result:
    """What became of a job.

    Attributes:
        outcome: ``right``; ``wrong``: what has to hold does not; ``broken``: the script itself failed, or never began.
        problems: what is wrong.
        seconds: from the start of the ranks to the end.
        steps: of the rank that made most, in the attempt that had most.
        pause_s: the longest time without a step of any rank that was seen, once it had made one.
        alarms: what was taken for a fault.
        notes: how many lines people were told.
        status: that the job ended with; None: it did not.
        verdict_s: of a hang: from when it happened to the verdict; None: there was none.
        verdict, named: what the verdict was, and which ranks it named.
        resumed_s: from when it happened until all ranks made a step again.
        load: of the machine, at the end, over five minutes.
    """

    case: str
    kind: Literal["healthy", "hang"]
    outcome: Literal["right", "wrong", "broken"]
    problems: list[str]
    commit: str
    began_unix_s: float
    seconds: float
    steps: int
    pause_s: float
    attempts: int
    alarms: list[str]
    notes: int
    status: int | None
    load: float
    is_busy: bool = False
    verdict_s: float | None = None
    verdict: str = ""
    named: list[int] = field(default_factory=list)
    resumed_s: float | None = None

    def keep(self, folder: Path) -> None:
        """Among the results, under a name of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        busy = "-busy" if self.is_busy else ""
        write_json(folder / f"{self.case}{busy}-{int(self.began_unix_s * 1000)}.json", asdict(self))


def read_results(folder: Path) -> list[Result]:
    """All that are kept there, the oldest first."""
    found = [Result(**json.loads(path.read_text())) for path in folder.glob("*.json")]
    return sorted(found, key=lambda result: result.began_unix_s)


class Pages:
    """The progress pages of a job's ranks, read from outside.

    Attributes:
        steps: most that a rank has made in one attempt.
        longest_s: time without a step of a rank.
        quiet_s: since the last step of any.
    """

    def __init__(self, folder: Path) -> None:
        self._mark, self._kept = f"TMPDIR={folder / 'tmp'}\0".encode(), folder / "pages"
        self._pages: set[Path] = set()
        self._folders: set[Path] = set()
        self.steps, self.longest_s, self.quiet_s = 0, 0.0, 0.0

    def find(self) -> None:
        """Ranks that are there now; where their pages are is written down for whoever clears up."""
        self._pages = set()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                # The name first: there are few ranks, and the environment of all processes is a lot to read.
                if (entry / "comm").read_text().startswith(_RANK) and self._mark in (entry / "environ").read_bytes():
                    maps = (entry / "maps").read_text().splitlines()
                    self._pages.update(Path(line.split(maxsplit=5)[5]) for line in maps if PAGES in line)
        folders = {page.parent for page in self._pages}
        if not folders <= self._folders:
            self._folders |= folders
            self._kept.write_text("".join(f"{folder}\n" for folder in sorted(self._folders)))

    def look(self) -> int:
        """What they say; the step of the rank that has made fewest, 0 where none has."""
        now_ns, least, quiet_s = time.monotonic_ns(), [], []
        for path in self._pages:
            said = read_progress(path)
            if said is None or said.step_ended_ns < 0:
                continue
            least.append(said.steps_here)
            self.steps = max(self.steps, said.steps_here)
            if os.path.exists(f"/proc/{said.pid}"):  # noqa: PTH110 - many times a second
                quiet_s.append((now_ns - said.step_ended_ns) / 1e9)
                self.longest_s = max(self.longest_s, quiet_s[-1], said.step_took_ns / 1e9)
        self.quiet_s = min(quiet_s, default=0.0)
        return min(least, default=0)


def forget_pages(folder: Path, which: str = "*") -> None:
    """Let go of the pages of jobs that were run in work folders in this one and were killed."""
    for kept in folder.glob(f"{which}/pages"):
        for line in kept.read_text().splitlines():
            if Path(line).name.startswith(PAGES):
                shutil.rmtree(line, ignore_errors=True)


class Turn:
    """A job that runs; call `look` again and again, and `close` in the end.

    Args:
        case: what is run.
        folder: its own, which is not there yet.
        limit_s: after so long it is stopped by a person, so to speak.
        commit: of this checkout.
        more: words for ``phalanx run``.
        is_busy: whether the machine is kept busy meanwhile, which is only told.
    """

    def __init__(
        self,
        case: Healthy | Hang,
        folder: Path,
        *,
        limit_s: float,
        commit: str = "",
        more: Sequence[str] = (),
        is_busy: bool = False,
    ) -> None:
        self.case, self.limit_s, self.commit, self.is_busy = case, limit_s, commit, is_busy
        self.signs = Signs()
        self.is_over = False
        self._folder, self._work = folder, folder / "script"
        self._work.mkdir(parents=True)
        (folder / "tmp").mkdir()
        command = self._prepare(case)
        hosts = ["--hosts", str(case.hosts), "--workers-per-host", str(case.workers)]
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        environ = {"PYTHONPATH": paths, "TMPDIR": str(folder / "tmp"), "HF_HUB_OFFLINE": "1"}
        self.job = Job(self._work, ["--show", "0", *hosts, *more, "--", *command], environ)
        self._pages = Pages(folder)
        self._began_s = time.monotonic()
        self.began_unix_s = time.time()
        self._looked_s = 0.0
        self._stopped_s: float | None = None
        self.happened_s: float | None = None
        """Unix time of what stops it."""
        self._is_told = False
        self.job.__enter__()

    def _prepare(self, case: Healthy | Hang) -> list[str]:
        script = case if isinstance(case, Healthy) else case.script
        if script is not None:
            script.prepare(self._work)
            return [str(self._work / script.command[0]), *script.command[1:]]
        assert isinstance(case, Hang)
        own("hanging.py")(self._work)
        kind = "none" if case.kind.startswith("sig") else case.kind
        rank = str(case.guilty[0] if case.guilty else 0)
        return [str(self._work / "hanging.py"), kind, "--rank", rank, "--when", str(self._now), *case.more]

    @property
    def _now(self) -> Path:
        return self._work / "now"

    def look(self) -> None:
        """See how far it is, and do what is due."""
        least, now_s = self._pages.look(), time.monotonic()
        if isinstance(self.case, Hang) and not self._is_told and self._is_time(self.case, least):
            self._happen(least)
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._pages.find()
            self._read_journal()
        if self.job.commands[-1].poll() is not None:
            self._read_journal()
            self.is_over = True
        elif self._stopped_s is not None:
            self.is_over = now_s - self._stopped_s > _STOP_S
        elif self._is_enough(now_s):
            self.stop()

    @property
    def seconds(self) -> float:
        """Since its ranks were started."""
        return 0.0 if self.signs.began_s is None else time.time() - self.signs.began_s

    @property
    def has_begun(self) -> bool:
        """Whether it has made a step, or there is anything to say of it."""
        return bool(self._pages.steps or self.signs.alarms or self.seconds > 60)

    @property
    def is_stopping(self) -> bool:
        return self._stopped_s is not None

    def stop(self) -> None:
        """As a person does."""
        self._stopped_s = time.monotonic()
        self.job.commands[-1].terminate()

    def _is_enough(self, now_s: float) -> bool:
        signs = self.signs
        if now_s - self._began_s > self.limit_s:
            return True
        if isinstance(self.case, Healthy) or self.happened_s is None:
            return False
        if time.time() - self.happened_s > self.case.within_s + _RESUME_S:
            return True
        return signs.verdict() is not None and 2 in signs.running

    def _is_time(self, case: Hang, step: int) -> bool:
        if case.script is not None and not case.script.steps:
            return self.seconds > case.before
        return step >= case.before and (not case.is_in_pause or self._pages.quiet_s > _PAUSE_S)

    def _happen(self, step: int) -> None:
        """Have it hang."""
        case = self.case
        assert isinstance(case, Hang)
        self._is_told = True
        if not case.kind.startswith("sig"):
            aside = self._now.with_name("soon")
            aside.write_text(str(step + min(_AHEAD, case.before)))
            aside.rename(self._now)
            return
        pid = self.job.rank_pid(case.guilty[0])
        assert pid is not None, "the rank has made steps"
        self.happened_s = time.time()
        os.kill(pid, signal.SIGSTOP if case.kind == "sigstop" else signal.SIGKILL)

    def _read_journal(self) -> None:
        if self.happened_s is None and (note := self._now.with_name("now.done")).exists():
            self.happened_s = float(note.read_text() or time.time())
        path = self.job.run_folder / "journal.db"
        if path.exists():
            with (
                contextlib.suppress(UserError, JournalError),
                read_journal(str(path), job=self.job.name) as journal,
            ):
                self.signs.take(journal.read(self.signs.next_sequence))

    def close(self) -> Result:
        """End it whatever it does; what became of it."""
        status = self.job.commands[-1].poll()
        self.job.__exit__()
        self._read_journal()
        signs, since_s = self.signs, self.signs.began_s or self.began_unix_s
        hang = isinstance(self.case, Hang)
        problems = self._of_hang(status) if hang else self._of_healthy(status)
        is_broken = not signs.attempts or (not hang and status in (1, 2) and not signs.blamed_hosts())
        is_broken |= hang and self.happened_s is None and not signs.alarms
        verdict = signs.verdict()
        return Result(
            case=self.case.name,
            kind="hang" if hang else "healthy",
            outcome="broken" if is_broken else "wrong" if problems else "right",
            problems=problems,
            commit=self.commit,
            began_unix_s=self.began_unix_s,
            seconds=max((signs.ended_s or time.time()) - since_s, 0.0),
            steps=max(self._pages.steps, signs.steps),
            pause_s=self._pages.longest_s,
            attempts=signs.attempts,
            alarms=[sign.words(since_s) for sign in signs.causes()],
            notes=len(signs.notes),
            status=status,
            load=os.getloadavg()[1],
            is_busy=self.is_busy,
            verdict_s=self._after(None if verdict is None else verdict.unix_s),
            verdict="" if verdict is None else verdict.name,
            named=list(signs.named()),
            resumed_s=self._after(signs.running.get(2)),
        )

    def _after(self, unix_s: float | None) -> float | None:
        return None if unix_s is None or self.happened_s is None else unix_s - self.happened_s

    def _of_healthy(self, status: int | None) -> list[str]:
        assert isinstance(self.case, Healthy)
        signs, problems = self.signs, [sign.words(self.signs.began_s or 0.0) for sign in self.signs.causes()]
        if signs.attempts > 1:
            problems.append(f"{signs.attempts} attempts")
        allowed = (STOPPED,) if self._stopped_s is not None else ()
        if status not in (0, *allowed):
            problems.append(f"status {status}: {signs.reason or self.job.output[-500:]}")
        # One that was stopped may have been compiling all the time, on a machine that is busy enough.
        if self.case.steps and not self._pages.steps and self._stopped_s is None:
            problems.append("no step was seen")
        return problems

    def _of_hang(self, status: int | None) -> list[str]:
        assert isinstance(self.case, Hang)
        case, signs, problems = self.case, self.signs, []
        if self.happened_s is None:
            alarms = [sign.words(signs.began_s or 0.0) for sign in signs.causes()]
            return [f"it never came to it; status {status}: {signs.reason or self.job.output[-500:]}", *alarms]
        early = [sign for sign in signs.causes() if sign.unix_s < self.happened_s]
        problems += [f"before it: {sign.words(self.happened_s)}" for sign in early]
        verdict = signs.verdict()
        found_s = self._after(None if verdict is None else verdict.unix_s)
        if found_s is None:
            problems.append("it was not found")
        elif found_s > case.within_s:
            problems.append(f"found after {found_s:.1f} s")
        named = signs.named()
        if wrong := [rank for rank in named if rank not in case.guilty]:
            problems.append(f"ranks {wrong} were named, and are innocent")
        if case.is_sure and case.guilty and not set(case.guilty) & set(named):
            problems.append(f"rank {case.guilty[0]} was not named")
        if hosts := signs.blamed_hosts():
            problems.append(f"{', '.join(hosts)} evicted or given back")
        shows_steps = case.script is None or case.script.steps
        if found_s is not None and (2 not in signs.running if shows_steps else signs.attempts < 2):
            problems.append("no step was made after it" if shows_steps else "it was not begun again")
        return problems

    def explain(self, folder: Path) -> None:
        """Keep what a person needs to see why: what the command said, the newest lines of ranks, the journal."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "said.txt").write_text(self.job.output[-200_000:])
        story = [*self.signs.notes, *self.signs.alarms]
        lines = [sign.words(self.signs.began_s or 0.0) for sign in sorted(story, key=lambda sign: sign.unix_s)]
        (folder / "signs.txt").write_text("\n".join(lines) + "\n")
        for path in (self.job.run_folder / "logs").glob("rank-*/*.log"):
            (folder / f"{path.parent.name}-{path.name}").write_bytes(path.read_bytes()[-100_000:])
        for path in self.job.run_folder.glob("journal.db*"):
            shutil.copyfile(path, folder / path.name)
        if (incidents := self.job.run_folder / "incidents").exists():
            shutil.copytree(incidents, folder / "incidents", dirs_exist_ok=True)

    def forget(self, *, keep: bool) -> None:
        """Let go of its files, and of the pages that killed hosts have left."""
        forget_pages(self._folder.parent, self._folder.name)
        if not keep:
            shutil.rmtree(self._folder, ignore_errors=True)
