"""A job's alerts and incidents on a terminal, line by line. Torch-free."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape

from phalanx.run.people.hub import Told
from phalanx.run.people.source import Source

_COLOURS = {"info": "default", "warning": "yellow", "error": "bold red", "good": "green"}


async def tell_on(source: Source, console: Console, number: int = 0) -> None:
    """Tell a person at a terminal what the driver says after this number, line by line."""
    async for item in source.follow(number):
        if isinstance(item, Told):
            tell(item, console)


def tell(item: Told, console: Console) -> None:
    """One thing that was said."""
    clock = time.strftime("%H:%M:%S", time.localtime(item.unix_s))
    about = f"incident {item.incident}: " if item.incident else ""
    text = escape(f"{about}{item.text}")
    console.print(f"[dim]{clock}[/dim] [{_COLOURS[item.level]}]{text}[/]", highlight=False)
