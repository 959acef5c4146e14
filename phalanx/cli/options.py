"""What several commands have in common: options, errors in words of options, and a group that imports what is called.

Imports only click, so that help stays as fast as it is without.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from phalanx.core.errors import UserError


class LazyGroup(click.Group):
    """Besides its own commands, those of other modules: by name, ``module:object`` and one line of help."""

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = dict(lazy or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Own subcommands, then the others, in the order in which they were given."""
        return [*self.commands, *self.lazy]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import what is called."""
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, _, name = self.lazy[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands without importing any of them."""
        own = [(name, command.get_short_help_str(limit=100)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(own + [(name, help_line) for name, (_, help_line) in self.lazy.items()])


def write_examples(formatter: click.HelpFormatter, examples: str) -> None:
    """A section of a help page, of lines that are not folded."""
    with formatter.section("Examples"):
        for line in examples.splitlines():
            formatter.write(f"{'':{formatter.current_indent}}{line}\n")


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def group(*options: Decorator) -> Decorator:
    """All of `options`, the first one first in the help."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return add


class NewFile(click.Path):
    """A file that will be written when all is done: what cannot be written is refused before anything is computed."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path; the folder that it is in has to be there, and let one write."""
        if not str(value):
            self.fail("'' is no name of a file; give one, such as report.html", param, ctx)
        path = Path(str(super().convert(value, param, ctx)))
        folder = path.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            why = "is no folder" if not folder.is_dir() else "does not let you write"
            self.fail(f"{str(path)!r} cannot be written: {str(folder)!r} {why}; name another", param, ctx)
        return path


class FiniteRange(click.FloatRange):
    """A range of numbers without nan and inf, which click lets pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class StepRange(click.ParamType):
    """``100:200``, ``100:``, ``:200`` or ``100``; the last one is included."""

    name = "steps"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """First and last step; None where it is open."""
        if isinstance(value, tuple):
            return value
        first, colon, last = str(value).partition(":")
        try:
            found = (int(first) if first else None, int(last) if last else None if colon else int(first))
        except ValueError:
            self.fail(f"{value!r} is no range of steps; give one such as 100:200", param, ctx)
        if None not in found and found[0] > found[1]:  # type: ignore[operator]
            self.fail(f"{value!r} ends before it begins", param, ctx)
        return found


AS_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
HTML = click.option("--html", type=NewFile(), metavar="FILE", help="Also write a page.")


@contextmanager
def in_words_of(given: Mapping[str, Any], renamed: Mapping[str, str] | None = None) -> Iterator[None]:
    """Errors about a value that an option gave name that option, with the value as it was given.

    Args:
        given: by name, as click hands them over; None: not given.
        renamed: options by fields that are called otherwise.
    """
    try:
        yield
    except UserError as error:
        name = (renamed or {}).get(error.field or "", error.field or "")
        if given.get(name) is None:
            raise
        option = f"--{name.replace('_', '-')}"
        raise UserError(error.problem, cure=error.cure, field=option, value=given[name]) from None
