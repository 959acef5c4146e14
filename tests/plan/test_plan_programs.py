"""Layouts of programs other than ours: chosen by their memory, among those that they have, with cures that hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from phalanx.cli.plan_command import command as plan
from phalanx.core.errors import UserError
from phalanx.plan.software import LAYOUTS, SOFTWARE

LLAMA = str(Path(__file__).parents[2] / "configs" / "plan" / "llama-70b.toml")


def _plan(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(plan, [LLAMA, "--cluster", "h100_400g", "--devices", "64", *words])


@pytest.mark.parametrize("program", sorted(SOFTWARE.keys() - {"deepspeed"}))
def test_the_layout_of_open_axes_fits_by_the_programs_own_memory_and_is_one_that_it_has(program: str) -> None:
    told = _plan("--software", program, "--json")
    assert told.exit_code == 0, told.output
    found = json.loads(told.output)
    assert found["fits"]
    for key, allowed in LAYOUTS.get(program, {}).items():
        if key in ("zero", "pipeline", "tensor", "context"):
            assert found["strategy"][key] in allowed


@pytest.mark.parametrize(
    ("program", "word", "said"),
    [
        ("deepspeed-zero3", "parallel.pipeline=2", "parallel.pipeline"),
        ("megatron-lm-2022", "parallel.zero=3", "parallel.zero"),
        ("fsdp2", "parallel.zero=1", "parallel.zero"),
    ],
)
def test_a_layout_that_a_program_does_not_have_is_refused(program: str, word: str, said: str) -> None:
    axes = ["parallel.shard=8", "parallel.tensor=8"]
    if "pipeline" in word:
        axes = ["parallel.shard=32", "parallel.zero=3"]
    error = _plan("--software", program, *axes, word).exception
    assert isinstance(error, UserError) and said in str(error) and f"is not what {program} has" in str(error)


def test_where_no_layout_of_a_program_fits_none_is_shown() -> None:
    """ZeRO 2 keeps all 70 billion weights on every GPU."""
    error = _plan("--software", "deepspeed").exception
    assert isinstance(error, UserError) and "no layout of so many devices fits" in str(error)


def test_an_axis_that_a_program_does_not_have_is_named_where_the_others_are_open() -> None:
    error = _plan("--software", "deepspeed", "parallel.context=2").exception
    assert isinstance(error, UserError) and error.field == "parallel.context" and "set it to 1" in str(error)


def test_a_search_stays_within_the_program() -> None:
    found = json.loads(_plan("--software", "deepspeed-zero3", "--search", "--json").output)
    strategy = found["prediction_of_best"]["strategy"]
    assert (strategy["zero"], strategy["pipeline"], strategy["tensor"], strategy["context"]) == (3, 1, 1, 1)
    error = _plan("--software", "deepspeed-zero3", "--search", "--where", "zero=1").exception
    assert isinstance(error, UserError) and "is not what deepspeed-zero3 has" in str(error)


@pytest.mark.parametrize("program", ["phalanx", "megatron-lm-2022", "megatron-core"])
def test_a_cure_that_is_followed_takes_what_it_says(program: str) -> None:
    axes = ["parallel.shard=8", "parallel.tensor=8", "train.recompute=none", "train.micro_batch=4"]
    found = json.loads(_plan("--software", program, *axes, "--json").output)
    assert not found["fits"] and found["reliefs"]
    for cure in found["reliefs"]:
        settings = cure["settings"].split()
        assert settings
        given = {word.partition("=")[0]: word for word in (*axes, *settings)}
        again = json.loads(_plan("--software", program, *given.values(), "--json").output)
        assert again["fits"]
        fullest = max(rank["total_bytes"] for rank in again["memory"])
        assert fullest == pytest.approx(cure["fullest_bytes"], rel=1e-6)
