"""What a person may get wrong on the command line of the planner: refused at once, by name, with nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx.cli.calibration import counts_of
from phalanx.cli.main import group
from phalanx.core.errors import UserError

CONFIG = str(Path(__file__).parents[2] / "configs" / "plan" / "gpt-175b.toml")
PLAN = ("plan", CONFIG, "--cluster", "megascale", "--devices", "1024")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model.layers=1000000000",), "model.layers = 1000000000: is more than can be predicted; give a number up to"),
        (("train.global_batch=1000000000000",), "train.global_batch = 1000000000000: is more than can be predicted"),
        (("data.sequence_length=99999999999",), "data.sequence_length = 99999999999: is more than can be predicted"),
        (("--search", "model.layers=1000000000"), "model.layers = 1000000000: is more than can be predicted"),
        (("model.hidden=1228800000000",), "Model.hidden = 1228800000000: is no such number"),
        (("--devices", "1000"), "cannot be shared by 1000 data-parallel ranks"),
        (("--cluster", "c" * 300), "is none of the clusters that come with Phalanx"),
    ],
)
def test_sizes_and_names_that_cannot_be_are_refused_at_once(words: tuple[str, ...], said: str) -> None:
    error = CliRunner().invoke(group, [*PLAN, *words]).exception
    assert isinstance(error, UserError)
    assert said in str(error)


COMMANDS = [
    PLAN,
    (*PLAN, "--search"),
    ("plan", "validate"),
    ("simulate", "network", "--devices", "1024"),
    ("simulate", "failures", "--devices", "1024"),
    ("simulate", "stragglers", "--devices", "1024"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("name", "said"),
    [("", "is no name of a file"), ("missing/page.html", "'missing' is no folder"), ("folder", "is a directory")],
)
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_computed(
    command: tuple[str, ...], name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    result = CliRunner().invoke(group, [*command, "--html", name])
    assert result.exit_code == 2
    assert "Invalid value for '--html'" in result.output and said in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_no_more_ranks_are_measured_than_a_host_has_room_for() -> None:
    with pytest.raises(UserError, match=r"--ranks = 100000: this host has \d+ cores; take up to \d+"):
        counts_of((2, 100_000), gpus=0)
    with pytest.raises(UserError, match=r"--ranks = 9: this host has 8 GPUs; take up to 8"):
        counts_of((9,), gpus=8)
    assert counts_of((2, 1, 2), gpus=0) == [1, 2]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ((*PLAN, "--search", "--top", "99999999999"), "--top"),
        (("simulate", "failures", "--devices", "64", "--runs", "99999999999"), "--runs"),
        (("simulate", "failures", "--devices", "64", "--trace-hosts", "99999999999"), "--trace-hosts"),
    ],
)
def test_counts_that_nobody_waits_for_are_refused(words: tuple[str, ...], option: str) -> None:
    result = CliRunner().invoke(group, [*words])
    assert result.exit_code == 2
    assert f"Invalid value for '{option}': 99999999999 is not in the range 1<=x<=" in result.output
