"""`phalanx simulate failures` and `stragglers`: what a person sees, what programs read, and nonsense."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cli.main import group
from phalanx.cli.simulate_failures import command as failures
from phalanx.cli.simulate_stragglers import command as stragglers
from phalanx.core.errors import UserError

SMALL = ("--devices", "64", "--days", "5", "--runs", "4")


def run(*words: str, command: Any = failures) -> Result:
    return CliRunner().invoke(command, list(words), env={"COLUMNS": "150"})


def as_json(*words: str, command: Any = failures) -> dict[str, Any]:
    result = run(*words, "--json", command=command)
    assert result.exit_code == 0, result.output
    loaded: dict[str, Any] = json.loads(result.output)
    return loaded


def refusal(*words: str, command: Any = failures) -> str:
    result = run(*words, command=command)
    assert isinstance(result.exception, UserError), (result.output, result.exception)
    return str(result.exception)


def test_a_person_sees_what_comes_of_it() -> None:
    result = run(*SMALL, "--spares", "1", "--failures", "llama3", "--price", "2")
    assert result.exit_code == 0, result.output
    for words in (
        "64 devices on 8 hosts, 1 spare: 5 days, 4 runs, seed 0",
        "Llama 3: 419 interruptions",
        "effective time (ETTR)",
        "ETTR by Meta's formula",
        "where the time goes",
        "Young 1974",
        "best",
        "cost",
    ):
        assert words in result.output


def test_programs_read_all_of_it_and_shares_sum_to_one() -> None:
    told = as_json(*SMALL, "--per-1000-host-days", "300", "--spares", "2", "--evict-after", "3", "--spread", "0.3")
    assert told["version"] == 1 and told["runs"] == 4
    assert sum(share["mean"] for share in told["shares_ratio"].values()) == pytest.approx(1)
    assert told["ettr_ratio"]["mean"] == told["shares_ratio"]["training"]["mean"]
    assert told["counts"]["failures"]["mean"] > 0
    assert sum(c["per_host_day"] for c in told["failure_classes"]) == pytest.approx(0.3)
    assert as_json(*SMALL, "--seed", "3") == as_json(*SMALL, "--seed", "3")


def test_the_best_is_chosen_where_it_is_asked_for() -> None:
    told = as_json(*SMALL, "--interval", "best", "--spares", "best", "--stall-s", "30", "--step-s", "10")
    best = {choice["why"]: choice for choice in told["intervals"]}["best"]
    assert told["checkpoints"]["interval_s"] == best["interval_s"]
    assert told["checkpoints"]["interval_s"] % 10 == 0
    assert told["pool"]["spares"] == {choice["why"]: choice for choice in told["spares"]}["this many"]["spares"]
    highest = max(choice["ettr_ratio"] for choice in told["intervals"])
    assert best["ettr_ratio"] == pytest.approx(highest, abs=1e-7)  # whole steps


def test_other_choices_are_played_with_the_same_failures() -> None:
    told = as_json(*SMALL, "--runs", "20", "--spares", "1", "--per-1000-host-days", "200", "--compare")
    own = told["intervals"][0]
    assert own["why"] == "this one" and own["gain_ratio"]["mean"] == 0
    assert any(choice["gain_ratio"]["mean"] != 0 for choice in told["intervals"])
    assert {choice["why"] for choice in told["spares"]} >= {"this many", "none", "best"}
    assert "gain, same failures" in run(*SMALL, "--compare", "--days", "1").output


def test_work_that_is_never_done_is_said_to_be_so() -> None:
    words = ("--devices", "8", "--steps", "1000000", "--days", "2", "--runs", "3")
    assert as_json(*words)["days"]["mean"] is None
    told = run(*words).output
    assert "never" in told and "100.0 % of the runs did not finish in 2 days" in told
    done = as_json("--devices", "8", "--steps", "1000", "--step-s", "10", "--days", "2", "--runs", "3")
    assert done["finished_ratio"] == 1 and 10_000 / 86_400 <= done["days"]["mean"] < 0.2


def event(node: str, days: float, kind: str) -> dict[str, Any]:
    told = {"Level": "Hardware Failure", "Class": "GPU", "Desc": "GPU Lost"}
    return {"node_id": node, "event_time": days, "event_type": f"fault_{kind}", "fault_type": told}


@pytest.fixture(name="trace")
def trace_fixture(tmp_path: Path) -> str:
    path = tmp_path / "trace.json"
    faults = [event("a", 1, "start"), event("a", 3, "end"), event("b", 6, "start"), event("b", 10, "end")]
    path.write_text(json.dumps(faults))
    return str(path)


def test_recorded_faults(trace: str) -> None:
    words = ("--devices", "8", "--spares", "0", "--trace", trace, "--trace-hosts", "2", "--runs", "40")
    recorded = as_json(*words, "--years", "recorded")
    assert recorded["work"]["days"] == 10 and recorded["failures_are_recorded"]
    away = {0.2: recorded["shares_ratio"]["waiting for hosts"]["least"], 0.4: None}
    assert away[0.2] == pytest.approx(0.2, abs=0.01)  # the one host of the job has one or the other
    assert recorded["shares_ratio"]["waiting for hosts"]["most"] == pytest.approx(0.4, abs=0.01)
    assert "much of it came together" in run(*words, "--years", "hosts").output
    for years in ("blocks", "hosts", "rates"):
        assert as_json(*words, "--years", years)["counts"]["failures"]["mean"] < 3
    assert as_json(*words, "--years", "rates", "--compare", "--runs", "5")["intervals"]


def test_a_page_has_figures_and_tables(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page, other = tmp_path / "months.html", tmp_path / "waiting.html"
    words = (*SMALL, "--steps", "1000", "--price", "1", "--compare", "--html", str(page))
    assert run(*words).output.rstrip().endswith(f"page: {page}")
    text = page.read_text()
    for words_of_it in ('id="parts"', 'id="runs"', 'id="days"', 'id="intervals"', 'id="spares"', "Young 1974"):
        assert words_of_it in text
    assert run("--devices", "64", "--html", str(other), command=stragglers).exit_code == 0
    assert 'id="stragglers"' in other.read_text()


REFUSED = [
    (("--devices", "12"), "fill no whole number of hosts; give a multiple of 8"),
    ((*SMALL, "--failures", "nobody"), "choose one of infinitehbd, llama3"),
    ((*SMALL, "--interval", "often"), "--interval = 'often': it is no number; give one, or best"),
    ((*SMALL, "--interval", "0"), "out of range; give a millisecond at least"),
    ((*SMALL, "--interval", "nan"), "out of range"),
    ((*SMALL, "--interval", "inf"), "--interval = 'inf'"),
    ((*SMALL, "--spares", "-1"), "--spares = '-1': it is out of range; give 0 or more"),
    ((*SMALL, "--spares", "1.5"), "it is no number; give one, or best"),
    ((*SMALL, "--days", "0"), "--days = 0"),
    ((*SMALL, "--days", "nan"), "--days = nan"),
    ((*SMALL, "--step-s", "-1"), "--step-s = -1"),
    ((*SMALL, "--price", "-1"), "--price = -1"),
    ((*SMALL, "--restart-s", "-5"), "--restart-s = -5"),
    ((*SMALL, "--detection-s", "inf"), "--detection-s = inf"),
    ((*SMALL, "--spread", "-1"), "spread"),
    ((*SMALL, "--persist-s", "100000"), "save no more often than every 100000 s"),
    ((*SMALL, "--memory-interval-s", "3600"), "save in memory more often than durably"),
    ((*SMALL, "--smallest", "9", "--when-missing", "shrink"), "the job is not so large; name a number up to 8"),
    ((*SMALL, "--lemon-share", "1.5"), "--lemon-share = 1.5"),
    ((*SMALL, "--lemon-times", "0"), "--lemon-times = 0"),
    ((*SMALL, "--evict-after", "-1"), "--evict-after = -1"),
    ((*SMALL, "--per-1000-host-days", "1e9"), "too many to play; watch"),
    ((*SMALL, "--per-1000-host-days", "-1"), "--per-1000-host-days = -1"),
    ((*SMALL, "--years", "hosts"), "is about recorded faults; give --trace FILE"),
    ((*SMALL, "--trace", "/nowhere.json"), "cannot read it"),
    ((*SMALL, "--trace-hosts", "10"), "--trace-hosts = 10: is about recorded faults; give --trace FILE"),
    ((*SMALL, "--shrink-by", "2"), "--shrink-by = 2: is about a job that shrinks; add --when-missing shrink"),
    ((*SMALL, "--shrink-by", "9", "--when-missing", "shrink"), "--shrink-by = 9: the job is not so large"),
    ((*SMALL, "--patience-s", "60"), "--patience-s = 60.0: is about a job that shrinks"),
    ((*SMALL, "--interval", "9e6"), "--interval = '9e6': no checkpoint would be saved in"),
    ((*SMALL, "--interval", "best", "--persist-s", "1e9"), "--persist-s = 1000000000.0: no checkpoint would be saved"),
    ((*SMALL, "--devices-per-host", "3"), "--devices = 64: they fill no whole number of hosts"),
    (("--devices", "8000000000", "--spares", "0"), "--devices = 8000000000: it is out of range"),
]


@pytest.mark.parametrize(("words", "says"), REFUSED, ids=lambda case: " ".join(case[-2:]) if len(case) < 20 else "")
def test_nonsense_is_refused_with_the_cure(words: tuple[str, ...], says: str) -> None:
    assert says in refusal(*words)


def test_nonsense_about_recorded_faults_is_refused(trace: str) -> None:
    few = ("--devices", "8", "--spares", "0", "--trace", trace, "--trace-hosts")
    assert "more hosts had faults; give 2 at least" in refusal(*few, "1")
    assert "1 hosts" not in refusal("--devices", "64", "--spares", "0", "--trace", trace, "--trace-hosts", "2")
    assert "more than the 2 that were recorded" in refusal("--devices", "64", *few[2:], "2")
    assert "leave out one of the two" in refusal(*few, "2", "--compare")
    assert "is about rates, not recorded faults" in refusal(*few, "2", "--lemon-share", "0.1")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--devices", "12"), "fill no whole number of pipelines; give a multiple of 8"),
        (("--devices", "64", "--slow-share", "2"), "--slow-share = 2.0"),
        (("--devices", "64", "--slow-excess", "-1"), "--slow-excess = -1.0"),
        (("--devices", "64", "--lasting-sigma", "nan"), "--lasting-sigma = nan"),
        (("--devices", "64", "--compute-s", "0"), "--compute-s = 0.0"),
        (("--devices", "64", "--find-s", "-1"), "--find-s = -1.0"),
        (("--devices", "64", "--slow-per-1000-host-days", "-1"), "--slow-per-1000-host-days = -1.0"),
        (("--devices", "64", "--cluster", "nowhere"), "--cluster = 'nowhere'"),
        (("--devices", "64", "--chunks", "2"), "--chunks = 2: 1f1b has 1 on each rank"),
        (("--devices", "64", "--schedule", "zbv", "--chunks", "3"), "--chunks = 3: zbv has 2 on each rank"),
        (("--devices", "64", "--schedule", "interleaved_1f1b", "--chunks", "9999"), "--chunks = 9999: it is out"),
        (("--devices", "64", "--pipeline", "4", "--micro-batches", "3"), "--micro-batches = 3: some ranks never"),
    ],
)
def test_nonsense_about_slow_hosts_is_refused(words: tuple[str, ...], says: str) -> None:
    assert says in refusal(*words, command=stragglers)


numbers = st.floats(allow_nan=True, allow_infinity=True).map(lambda value: repr(value))
OPTIONS = (
    *("--step-s", "--days", "--price", "--per-1000-host-days", "--lemon-share", "--lemon-times", "--idle-ratio"),
    *("--detection-s", "--restart-s", "--load-s", "--queue-s", "--find-slow-s", "--spread", "--planned-per-day"),
    *("--planned-s", "--interval", "--stall-s", "--persist-s", "--memory-interval-s", "--memory-stall-s"),
    *("--provision-s", "--patience-s", "--spares"),
)


@given(option=st.sampled_from(OPTIONS), value=numbers)
@settings(max_examples=60, deadline=None)
def test_any_number_is_played_or_refused(option: str, value: str) -> None:
    result = run("--devices", "16", "--days", "1", "--runs", "2", "--spares", "1", option, value)
    assert result.exit_code in (0, 2) or isinstance(result.exception, UserError), (result.output, result.exception)


def test_what_waiting_costs() -> None:
    told = as_json("--devices", "12288", command=stragglers)
    rows = told["by_size"]
    assert rows[-1]["devices"] == 12_288 and rows[-1]["hosts"] == 1536
    for row in rows:
        assert 0 <= row["alike_ratio"] <= row["found_ratio"] <= row["unfound_ratio"] < 0.2
    assert [row["unfound_ratio"] for row in rows] == sorted(row["unfound_ratio"] for row in rows)
    result = run("--devices", "12288", command=stragglers)
    assert result.exit_code == 0 and "gained" in result.output and "12,288" in result.output


def test_both_are_found_by_name_and_help_loads_neither_torch_nor_numpy() -> None:
    for name in ("failures", "stragglers"):
        result = CliRunner().invoke(group, ["simulate", name, "--help"])
        assert result.exit_code == 0 and "--devices N" in result.output
    code = (
        "import sys; from phalanx.cli import simulate_failures, simulate_stragglers; "
        "assert not {'torch', 'numpy', 'rich', 'pydantic'} & set(sys.modules); "
        "from click.testing import CliRunner; "
        "r = CliRunner().invoke(simulate_failures.command, ['--devices', '16', '--days', '1', '--runs', '2']); "
        "assert r.exit_code == 0, r.output; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_refusal_is_one_line_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    from phalanx.cli.main import main

    with pytest.raises(SystemExit) as ended:
        main(["simulate", "failures", "--devices", "12"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("error: --devices = 12:") and told.count("\n") == 1
