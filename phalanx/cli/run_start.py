"""`phalanx run … SCRIPT`: a job is started, in the foreground or not, and its driver is kept alive."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import cast, get_args

import click
from rich.console import Console
from rich.markup import escape

from phalanx.cli.run_command import DRIVE, SUPERVISE
from phalanx.core.config import validate
from phalanx.core.errors import UserError
from phalanx.core.files import write_json
from phalanx.ipc.processes import Identity, identity_of
from phalanx.run.backends.backend import submit_job
from phalanx.run.config import RunConfig, load_job
from phalanx.run.drive.refusals import refuse
from phalanx.run.flags import read_flags
from phalanx.run.job_folder import SUPERVISOR, Card, life, read_card, set_aside
from phalanx.run.reports.live_view import show
from phalanx.run.reports.terminal_text import Ranks
from phalanx.run.reports.training_settings import training_alerts
from phalanx.run.secrets import ensure_token
from phalanx.run.supervise import TO_BE_STARTED_AGAIN, Supervisor, end_with
from phalanx.telemetry.alerts.alert_config import AlertsConfig

_VALUES = ("--hosts", "--spares", "--workers-per-host", "--start", "--folder", "--job", "--set", "--show")
_OURS = {
    **dict.fromkeys(_VALUES, True),
    **dict.fromkeys(("--detach", "-d", "--fresh", "--no-supervisor"), False),
}
_NUMBERS = {"--hosts": "run.hosts", "--spares": "run.spares", "--workers-per-host": "run.workers_per_host"}

_BEGIN_S = 120.0
_LOG_BYTES = 16 << 20


class _Raw(click.Command):
    """A command that gets its words as they are: those of the script are only the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Leave them alone, but for a question for help before the script."""
        if args[:1] in (["-h"], ["--help"]):
            assert ctx.parent is not None
            click.echo(ctx.parent.get_help())
            ctx.exit()
        ctx.params["arguments"] = tuple(args)
        return []


@dataclass(frozen=True)
class _Given:
    """A command line that starts a job, understood."""

    config: RunConfig
    words: tuple[str, ...]
    notes: list[str]
    is_detached: bool
    is_fresh: bool
    is_supervised: bool
    ranks: Ranks

    @property
    def folder(self) -> Path:
        return self.config.run_folder.absolute()

    def command(self, hidden: str) -> list[str]:
        """Of this program, given the same words."""
        return [sys.executable, "-m", "phalanx.cli.main", "run", hidden, *self.words]


@click.command(cls=_Raw)
def start(arguments: tuple[str, ...]) -> None:
    """Start a job."""
    given = _read(arguments)
    for note in given.notes:
        click.echo(note, err=True)
    if (status := submit_job(given.config)) is not None:
        end_with(status)
    _see_room(given)  # before the rest, which finds a driver that lives there in its way
    refuse(given.config)
    _make_places(given.config)
    _make_room(given)
    config, console = given.config, _console()
    hosts = "1 host" if config.hosts == 1 else f"{config.hosts} hosts"
    console.print(f"job {escape(config.job_name)}: {hosts}, folder {escape(str(config.run_folder))}", soft_wrap=True)
    if given.is_detached:
        _detach(given)
    elif given.is_supervised:
        end_with(_supervise(given))
    else:
        end_with(_drive(given))


@click.command(cls=_Raw)
def supervise_here(arguments: tuple[str, ...]) -> None:
    """Supervise, in a session of its own."""
    end_with(_supervise(_read(arguments)))


@click.command(cls=_Raw)
def drive_here(arguments: tuple[str, ...]) -> None:
    """Be the driver, in a process group of its own, which a terminal takes for one in the background."""
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        end_with(_drive(_read(arguments)))
    except UserError:
        raise
    except Exception:  # a fault of ours, or a disk that fails: it must not pass for the end of the job
        traceback.print_exc()
        end_with(TO_BE_STARTED_AGAIN)


def _drive(given: _Given) -> int:
    from phalanx.run.drive.main import drive  # SQLAlchemy and FastAPI: who supervises does without them

    folder = given.config.run_folder
    return drive(given.config, lambda source: show(source, _console(), ranks=given.ranks, folder=folder))


def _supervise(given: _Given) -> int:
    def has_begun(pid: int) -> bool:
        card = _card(given.folder)
        return card is not None and card.pid == pid

    given.folder.mkdir(parents=True, exist_ok=True)
    write_json(given.folder / SUPERVISOR, asdict(identity_of(os.getpid()) or Identity(0, 0, "")))
    return Supervisor(given.command(DRIVE), has_begun, _say).run()


def _make_places(config: RunConfig) -> None:
    """The folders that are not in the run folder, where the hosts are this machine; on others their tests make them."""
    if config.backend != "local":
        return
    journal = "" if not config.journal or "://" in config.journal else str(Path(config.journal).absolute().parent)
    checkpoints = "" if "://" in config.checkpoint_place else config.checkpoint_place
    named = {"run.checkpoints": checkpoints, "run.logs.folder": config.logs.folder, "run.journal": journal}
    for field, place in named.items():
        if place:
            _make_folder(Path(place), field, "give another folder")
    if config.token_file:
        ensure_token(config.token_path.absolute())


def _make_folder(folder: Path, field: str, cure: str) -> None:
    """Make it, unless it is there; UserError: it cannot be made, or not be written to."""
    cure, value = f"{cure}, or mend its permissions", str(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot be made: {error.strerror or error}", cure=cure, field=field, value=value) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError("cannot be written to", cure=cure, field=field, value=value)


def _make_room(given: _Given) -> None:
    """Make the folder, and put aside what a job that is over has left; UserError: a driver lives there, or may."""
    _make_folder(given.config.run_folder, "run.folder", "give another --folder")
    with (given.folder / ".starting").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two commands at once, one finds what the other has left
        card = _see_room(given)
        if card is None:
            return
        shown = given.config.run_folder
        if _is_new(given, card):
            how = f"ended with status {card.status}" if card.status is not None else "is over"
            beside = shown / set_aside(given.folder, card).relative_to(shown.absolute())
            _say(f"the job before {how}; what it left is in {beside}")
        else:
            _say(f"the job in {shown} has not ended, and its driver is dead: this one takes over (--fresh begins anew)")


def _see_room(given: _Given) -> Card | None:
    """The job that the folder is of; None: of none. UserError: its driver lives, or may."""
    folder, shown = given.folder, given.config.run_folder
    card = read_card(folder)
    if card is None:
        return None
    found = life(card)
    if found == "lives":
        cure = f"watch it with `phalanx run attach --folder {quote(str(shown))}`, or give this one another --folder"
        raise UserError(f"the job {card.job!r} runs there already (driver: process {card.pid})", cure=cure)
    if _is_new(given, card):
        if found == "elsewhere" and card.status is None:
            cure = "give another --folder, or remove job.json from it"
            raise UserError(f"its driver was started on {card.driver_host} and may live there", cure=cure)
        if card.journal != "journal.db":
            cure = "give this one another --folder, and with --set run.name=… another name in that journal"
            raise UserError(f"the journal of the job before is kept elsewhere ({card.journal})", cure=cure)
    return card


def _is_new(given: _Given, card: Card) -> bool:
    """Whether this begins a job, and does not take over the one whose card this is."""
    from phalanx.run.driver.job_status import is_over  # SQLAlchemy

    return given.is_fresh or is_over(given.folder, card)


def _detach(given: _Given) -> None:
    """Start the supervisor in a session of its own, and return when its driver has begun."""
    folder, shown = given.folder, given.config.run_folder
    before, path = _card(folder), folder / "driver.log"
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > _LOG_BYTES:
            path.replace(path.with_name(f"{path.name}.1"))
    with path.open("ab") as log:
        begin_bytes = log.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            given.command(SUPERVISE), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    card = _until_begun(folder, before, process, begin_bytes)
    process.returncode = 0  # it is not this process's child from now on
    is_only = given.config.folder == "" and len(list(Path("runs").glob("*/job.json"))) == 1
    at = "" if is_only else f" --folder {quote(str(shown))}"
    click.echo(f"it runs detached: driver {card.pid}, kept alive by {process.pid}, said in {shown / 'driver.log'}")
    click.echo(f"  watch it   phalanx run attach{at}\n  look at it phalanx run status{at}")
    click.echo(f"  its ranks  phalanx run logs -f{at}\n  end it     phalanx run stop{at}")


def _until_begun(folder: Path, before: Card | None, process: subprocess.Popen[bytes], begin_bytes: int) -> Card:
    """The card of the driver that begins, which writes its log from `begin_bytes` on."""
    until_s = time.monotonic() + _BEGIN_S
    try:
        while time.monotonic() < until_s:
            card = _card(folder)
            if card is not None and card != before and (card.status is not None or life(card) == "lives"):
                return card
            if process.poll() is not None:
                written = (folder / "driver.log").read_bytes()[begin_bytes:]
                sys.stderr.write(written.decode(errors="replace")[-4000:])
                end_with(process.returncode)
            time.sleep(0.05)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        raise
    cure = f"look into {folder / 'driver.log'}; it may still come"
    raise UserError(f"the driver has not begun within {_BEGIN_S:g} s", cure=cure)


def _read(arguments: tuple[str, ...]) -> _Given:
    flags = read_flags(arguments, os.environ, _OURS)
    changes, switches, shown = dict(flags.changes), set[str](), list[str]()
    job, overrides, rest = None, [], list(flags.ours)
    while rest:
        flag = rest.pop(0)
        if not _OURS[flag]:
            switches.add(flag)
            continue
        value = rest.pop(0)
        if flag == "--job":
            job = Path(value)
        elif flag == "--set":
            overrides.append(value)
        elif flag == "--show":
            shown.append(value)
        elif flag in ("--folder", "--start"):
            changes[f"run.{flag[2:]}"] = value
        else:
            changes[_NUMBERS[flag]] = int(value) if value.isdecimal() else value
    is_detached = bool(switches & {"--detach", "-d"})
    shown = shown or ["none" if is_detached else "0"]  # what ranks write is in their logs in any case
    if shown[-1] not in get_args(Ranks):
        cure = f"give one of {', '.join(get_args(Ranks))}"
        raise UserError("lines of which ranks are shown?", cure=cure, field="--show", value=shown[-1])
    loaded = load_job(job, overrides, changes)
    config = loaded.value.run
    if config.backend == "local" and loaded.origin("run.policy.joining_check") == "default":
        # One machine is one host as far as its hardware goes: no need to measure it once for each executor.
        config = config.model_copy(update={"policy": config.policy.model_copy(update={"joining_check": "passive"})})
    if not config.alerts.is_on and (given := training_alerts(config)):
        with contextlib.suppress(UserError):  # which the training reports, with its file
            config = config.model_copy(update={"alerts": validate(AlertsConfig, given)})
    is_supervised = "--no-supervisor" not in switches
    if is_detached and not is_supervised:
        raise UserError("--detach and --no-supervisor contradict each other", cure="give one of them")
    ranks = cast(Ranks, shown[-1])
    return _Given(config, arguments, flags.notes, is_detached, "--fresh" in switches, is_supervised, ranks)


def _card(folder: Path) -> Card | None:
    with contextlib.suppress(UserError):
        return read_card(folder)
    return None


def _console() -> Console:
    return Console(emoji=False, stderr=True)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        click.echo(f"phalanx run: {text}", err=True)
