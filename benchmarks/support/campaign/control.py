"""One case from its manifest to its facts: the real ``phalanx run``, watched from outside."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import trustme

from phalanx.core.errors import UserError
from phalanx.faults.campaign import agenda_of
from phalanx.faults.case_manifest import Incident, Manifest
from phalanx.faults.fault_schedule import KINDS, Memory, write_agenda
from phalanx.faults.host_faults import Machine, NotDoneError, happen, is_time, kill, set_offset, small_disk, tree_of
from phalanx.faults.referee import Fact, facts_of
from phalanx.faults.tcp_proxy import Link
from phalanx.run.backends.local import INTERFACE, Network, number_of
from phalanx.run.journal import JournalError, read_journal
from phalanx.run.wire.driver_address import parse, publish
from support.campaign.settings import (
    DISK_BYTES,
    SUBNET,
    Places,
    command,
    hosts_of,
    kinds_of,
    uses_links,
    uses_namespaces,
)
from support.campaign.story import Story

SCRIPT = Path(__file__).with_name("train.py")

_POLL_S = 0.02
_AGAIN_S = 1.0
_GOING_S = 10.0


@dataclass
class Watched:
    """What is known of a run from outside.

    Attributes:
        attempt, step: the newest that rank 0 has reported.
        is_saving: it says that it is in a checkpoint.
    """

    places: Places
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
                self._take(line)

    def _take(self, line: str) -> None:
        time_ns, attempt, step, word = line.split()
        self.attempt, self.step, self.is_saving = int(attempt), int(step), word == "saving"
        if self.is_saving:
            return
        at_s = int(time_ns) / 1e9
        same = {"attempt": self.attempt, "step": self.step}
        self.facts += [Fact(at_s, "progress", **same), Fact(at_s, "loss", **same, loss=word)]


class Run:
    """A case that runs.

    Args:
        case: what is to happen.
        folder: for the run; there is nothing yet.
        guard_s: after so long the case is ended.
        more: words for ``phalanx run``.
    """

    def __init__(self, case: Manifest, folder: Path, guard_s: float, more: list[str]) -> None:
        self.case, self.guard_s, self.more = case, guard_s, more
        self.places = Places(folder)
        self.watched = Watched(self.places)
        machines = case.cluster.hosts + case.cluster.spares
        self.story = Story(time.time() - time.monotonic(), machines)
        self.facts: list[Fact] = []
        self.links: dict[str, Link] = {}
        self.driver: subprocess.Popen[bytes] | None = None
        self._began: set[int] = set()
        self._due: dict[int, float] = {}
        self._journal_ns: tuple[int, ...] = ()
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self._pids: set[int] = set()

    def facts_of_it(self) -> list[Fact]:
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
            self._take_over_facts(status)
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
        if uses_namespaces(self.case):
            write_certificates(self.places.certificates, Network(self.places.run, SUBNET).address)

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
        words = [sys.executable, "-m", "phalanx", *command(self.case, self.places, self.more)]
        with (self.places.folder / "driver.txt").open("ab") as out:
            self.driver = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.places.folder, start_new_session=True
            )

    def _look(self) -> None:
        self.watched.look()
        path = self.places.run / "journal.db"
        now = tuple(_changed_ns(file) for file in (path, path.with_name("journal.db-wal")))
        if now == self._journal_ns:  # fifty times a second it is not worth opening it to see that
            return
        with contextlib.suppress(UserError, JournalError):
            journal = read_journal(str(path), job="train")
            with journal:
                self.story.take(journal.read(self.story.next_sequence))
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
        if not self.story.names:
            return False
        if incident.settings.get("how") == "stops":  # before the driver turns to it, but not long before
            return bool(self._began)
        if incident.when.phase == "recovery":
            return self.story.starts >= incident.when.attempt
        attempt, step = self.watched.attempt, self.watched.step
        # What happens in a rank may keep it from saying that it has come there.
        done = [record.step for record in Memory(self.places.agenda).records() if record.attempt == max(attempt, 1)]
        return bool(attempt) and is_time(incident, attempt, max(step, *done, 0), is_saving=self.watched.is_saving)

    def _do(self, number: int, incident: Incident) -> None:
        assert self.driver is not None
        machines = self._machines()
        began_s, attempt = time.monotonic(), max(self.story.starts, 1)
        try:
            with happen(incident, machines, self.driver.pid):
                self.facts.append(Fact(began_s, "happened", incident=number, attempt=attempt, step=self.watched.step))
                lasts = incident.lasts
                if lasts.unit in ("seconds", "forever"):
                    self._over.wait(lasts.amount if lasts.unit == "seconds" else None)
        except (NotDoneError, UserError, OSError, psutil.Error) as error:
            self.facts.append(Fact(began_s, "refused", incident=number, text=f"{type(error).__name__}: {error}"))

    def _machines(self) -> list[Machine]:
        return [self._machine(host) for host in self.story.names]

    def _machine(self, host: str) -> Machine:
        guard = self._guard_of(host)
        inner = _children_of(guard) if guard else []
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

    def _guard_of(self, host: str) -> int:
        """The process that watches over the executor; 0: there is none."""
        try:
            return int(json.loads((self.places.run / "executors" / f"{host}.json").read_text())["pid"])
        except (OSError, ValueError):
            return 0

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

    def _take_over_facts(self, status: int | None) -> None:
        now_s = time.monotonic()
        self.facts += [*self.watched.facts, *self.story.facts, *facts_of(Memory(self.places.agenda).records())]
        if status is not None:
            self.facts.append(Fact(now_s, "ended", status=status, step=self.watched.step))
            left = self._left(_GOING_S)
            if left:
                words = "; ".join(" ".join(_command_line(pid))[:200] for pid in left)
                self.facts.append(Fact(time.monotonic(), "left", pids=left, text=words))

    def _left(self, within_s: float) -> list[int]:
        """Processes of this run that are there still; those that are on their way out are waited for."""
        end_s = time.monotonic() + within_s
        while (found := processes_of(self.places.folder)) and time.monotonic() < end_s:
            time.sleep(0.05)
        return found

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


def write_certificates(folder: Path, address: str) -> None:
    """For a driver that other hosts reach: of an authority of this run alone."""
    authority, key = trustme.CA(), folder / "key.pem"
    folder.mkdir()
    own = authority.issue_cert(address)
    key.touch(0o600)
    own.private_key_pem.write_to_path(str(key))
    own.cert_chain_pems[0].write_to_path(str(folder / "certificate.pem"))
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))


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


def _children_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _command_line(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


@contextlib.contextmanager
def work_folder(keep: bool = False) -> Iterator[Path]:
    """A folder for one case, whose name tells nothing; the case is run in ``job`` in there."""
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
            Network(Places(job).run, SUBNET).end()
