"""`phalanx plan CONFIG --search`: the best is what `phalanx plan` says of the settings that it prints."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from phalanx.cli.plan_command import command as plan
from phalanx.core.errors import UserError

SMALL = """
[data]
sequence_length = 2048
[model]
vocab_size = 50304
layers = 8
hidden = 2048
heads = 16
[train]
steps = 1000
global_batch = 64
"""
ON = ("--cluster", "selene", "--devices", "16")
FEW = ("--where", "tensor<=4", "--where", "context=1", "--where", "schedule=1f1b", "--where", "zero=1,2")


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "small.toml").write_text(SMALL)
    return str(tmp_path / "small.toml")


def _plan(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(plan, list(arguments), catch_exceptions=True)


def test_the_settings_that_are_printed_give_what_was_promised(config: str) -> None:
    done = _plan(config, *ON, "--search", *FEW, "--top", "3", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert len(found["best"]) == 3
    sections = tomllib.loads(found["best"][0]["toml"])
    words = [
        f"{section}.{key}={json.dumps(value)}" for section, keys in sections.items() for key, value in keys.items()
    ]
    again = json.loads(_plan(config, *ON, *words, "--json").output)
    assert again["step_s"] == pytest.approx(found["best"][0]["step_s"], rel=1e-12)
    assert again["strategy"] == found["best"][0]["strategy"]
    assert found["prediction_of_best"]["step_s"] == again["step_s"]


def test_it_is_shown_and_written(config: str, tmp_path: Path) -> None:
    done = _plan(config, *ON, "--search", *FEW, "--html", str(tmp_path / "search.html"))
    assert done.exit_code == 0, done.output
    for words in ("the fastest layouts", "what limits the fastest", "to paste into the config", "page: "):
        assert words in done.output
    page = (tmp_path / "search.html").read_text()
    assert all(f'id="{name}"' in page for name in ("pareto", "choices", "step", "memory"))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--search", "--where", "tensr=8"), "no 'tensr' to constrain"),
        (("--where", "tensor=8"), "is about a search"),
        (("--search", "--where", "memory<=50MB"), "fit"),
    ],
)
def test_nonsense_is_refused(config: str, words: tuple[str, ...], problem: str) -> None:
    error = _plan(config, *ON, *words).exception
    assert isinstance(error, UserError)
    assert problem in str(error)
