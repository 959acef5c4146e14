"""Failures from files: those that come with the planner, a person's own, and nonsense."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import UserError
from phalanx.simulate.failure_model import (
    FOLDER,
    Checkpoints,
    Duration,
    FailureClass,
    Failures,
    FailureScenario,
    Pool,
    Recovery,
    Work,
    known,
    load_failures,
)

GOOD = """
source = "me"
[[class]]
name = "GPU"
failures_per_1000_host_days = 2
effect = "stops"
repair_median_s = 3600
repair_p90_s = 7200
mark = "measured"
source = "my log"
date = "2026-01"
[lemons]
share_ratio = 0.01
rate_ratio = 10
"""


def write(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


def test_what_comes_with_the_planner() -> None:
    assert known() == ["infinitehbd", "llama3", "meta-rsc1", "meta-rsc2", "minder"]
    rates = {name: 1000 * load_failures(name).per_host_day() for name in known()}
    assert rates["meta-rsc1"] == 6.5 and rates["meta-rsc2"] == 2.34
    assert rates["llama3"] == pytest.approx(419 / 54 / 2.048, rel=1e-3)
    assert rates["minder"] == pytest.approx(rates["llama3"], rel=1e-3)
    lemons = load_failures("meta-rsc1")
    touched = lemons.lemon_share * lemons.lemon_times * lemons.usual_ratio
    assert touched == pytest.approx(0.13, abs=0.001)


@pytest.mark.parametrize("name", known())
def test_every_number_has_a_mark_a_source_and_a_date(name: str) -> None:
    import tomllib

    content = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    for table in [*content["class"], *([content["lemons"]] if "lemons" in content else [])]:
        assert table["mark"] in ("measured", "derived", "assumed")
        assert table["source"] and len(table["date"]) == 7


def test_a_persons_own_file(tmp_path: Path) -> None:
    failures = load_failures(write(tmp_path, GOOD))
    assert failures.per_host_day() == pytest.approx(0.002) and failures.lemon_share == 0.01
    assert failures.classes[0].repair.median_s == 3600
    assert failures.scaled(0.5).per_host_day() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("repair_median_s", "repair_s", "GPU: repair_s: there is no such key"),
        ("[lemons]", "[melons]", "melons: there is no such key"),
        ("= 2\n", "= -2\n", "out of range; give a number from 0"),
        ("= 2\n", "= nan\n", "out of range"),
        ("= 2\n", '= "many"\n', "mine.toml: GPU: failures_per_1000_host_days = 'many': is no number"),
        ("= 2\n", "= true\n", "failures_per_1000_host_days = True: is no number"),
        ("failures_per_1000_host_days = 2", "", "failures_per_1000_host_days: the file says too little"),
        ('name = "GPU"', "", "says too little"),
        ("[[class]]", "[class]", "mine.toml: class: the file says too little; write [[class]]"),
        ("repair_p90_s = 7200", "", "GPU: repair_median_s: are no one way to repair; write repair_median_s with"),
        ("repair_p90_s = 7200", "repair_fixed_s = 1", "repair_fixed_s, repair_median_s: are no one way to repair"),
        ("repair_median_s = 3600", "", "GPU: repair_p90_s: are no one way"),
        ("repair_median_s = 3600\nrepair_p90_s = 7200", "repair_values_s = 3", "repair_values_s = 3: is no list"),
        ('"stops"', '"stops"\nmemory_survives = "no"', "memory_survives = 'no': is neither; write true or false"),
        ("[lemons]", "[[lemons]]", "lemons: the file says too little; write [lemons]"),
        ("share_ratio = 0.01", 'share_ratio = "0.01"', "lemons.share_ratio = '0.01': is no number"),
        ('"stops"', '"explodes"', "no such effect; choose one of stops"),
        ('"measured"', '"guessed"', "no such mark"),
        ("= 7200", "= 60", "p90_s"),
        ("0.01", "1.5", "lemon_share"),
        ("[[class]]", "[[class]", "no TOML"),
        ('source = "me"', "", "says too little"),
    ],
)
def test_a_wrong_file_is_refused_with_the_cure(tmp_path: Path, old: str, new: str, words: str) -> None:
    with pytest.raises(UserError) as refused:
        load_failures(write(tmp_path, GOOD.replace(old, new, 1)))
    assert words in str(refused.value)


def test_unknown_failures_are_refused_with_the_known_ones() -> None:
    for name in ("nobody", "", "x" * 300):
        with pytest.raises(UserError, match="choose one of infinitehbd, llama3, meta-rsc1"):
            load_failures(name)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "deep.toml").write_text("x = " + "[" * 10_000)
    for name, said in (("folder", "Is a directory"), ("deep", "is no TOML"), ("nothing", "No such file")):
        with pytest.raises(UserError, match=f"{name}.toml: .*{said}"):
            load_failures(str(tmp_path / f"{name}.toml"))


WORK = Work(4)
NONE = Failures(())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Work(0),
        lambda: Work(4, devices_per_host=0),
        lambda: Work(4, step_s=0),
        lambda: Work(4, days=0),
        lambda: Work(4, days=float("inf")),
        lambda: Work(4, price_per_device_hour=-1),
        lambda: FailureClass("x", -1),
        lambda: FailureClass("x", 1, slowdown=0.5),
        lambda: FailureClass("x", 1, "bang"),  # type: ignore[arg-type]
        lambda: FailureClass("x", 1, detection_s=-1),
        lambda: Failures((), lemon_share=2),
        lambda: Failures((), lemon_times=0.5),
        lambda: Failures((), idle_ratio=1.5),
        lambda: NONE.scaled(1.0),
        lambda: Recovery(detection_s=float("nan")),
        lambda: Recovery(spread=-1),
        lambda: Checkpoints(0),
        lambda: Checkpoints(60, persist_s=61),
        lambda: Checkpoints(60, memory_interval_s=61),
        lambda: Checkpoints(60, memory_interval_s=1e-9),
        lambda: Pool(spares=-1),
        lambda: Pool(when_missing="cry"),  # type: ignore[arg-type]
        lambda: Pool(shrink_by=0),
        lambda: FailureScenario(WORK, NONE, pool=Pool(smallest_hosts=5)),
        lambda: Duration.observed(()),
        lambda: Duration.fixed(-1),
        lambda: Duration.lognormal(0, 1),
        lambda: Duration.lognormal(2, 1),
    ],
)
def test_values_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises(UserError) as refused:
        make()
    assert ";" in str(refused.value)  # the cure


def test_values_and_formulas_need_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; import phalanx.simulate.failure_model, phalanx.simulate.failure_formulas, "
        "phalanx.simulate.failure_trace; assert not {'torch', 'numpy', 'scipy', 'pandas'} & set(sys.modules)\n"
        "import phalanx.simulate.failure_simulation; assert not {'torch', 'scipy', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
