"""`phalanx dashboard`: runs, ranks and incidents in a browser. Needs no torch and no network."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from phalanx.dashboard.data_source import DataSource
    from phalanx.run.secrets import Token

_EXAMPLES = """\b
Examples:
  phalanx dashboard
  phalanx dashboard experiments
  phalanx dashboard runs/base --port 9000
  phalanx dashboard s3://bucket/runs
  phalanx dashboard http://127.0.0.1:44969 --driver-token runs/job/secret/token
From elsewhere: ssh -L 8642:127.0.0.1:8642 HOST, then open the address that is printed.
"""

PORT = 8642


@click.command(epilog=_EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("where", default="runs", metavar="[FOLDER | RUN | STORAGE_URL | DRIVER_URL]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0: any that is free.")
@click.option("--allow-host", "hosts", multiple=True, metavar="NAME", help="A name that leads here, as behind a proxy.")
@click.option(
    "--token-file", type=click.Path(path_type=Path), help="Keep the token there (made if missing): links stay good."
)
@click.option("--no-token", is_flag=True, help="Let everybody in who reaches the address; only on loopback.")
@click.option("--certificate", type=click.Path(path_type=Path, exists=True), help="PEM file: serve TLS.")
@click.option("--key", type=click.Path(path_type=Path, exists=True), help="PEM file of the certificate's key.")
@click.option(
    "--driver-token", type=click.Path(path_type=Path), help="File with the token of the driver at DRIVER_URL."
)
@click.option("--driver-authority", type=click.Path(path_type=Path), help="PEM file that checks its certificate.")
def command(
    where: str,
    host: str,
    port: int,
    hosts: tuple[str, ...],
    token_file: Path | None,
    no_token: bool,
    certificate: Path | None,
    key: Path | None,
    driver_token: Path | None,
    driver_authority: Path | None,
) -> None:
    """Runs, ranks and incidents in a browser, live: a folder of runs [runs], one run, both also in
    object storage, or a driver by its URL."""
    from phalanx.core.addresses import is_loopback
    from phalanx.core.errors import UserError
    from phalanx.dashboard.dashboard_app import create_app
    from phalanx.dashboard.metrics_store import cache_folder
    from phalanx.dashboard.serving import Listening, serve
    from phalanx.run.secrets import TOKEN_BYTES, Token

    if not is_loopback(host):
        if no_token:
            raise UserError("would let everybody in", cure="leave it out, or listen on loopback", field="--no-token")
        if certificate is None:
            problem = "the token would cross the network in clear"
            cure = "give --certificate and --key, or listen on loopback and use ssh -L"
            raise UserError(problem, cure=cure, field="--host", value=host)
    if (certificate is None) != (key is None):
        raise UserError("come together", cure="give both or neither", field="--certificate, --key")
    token: Token | None = None
    if not no_token:
        token = _kept_token(token_file) if token_file else Token(os.urandom(TOKEN_BYTES).hex())
    with _source(where, driver_token, driver_authority) as source:
        app = create_app(source, token, hosts, cache=cache_folder())
        serve(app, Listening(host, port, certificate, key), token, click.echo)


def _kept_token(path: Path) -> Token:
    from phalanx.run.secrets import ensure_token

    return ensure_token(path, "--token-file")


@contextmanager
def _source(where: str, driver_token: Path | None, authority: Path | None) -> Iterator[DataSource]:
    from phalanx.dashboard.data_source import DataSource
    from phalanx.dashboard.stored_runs import StoredRuns, is_store_url

    if not is_store_url(where):
        yield _folder_or_driver(where, driver_token, authority)
        return
    with tempfile.TemporaryDirectory(prefix="phalanx-dashboard-") as folder:
        store = StoredRuns(where, Path(folder).resolve() / where.rstrip("/").rpartition("/")[2])
        click.echo(f"fetching what {where} has of runs")
        store.begin()
        try:
            yield DataSource.of_store(store)
        finally:
            store.close()


def _folder_or_driver(where: str, driver_token: Path | None, authority: Path | None) -> DataSource:
    from phalanx.core.errors import UserError
    from phalanx.dashboard.data_source import DataSource

    if not where.startswith(("http://", "https://")):
        return DataSource.of_folder(Path(where))
    if driver_token is None:
        cure = "give --driver-token: the file secret/token of the job's run folder"
        raise UserError("the driver asks for its token", cure=cure, value=where)
    from phalanx.run.api.api_client import Client
    from phalanx.run.secrets import read_token

    token = read_token(driver_token, "--driver-token")
    Client.at(where, token, authority)  # refuses what is wrong with them now
    return DataSource.of_driver(where, lambda: Client.at(where, token, authority))
