"""One case from its manifest to its facts: the real ``phalanx run``, watched from outside."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
from rich.console import Console

from phalanx.core.errors import UserError
from phalanx.core.files import write_json
from phalanx.faults.campaign import SLOW_STEPS, agenda_of
from phalanx.faults.case_manifest import Incident, Manifest
from phalanx.faults.fault_schedule import KINDS, Memory, write_agenda
from phalanx.faults.host_faults import Machine, NotDoneError, happen, is_time, kill, set_offset, small_disk, tree_of
from phalanx.faults.referee import Fact, Result, Results, Score, facts_of, judge, summary
from phalanx.faults.tcp_proxy import Link
from phalanx.run.backends.local import INTERFACE, Network, number_of
from phalanx.run.campaign.case_command import (
    DISK_BYTES,
    QUIET,
    SUBNET,
    CasePaths,
    command,
    hosts_of,
    kinds_of,
    uses_links,
    uses_namespaces,
)
from phalanx.run.campaign.journal_facts import JournalFacts
from phalanx.run.journal import JournalError, read_journal
from phalanx.run.wire.driver_address import parse, publish

SCRIPT = Path(__file__).with_name("tiny_training.py")
"""What is trained in every case."""

_POLL_S = 0.02
_AGAIN_S = 1.0
_GOING_S = 10.0


@dataclass
class _Rank0:
    """What rank 0 of a run has reported.

    Attributes:
        attempt, step: the newest.
        is_saving: it is in a checkpoint.
    """

    places: CasePaths
    facts: list[Fact] = field(default_factory=list)
    attempt: int = 0
    step: int = 0
    is_saving: bool = False
    _read: int = 0

    def look(self) -> None:
        """Take in what rank 0 has written since."""
        with contextlib.suppress(FileNotFoundError), self.places.losses.open("rb") as file:
            file.seek(self._read)
            text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read += len(whole)
            for line in whole.decode().splitlines():
                time_ns, attempt, step, word = line.split()
                self.attempt, self.step, self.is_saving = int(attempt), int(step), word == "saving"
                if not self.is_saving:
                    done = Fact(int(time_ns) / 1e9, "progress", attempt=self.attempt, step=self.step)
                    self.facts += [done, msgspec.structs.replace(done, what="loss", loss=word)]


class CaseRun:
    """A case that runs.

    Args:
        case: what is to happen.
        folder: for the run; there is nothing yet.
        guard_s: after so long the case is ended.
    """

    def __init__(self, case: Manifest, folder: Path, guard_s: float) -> None:
        self.case, self.guard_s = case, guard_s
        self.places = CasePaths(folder)
        self._rank_0 = _Rank0(self.places)
        machines = case.cluster.hosts + case.cluster.spares
        self.journal = JournalFacts(time.time() - time.monotonic(), machines)
        self.facts: list[Fact] = []
        self.links: dict[str, Link] = {}
        self.driver: subprocess.Popen[bytes] | None = None
        self._began: set[int] = set()
        self._due: dict[int, float] = {}
        self._journal_ns: tuple[int, ...] = ()
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self._pids: set[int] = set()

    def run(self) -> list[Fact]:
        """Run it; everything that was observed."""
        self._prepare()
        with ExitStack() as stack:
            if "disk-full" in kinds_of(self.case):
                for host in hosts_of(self.case):
                    stack.enter_context(small_disk(self.places.disk(host), DISK_BYTES))
            stack.callback(self._end_all)
            stack.callback(self._end_threads)
            status = self._follow(stack)
            self._end_threads()
            self._look()
            self._gather_facts(status)
        return self.facts

    def _prepare(self) -> None:
        folder = self.places.folder
        folder.mkdir(parents=True)
        for name in (self.places.states, self.places.doors, folder / "clocks"):
            name.mkdir()
        for host in hosts_of(self.case):
            set_offset(self.places.clock(host), 0.0)
        shutil.copyfile(SCRIPT, self.places.script)
        write_agenda(agenda_of(self.case), self.places.agenda)

    def _follow(self, stack: ExitStack) -> int | None:
        """Until the job has ended; its status, None: it did not end."""
        self._start()
        end_s = time.monotonic() + self.guard_s
        while time.monotonic() < end_s:
            assert self.driver is not None
            status = self.driver.poll()
            if status is not None and status != -signal.SIGKILL:
                return status
            if status == -signal.SIGKILL:
                time.sleep(_AGAIN_S)
                self._start()
            self._look()
            self._open_links(stack)
            self._do_what_is_due()
            time.sleep(_POLL_S)
        return None

    def _start(self) -> None:
        """Start the driver, for the first time or again."""
        words = [sys.executable, "-m", "phalanx", *command(self.case, self.places)]
        with (self.places.folder / "driver.txt").open("ab") as out:
            self.driver = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.places.folder, start_new_session=True
            )

    def _look(self) -> None:
        self._rank_0.look()
        path = self.places.run / "journal.db"
        now = tuple(_changed_ns(file) for file in (path, path.with_name("journal.db-wal")))
        if now == self._journal_ns:  # fifty times a second it is not worth opening it to see that
            return
        with contextlib.suppress(UserError, JournalError):
            journal = read_journal(str(path), job="train")
            with journal:
                self.journal.take(journal.read(self.journal.next_sequence))
            self._journal_ns = now

    # Incidents from outside

    def _do_what_is_due(self) -> None:
        for number, incident in enumerate(self.case.incidents):
            if KINDS[incident.kind].is_inside or number in self._began or not self._is_time(incident):
                continue
            now_s = time.monotonic()
            if now_s < self._due.setdefault(number, now_s + incident.when.delay_s):
                continue
            self._began.add(number)
            thread = threading.Thread(target=self._do, args=(number, incident), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _is_time(self, incident: Incident) -> bool:
        if not self.journal.names:
            return False
        if incident.settings.get("how") == "stops":  # before the driver turns to it, but not long before
            return bool(self._began)
        if incident.when.phase == "recovery":
            return self.journal.starts >= incident.when.attempt
        attempt, step = self._rank_0.attempt, self._rank_0.step
        # What happens in a rank may keep it from saying that it has come there.
        done = [record.step for record in Memory(self.places.agenda).records() if record.attempt == max(attempt, 1)]
        return bool(attempt) and is_time(incident, attempt, max(step, *done, 0), is_saving=self._rank_0.is_saving)

    def _do(self, number: int, incident: Incident) -> None:
        assert self.driver is not None
        machines = [self._machine(host) for host in self.journal.names]
        began_s, attempt = time.monotonic(), max(self.journal.starts, 1)
        try:
            with happen(incident, machines, self.driver.pid):
                self.facts.append(Fact(began_s, "happened", incident=number, attempt=attempt, step=self._rank_0.step))
                lasts = incident.lasts
                if lasts.unit in ("seconds", "forever"):
                    self._over.wait(lasts.amount if lasts.unit == "seconds" else None)
        except (NotDoneError, UserError, OSError, psutil.Error) as error:
            self.facts.append(Fact(began_s, "refused", incident=number, text=f"{type(error).__name__}: {error}"))

    def _machine(self, host: str) -> Machine:
        # The process that watches over the executor, and the executor itself; 0: there is none.
        guard, inner = 0, []
        with contextlib.suppress(OSError, ValueError):
            guard = int(json.loads((self.places.run / "executors" / f"{host}.json").read_text())["pid"])
            inner = [int(word) for word in Path(f"/proc/{guard}/task/{guard}/children").read_text().split()]
        network = Network(self.places.run, SUBNET)
        return Machine(
            executor=inner[0] if inner else guard,
            others=(guard,) if guard else (),
            interface=INTERFACE,
            namespace=network.name_of(number_of(host)),
            disk=self.places.disk(host),
            clock=self.places.clock(host),
            link=self.links.get(host),
        )

    def _open_links(self, stack: ExitStack) -> None:
        """Between each host and the driver, once it is known where that listens."""
        published = self.places.run / "driver"
        if self.links or not uses_links(self.case) or not published.exists():
            return
        where = parse(published.read_text())
        for host in hosts_of(self.case):
            link = self.links[host] = stack.enter_context(Link(where.host, where.port))
            publish(self.places.doors / host, where._replace(host="127.0.0.1", port=link.port))

    # The end

    def _end_threads(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _gather_facts(self, status: int | None) -> None:
        now_s = time.monotonic()
        self.facts += [*self._rank_0.facts, *self.journal.facts, *facts_of(Memory(self.places.agenda).records())]
        if status is not None:
            self.facts.append(Fact(now_s, "ended", status=status, step=self._rank_0.step))
            # Those that are on their way out are waited for.
            while (left := processes_of(self.places.folder)) and time.monotonic() < now_s + _GOING_S:
                time.sleep(0.05)
            if left:
                words = "; ".join(" ".join(_command_line(pid))[:200] for pid in left)
                self.facts.append(Fact(time.monotonic(), "left", pids=left, text=words))

    def _end_all(self) -> None:
        if self.driver is not None and self.driver.poll() is None:
            self.driver.kill()
        if self.driver is not None:
            self.driver.wait()
        for _ in range(3):
            with contextlib.suppress(NotDoneError):
                kill(tree_of(processes_of(self.places.folder)))
        if uses_namespaces(self.case):
            Network(self.places.run, SUBNET).end()


def _changed_ns(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def processes_of(folder: Path) -> list[int]:
    """Processes that name this folder in their command line or in the environment that they were started with."""
    wanted, found = str(folder).encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (entry / "cmdline").read_bytes() or wanted in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return sorted(found)


def _command_line(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


@contextlib.contextmanager
def work_folder(*, keep: bool = False) -> Iterator[Path]:
    """A folder for one case, whose name gives nothing away; the case is run in ``job`` in there."""
    folder = Path(tempfile.mkdtemp(prefix="job-"))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def forget_networks(folder: Path) -> None:
    """Let go of the networks of all cases that have been run in work folders in this one."""
    if shutil.which("ip") is not None:
        for job in folder.glob("job-*/job"):
            Network(CasePaths(job).run, SUBNET).end()


_KEPT = ("driver.txt", "losses.txt")


def run_case(case: Manifest, folder: Path, *, guard_s: float, keep: bool = False) -> Score:
    """Run a case, keep its result in `folder`, and what explains it beside; its score.

    Raises:
        RuntimeError: the undisturbed training did not come to its end.
    """
    truth = _undisturbed(case, folder, guard_s)
    with work_folder(keep=keep) as work:
        run = CaseRun(case, work / "job", guard_s)
        facts = run.run()
        _explain(run, folder / "explained" / case.id)
        score = judge(case, facts, truth)
    Results(folder).keep(Result(score, sorted(facts, key=lambda fact: fact.at_s)))
    return score


def run_cases(cases: Sequence[Manifest], folder: Path, *, guard_s: float, keep: bool = False, console: Console) -> None:
    """Run these one after the other, with a line for each as soon as it is judged."""
    for number, case in enumerate(cases, 1):
        began_s = time.monotonic()
        score = run_case(case, folder, guard_s=guard_s, keep=keep)
        line = f"[{number}/{len(cases)}] {case.id}: {score.outcome} in {time.monotonic() - began_s:.0f} s"
        console.print("; ".join([line, *score.problems]), soft_wrap=True, highlight=False, markup=False)


def show_results(cases: Sequence[Manifest], folder: Path, console: Console) -> bool:
    """Print the table of these cases; whether all of them were right."""
    results = Results(folder)
    console.print(summary(cases, results))
    found = [results.find(case) for case in cases]
    return all(result is not None and result.score.outcome == "right" for result in found)


def _explain(run: CaseRun, folder: Path) -> None:
    """Keep what a person needs to see why it went as it did."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "story.txt").write_text("\n".join(run.journal.log) + "\n")
    for path in [run.places.folder / name for name in _KEPT]:
        if path.exists():
            shutil.copyfile(path, folder / path.name)
    for path in (run.places.run / "executors").glob("*.err"):
        shutil.copyfile(path, folder / path.name)
    logs = run.places.run / "logs"
    if logs.exists():
        shutil.copytree(logs, folder / "logs", dirs_exist_ok=True)


def _undisturbed(case: Manifest, folder: Path, guard_s: float) -> Mapping[int, str]:
    """The loss of every step when nothing goes wrong; run once for each number of ranks and kept in `folder`.

    All ranks are on one host, which imports once for all of them: what they compute does not depend on where they are.
    """
    alone = {"hosts": 1, "workers_per_host": case.cluster.ranks, "spares": 0, "may_shrink": False}
    cluster = case.cluster.model_copy(update=alone)
    quiet = Manifest(id=QUIET, seed=0, cluster=cluster, steps=max(case.steps, SLOW_STEPS))
    what = f"{quiet.model_dump_json()} {SCRIPT.read_text()}"
    path = folder / f"undisturbed-{hashlib.sha256(what.encode()).hexdigest()[:12]}.json"
    if not path.exists():
        with work_folder() as work:
            run = CaseRun(quiet, work / "job", guard_s)
            facts = run.run()
            _explain(run, folder / "explained" / "quiet")
        losses = {fact.step: fact.loss for fact in facts if fact.what == "loss"}
        if sorted(losses) != list(range(1, quiet.steps + 1)) or any(fact.what == "detected" for fact in facts):
            raise RuntimeError(f"the undisturbed training did not run well: {len(losses)} of {quiet.steps} losses")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, losses)
    return {int(step): loss for step, loss in json.loads(path.read_text()).items()}
