"""A prediction as text and as JSON: it adds up, fits the terminal, and can be read without colour."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_report_samples import part, prediction, report
from rich.console import Console

from phalanx.plan.report.report_model import MEMORY_KINDS, make_tree, prediction_json, printed, pruned
from phalanx.plan.report.report_text import bar, prediction_text, run_line, seconds_text, wrapped


def _text(width: int = 80, ranks: int = 8, fullest: float = 51.0, sources: bool = False) -> str:
    file = io.StringIO()
    shown = prediction_text(report(ranks, fullest), width=width, sources=sources)
    Console(file=file, width=width, color_system=None).print(shown, highlight=False)
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_lines_fit_the_terminal(width: int) -> None:
    lines = _text(width, sources=True).splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line[:60] for line in lines)  # only what does not fit of a source


def test_what_is_printed_of_the_step_adds_up() -> None:
    table = _text().partition("where the step goes")[2].partition("hidden")[0]
    rows = re.findall(r"^( *)([a-z]+) +([\d.,]+) +([\d.]+) %", table, flags=re.MULTILINE)
    top = [round(1000 * float(seconds)) for indent, name, seconds, _ in rows if not indent and name != "step"]
    below = [round(1000 * float(seconds)) for indent, _, seconds, _ in rows if len(indent) == 2]
    alone = [round(1000 * float(seconds)) for _, name, seconds, _ in rows if name == "stragglers"]
    step = [round(1000 * float(seconds)) for _, name, seconds, _ in rows if name == "step"]
    assert sum(top) == step[0] == round(1000 * prediction().step_s)
    assert sum(below) + sum(alone) == step[0]


def test_marks_and_sources_are_told() -> None:
    narrow, wide, full = _text(80), _text(120), _text(80, sources=True)
    assert "measured" in narrow and "assumed" in narrow
    assert "vTrain's profile" not in narrow and "vTrain's profile" in wide
    rests = full.partition("what the numbers rest on")[2]
    assert "measured: all-gather of 8 GPUs, vTrain's profile of 2023-11\n    tensor/gather" in rests


def test_what_the_run_takes_is_a_line_of_its_own() -> None:
    line = next(line for line in _text().splitlines() if line.startswith("300B tokens: "))
    days, hours, dollars = re.findall(r"[\d,.]+(?= days| device-hours| USD at)", line)
    shown = report()
    assert shown.run_s == pytest.approx(300e9 / shown.prediction.tokens_per_s)
    assert float(days) == pytest.approx(shown.run_s / 86400, abs=0.05)
    assert float(hours.replace(",", "")) == pytest.approx(1024 * shown.run_s / 3600, abs=0.5)
    assert float(dollars.replace(",", "")) == pytest.approx(2 * 1024 * shown.run_s / 3600, abs=0.5)
    assert line.endswith(" USD at 2.00 USD an hour")
    assert run_line(replace(shown, usd_per_device_hour=None)).endswith(" device-hours")
    assert run_line(replace(shown, total_tokens=0)) == ""
    assert prediction_json(shown)["run_device_hours"] == shown.device_hours


def test_sources_are_bounded_where_lines_may_have_any_length() -> None:
    shown = report()
    first, *others = shown.prediction.parts
    long = replace(first, source="measured " * 50)
    shown = replace(shown, prediction=replace(shown.prediction, parts=(long, *others)))
    file = io.StringIO()
    Console(file=file, width=10_000, color_system=None).print(prediction_text(shown, width=10_000))
    assert 150 < max(map(len, file.getvalue().splitlines())) <= 160


def test_the_verdict_is_a_sentence() -> None:
    assert "\nfits: 51.00 GiB of 74.51 GiB on the fullest rank, pipeline rank 0 (68 %)\n" in _text()
    too_much = _text(120, ranks=2, fullest=90.0)
    assert (
        "\ndoes not fit: 90.00 GiB of 74.51 GiB on the fullest rank, pipeline rank 0, 15.49 GiB too much\n" in too_much
    )


def test_of_many_pipeline_ranks_those_that_tell_something_are_shown() -> None:
    memory = _text(ranks=8).partition("memory by pipeline rank")[2].partition("start-up")[0]
    assert memory.splitlines()[1].split() == ["0", "(fullest)", "4", "7"]
    assert _text(ranks=3).partition("memory by pipeline rank")[2].splitlines()[1].split() == [
        "0",
        "(fullest)",
        "1",
        "2",
    ]


def test_memory_of_one_small_rank_is_told_in_a_unit_that_suits_it() -> None:
    shown = report(1)
    (rank,) = shown.prediction.memory
    small = (replace(rank, **{kind: getattr(rank, kind) / 1024 for kind in MEMORY_KINDS}),)
    file = io.StringIO()
    text = prediction_text(replace(shown, prediction=replace(shown.prediction, memory=small)))
    Console(file=file, width=80, color_system=None).print(text)
    told = file.getvalue().partition("\nmemory, MiB\n")[2]
    rows = dict(re.findall(r"^([a-z ]+?) +([\d.]+)$", told, flags=re.MULTILINE))
    assert float(rows["in all"]) == pytest.approx(51.0)
    assert sum(map(float, rows.values())) == pytest.approx(2 * 51.0, abs=0.05)


def test_json_has_units_in_its_keys_and_adds_up() -> None:
    plain = json.loads(json.dumps(prediction_json(report())))
    assert sum(piece["seconds"] for piece in plain["parts"]) == pytest.approx(plain["step_s"], rel=1e-12)
    for rank in plain["memory"]:
        kinds = [value for key, value in rank.items() if key.endswith("_bytes") and key != "total_bytes"]
        assert sum(kinds) == pytest.approx(rank["total_bytes"])
    assert plain["run_s"] == pytest.approx(300e9 / plain["tokens_per_s"])
    assert plain["cost_usd"] == pytest.approx(plain["run_s"] / 3600 * 1024 * 2.0)
    assert plain["fits"] is True
    assert plain["strategy"]["schedule"] == "interleaved_1f1b"
    assert {piece["mark"] for piece in plain["parts"]} == {"measured", "derived", "assumed"}


@given(
    st.lists(st.tuples(st.sampled_from(["a", "a/b", "a/c", "d/e/f", "d/e", "g"]), st.floats(1e-6, 50.0)), min_size=1)
)
def test_printed_numbers_of_a_group_add_up_to_the_groups(pieces: list[tuple[str, float]]) -> None:
    root = make_tree([part(path, seconds) for path, seconds in pieces])
    assert root.seconds == pytest.approx(sum(seconds for _, seconds in pieces))
    _, texts = printed(root)
    values = {key: round(float(text.replace(",", "")) * 1000) for key, text in texts.items()}
    for _, node in root.walk():
        if node.children:
            assert values[id(node)] == sum(values[id(child)] for child in node.children)
            assert node.seconds == pytest.approx(sum(child.seconds for child in node.children))


def test_small_things() -> None:
    assert [seconds_text(value) for value in (1234.5, 5.549, 0.0123, 4.5e-5)] == [
        "1,234 s",
        "5.55 s",
        "12.3 ms",
        "45.0 µs",
    ]
    assert (bar(0.0, 8), bar(0.5, 8), bar(1.0, 8)) == ("", "████", "████████")
    assert wrapped("takes about 12 GiB", 14) == "takes about\n12 GiB"


def test_small_parts_are_one_and_nothing_is_lost() -> None:
    pieces = [part("a/x", 90.0), part("a/y", 0.1), part("a/z", 0.2, "assumed", "guess"), part("a/w", 5.0)]
    pieces += [part("b/u", 0.1), part("b/v", 0.1, "assumed"), part("c", 0.05)]
    root = make_tree(pieces)
    short = pruned(root, 0.5)
    shown = {node.path: (node.name, node.seconds) for _, node in short.walk()}
    assert list(shown) == ["", "a", "a/x", "a/w", "a/…", "b", "c"]
    assert shown["a/…"] == ("2 small ones", pytest.approx(0.3))
    assert short.seconds == pytest.approx(sum(piece.seconds for piece in pieces))
    assert sum(node.seconds for _, node in short.walk() if not node.children) == pytest.approx(short.seconds)
    marks = {node.path: node.part.mark for _, node in short.walk() if node.part}
    assert (marks["a/…"], marks["b"], marks["a/x"]) == ("assumed", "assumed", "derived")
    assert [node.path for _, node in pruned(root, 0.0).walk()] == [node.path for _, node in root.walk()]
