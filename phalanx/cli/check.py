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

from phalanx.checks.check_host import this_host
from phalanx.checks.check_result import Check, CheckResult, Level
from phalanx.checks.peer_bandwidth import serve_peer
from phalanx.checks.runner import CHECKS, choose, named, run_checks
from phalanx.cli.tables import make_console, make_table
from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.ipc.processes import ReceivedSignals
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
        show_list(checks, as_json)
        return
    if serve:
        be_peer(_address(serve, "--serve"), token_file)
        return
    if token_file:
        read_token(token_file)
    addresses = tuple(map(_address, peers))
    expected = _thresholds(expect)
    host = this_host(os.environ, folder=folder, peers=addresses, peer_key=token_file, expected=expected)
    console = make_console()
    began_s = time.perf_counter()
    with console.status("testing this host …") if not as_json and console.is_terminal else nullcontext():
        results = run_checks(checks, host)
    seconds = time.perf_counter() - began_s
    if as_json:
        click.echo(json.dumps(as_object("only" if only else level, results, seconds), indent=1))
    else:
        show(results, seconds)
    sys.exit(any(result.outcome == "fail" for result in results))


def be_peer(address: str, token_file: Path | None) -> None:
    """Serve measurements until SIGINT or SIGTERM.

    Raises:
        UserError: it cannot listen there, or other hosts could ask and there is no key.
    """
    host, _, port = address.rpartition(":")
    key = ensure_token(token_file).reveal().encode() if token_file else None
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


def as_object(level: str, results: Sequence[CheckResult], seconds: float) -> dict[str, object]:
    """What ``--json`` prints."""
    return {
        "host": socket.gethostname(),
        "set": level,
        "passed": not any(result.outcome == "fail" for result in results),
        "seconds": round(seconds, 3),
        "results": [asdict(result) for result in results],
    }


def show(results: Sequence[CheckResult], seconds: float) -> None:
    """Print a table, and below it what to do."""
    console = make_console()
    table = make_table("check", "verdict", "measured", "limit", "remarks", right=(2, 3), whole=(0, 1, 2, 3))
    for result in results:
        table.add_row(*_cells(result))
    console.print(table)
    for result in results:
        if result.outcome == "fail":
            console.print(f"[bold red]{escape(result.name)}[/]: {escape(result.action)}", highlight=False)
    counts = {outcome: sum(result.outcome == outcome for result in results) for outcome in _COLOURS}
    told = f"{counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped in {units.duration(seconds)}"
    console.print(told, highlight=False)


def show_list(checks: Sequence[Check], as_json: bool) -> None:
    """Print what the checks test."""
    if as_json:
        rows = [{"name": check.name, "set": check.level, "summary": check.summary} for check in checks]
        click.echo(json.dumps(rows, indent=1))
        return
    table = make_table("check", "set", "tests", whole=(0, 1))
    for check in checks:
        table.add_row(check.name, check.level, check.summary)
    make_console().print(table)


def _cells(result: CheckResult) -> list[str]:
    colour = _COLOURS[result.outcome]
    measured = "" if result.value is None else f"{_number(result.value)} {result.unit}"
    threshold = "" if result.threshold is None else _number(result.threshold)
    remarks = "; ".join(filter(None, [result.reason, result.threshold_source]))
    verdict = f"[{colour}]{result.outcome}[/]"
    return [escape(result.name), verdict, escape(measured), threshold, escape(remarks)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"


def _address(text: str, option: str = "--peer") -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise UserError("a peer is a host and a port", cure=f"write {option} HOST:PORT", field=option, value=text)
    return text


def _thresholds(given: Sequence[str]) -> dict[str, float]:
    found = {}
    for text in given:
        name, _, value = text.partition("=")
        named([name])
        try:
            found[name] = float(value)
        except ValueError:
            cure = "write --expect NAME=NUMBER, such as gemm=500"
            raise UserError("a threshold is a number", cure=cure, field="--expect", value=text) from None
    return found
