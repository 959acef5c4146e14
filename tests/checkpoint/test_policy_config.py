"""`CheckpointConfig`: what it accepts, what it refuses and the cure it names, and what follows from it."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.core.config import load, validate, walk
from phalanx.core.errors import UserError
from phalanx.core.units import parse_size


def test_every_field_is_described() -> None:
    assert all(field.description for _, _, field in walk(CheckpointConfig()))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500 GB", 500 * 10**9),
        ("1.5 TiB", 3 * 2**39),
        ("1000", 1000),
        ("2k", 2000),
        ("2 KiB", 2048),
        ("7 B", 7),
        ("3PB", 3 * 10**15),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected
    assert CheckpointConfig.model_validate({"budget_bytes": text}).budget_bytes == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget_bytes": "much"}, "budget_bytes: 'much' is no size; write bytes, or such as \"500 GB\""),
        ({"budget_bytes": "1.2.3 GB"}, "'1.2.3 GB' is no size"),
        ({"budget_bytes": -1}, "budget_bytes = -1: .*no limit"),
        ({"mode": "blocking", "memory_every_steps": 5}, "memory_every_steps = 5 does not fit mode = 'blocking'.*; set"),
        ({"mode": "blocking", "replicas": True}, "replicas = true does not fit.*; set mode = 'background'"),
        ({"memory_slots": 1}, "memory_slots = 1 leaves no good snapshot.*; set it to 2, 3 or 4"),
        ({"memory_slots": 5}, "memory_slots = 5: .*2 to 4"),
        ({"storage_options": {"a": 1}}, "folder = '' is no URL; give folder as a URL"),
        ({"folder": "s3://b/c", "storage_options": {"secret": "x"}}, r"storage_options\.secret looks like a secret"),
        (
            {"folder": "s3://b/c", "storage_options": {"client_kwargs": {"aws_session_token": "x"}}},
            r"client_kwargs\.aws_session_token looks like a secret.*; give it in the environment",
        ),
        ({"replicas": "yes"}, "replicas = 'yes': .*auto"),
        ({"every_s": -1}, "every_s = -1: .*seconds"),
        ({"wall_time_margin_s": -1}, "wall_time_margin_s = -1"),
    ],
)
def test_refused_with_the_cure(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(CheckpointConfig, settings)


def test_overrides_reach_a_table() -> None:
    given = ["folder=s3://b/c", "storage_options.endpoint_url=http://h:1", "replicas=auto", "budget_bytes=5 GB"]
    config = load(CheckpointConfig, None, given).value
    assert config.storage_options == {"endpoint_url": "http://h:1"}
    assert config.budget_bytes == 5 * 10**9
    again = CheckpointConfig.model_validate(config.model_dump(mode="json"))
    assert again == config


def test_both_modes_write_to_object_stores() -> None:
    for mode in ("blocking", "background"):
        assert validate(CheckpointConfig, {"mode": mode, "folder": "s3://b/c"}).folder == "s3://b/c"


def test_slots() -> None:
    assert CheckpointConfig().slots == 2
    assert CheckpointConfig(memory_every_steps=1).slots == 3
    assert CheckpointConfig(memory_every_steps=1, memory_slots=2).slots == 2


def test_replicas() -> None:
    assert CheckpointConfig().replicated(hosts=2)
    assert not CheckpointConfig().replicated(hosts=1)
    assert not CheckpointConfig(replicas=False).replicated(hosts=2)
    assert not CheckpointConfig(replicas=True).replicated(hosts=1)


def test_rack() -> None:
    slurm = {"SLURM_TOPOLOGY_ADDR": "s0.s4.node17"}
    assert CheckpointConfig().rack_of({}) == ""
    assert CheckpointConfig().rack_of({"SLURM_TOPOLOGY_ADDR": "node17"}) == ""
    assert CheckpointConfig().rack_of(slurm) == "s0.s4"
    assert CheckpointConfig().rack_of(slurm | {"PHALANX_RACK": "r7"}) == "r7"
    assert CheckpointConfig(rack="r8").rack_of(slurm | {"PHALANX_RACK": "r7"}) == "r8"
