"""Machines and their hosts: who is dead, cut off, stopped or slow stands on the page, and its figures say the same."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from dashboard_helpers import client_of
from fastapi.testclient import TestClient
from support.traced_runs import STEP_MS, large_run, traced_run

from phalanx.dashboard.machine_states import hosts_now
from phalanx.figures.style import described
from phalanx.run.api.bodies import HostBody, Worker
from phalanx.telemetry.rank_deaths import DIED
from phalanx.telemetry.rank_states import JobState, RankState
from phalanx.telemetry.span_writer import note_incident
from tests.telemetry.trace_runs import span, write_run


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    folder = tmp_path_factory.mktemp("runs")
    traced_run(folder / "small")
    traced_run(folder / "stuck", ends={6: 9})
    traced_run(folder / "calm", slow={})
    return client_of(folder)


def _look(page: str, host: str) -> str:
    found = re.search(rf'class="look-([\w-]+)" href="/machines/host\?run=\w+&amp;host={host}"', page)
    assert found, page
    return found.group(1)


def test_a_slow_host_is_marked_and_named(client: TestClient) -> None:
    page = client.get("/machines?run=small").text
    assert re.search(r"slow: rank 5 \(host node-2, stage 1\); the first computes 4\d% longer than its stage", page)
    assert [_look(page, f"node-{number}") for number in range(4)] == ["well", "well", "slow", "well"]
    assert "▲" in page and "all is well" not in page  # a sign, not only a colour


def test_who_stopped_first_is_marked_and_named(client: TestClient) -> None:
    page = client.get("/machines/now?run=stuck").text
    assert "stopped first: rank 6 (node-3); did the least in step 9; the last it did: data" in page
    assert _look(page, "node-3") == "stopped"


def test_a_calm_run_says_so(client: TestClient) -> None:
    page = client.get("/machines?run=calm").text
    assert "all is well; no slow rank: none of 8 computes more than" in page


def test_a_slow_one_of_three_and_a_doubtful_one_are_not_well(tmp_path: Path) -> None:
    for name, longest in (("slow", 35.0), ("doubtful", 24.0)):
        ms = (16.0, 20.0, longest)
        rows = [
            span(rank, step, kind, 100 * step, 100 * step + (90 if kind == "step" else ms[rank]))
            for rank in range(3) for step in range(10) for kind in ("step", "forward")
        ]  # fmt: skip
        write_run(tmp_path / name, rows)
    write_run(tmp_path / "alone", [row | {"host": "vm"} for row in rows if row["rank"] < 2] + [
        span(2, step, kind, 100 * step, 100 * step + (90 if kind == "step" else 35), host="vm")
        for step in range(10) for kind in ("step", "forward")
    ])  # fmt: skip
    pages = client_of(tmp_path)
    page, title = pages.get("/machines?run=slow").text, described(pages.get("/machines/heatmap?run=slow").json())
    assert "all is well" not in page and "slow: rank 2 (host host1" in page and "rank 2 (host1) 1.75×" in title
    by_host = described(pages.get("/machines/heatmap?run=slow&by=host").json())
    assert "none is slow" not in by_host
    by_host = described(pages.get("/machines/heatmap?run=alone&by=host").json())
    assert by_host.endswith("on 1 host as ratios to the median: rank 2 (vm) is slow among the ranks of its stage")
    page = pages.get("/machines?run=doubtful").text
    title = described(pages.get("/machines/heatmap?run=doubtful").json())
    assert "all is well" not in page and 'class="verdict good"' not in page and "too much to be sure" in page
    assert "rank 2 takes 20% longer" in title and "none is slow" not in title


def test_one_rank_is_not_compared(tmp_path: Path) -> None:
    rows = [span(0, step, kind, 100 * step, 100 * step + 50) for step in range(9) for kind in ("step", "forward")]
    write_run(tmp_path / "one", rows)
    figure = client_of(tmp_path).get("/machines/heatmap?run=one").json()
    assert figure["layout"]["title"]["text"] == "1 rank: too little to compare"
    assert figure["layout"]["yaxis"]["dtick"] == 1


def test_the_heat_map_is_of_ranks_or_hosts_and_leads_to_the_host(client: TestClient) -> None:
    figure = client.get("/machines/heatmap?run=small").json()
    assert described(figure).endswith("rank 5 (node-2) 1.41× in forward, 1.41× in backward")
    by_host = client.get("/machines/heatmap?run=small&by=host").json()
    assert by_host["data"][0]["y"] == ["node-0", "node-1", "node-2", "node-3"]
    page = client.get("/machines?run=small&by=host").text
    assert 'data-href="/machines/host?run=small&amp;host={y}"' in page


def test_nothing_is_made_again_while_files_are_the_same(client: TestClient) -> None:
    first = client.get("/machines/heatmap?run=small")
    again = client.get("/machines/heatmap?run=small", headers={"if-none-match": first.headers["etag"]})
    other = client.get("/machines/heatmap?run=small&steps=1:3", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, other.status_code) == (304, 200)


def test_a_host_has_its_ranks_counters_and_incidents(client: TestClient) -> None:
    page = client.get("/machines/host?run=small&host=node-2").text
    assert re.search(r"slow: rank 5 computes 4\d% longer than its peers", page)
    assert re.search(r">5</th>.*\+4\d\.\d %", page) and "slow rank, rank 5, step 8" in page
    assert client.get("/machines/host?run=small&rank=5").text.count("node-2") == page.count("node-2")
    steps = client.get("/machines/host/steps?run=small&host=node-2").json()
    assert "rank 5 takes 40.8% longer than the median" in described(steps)
    counters = client.get("/machines/host/counters?run=small&host=node-2").json()
    assert "GPU, °C" in described(counters) and "network, GB/s 2.8 to 3" in described(counters)
    assert counters["layout"]["title"]["text"] == "Counters of node-2, 2 GPUs: 0 blue, 1 orange"


def test_a_host_that_is_not_there_is_said(client: TestClient) -> None:
    for query in ("host=nowhere", "rank=99", "host=../../etc"):
        answer = client.get(f"/machines/host?run=small&{query}")
        assert answer.status_code == 404 and "there is no such host in this run" in answer.text


def test_without_telemetry_the_page_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "runs" / "plain").mkdir(parents=True)
    (tmp_path / "runs" / "plain" / "metrics.jsonl").write_text("")
    page = client_of(tmp_path / "runs").get("/machines?run=plain")
    assert page.status_code == 200 and "No heat map" in page.text and "phalanx trace import FILES RUN" in page.text


def test_a_death_that_is_noted_while_a_run_goes_on_is_seen_at_once(tmp_path: Path) -> None:
    run = traced_run(tmp_path / "runs" / "a", slow={}, began_ns=time.time_ns() - round(12 * STEP_MS * 1e6))
    client = client_of(tmp_path / "runs")
    assert "dead" not in client.get("/machines/now?run=a").text
    note_incident(run / "telemetry", DIED, time.time_ns(), rank=3, host="node-1", attempt=0)
    (run / "metrics.jsonl").write_text("")  # not finished: a run that has done all its steps has no dead rank
    page, until_s = "", time.monotonic() + 60
    while "dead" not in page and time.monotonic() < until_s:  # what was asked a moment ago is not asked again
        time.sleep(0.02)
        page = client.get("/machines/now?run=a").text
    assert "dead: rank 3 (node-1); its process ended in step 12" in page and _look(page, "node-1") == "dead"


def test_many_ranks_are_one_grid_without_names(tmp_path: Path) -> None:
    large_run(tmp_path / "runs" / "large", ranks=1024, steps=12, slow=(77,))
    client = client_of(tmp_path / "runs")
    page = client.get("/machines?run=large").text
    assert "host-grid dense" in page and _look(page, "gpu-0009") == "slow" and page.count('class="look-well"') == 128
    assert described(client.get("/machines/heatmap?run=large").json()).startswith("Phases of a step on 1,024 ranks")


def _rank(rank: int, **more: object) -> RankState:
    return RankState(rank, f"node-{rank // 2}", 7, 6, 1, **more)  # type: ignore[arg-type]


def test_the_driver_is_believed_before_spans_but_for_what_it_does_not_see() -> None:
    job = JobState((_rank(0), _rank(1), _rank(2), _rank(3)), 0.5, 0.0, "")
    worker = Worker(rank=2, pid=1, state="ended")
    driver = [
        HostBody(name="a", state="active", ranks=(0, 1), silent_s=9.0),
        HostBody(name="b", state="active", ranks=(2, 3), silent_s=0.4, workers=(worker,)),
        HostBody(name="c", state="spare", silent_s=0.5),
        HostBody(name="d", state="evicted", why="rank 9 was killed", silent_s=500.0),
    ]
    found = {host.name: (host.look, host.why) for host in hosts_now(job, {}, listed=driver)}
    assert found == {
        "a": ("cut off", "not heard of for 9 s"),
        "b": ("dead", "rank 2 has ended"),
        "c": ("spare", ""),
        "d": ("leaves", "rank 9 was killed"),
    }
    slow = hosts_now(job, {0: 0.3}, listed=[HostBody(name="a", state="active", ranks=(0, 1), silent_s=0.1)])
    assert [(host.name, host.look) for host in slow] == [("a", "slow"), ("node-1", "well")]


@pytest.mark.parametrize(("still_s", "look"), [(5.0, "waits"), (29.0, "waits"), (31.0, "stopped")])
def test_who_only_prints_now_and_then_is_not_called_stopped(still_s: float, look: str) -> None:
    worker = Worker(rank=1, pid=1, state="running", still_s=still_s)
    [host] = hosts_now(None, {}, listed=[HostBody(name="a", state="active", silent_s=0.1, workers=(worker,))])
    assert (host.look, host.why) == (look, f"rank 1 has not moved for {still_s:.0f} s")


def test_hosts_come_by_their_numbers() -> None:
    job = JobState(tuple(_rank(rank) for rank in (0, 4, 20, 22)), 0.5, 0.0, "")
    assert [host.name for host in hosts_now(job, {})] == ["node-0", "node-2", "node-10", "node-11"]


def test_figures_are_json_that_browsers_read(client: TestClient) -> None:
    for path in ("heatmap", "host/counters", "host/steps"):
        text = client.get(f"/machines/{path}?run=small&host=node-0").text
        json.loads(text, parse_constant=pytest.fail)


def test_a_damaged_file_costs_its_steps_and_no_page(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "cut"
    traced_run(run)
    *whole, last = sorted((run / "telemetry" / "steps").glob("*/*.parquet"))
    last.write_bytes(last.read_bytes()[:-20])
    page = client_of(tmp_path / "runs").get("/machines?run=cut")
    assert page.status_code == 200 and whole[0].parent.name in page.text
