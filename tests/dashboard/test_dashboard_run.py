from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

import pytest
from dashboard_helpers import BASE, client_of, make_run

from phalanx.core.units import duration
from phalanx.data.config import DataConfig, SourceConfig, TokenizerConfig
from phalanx.data.prepare import prepare
from phalanx.telemetry.run_list import read_kept, read_run
from phalanx.telemetry.run_samples import keep_sample, keep_why_none
from tests.telemetry.trace_runs import GROUPS, four_ranks, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "base")


def test_the_page_shows_the_run(run: Path) -> None:
    (run / "ended.json").write_text(json.dumps({"step": 20, "why": "ValueError: it broke"}))
    page = client_of(run.parent).get("/run?run=base").text
    for words in ("ValueError: it broke", "81.9k", "optim.lr", "python", "/run/figure?run=base&amp;column=grad_norm"):
        assert words in page
    assert client_of(run).get("/run").status_code == 200  # the run itself is what the dashboard shows


def test_a_run_that_is_not_there_is_named(run: Path) -> None:
    answer = client_of(run.parent).get("/run?run=nothing")
    assert answer.status_code == 404
    assert "there is no such run" in answer.text


def test_a_name_that_is_too_long_is_no_run(run: Path) -> None:
    for path in ("/run", "/run/state", "/logs", "/run/batch"):
        answer = client_of(run.parent).get(f"{path}?run={'A' * 6000}")
        assert answer.status_code == 404 and "there is no such run" in answer.text
        assert "A" * 300 not in answer.text


def test_a_loop_without_settings_has_its_pace_and_no_text_of_batches(tmp_path: Path) -> None:
    trace = write_run(tmp_path / "runs" / "own", four_ranks(3), GROUPS)
    row = read_run(tmp_path / "runs" / "own")
    assert row.step == 2 and row.step_s is not None and trace.folder.is_dir()
    page = client_of(tmp_path / "runs").get("/run?run=own").text
    assert "<b>2</b><span>step</span>" in page.replace("\n", "")
    assert f"<b>{duration(row.step_s)}</b><span>a step</span>" in page
    assert "/run/batch" not in page


def test_loss_and_held_out_loss_are_two_curves_with_marks(run: Path) -> None:
    figure = client_of(run.parent).get("/run/figure?run=base&column=loss").json()
    assert {trace["name"] for trace in figure["data"] if trace["mode"] == "lines"} == {"training", "held-out"}
    checkpoints = next(trace for trace in figure["data"] if trace["name"] == "checkpoint")
    assert checkpoints["x"] == [10, 20]


def test_small_figures_are_of_one_column(run: Path) -> None:
    figure = client_of(run.parent).get("/run/figure?run=base&column=grad_norm&x=tokens").json()
    assert figure["layout"]["title"]["text"] == "norm of the gradient"
    assert {trace["mode"] for trace in figure["data"]} == {"lines"}


def test_samples_come_newest_first_and_are_no_markup(run: Path) -> None:
    client = client_of(run.parent)
    assert "No samples" in client.get("/run/samples?run=base").text
    for step in (10, 20):
        keep_sample(run, step, "Once", f" <b>upon</b> {step}")
    page = client.get("/run/samples?run=base").text
    assert page.index("after step 20") < page.index("after step 10")
    assert "&lt;b&gt;upon" in page
    keep_why_none(run, "no rank holds the whole model")  # it goes on, spread over ranks
    page = client.get("/run/samples?run=base").text
    assert "No more samples: no rank holds the whole model" in page and "after step 20" in page
    assert "No more samples" in client.get("/run?run=base").text
    keep_sample(run, 30, "Once", " again")
    assert "No more samples" not in client.get("/run/samples?run=base").text


def test_names_notes_and_tags_are_kept(run: Path) -> None:
    client = client_of(run.parent)
    form = {"run": "base", "name": "first", "note": "too slow", "tags": "good lr:3"}
    answer = client.post("/run/note", data=form, headers={"origin": BASE})
    assert (answer.status_code, answer.headers["location"]) == (303, "/run?run=base")
    assert read_kept(run) == {"name": "first", "note": "too slow", "tags": ["good", "lr:3"]}
    client.post("/run/note", data={"run": "base", "note": "fast"}, headers={"origin": BASE})
    assert read_kept(run) == {"name": "first", "note": "fast", "tags": ["good", "lr:3"]}  # what is not given stays
    client.post("/run/note", data={"run": "base", "tags": "lr:3", "name": "", "note": ""}, headers={"origin": BASE})
    assert read_kept(run) == {"tags": ["lr:3"]}
    assert client.post("/run/note", data={"run": "base"}).status_code == 403


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run whose prepared text is there, as seen from the folder above `runs`."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"This is document {number} of them." for number in range(300)))
    config = DataConfig(
        sequence_length=32,
        sources=(SourceConfig(kind="text", path=(str(text),), document_separator="\n"),),
        tokenizer=TokenizerConfig(kind="bytes"),
        folder=str(tmp_path / "prepared"),
        validation_fraction=0.0,
    )
    prepare(config)
    data = config.model_copy(update={"folder": "prepared"}).model_dump(mode="json")
    run = make_run(tmp_path / "runs" / "base", data=data, optim={"lr": 1e-3, "batch_warmup": {"start": 0}})
    # What a step counts as its tokens says which samples it read: 12 of them each.
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.update({"tokens": line["step"] * 12 * 32} if line["kind"] == "step" else {})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_the_text_of_a_batch_is_shown(trained: Path) -> None:
    client = client_of(trained.parent)
    page = client.get("/run/batch?run=base&step=3").text
    assert "Samples 24 to 35" in page
    assert "This is document" in page
    assert page.count('class="sample-text"') == 8
    assert "never" not in page and "does not exist" not in page
    beyond = client.get("/run/batch?run=base&step=9999").text
    assert "Step 9,999 does not exist: the run has 20 steps, of which 20 are done" in beyond
    lines = (trained / "metrics.jsonl").read_text().splitlines(keepends=True)
    (trained / "metrics.jsonl").write_text("".join(lines[:5]))
    assert "Step 6 was never made: 5 steps are done" in client.get("/run/batch?run=base&step=6").text
    (trained / "metrics.jsonl").write_text("".join(lines))
    assert client.get("/run/batch?run=base&step=3&first=8").text.count('class="sample-text"') == 4


def test_without_figures_the_settings_say_what_a_step_reads(trained: Path) -> None:
    (trained / "metrics.jsonl").write_text("")
    assert "Samples 8 to 11" in client_of(trained.parent).get("/run/batch?run=base&step=3").text


def test_a_batch_whose_text_is_gone_says_so(run: Path) -> None:
    answer = client_of(run.parent).get("/run/batch?run=base&step=3")
    assert answer.status_code == 200
    assert "settings do not say what it reads" in answer.text


def test_a_run_of_slow_steps_is_not_old(tmp_path: Path) -> None:
    # 10 steps of 4 * 4096 tokens at 1000 tokens a second: something new every 164 s.
    more = {"data": {"sequence_length": 4096}, "logging": {"every_steps": 10}}
    run = make_run(tmp_path / "runs" / "base", steps=5, age_s=300, **more)
    with (run / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        client = client_of(run.parent)
        assert "Old data" not in client.get("/freshness?run=base").text
        os.utime(run / "metrics.jsonl", (time.time() - 600,) * 2)
        assert "Old data" in client.get("/freshness?run=base").text


def test_a_run_that_only_begins_is_not_old(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "base", steps=0)
    (run / "metrics.jsonl").unlink()
    os.utime(run, (time.time() - 600,) * 2)
    with (run / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        client = client_of(run.parent)
        assert "Old data" not in client.get("/run?run=base").text
        assert "no figures yet" in client.get("/runs/figure").text


def test_old_data_is_said_to_be_old(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "base", steps=5, age_s=300)
    client = client_of(run.parent)
    assert "Old data" not in client.get("/freshness?run=base").text
    with (run / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        page = client.get("/freshness?run=base").text
        assert "Old data" in page
        assert "the run still goes on" in page
        assert "left" in client.get("/run/state?run=base").text
