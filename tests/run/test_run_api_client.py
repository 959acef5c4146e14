"""What is asked over the interface, and what comes of it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from api_house import GUARD_S, House, make_town, open_house
from driver_helpers import running

from phalanx.core.errors import UserError
from phalanx.run import messages
from phalanx.run.api.api_client import Client
from phalanx.run.api.bodies import Status, status_body
from phalanx.run.clock import Now
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.decide.state import Host, State
from phalanx.run.driver.job_status import Known, overview
from phalanx.run.incidents.incident_pages import store
from phalanx.run.incidents.report import Incident, IncidentOutcome, Seen
from phalanx.run.job_folder import Card, write_card
from phalanx.run.logs.log_files import RankLog
from phalanx.run.messages import WorkerState
from phalanx.run.reports.recent_events import HostView, Overview, Told


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with open_house(tmp_path / "run") as house:
        write_card(house.folder, card(house))
        yield house


def card(house: House, **changes: Any) -> Card:
    known = {"driver_host": "here", "pid": 1, "started_ticks": 1, "boot_id": "", "began_unix_s": 1.0}
    places = {"token": "secret/token", "journal": "journal.db", "logs": "logs", "journal_job": "job"}
    return Card(job="demo", **{"http": house.url, **known, **places, **changes})


def ask(house: House, work: Callable[[Client], Awaitable[Any]]) -> Any:
    async def asking() -> Any:
        async with Client(house.folder) as client, asyncio.timeout(GUARD_S):
            return await work(client)

    return asyncio.run(asking())


async def first(lines: AsyncIterator[Any], count: int) -> list[Any]:
    found = []
    async for line in lines:
        found.append(line)
        if len(found) == count:
            break
    return found


def test_the_overview_is_the_same_there_and_here(house: House) -> None:
    here = house.do(lambda: house.job.overview(256))
    there = ask(house, lambda client: client.overview())
    assert isinstance(there, Overview)
    assert there == status_body(here)
    assert [worker.step for host in there.hosts for worker in host.workers] == [
        worker.step for host in here.hosts for worker in host.workers
    ]
    assert there.hosts_by_state == {"active": 2, "spare": 1}


def test_a_loss_that_is_no_number_is_null_in_json_and_no_number_again_here() -> None:
    broken = HostView(name="a", state="active", workers=(WorkerState(0, 1, "running", loss=math.nan),))
    now = Overview(job="j", unix_s=1.0, phase="running", phase_s=1.0, attempt=1, world_size=1, hosts_wanted=1,
                   workers_per_host=1, hosts=(broken,))  # fmt: skip
    text = msgspec.json.encode(status_body(now))
    assert json.loads(text)["hosts"][0]["workers"][0]["loss"] is None
    assert math.isnan(msgspec.json.decode(text, type=Status).hosts[0].workers[0].loss or 0.0)


def test_what_a_later_driver_adds_is_no_error() -> None:
    town = {"job": "j", "unix_s": 1, "phase": "running", "phase_s": 1, "attempt": 1, "world_size": 1}
    later = {**town, "hosts_wanted": 1, "workers_per_host": 1, "hosts": [], "mood": "good"}
    assert msgspec.json.decode(json.dumps(later), type=Status).attempt == 1


def test_of_many_hosts_those_in_trouble_are_shown_and_all_are_counted() -> None:
    hosts = {f"node-{number}": Host("", "active") for number in range(12_500)}
    hosts["node-7000"] = Host("", "unknown", "nothing was heard of it")
    hosts["node-12000"] = Host("", "evicted", "its memory is broken")
    state = State(Policy(), Job("big", 12_498, 8), hosts=hosts, placement=tuple(hosts), phase="running", attempt=1)
    shown = overview(Known(state), Now(1.0, 1.0), 10)
    assert len(shown.hosts) == 10
    assert {"node-7000", "node-12000"} <= {host.name for host in shown.hosts}
    assert shown.hosts_by_state == {"active": 12_498, "unknown": 1, "evicted": 1}
    assert shown.hosts[1].ranks == tuple(range(8, 16))


def test_hosts_come_in_pages(tmp_path: Path) -> None:
    with open_house(tmp_path / "run", hosts=5) as house, house.friend() as client:
        names, after = [], ""
        while True:
            page = client.get("/api/hosts", params={"after": after, "most": 2}).json()
            names += [host["name"] for host in page["hosts"]]
            if not (after := page["next"]):
                break
        assert names == list(house.job.state.hosts)
        spares = client.get("/api/hosts", params={"state": "spare"}).json()["hosts"]
        assert [host["state"] for host in spares] == ["spare"]
        assert client.get("/api/hosts", params={"after": "nobody"}).status_code == 404
        assert client.get("/api/hosts/node-1").json()["name"] == "node-1"


def test_orders_of_people_become_events_with_their_names(house: House) -> None:
    assert "as soon as another" in ask(house, lambda client: client.order("drain", "node-1", "anna@desk"))
    assert house.job.state.hosts["node-1"].leaves or house.job.state.hosts["node-1"].state == "gone"
    entries = [entry.json_text for entry in house.town.journal.read()]
    assert any("drain-asked" in text and "anna@desk" in text for text in entries)
    ask(house, lambda client: client.order("evict", "node-2", "anna@desk"))
    house.do(lambda: (house.town.deliver(), house.town.until(lambda state: state.hosts["node-2"].state == "evicted")))
    assert "may join again" in ask(house, lambda client: client.order("return", "node-2", "x"))


@pytest.mark.parametrize(
    ("what", "host", "problem"),
    [("drain", "nobody", "no host 'nobody'"), ("evict", "nobody", "no host"), ("return", "node-1", "is active")],
)
def test_orders_that_do_not_fit_say_why(house: House, what: str, host: str, problem: str) -> None:
    before = house.written()
    with pytest.raises(UserError, match=problem):
        ask(house, lambda client: client.order(what, host, "x"))
    assert house.written() == before


def test_a_job_is_stopped_once_however_often_it_is_asked_but_at_once_when_told_so(house: House) -> None:
    house.do(lambda: house.town.hosts["node-1"].__setattr__("is_mute", True))  # it does not say that it has stopped
    assert "stopping; ranks have 30 s" in ask(house, lambda client: client.stop("anna"))
    before = house.written()
    assert "already" in ask(house, lambda client: client.stop("anna"))
    assert house.written() == before
    assert "at once" in ask(house, lambda client: client.stop("anna", 0.0))
    assert house.written() > before
    stops = [message for _, message in house.town.sent(messages.Stop)]
    assert [stop.grace_s for stop in stops][-1] == 0


def test_a_host_whose_eviction_is_under_way_is_returned_later_and_that_is_said(house: House) -> None:
    house.do(lambda: house.town.hosts["node-1"].__setattr__("is_mute", True))  # so that not all have stopped
    ask(house, lambda client: client.order("evict", "node-2", "anna"))
    with pytest.raises(UserError, match=r"node-2 is being evicted: .*; wait until .* shows it as evicted"):
        ask(house, lambda client: client.order("return", "node-2", "anna"))


def test_a_job_is_stopped_with_a_grace_in_seconds(house: House) -> None:
    house.do(lambda: house.town.hosts["node-1"].__setattr__("is_mute", True))
    assert "ranks have 90 s after SIGTERM" in ask(house, lambda client: client.stop("anna", 90.0))
    assert "what is left" in ask(house, lambda client: client.stop("anna", 7.0))
    stops = [message for _, message in house.town.sent(messages.Stop)]
    assert {stop.grace_s for stop in stops} == {90.0, 7.0}
    with pytest.raises(UserError, match="grace_s"):
        ask(house, lambda client: client.stop("anna", -1.0))


def test_a_job_that_is_over_takes_no_orders(house: House) -> None:
    house.do(lambda: (house.job.stop("anna", True), house.town.deliver()))
    house.do(lambda: house.town.until(lambda state: state.phase == "ended"))
    with pytest.raises(UserError, match="the job is over: stopped by anna"):
        ask(house, lambda client: client.order("drain", "node-1", "x"))
    assert ask(house, lambda client: client.overview()).status == 5


def test_what_is_said_is_followed_until_the_job_ends(house: House) -> None:
    house.do(lambda: [house.job.hub.say("info", f"word {number}", 1.0) for number in range(250)])
    last = house.job.hub.last

    async def follow(client: Client) -> list[Any]:
        lines = client.follow(last - 250)
        found = await first(lines, 250)
        house.do(lambda: (house.job.hub.say("good", "bye", 2.0), house.job.hub.close()))
        return [*found, *[item async for item in lines]]

    items = ask(house, follow)
    assert [item.text for item in items if isinstance(item, Told)] == [*(f"word {n}" for n in range(250)), "bye"]
    assert [item.number for item in items] == list(range(last - 249, last + 2))


def test_logs_come_from_files_where_they_are_and_else_from_what_executors_told(house: House) -> None:
    assert ask(house, lambda client: client.logs(0, 5)) == []
    log = RankLog(house.folder / "logs", 1, 1)
    log.write([f"line {number}" for number in range(10)], 5.0)

    async def follow(client: Client) -> list[Any]:
        lines = client.follow_logs(1, 2)
        found = await first(lines, 2)
        log.write(["new"], 6.0)
        return [*found, *await first(lines, 1)]

    assert [line.text for line in ask(house, lambda client: client.logs(1, 2))] == ["line 8", "line 9"]
    assert [line.text for line in ask(house, follow)] == ["line 8", "line 9", "new"]
    log.close()
    with pytest.raises(UserError, match="there is no rank 99"):
        ask(house, lambda client: client.logs(99, 1))


def test_incidents_come_as_json_and_as_a_page(house: House) -> None:
    facts = [
        Seen(unix_s=1.0, by="executor", what="killed <b>"),
        IncidentOutcome(unix_s=2.0, result="recovered", summary="fine"),
    ]
    store(house.folder, Incident(number=1, job="demo", attempt=1, facts=facts))
    assert [line.title for line in ask(house, lambda client: client.incidents())] == ["fine"]
    assert ask(house, lambda client: client.incident(1)).facts == facts
    page = house.friend().get("/api/incidents/1/page")
    assert page.headers["content-type"].startswith("text/markdown") and "<b>" not in page.text
    with pytest.raises(UserError, match="no such incident"):
        ask(house, lambda client: client.incident(2))


def test_metrics_name_their_units_and_nothing_per_rank(house: House) -> None:
    house.do(lambda: house.town.go_on(5))
    text = house.friend().get("/metrics").text
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(found['phalanx_run_hosts{state="active"}']) == 2
    assert float(found['phalanx_run_phase{phase="running"}']) == 1
    assert float(found["phalanx_run_heartbeats_total"]) >= 5
    assert float(found["phalanx_run_step"]) == house.job.driver.attempt.step
    assert 0 <= float(found["phalanx_run_heartbeat_age_max_seconds"]) <= 2
    assert 0 < float(found["phalanx_run_training_seconds_total"]) <= float(found["phalanx_run_job_seconds_total"])
    assert "phalanx_run_exit_status" not in found
    assert "node-" not in text and "rank" not in {name.partition("=")[0] for name in found}
    assert len(found) < 60


def test_a_driver_that_does_not_answer_is_an_error_that_may_pass(house: House) -> None:
    write_card(house.folder, card(house, http="http://127.0.0.1:9"))
    with pytest.raises(ConnectionError, match="does not answer"):
        ask(house, lambda client: client.overview())


def test_the_job_out_of_its_journal_is_the_job_that_the_driver_knew(tmp_path: Path) -> None:
    from phalanx.run.driver.job_status import remember

    town = make_town(tmp_path)
    town.until(running(1))
    past = remember(tmp_path, Card(job="demo", driver_host="", pid=1, started_ticks=1, boot_id="", began_unix_s=1.0,
                                   token="", journal="journal.db", logs="", journal_job="job"))  # fmt: skip
    assert past is not None and past.state == town.driver.state and past.addresses["node-1"] == "at-node-1"
    assert past.state.phase != "ended"
    town.journal.close()
