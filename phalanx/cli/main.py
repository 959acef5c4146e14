"""The `phalanx` command: finds the subcommand's module by name, so that help never imports what it does not show."""

from __future__ import annotations

import codecs
import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click

from phalanx import __version__
from phalanx.cli.options import LazyGroup
from phalanx.core.errors import UserError, not_permitted
from phalanx.core.files import StoreFailedError

# Subcommand -> one line of help. The code lies in `phalanx.cli.<name>_command`, in an object called `command`.
COMMANDS: dict[str, str] = {
    "train": "Train a model: phalanx train CONFIG.toml key=value …",
    "run": "Keep any distributed script running: phalanx run --hosts 4 -- train.py …",
    "explain": "Print every setting of a config, where it came from, and what follows from it.",
    "data": "Prepare text for training and look at what was prepared.",
    "generate": "Sample text from a trained model.",
    "evaluate": "Loss, perplexity and bits per byte on held-out text.",
    "plan": "Know before: predict step time and memory, search the best layout for a cluster.",
    "simulate": "What if: networks, failures over months, slow ranks.",
    "status": "How a run is, from another terminal: state, progress, checkpoint, ranks in trouble.",
    "logs": "What a run has logged, all ranks together; -f goes on as they write.",
    "runs": "All runs of a folder in one table; compare two; notes, tags; import other people's runs.",
    "trace": "See what every rank did and when: breakdown, slow ranks, timelines, SQL.",
    "dashboard": "Runs, ranks and incidents in a browser, live.",
    "alerts": "Who hears of trouble: try it, list what was reported; rules for Prometheus, a board for Grafana.",
    "detect": "Which machine is slow, stuck, silently wrong or about to fail: judges of traces, dumps, metrics, logs.",
    "faults": "Make things go wrong on purpose, and judge how well `phalanx run` handles them.",
    "check": "Test this host: processors, memory, GPUs, network, disks, clock and settings.",
    "checkpoint": "List, show, verify, compare, convert and prune checkpoints.",
}

_LOOKERS = ("status", "logs", "runs", "trace", "dashboard", "detect")
"""Commands that look at what others may have written; to the rest a refusal is no matter of their arguments."""

_ABOUT_PATHS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.ENXIO)


@click.group(
    cls=LazyGroup,
    lazy={name: (f"phalanx.cli.{name}_command:command", help_line) for name, help_line in COMMANDS.items()},
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="phalanx")
def group() -> None:
    """Train large language models on one laptop core or on thousands of GPUs with the same code."""


def yield_idle_cores() -> None:
    """Let waiting OpenMP threads give up their core soon, unless the environment says otherwise.

    By default they spin for milliseconds at every barrier, and one other busy process on the machine slows a step on
    two cores by three to ten times. Must be called before torch loads its OpenMP library, which reads this once
    (docs/LOG.md has the measurement).
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


class OutputError(Exception):
    """Stdout does not take what is written. Not an OSError, which would be shown as one of a file that was read."""


class _Output(io.FileIO):
    """The process's stdout, whose errors are told apart from those of other files."""

    def write(self, data: Any) -> int:
        """See `io.RawIOBase.write`."""
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"the output cannot be written ({error.strerror})") from None


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point: a `UserError` becomes one line on stderr and exit status 2, a Ctrl-C status 130."""
    if arguments is None:
        _read_utf8()
    yield_idle_cores()
    with _stdout():
        status = _status_of(arguments)
    raise status if isinstance(status, SystemExit) else SystemExit(status)


def _read_utf8() -> None:
    """Begin again in Python's UTF-8 mode where it takes names of files for ASCII: good paths would be refused."""
    # A rank is a process that somebody else has made, and its program may have been given otherwise.
    if sys.getfilesystemencoding() == "ascii" and os.environ.get("PYTHONUTF8") != "1" and "RANK" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONUTF8": "1"})


def _status_of(arguments: list[str] | None) -> int | SystemExit:
    """Run the command; its exit status, or the exit that it asked for, which may tell its launcher why."""
    try:
        try:
            returned = group.main(args=arguments, prog_name="phalanx", standalone_mode=False)
            status: int | SystemExit = returned if isinstance(returned, int) else 0
        except SystemExit as ended:
            status = ended
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped by SIGINT", err=True)
        return 128 + signal.SIGINT
    except (UserError, StoreFailedError) as error:
        _show_error(str(error if isinstance(error, UserError) else error.to_user()))
        return 2
    except OutputError as error:
        _show_error(f"{error}; free some space, or write it elsewhere")
        return 1
    except BrokenPipeError:  # the reader has had enough, as `head` has
        return 1
    except OSError as error:
        told = _of_arguments(error, sys.argv[1:] if arguments is None else arguments)
        if told is None:
            raise
        _show_error(str(told))
        return 2


def _of_arguments(error: OSError, arguments: list[str]) -> UserError | None:
    """The error as a person reads it where it is about a path that was given, or about what lies below one."""
    if not isinstance(error.filename, str | bytes):
        return None
    shown = os.fsdecode(error.filename)
    if isinstance(error, PermissionError) and arguments[0] in _LOOKERS:
        return not_permitted(shown)
    path = Path(shown).absolute()
    given = {Path(argument).absolute() for argument in arguments}
    if error.errno in _ABOUT_PATHS and not given.isdisjoint((path, *path.parents)):
        return UserError(f"cannot be used ({error.strerror})", cure="check the path", value=shown)
    return None


@contextmanager
def _stdout() -> Iterator[None]:
    """Stdout says `OutputError`, where it is the process's own; what it never took is dropped at the end."""
    usual = sys.__stdout__
    if usual is None or usual is not sys.stdout:
        yield
        return
    usual.flush()
    file = io.BufferedWriter(_Output(usual.fileno(), "w", closefd=False))
    # Neither a dash nor a name that is not UTF-8 is a reason to fail.
    errors = "replace"
    if codecs.lookup(usual.encoding).name == "utf-8":
        errors = "backslashreplace" if usual.errors == "strict" else (usual.errors or errors)
    sys.stdout = io.TextIOWrapper(file, usual.encoding, errors, line_buffering=usual.line_buffering)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except (OutputError, OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, usual.fileno())
            os.close(null)
        sys.stdout.detach()
        sys.stdout = usual


def _show_error(problem: str) -> None:
    click.echo(click.style("error: ", fg="red", bold=True) + problem, err=True)


if __name__ == "__main__":
    main()
