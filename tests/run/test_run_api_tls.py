"""With TLS the client knows the driver by its certificate, or by who has signed it, and by nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from api_house import GUARD_S, House, open_house

from phalanx.run.api.api_client import Client
from phalanx.run.job_folder import Card, write_card
from phalanx.run.reports.recent_events import Overview
from phalanx.run.secrets import TlsFiles, server_context


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[House, Path]]:
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    trustme.CA().cert_pem.write_to_path(folder / "other.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "driver.pem")
    issued.private_key_pem.write_to_path(folder / "driver.key")
    (folder / "driver.key").chmod(0o600)
    context = server_context(TlsFiles(folder / "driver.pem", folder / "driver.key"))
    with open_house(folder / "run", tls=context) as house:
        yield house, folder


def ask(secured: tuple[House, Path], certificate: str, authority: str) -> Overview:
    house, folder = secured
    known = {"driver_host": "here", "pid": 1, "started_ticks": 1, "boot_id": "", "began_unix_s": 1.0}
    places = {"token": "secret/token", "journal": "journal.db", "logs": "logs", "journal_job": "job"}
    trusted = {
        "certificate": str(folder / certificate),
        "authority": str(folder / authority) if authority else "",
    }
    write_card(house.folder, Card(job="demo", http=house.url, **known, **places, **trusted))

    async def asking() -> Overview:
        async with Client(house.folder) as client, asyncio.timeout(GUARD_S):
            return await client.overview()

    return asyncio.run(asking())


@pytest.mark.parametrize(("certificate", "authority"), [("driver.pem", ""), ("not-here.pem", "ca.pem")])
def test_the_drivers_certificate_or_its_authority_is_enough(
    secured: tuple[House, Path], certificate: str, authority: str
) -> None:
    assert ask(secured, certificate, authority).job == "demo"


@pytest.mark.parametrize(("certificate", "authority"), [("not-here.pem", ""), ("not-here.pem", "other.pem")])
def test_a_driver_with_another_certificate_is_not_told_the_token(
    secured: tuple[House, Path], certificate: str, authority: str
) -> None:
    with pytest.raises(ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
        ask(secured, certificate, authority)
