"""Commands on the driver's host reach it by a socket that only their user can connect to."""

from __future__ import annotations

import asyncio
import socket
import stat
import tempfile
from pathlib import Path

import pytest
from api_house import GUARD_S, open_house

from phalanx.run.api.api_client import Client
from phalanx.run.job_folder import Card, local_socket, write_card


def ask(folder: Path) -> str:
    async def asking() -> str:
        async with Client(folder) as client, asyncio.timeout(GUARD_S):
            return (await client.overview()).job

    return asyncio.run(asking())


def test_the_token_does_not_cross_loopback_where_both_are_on_one_host(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with tempfile.TemporaryDirectory(prefix="local") as short:
        local = Path(short) / "driver"
        local.touch()  # what one that was killed has left
        with open_house(folder, local=local):
            assert stat.S_ISSOCK(local.stat().st_mode) and stat.S_IMODE(local.stat().st_mode) == 0o600
            with socket.create_server(("127.0.0.1", 0)) as closed:
                url = f"http://127.0.0.1:{closed.getsockname()[1]}"
            known = {"pid": 1, "started_ticks": 1, "boot_id": "", "began_unix_s": 1.0, "http": url, "local": str(local)}
            places = {"token": "secret/token", "journal": "journal.db", "logs": "logs", "journal_job": "job"}
            write_card(folder, Card(job="demo", driver_host=socket.gethostname(), **known, **places))
            assert ask(folder) == "demo"
            write_card(folder, Card(job="demo", driver_host="elsewhere", **known, **places))
            with pytest.raises(ConnectionError):
                ask(folder)
        assert not local.exists()


def test_each_run_folder_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    first, second = local_socket(Path("a")), local_socket(Path("b"))
    assert first is not None and second is not None and first != second and first == local_socket(Path("a").absolute())
    (tmp_path / first.parent.name).chmod(0o777)
    assert local_socket(Path("a")) is None, "others could put another there"
