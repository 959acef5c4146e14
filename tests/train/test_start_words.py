"""What a person is told when ranks start: how long it took, which layout, and that their number is wrong."""

from __future__ import annotations

import pytest

from phalanx.core.config import validate
from phalanx.core.errors import UserError
from phalanx.core.phases import Phases
from phalanx.parallel.layout_choice import Machines
from phalanx.train.config import RunConfig
from phalanx.train.derived.run_layout import check_started, resolve_layout
from phalanx.train.summary import started


def config(**parallel: object) -> RunConfig:
    model = {"layers": 4, "hidden": 32, "heads": 4, "vocab_size": 64, "vocab_multiple": 1}
    train = {"steps": 2, "global_batch": 8}
    tree = {"model": model, "train": train, "optim": {"name": "adamw"}, "parallel": parallel}
    return validate(RunConfig, tree)


def test_starting_is_told_in_few_words() -> None:
    phases = Phases()
    for name, seconds in (("template", 2.0), ("fork", 0.02), ("setup", 0.1), ("store", 0.01), ("data", 0.001)):
        phases.add(name, seconds)
    for name in ("mesh/control", "mesh/shard"):
        phases.add(name, 0.05)
    assert started(phases) == "started in 2.2 s (imports 2.00, fork 0.02, groups 0.11)"
    assert started(Phases()) == "started in 0.0 s"


def test_reasons_of_a_chosen_layout_are_told_once_and_together() -> None:
    said: list[str] = []
    chosen = resolve_layout(config(devices=2), 64, Machines(2), 2, said.append)
    assert chosen.parallel.layout.shard == 2 and chosen.parallel.devices == 0
    assert len(said) == 1 and said[0].startswith("layout chosen for 2 ranks:\n  shard = 2: ")
    resolve_layout(config(shard=2), 64, Machines(2), 2, said.append)
    assert len(said) == 1


def test_another_number_of_ranks_is_refused_with_both_numbers() -> None:
    check_started(config(), 7)  # nothing asked for: any number will do
    check_started(config(tensor=2), 2)
    with pytest.raises(UserError, match=r"parallel: pipeline 2 x tensor 2 needs 4 ranks, and 2 were started; start 4"):
        check_started(config(tensor=2, pipeline=2), 2)
    with pytest.raises(UserError, match=r"devices = 4 needs 4 ranks, and 1 was started.*parallel\.devices=1"):
        check_started(config(devices=4), 1)
