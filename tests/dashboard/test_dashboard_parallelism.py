"""A rank's place and groups, what flows where, and its pipeline as it ran beside its plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dashboard_helpers import client_of
from fastapi.testclient import TestClient
from support.traced_runs import traced_run

from phalanx.core.layout import Layout
from phalanx.dashboard.run_telemetry import layout_of_groups
from phalanx.figures.style import described
from phalanx.telemetry.layer_norms import append_norms


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    folder = tmp_path_factory.mktemp("runs")
    run = traced_run(folder / "small")
    for step in (1, 2):
        append_norms(run, step, {"gradient": {"blocks.0": 0.5 * step, "blocks.1": 0.25}})
    foreign = traced_run(folder / "foreign")  # a loop of somebody else: groups were recorded, there is no config
    for name in ("config.json", "prediction.json"):
        (foreign / name).unlink()
    traced_run(folder / "stuck", ends={6: 9})
    return client_of(folder)


def test_the_slow_rank_comes_first_with_its_place_groups_and_neighbours(client: TestClient) -> None:
    page = client.get("/parallelism?run=small").text
    assert "pipeline 1 of 2, shard 0 of 2, tensor 1 of 2" in page and "pp2·fs2·tp2 (8 ranks)" in page
    assert 'href="/parallelism?run=small&amp;rank=1">1</a>' in page  # from whom it receives activations
    assert "optimizer AdamW, step 12" in page


def test_the_lattice_tells_last_events_and_crosses_out_who_has_none(client: TestClient) -> None:
    figure = client.get("/parallelism/lattice?run=stuck&rank=2").json()
    silent = next(trace for trace in figure["data"] if trace["name"] == "no last event")
    assert silent["customdata"] == [6]
    page = client.get("/parallelism?run=stuck").text
    assert "rank 6 stopped first: did the least in step 9" in page


def test_layouts_come_from_recorded_groups_where_there_is_no_config(client: TestClient) -> None:
    page = client.get("/parallelism?run=foreign&rank=0").text
    assert "pp2·fs2·tp2 (8 ranks)" in page
    assert "no prediction" in described(client.get("/parallelism/parts?run=foreign").json())


def test_the_pipeline_as_it_ran_stands_beside_its_plan(client: TestClient) -> None:
    said = described(client.get("/parallelism/pipeline?run=small&rank=5&steps=3").json())
    assert said.startswith("A step of the pipeline on 2 pipeline ranks: ") and "as planned, with even passes" in said


def test_bytes_and_parts_are_those_of_the_spans(client: TestClient) -> None:
    assert "most, 64 MiB, from rank 0 to rank 2" in described(client.get("/parallelism/bytes?run=small").json())
    said = described(client.get("/parallelism/parts?run=small").json())
    assert "0.47 s measured, 0.372 s expected (+26.3 %); largest differences: wait +0.06" in said


def test_norms_are_shown_where_they_were_written(client: TestClient) -> None:
    assert "/parallelism/norms?run=small&amp;quantity=gradient" in client.get("/parallelism?run=small").text
    assert "largest 1 in layer blocks.0" in described(client.get("/parallelism/norms?run=small").json())
    assert "No norms of layers were written" in client.get("/parallelism?run=stuck").text


def test_a_rank_that_is_not_there_is_said(client: TestClient) -> None:
    page = client.get("/parallelism?run=small&rank=99")
    assert page.status_code == 200 and "there is no such rank" in page.text
    assert client.get("/parallelism/lattice?run=small&rank=99").status_code == 404


def test_without_telemetry_the_page_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "runs" / "plain").mkdir(parents=True)
    (tmp_path / "runs" / "plain" / "metrics.jsonl").write_text("")
    page = client_of(tmp_path / "runs").get("/parallelism?run=plain")
    assert page.status_code == 200 and "No ranks to show" in page.text


@pytest.mark.parametrize(
    ("groups", "least", "layout"),
    [
        ([("pipeline", [0, 16, 32, 48]), ("shard", [0, 4, 8, 12])], 49, Layout(pipeline=4, shard=4, tensor=4)),
        ([("shard", [0, 1, 2, 3])], 4, Layout(shard=4)),
        ([("tensor", [0, 1]), ("replicate", [0, 2])], 4, Layout(replicate=2, tensor=2)),
        ([("shard", [0, 2, 3])], 4, None),
        ([("world", [0, 1, 2, 3])], 4, None),
        ([], 1, None),
    ],
)
def test_layouts_of_groups(groups: list[tuple[str, list[int]]], least: int, layout: Layout | None) -> None:
    assert layout_of_groups([{"group": name, "ranks": ranks} for name, ranks in groups], least) == layout


def test_figures_are_json_that_browsers_read(client: TestClient) -> None:
    for path in ("lattice", "bytes", "pipeline", "parts", "norms"):
        json.loads(client.get(f"/parallelism/{path}?run=small").text, parse_constant=pytest.fail)
