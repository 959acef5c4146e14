"""`phalanx check`: self-tests of this host, before a job and after trouble."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import click
from rich.markup import escape

from phalanx.checks.check_host import Check, CheckResult, Level, this_host
from phalanx.checks.peer_bandwidth import serve_peer
from phalanx.checks.runner import CHECKS, choose, named, run_checks
from phalanx.cli.tables import make_console, make_table
from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.ipc.stop_request import ReceivedSignals
from phalanx.run.secrets import ensure_token, read_token

_COLOURS = {"pass": "green", "fail": "bold red", "skip": "dim"}


@click.command()
@click.option("--passive", "level", flag_value="passive", help="Only read what the system tells; under 0.1 s.")
@click.option("--quick", "level", flag_value="quick", default=True, help="Measure, too; under 5 s. The default.")
@click.option("--full", "level", flag_value="full", help="GPUs and collectives, too; minutes.")
@click.option("--only", multiple=True, metavar="NAME", help="Just this check, of any set; may be repeated.")
@click.option("--folder", default="", metavar="CHECKPOINTS", help="Where checkpoints go: a folder or a URL.")
@click.option("--peer", "peers", multiple=True, metavar="HOST:PORT", help="A host that serves; may be repeated.")
@click.option("--serve", metavar="HOST:PORT", help="Be a peer of other hosts until Ctrl-C; test nothing.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="Key of peers, the same on all; made by --serve where there is none.",
)
@click.option("--expect", multiple=True, metavar="NAME=VALUE", help="A threshold of your own; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--list", "only_list", is_flag=True, help="Show the checks of the set, and run none.")
def command(
    level: Level,
    only: tuple[str, ...],
    folder: str,
    peers: tuple[str, ...],
    serve: str | None,
    token_file: Path | None,
    expect: tuple[str, ...],
    as_json: bool,
    only_list: bool,
) -> None:
    """Test this host: processors, memory, GPUs, network, disks, clock and settings.

    The exit status is 0 when nothing failed, 1 when something did, 2 when an option is wrong. What is absent, such as
    a GPU, is skipped. A value without a known threshold is shown without a verdict.
    """
    checks = named(only) if only else choose(CHECKS, level)
    if only_list:
        _show_list(checks, as_json)
        return
    if serve:
        _be_peer(_address(serve, "--serve"), token_file)
        return
    if token_file:
        read_token(token_file, "--token-file")
    addresses = tuple(map(_address, peers))
    expected = {}
    for text in expect:
        name, _, value = text.partition("=")
        named([name])
        try:
            expected[name] = float(value)
        except ValueError:
            cure = "write --expect NAME=NUMBER, such as gemm=500"
            raise UserError("a threshold is a number", cure=cure, field="--expect", value=text) from None
    host = this_host(os.environ, folder=folder, peers=addresses, peer_key=token_file, expected=expected)
    console = make_console()
    began_s = time.perf_counter()
    with console.status("testing this host …") if not as_json and console.is_terminal else nullcontext():
        results = run_checks(checks, host)
    seconds = time.perf_counter() - began_s
    has_failed = any(result.outcome == "fail" for result in results)
    if as_json:
        found = {
            "host": socket.gethostname(),
            "set": "only" if only else level,
            "passed": not has_failed,
            "seconds": round(seconds, 3),
            "results": [asdict(result) for result in results],
        }
        click.echo(json.dumps(found, indent=1))
    else:
        _show(results, seconds)
    sys.exit(has_failed)


def _be_peer(address: str, token_file: Path | None) -> None:
    """Serve measurements until SIGINT or SIGTERM."""
    host, _, port = address.rpartition(":")
    key = ensure_token(token_file, "--token-file").reveal().encode() if token_file else None
    try:
        with (
            ReceivedSignals([signal.SIGTERM, signal.SIGINT]) as received,
            serve_peer(host.strip("[]"), int(port), key=key) as chosen,
        ):
            click.echo(f"serving measurements at {host}:{chosen}; Ctrl-C ends it")
            while not received.take(timeout_s=None):
                pass  # of others, which woke us
    except OSError as error:
        cure = "give an address of this host and a free port"
        raise UserError(f"cannot serve ({error.strerror})", cure=cure, field="--serve", value=address) from None


def _show(results: Sequence[CheckResult], seconds: float) -> None:
    """Print a table, and below it what to do."""

    def number(value: float) -> str:
        return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"

    console = make_console()
    table = make_table("check", "verdict", "measured", "limit", "remarks", right=(2, 3), whole=(0, 1, 2, 3))
    for result in results:
        verdict = f"[{_COLOURS[result.outcome]}]{result.outcome}[/]"
        measured = "" if result.value is None else f"{number(result.value)} {result.unit}"
        threshold = "" if result.threshold is None else number(result.threshold)
        remarks = "; ".join(filter(None, [result.reason, result.threshold_source]))
        table.add_row(escape(result.name), verdict, escape(measured), threshold, escape(remarks))
    console.print(table)
    for result in results:
        if result.outcome == "fail":
            console.print(f"[bold red]{escape(result.name)}[/]: {escape(result.action)}", highlight=False)
    counts = {outcome: sum(result.outcome == outcome for result in results) for outcome in _COLOURS}
    summary = f"{counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped"
    console.print(f"{summary} in {units.duration(seconds)}", highlight=False)


def _show_list(checks: Sequence[Check], as_json: bool) -> None:
    if as_json:
        rows = [{"name": check.name, "set": check.level, "summary": check.summary} for check in checks]
        click.echo(json.dumps(rows, indent=1))
        return
    table = make_table("check", "set", "tests", whole=(0, 1))
    for check in checks:
        table.add_row(check.name, check.level, check.summary)
    make_console().print(table)


def _address(text: str, option: str = "--peer") -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise UserError("a peer is a host and a port", cure=f"write {option} HOST:PORT", field=option, value=text)
    return text
