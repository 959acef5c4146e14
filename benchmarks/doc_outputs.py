"""Outputs of commands in the pages of the planner, written by running them.

    python benchmarks/doc_outputs.py            # run every command again and write what it prints
    python benchmarks/doc_outputs.py --check    # change nothing, say which pages are of older code

A block is written where a line of its page says so, right above the block:

    <!-- output: paragraphs=1,2,4 rows=6 -->

The block's lines that begin with "$ phalanx" (and go on behind a backslash) are the command; where it has none, the
comment ends in one. Of what it prints, `paragraphs` (parts between empty lines, from 1) are kept, all unless given,
and of each the first `rows` lines. "…" stands for what is left out. How long a search took is no part of it. The
command `summary` sums up the table of errors above it. A test runs the check.
"""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from shlex import split
from statistics import fmean

from click.testing import CliRunner

from phalanx.cli.main import group

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/plan.md", "docs/plan_search.md", "docs/plan_memory.md")
_WIDTH = "100"
_LEFT_OUT = "…"
_COMMENT = re.compile(r"^<!-- output:(?P<words>.*?)(?P<command>\$ .*|summary )?-->$")
_TOOK = re.compile(r"in [\d.]+ s \(")


@dataclass(frozen=True)
class Kept:
    """What of an output a page shows."""

    paragraphs: tuple[int, ...] = ()
    rows: int = 0

    @classmethod
    def of(cls, words: str) -> Kept:
        """As a comment says it."""
        given = dict(word.split("=") for word in words.split())
        paragraphs = tuple(int(number) for number in given.pop("paragraphs", "").split(",") if number)
        return cls(paragraphs, int(given.pop("rows", 0)), **given)


def written(page: str, folder: Path = ROOT) -> str:
    """The text of a page with every block as its command prints it now, where it runs in `folder`."""
    lines, made = iter(page.splitlines()), list[str]()
    for line in lines:
        made.append(line)
        comment = _COMMENT.match(line)
        if comment is None:
            continue
        if comment["command"] == "summary ":
            made += ["", *_summary(made)]
            _skip_table(lines)
            made.append("")
            continue
        fence = next(lines)
        old = list(iter(lambda: next(lines), "```"))
        command = _command(old)
        made += [
            fence,
            *command,
            *_output(comment["command"] or _joined(command), Kept.of(comment["words"]), folder),
            "```",
        ]
    return "\n".join(made) + "\n"


def _command(block: Sequence[str]) -> list[str]:
    """The lines of a block that are its command."""
    count = next((n for n, line in enumerate(block, 1) if not line.endswith("\\")), 0)
    return list(block[:count]) if block and block[0].startswith("$ ") else []


def _joined(command: Sequence[str]) -> str:
    return " ".join(line.removesuffix("\\").strip() for line in command)


def _output(command: str, kept: Kept, folder: Path) -> list[str]:
    program, *words = split(command.removeprefix("$ "))
    assert program == "phalanx", command
    with chdir(folder):
        done = CliRunner(env={"COLUMNS": _WIDTH}).invoke(group, words)
    text = (
        done.output if done.exception is None or isinstance(done.exception, SystemExit) else f"error: {done.exception}"
    )
    return list(_excerpt(_TOOK.sub(f"in {_LEFT_OUT} s (", text), kept))


def _excerpt(text: str, kept: Kept) -> Iterator[str]:
    paragraphs = [part.splitlines() for part in re.split(r"\n\s*\n", text.strip("\n"))]
    chosen = kept.paragraphs or tuple(range(1, len(paragraphs) + 1))
    before, left_out = 0, False
    for number in chosen:
        if not left_out and number > before + 1:
            yield _LEFT_OUT
        elif before and not left_out:
            yield ""
        lines = paragraphs[number - 1]
        left_out = bool(kept.rows) and len(lines) > kept.rows
        yield from (line.rstrip() for line in (lines[: kept.rows] if left_out else lines))
        if left_out:
            yield _LEFT_OUT
        before = number
    if before < len(paragraphs) and not left_out:
        yield _LEFT_OUT


def _summary(page: Sequence[str]) -> Iterator[str]:
    """Errors of the page's last table by column: how many rows have one, their mean, the largest."""
    end = next(n for n in range(len(page), 0, -1) if page[n - 1].startswith("|"))
    begin = next(n for n in range(end, 0, -1) if not page[n - 1].startswith("|"))
    heads, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page[begin:end]]
    yield "| kind | layouts | mean error | largest | within 5 % |"
    yield "|---|---|---|---|---|"
    for column, head in enumerate(heads[1:], 1):
        found = [re.findall(r"([+-]\d+\.\d+) ?%", row[column]) for row in rows]
        errors = [abs(float(each[-1])) for each in found if each]
        close = sum(error <= 5 for error in errors)
        name = head.partition(",")[0]
        yield f"| {name} | {len(errors)} | {fmean(errors):.1f} % | {max(errors):.1f} % | {close} |"


def _skip_table(lines: Iterator[str]) -> None:
    """Past an empty line, a table, and the empty line after it."""
    next(lines)
    while next(lines).startswith("|"):
        pass


def main() -> None:
    """Write or check the pages."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    only_check = "change nothing, and fail where a page is of older code; `make bench` asks by the second name"
    parser.add_argument("--check", "--quick", action="store_true", help=only_check)
    check, stale = parser.parse_args().check, []
    for name in PAGES:
        before = (ROOT / name).read_text()
        after = written(before)
        if after != before:
            stale.append(name)
            if not check:
                (ROOT / name).write_text(after)
    print(f"{'of older code' if check else 'written'}: {', '.join(stale) or 'none'}")
    sys.exit(check and bool(stale))


if __name__ == "__main__":
    main()
