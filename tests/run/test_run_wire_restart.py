"""The driver's process is killed again and again; TLS; and the same on uvloop."""

import asyncio
import json
import ssl
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import test_run_wire_connection as connection
import trustme
import uvloop
from wire_helpers import driving, ended, executing, guarded, runs

from phalanx.run.wire import driver_address

HERE = Path(__file__).parent


@contextmanager
def driver_process(journal, where):
    process = subprocess.Popen([sys.executable, HERE / "wire_driver.py", journal, where])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@runs
async def test_a_driver_that_is_killed_again_and_again_hears_everything_once(tmp_path):
    journal, where, kills, batch = tmp_path / "journal", tmp_path / "driver", 4, 100
    journal.touch()

    def heard():
        return [tuple(json.loads(line)) for line in journal.read_text().splitlines()]

    async with (
        executing(driver_address.published(where), "a") as first,
        executing(driver_address.published(where), "b") as second,
    ):
        for kill in range(kills):
            with driver_process(journal, where):
                for rank in range(kill * batch, (kill + 1) * batch):
                    first.link.send(ended(rank))
                    second.link.send(ended(rank))
                while len(heard()) < kill * batch + batch // 2:  # some are handled, and some of these acknowledged
                    await asyncio.sleep(0.002)
        with driver_process(journal, where):
            await first.link.drained()
            await second.link.drained()
    for host in ("a", "b"):
        assert [rank for name, _, _, rank in heard() if name == host] == list(range(kills * batch))


@pytest.fixture
def authority():
    return trustme.CA()


def sides(authority, *names):
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.issue_cert(*names).configure_cert(server)
    authority.configure_trust(client)
    return server, client


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_tls(authority, run):
    server, client = sides(authority, "127.0.0.1")

    async def play():
        async with driving(ssl=server) as driver, executing(driver.address, ssl=client) as executor:
            await executor.welcomed()
            executor.link.send(ended(0))
            await executor.link.drained()
            assert driver.messages() == [ended(0)]
            executor.link.close()
            await executor.task
            await driver.heard.kind("gone")

    run(guarded(play))


@runs
async def test_tls_on_all_addresses_under_a_name_of_the_job(authority):
    server, client = sides(authority, "driver.job-a")
    async with driving(ssl=server, host="0.0.0.0") as driver:
        where = f"127.0.0.1:{driver.server.address.port}"
        async with executing(where, ssl=client, server_name="driver.job-a") as executor:
            await executor.welcomed()
        async with executing(where, ssl=client) as executor:
            await has_problem(executor, "certificate verify failed")


@runs
async def test_a_certificate_of_somebody_else_is_not_believed(authority):
    server, _ = sides(trustme.CA(), "127.0.0.1")
    _, client = sides(authority, "127.0.0.1")
    async with driving(ssl=server) as driver, executing(driver.address, ssl=client) as executor:
        await has_problem(executor, "certificate verify failed")
        assert not driver.heard.all


@runs
async def test_tls_on_one_side_only_is_no_connection(authority):
    server, client = sides(authority, "127.0.0.1")
    async with driving(ssl=server) as driver, executing(driver.address) as executor:
        await has_problem(executor, "has ended")
        assert not driver.heard.all
    async with driving() as driver, executing(driver.address, ssl=client) as executor:
        await has_problem(executor, "no connection")
        assert not driver.heard.all


async def has_problem(executor, words):
    while words not in executor.link.problem:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "test",
    [value for name, value in vars(connection).items() if name.startswith("test_") and hasattr(value, "__wrapped__")],
    ids=lambda t: t.__name__,
)
def test_on_uvloop(test, request):
    """What the driver runs on."""
    named = test.__wrapped__.__code__.co_varnames[: test.__wrapped__.__code__.co_argcount]
    fixtures = {name: request.getfixturevalue(name) for name in named}
    uvloop.run(guarded(test.__wrapped__, **fixtures))
