"""What a user would import by the docs is there, works as it is shown, and costs nothing before it is asked for."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import phalanx
from phalanx.core.errors import UserError
from phalanx.model.config import ModelConfig
from phalanx.simulate.failure_report import months_text

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "examples").glob("*.py")])
PAGE = (ROOT / "docs" / "api.md").read_text()
NAMES = re.findall(r"^\| `phalanx\.(\w+)` \| ", PAGE.partition("## Rooms")[0], flags=re.MULTILINE)
ROOMS = re.findall(r"^\| `(phalanx\.\w+)`", PAGE.partition("## Rooms")[2], flags=re.MULTILINE)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def imports_of(page: Path) -> list[tuple[str, list[str]]]:
    """Every ``from phalanx… import …`` of a page: module and names."""
    found = re.findall(r"from (phalanx[\w.]*) import \(?([\w, ]+)", page.read_text())
    return [(module, [name.split()[0] for name in names.split(",") if name.strip()]) for module, names in found]


@pytest.mark.parametrize("page", [page for page in PAGES if imports_of(page)], ids=lambda page: page.name)
def test_every_name_that_the_docs_import_is_there(page: Path) -> None:
    for module, names in imports_of(page):
        for name in names:
            imported = importlib.import_module(module)
            assert hasattr(imported, name) or importlib.import_module(f"{module}.{name}"), f"{module}.{name}"


def test_the_package_offers_what_the_page_says_and_nothing_else() -> None:
    assert set(NAMES) == set(dir(phalanx)) >= {"load_config", "train", "plan", "search", "simulate", "Decoder"}
    for name in NAMES:
        assert callable(getattr(phalanx, name))
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = phalanx.Nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize("before", ["", "import phalanx.train.config, phalanx.plan.types, phalanx.simulate.traffic"])
def test_rooms_can_be_called_whatever_was_imported_before_and_cost_no_torch(before: str) -> None:
    code = f"""
import sys
{before}
import phalanx
from phalanx import plan, simulate, train
assert plan is phalanx.plan and callable(train) and callable(phalanx.train)
settings = ["train.steps=9", "data.sources.0.kind=python-stdlib", "model.vocab_size=512", "data.sequence_length=64"]
config = phalanx.load_config(None, settings)
assert plan(config, "selene", 8).prediction.step_s > 0
assert simulate(64, days=2, runs=3, spares=1, seed=2).outcome.ettr.mean > 0.5
assert phalanx.train.RunConfig is type(config)
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=ENVIRONMENT)


def test_there_are_rooms() -> None:
    assert {"phalanx.optim", "phalanx.model", "phalanx.data", "phalanx.parallel", "phalanx.checkpoint"} <= set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_offers_what_its_row_says_and_nothing_else(room: str) -> None:
    module = importlib.import_module(room)
    row = next(line for line in PAGE.partition("## Rooms")[2].splitlines() if line.startswith(f"| `{room}`"))
    told = set(re.findall(r"`(\w+)`", row.split("|")[2]))
    assert told == set(module.__all__) == set(dir(module))
    for name in told:
        assert getattr(module, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = module.Nothing
    assert not [name for name in told if (ROOT / room.replace(".", "/") / f"{name}.py").exists()]


def test_naming_costs_no_torch() -> None:
    """A config may be imported by name too without it."""
    code = (
        f"import sys, {', '.join(ROOMS)}\nfrom phalanx.optim import OptimConfig\nfrom phalanx.train import RunConfig\n"
    )
    code += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_examples_run_as_they_are_printed(tmp_path: Path, number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS[number]], cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr


SETTINGS = ["train.steps=9", "data.sources.0.kind=python-stdlib", "model.vocab_size=512", "data.sequence_length=64"]


SMALL = ModelConfig(layers=1, hidden=32, heads=2, vocab_size=64, max_sequence=16)


class NoMethods:
    """Nothing that a callback has."""


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: phalanx.load_config(None, "train.steps=3"), "overrides"),
        (lambda: phalanx.load_config(None, {"train.steps": 3}), "overrides"),
        (lambda: phalanx.load_config(None, [3]), "overrides"),
        (lambda: phalanx.load_config(5), "path"),
        (lambda: phalanx.plan("tiny.toml", "selene", 64), "config"),
        (lambda: phalanx.search(phalanx.load_config(None, SETTINGS), "selene", 8, top=0), "top"),
        (lambda: phalanx.search(phalanx.load_config(None, SETTINGS), "selene", 8, where="tensor=8"), "where"),
        (lambda: phalanx.train("tiny.toml", callbacks=[NoMethods()]), "callbacks"),
        (lambda: phalanx.train("tiny.toml", callbacks=[phalanx.Callback]), "callbacks"),
        (lambda: ModelConfig(layers="six"), "layers"),
        (lambda: ModelConfig(hidden=None), "hidden"),
        (lambda: ModelConfig(rope_scaling=[1]), "rope_scaling"),
        (lambda: ModelConfig(hiden=5), "hiden"),
        (lambda: phalanx.Decoder(None), "config"),
        (lambda: phalanx.Decoder({"layers": 1}), "config"),
        (lambda: phalanx.Decoder(SMALL, dtype="float32"), "dtype"),
        (lambda: phalanx.Decoder(SMALL, compute_dtype=torch.int8), "compute_dtype"),
        (lambda: phalanx.Decoder(SMALL, device="gpu"), "device"),
        (lambda: phalanx.Decoder(SMALL, device=[1]), "device"),
        (lambda: phalanx.Decoder(SMALL, layers=3), "layers"),
        (lambda: phalanx.Decoder(SMALL, layers=range(5)), "layers"),
        (lambda: phalanx.Decoder(SMALL, fp8_layers=3), "fp8_layers"),
        (lambda: phalanx.simulate("many"), "--devices"),
        (lambda: phalanx.simulate(64, runs="x"), "--runs"),
        (lambda: phalanx.simulate(64, seed=1.5), "--seed"),
        (lambda: phalanx.simulate(64, compare="yes"), "--compare"),
        (lambda: phalanx.simulate(64, days="ninety"), "--days"),
        (lambda: phalanx.simulate(64, price=None), "--price"),
        (lambda: phalanx.simulate(64, failures=5), "--failures"),
        (lambda: phalanx.simulate(64, trace=5), "--trace"),
        (lambda: phalanx.simulate(64, interval=[1]), "--interval"),
        (lambda: phalanx.simulate(64, restart_s=True), "--restart-s"),
        (lambda: phalanx.simulate(64, years=3), "--years"),
    ],
)
def test_what_a_notebook_gets_wrong_is_named(call: Callable[[], object], field: str) -> None:
    with pytest.raises(UserError) as error:
        call()
    assert error.value.field == field and error.value.cure


@pytest.mark.parametrize("name", ["train", "plan", "simulate"])
def test_a_room_that_is_called_pickles_by_its_name(name: str) -> None:
    room = getattr(phalanx, name)
    assert pickle.loads(pickle.dumps(room)) is room and copy.deepcopy({"call": room})["call"] is room


def test_numbers_of_numpy_are_numbers() -> None:
    settings = {"days": np.float32(3), "step_s": np.float64(2), "spares": 2, "runs": np.int32(2)}
    console = Console(record=True, file=io.StringIO())
    console.print(months_text(phalanx.simulate(np.int64(64), **settings)))
    assert "64" in console.export_text()


def test_help_shows_the_arguments_of_a_room_that_is_called() -> None:
    assert "callbacks" in inspect.signature(phalanx.train).parameters
    assert "devices" in inspect.signature(phalanx.plan).parameters


_TWICE = """
import phalanx

class Fails(phalanx.Callback):
    def on_step(self, report):
        if report.step == 2:
            raise ValueError("mine")

settings = ["data.sources.0.kind=text", "data.sources.0.path=words.txt", "data.validation_fraction=0",
    "data.tokenizer.kind=bytes", "model.layers=2",
    "model.hidden=32", "model.heads=2", "data.sequence_length=16", "train.global_batch=4", "parallel.devices=2",
    "logging.every_steps=1", "optim.name=adamw", "optim.muon={}", "data.folder=prepared"]

def train(name, steps, **more):
    config = phalanx.load_config(None, [*settings, f"run.folder={name}", f"train.steps={steps}"])
    return phalanx.train(config, quiet=True, **more)

print("steps", train("first", 2).steps, train("second", 3).steps, flush=True)
try:
    train("third", 6, callbacks=[Fails()])
except phalanx.CallbackError as error:
    print("caught", error, flush=True)
"""


@pytest.mark.slow
def test_two_ranks_of_torchrun_train_twice_and_hear_of_a_failed_callback(tmp_path: Path) -> None:
    """The launcher's store outlives the first run; an error is raised, as documented, not an exit."""
    (tmp_path / "words.txt").write_text("a rose is a rose is a rose\\n" * 200)
    (tmp_path / "twice.py").write_text(_TWICE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "twice.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("steps 2 3") == 2
    assert done.stdout.count("caught Fails.on_step failed at step 2 (ValueError: mine)") == 1  # on rank 0
