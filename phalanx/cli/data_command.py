"""`phalanx data`: prepare text for training and look at what was prepared."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phalanx.cli.tables import make_console, make_table
from phalanx.core import units
from phalanx.core.config import load
from phalanx.core.errors import UserError
from phalanx.data import prepare as preparing
from phalanx.data.config import DataConfig, Split
from phalanx.data.tokens.prepared_corpus import Prepared, PreparedSplit
from phalanx.data.tokens.shards import TokenStream
from phalanx.train.config import RunConfig
from phalanx.train.reports.preparation_progress import PrepareDisplay


@click.group()
def command() -> None:
    """Prepare text for training and look at what was prepared."""


@command.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("--workers", type=click.IntRange(min=1), help="Processes; default: one per core.")
def prepare(config: Path, overrides: tuple[str, ...], workers: int | None) -> None:
    """Tokenise the sources of CONFIG into memory-mapped shards; what is there already is kept."""
    data = load(RunConfig, config, overrides).value.data
    console = Console(emoji=False)
    begin_s = time.monotonic()
    with PrepareDisplay(console) as display:
        prepared = preparing.prepare(data, workers=workers, progress=display.show)
    make_console().print(_summary(prepared, data))
    console.print(f"ready in {units.duration(time.monotonic() - begin_s)}", highlight=False)


@command.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
def info(config: Path, overrides: tuple[str, ...]) -> None:
    """What has been prepared for CONFIG: tokens, documents and bytes of each source, and where they lie."""
    data = load(RunConfig, config, overrides).value.data
    make_console().print(_summary(preparing.open_prepared(data), data))


@command.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("--split", type=click.Choice(["train", "validation"]), default="train", show_default=True)
@click.option(
    "--source", "number", type=click.IntRange(min=0), default=0, show_default=True, help="Number of the source."
)
@click.option("--at", type=click.IntRange(min=0), default=0, show_default=True, help="First token.")
@click.option("--tokens", type=click.IntRange(min=1), default=256, show_default=True, help="How many tokens.")
def inspect(config: Path, overrides: tuple[str, ...], split: Split, number: int, at: int, tokens: int) -> None:
    """Print prepared tokens as text: new documents marked, text that is not trained on dimmed."""
    prepared = preparing.open_prepared(load(RunConfig, config, overrides).value.data)
    parts = prepared.split(split)
    if number >= len(parts) or at >= parts[number][1].num_tokens:
        cure = "`phalanx data info` says what there is"
        raise UserError(f"there is no token {at} of source {number} in the {split} split", cure=cure)
    stream = TokenStream(parts[number][1].shards)
    Console(emoji=False).print(_as_markup(prepared, stream, at, tokens), highlight=False, soft_wrap=True)


def _as_markup(prepared: Prepared, stream: TokenStream, at: int, count: int) -> str:
    count = min(count, len(stream) - at)
    begin = np.array([at])
    ids, trained = np.zeros((1, count), np.int64), np.ones((1, count), np.uint8)
    stream.read_tokens(begin, ids)
    stream.read_mask(begin, trained)
    starts = set(stream.document_starts(begin, count)[1])
    borders = sorted({0, count} | starts | set((np.flatnonzero(np.diff(trained[0])) + 1).tolist()))
    text = ""
    for low, high in itertools.pairwise(borders):
        part = escape(prepared.tokenizer.decode(ids[0, low:high].tolist()))
        text += "[reverse]document[/reverse] " if low in starts else ""
        text += part if trained[0, low] or not part else f"[dim]{part}[/dim]"
    return text


def _summary(prepared: Prepared, config: DataConfig) -> Table:
    columns = ("source", "split", "tokens", "documents", "text", "bytes/token", "left out")
    numbers = tuple(range(2, len(columns)))
    table = make_table(*columns, right=numbers, whole=(0, 1, *numbers))
    sources = (*prepared.sources, *prepared.validation_sources)
    for source in sources:
        for name, part in source.splits.items():
            ratio = f"{part.num_bytes / part.num_tokens:.2f}" if part.num_bytes else "n/a"
            size = units.size(part.num_bytes) if part.num_bytes else "n/a"
            cells = (source.name, name, f"{part.num_tokens:,}", f"{part.num_documents:,}", size, ratio)
            table.add_row(*map(escape, cells), str(source.num_skipped))
    caption = f"{prepared.vocab_size:,} token ids ({config.tokenizer.kind}), in {escape(config.folder)}"
    trained = [_trained(source.name, name, part) for source in sources for name, part in source.splits.items()]
    left_out = [f"left out of {source.name}: {name}" for source in sources for name in source.skipped]
    table.caption = "\n".join([caption, *map(escape, filter(None, trained)), *map(escape, left_out)])
    table.caption_justify = "left"
    return table


def _trained(source: str, name: Split, part: PreparedSplit) -> str:
    """How much of a split is trained on; empty: all of it."""
    if not part.num_untrained and not any(shard.mask for shard in part.shards):
        return ""
    tokens = f"{part.num_trained:,} of {part.num_tokens:,} tokens"
    without = f"{part.num_untrained:,} of {part.num_documents:,} documents have none to train on"
    return f"trained on in {source}, {name}: {tokens}; {without}"
