"""Outputs of commands in docs/detect_hang.md: of NVIDIA's dumps, and of real loops that stand still while they run.

    python benchmarks/detect_hang_page.py             # run every command again and write what it prints
    python benchmarks/detect_hang_page.py --check     # change nothing, fail where the page is of older code

A block of a loop is under a line ``<!-- loop: CASE RANKS -->`` (`support.own_loop`). Names of hosts, times, and where a
rank was when it was looked at are of the run that was written down; a check leaves them out. Without the published
dumps their block stays as it is.
"""

from __future__ import annotations

import re
import socket
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

from click.testing import CliRunner
from doc_outputs import ROOT, written
from support.own_loop import paused_loop

from phalanx.cli.detect_command import command

PAGE = ROOT / "docs" / "detect_hang.md"
TRACES = ROOT.parent / "shared" / "data" / "traces"
BLOCK = re.compile(r"<!-- loop: (?P<case>\w+) (?P<ranks>\d+) -->\n```\n(?P<text>.*?)\n```", re.DOTALL)
_VARIES = (
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "TIME"),
    (r"(since|span) \d+(\.\d+)? s", r"\1 N s"),
    (r"gets on: .*?(, while 1 other)", r"gets on: SOMEHOW\1"),
    (r"\.py:\d+", ".py:N"),
)


def loop_output(case: str, ranks: int) -> str:
    """What the command says of a loop that has paused in this way."""
    with TemporaryDirectory() as folder, chdir(folder), paused_loop(Path("runs/mine").absolute(), case, ranks=ranks):
        done = CliRunner(env={"COLUMNS": "100"}).invoke(command, ["hang", "runs/mine"])
    text = done.output.replace(f"host {socket.gethostname()}", "host h0").replace(f"on {socket.gethostname()}", "on h0")
    return f"$ phalanx detect hang runs/mine\n{text.rstrip()}"


def page_of_dumps(text: str) -> str:
    """The page with blocks of dumps as their commands print them now."""
    if not (TRACES / "flight-recorder").exists():
        return text
    with TemporaryDirectory() as folder:
        (Path(folder) / "traces").symlink_to(TRACES)
        return written(text, Path(folder))


def page_now() -> str:
    """The page with every block as its command prints it now."""
    text = page_of_dumps(PAGE.read_text())
    return BLOCK.sub(
        lambda found: found[0].replace(found["text"], loop_output(found["case"], int(found["ranks"]))), text
    )


def comparable(text: str) -> str:
    """Without what differs from run to run."""
    for pattern, words in _VARIES:
        text = re.sub(pattern, words, text)
    return text


def main() -> None:
    """Write or check the page."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--check", "--quick", action="store_true", help="change nothing, fail where it is old")
    check = parser.parse_args().check
    now = page_now()
    is_stale = comparable(now) != comparable(PAGE.read_text())
    if is_stale and not check:
        PAGE.write_text(now)
    print(f"{'of older code' if check else 'written'}: {PAGE.name if is_stale else 'none'}")
    sys.exit(check and is_stale)


if __name__ == "__main__":
    main()
