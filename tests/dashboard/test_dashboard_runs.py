from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner
from dashboard_helpers import BASE, client_of, make_run

from phalanx.cli.main import group
from phalanx.dashboard.data_source import DataSource
from phalanx.figures.series import unpacked
from phalanx.ipc.processes import Identity
from phalanx.run.job_folder import Card, write_card
from phalanx.telemetry.run_list import keep_tags, read_kept


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    make_run(folder / "base", age_s=300)
    make_run(folder / "sweep" / "low", steps=10, age_s=200, optim={"lr": 1e-4})
    make_run(folder / "sweep" / "high", steps=15, age_s=100, optim={"lr": 1e-2})
    keep_tags(folder / "base", ["good"], [])
    return folder


def rows(page: str) -> list[str]:
    return re.findall(r'<th scope="row"><a href="[^"]*">([^<]*)</a>', page)


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("", ["sweep/high", "sweep/low", "base"]),
        ("?sort=name", ["base", "sweep/high", "sweep/low"]),
        ("?sort=loss", ["base", "sweep/high", "sweep/low"]),
        ("?q=sweep", ["sweep/high", "sweep/low"]),
        ("?q=SWEEP+low", ["sweep/low"]),
        ("?tag=good", ["base"]),
        ("?state=finished", ["base"]),
        ("?q=nothing", []),
    ],
)
def test_the_list_is_sorted_and_cut_as_the_url_says(runs: Path, query: str, names: list[str]) -> None:
    assert rows(client_of(runs).get(f"/{query}").text) == names


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("", {"base", "sweep/high", "sweep/low"}),
        ("?chosen=1&on=base&on=sweep/low", {"base", "sweep/low"}),
        ("?chosen=1&on=*&q=sweep", {"sweep/high", "sweep/low"}),
        ("?chosen=1", set()),
    ],
)
def test_chosen_runs_have_curves(runs: Path, query: str, names: set[str]) -> None:
    figure = client_of(runs).get(f"/runs/figure{query}").json()
    assert {trace["name"] for trace in figure["data"] if trace["mode"] == "lines"} == names


def test_curves_go_over_the_axis_that_is_asked_for(runs: Path) -> None:
    client = client_of(runs)
    for x, last in (("step", 20), ("tokens", 20 * 4096), ("time_s", 10)):
        figure = client.get("/runs/figure", params={"chosen": 1, "on": "base", "x": x}).json()
        line = next(trace for trace in figure["data"] if trace["mode"] == "lines")
        assert unpacked(line["x"])[-1] == pytest.approx(last)
        assert unpacked(line["y"])[-1] == pytest.approx(2 + 3 / 20**0.5)
    held_out = client.get("/runs/figure?chosen=1&on=base&x=tokens&column=validation_loss").json()
    line = next(trace for trace in held_out["data"] if trace["mode"] == "lines")
    assert unpacked(line["x"]).tolist() == [10 * 4096, 20 * 4096]


def test_flops_follow_from_the_settings(tmp_path: Path) -> None:
    model = {"layers": 2, "hidden": 64, "heads": 4, "vocab_size": 256}
    make_run(tmp_path / "runs" / "one", model=model, data={"sequence_length": 64})
    figure = client_of(tmp_path / "runs").get("/runs/figure?x=flops").json()
    line = next(trace for trace in figure["data"] if trace["mode"] == "lines")
    assert unpacked(line["x"])[-1] > 20 * 4096 * 6 * 2 * 64 * 64


def test_a_figure_is_not_made_again_while_nothing_is_new(runs: Path) -> None:
    client = client_of(runs)
    first = client.get("/runs/figure")
    again = client.get("/runs/figure", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    with (runs / "base" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 21, "loss": 9.0}\n')
    later = client.get("/runs/figure", headers={"if-none-match": first.headers["etag"]})
    assert later.status_code == 200
    line = next(trace for trace in later.json()["data"] if trace["mode"] == "lines" and trace["name"] == "base")
    assert unpacked(line["y"])[-1] == 9.0


def test_settings_that_differ_are_beside_each_other(runs: Path) -> None:
    page = client_of(runs).get("/?chosen=1&on=base&on=sweep/high").text
    assert re.search(r"optim\.lr</th><td[^>]*>0\.001</td><td[^>]*>0\.01</td>", page)
    assert "model.layers" not in page


def test_tags_of_chosen_runs_are_changed_together(runs: Path) -> None:
    client = client_of(runs)
    form = {"runs": "base\nsweep/low", "tags": "+old -good", "back": "sort=name"}
    answer = client.post("/runs/tags", data=form, headers={"origin": BASE})
    assert (answer.status_code, answer.headers["location"]) == (303, "/?sort=name")
    assert read_kept(runs / "base")["tags"] == read_kept(runs / "sweep" / "low")["tags"] == ["old"]
    assert rows(client.get("/?tag=old").text) == ["sweep/low", "base"]


@pytest.mark.parametrize("back", ["//evil.example", "\r\nset-cookie: a=b"])
def test_a_form_sends_nobody_elsewhere(runs: Path, back: str) -> None:
    answer = client_of(runs).post(
        "/runs/tags", data={"runs": "base", "tags": "x", "back": back}, headers={"origin": BASE}
    )
    assert answer.headers["location"].startswith("/?")
    assert "set-cookie" not in answer.headers


def test_bad_queries_are_refused_in_words(runs: Path) -> None:
    client = client_of(runs)
    for query in ("sort=nothing", "span=-1", "x=time", "span=nan"):
        answer = client.get(f"/?{query}")
        assert answer.status_code == 422
        assert "This cannot be shown" in answer.text
    answer = client.get("/?state=nothing")
    assert answer.status_code == 422 and "state: Input should be" in answer.text and "literal[" not in answer.text
    assert client.post("/runs/tags", data={"runs": "base", "tags": "<b>"}, headers={"origin": BASE}).status_code == 404


def test_what_people_and_runs_say_is_no_markup(tmp_path: Path) -> None:
    path = make_run(tmp_path / "runs" / "<script>alert(1)</script>", steps=3)
    (path / "run.json").write_text(json.dumps({"note": "<img src=x>", "name": "<b>bold</b>"}))
    page = client_of(tmp_path / "runs").get("/").text
    assert "<img src=x>" not in page
    assert "<b>bold" not in page
    assert "&lt;b&gt;bold" in page


@pytest.mark.parametrize(
    ("status", "state"),
    [(0, "finished"), (1, "failed"), (5, "stopped"), (6, "stopped"), (130, "stopped"), (None, "died")],
)
def test_a_job_of_somebody_s_own_script_is_a_row_here_and_in_the_terminal(
    tmp_path: Path, status: int | None, state: str
) -> None:
    folder = tmp_path / "jobs" / "theirs"
    folder.mkdir(parents=True)
    gone = Identity(1 << 30, 1, "x")
    card = Card(
        job="theirs",
        driver_host=socket.gethostname(),
        pid=gone.pid,
        started_ticks=gone.started_ticks,
        boot_id=gone.boot_id,
        began_unix_s=1.0,
        token="token",
        journal="journal.db",
        logs="logs",
        journal_job="theirs",
        status=status,
        ended="AttributeError: no attribute 'x'",
    )
    write_card(folder, card)
    (row,) = DataSource.of_folder(tmp_path / "jobs").runs()
    assert row.row.state == state
    (listed,) = json.loads(CliRunner().invoke(group, ["runs", str(tmp_path / "jobs"), "--json"]).output)["runs"]
    assert (listed["name"], listed["state"]) == ("theirs", state)
    assert ("AttributeError" in listed["why"]) == (state in ("failed", "stopped"))


def test_a_folder_without_runs_says_so(tmp_path: Path) -> None:
    answer = client_of(tmp_path).get("/")
    assert answer.status_code == 200
    assert "No runs in" in answer.text
