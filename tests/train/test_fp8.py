"""`train.precision = "fp8"`: what is refused, which blocks it is in, and runs with it."""

from pathlib import Path
from typing import Any

import pytest
from train_helpers import configured

from phalanx.core.errors import UserError
from phalanx.train import device
from phalanx.train.config import TrainConfig

FITS: dict[str, Any] = {
    "train.precision": "fp8",
    "model.layers": 3,
    "model.hidden": 32,
    "model.heads": 2,
    "model.mlp_hidden": 48,
    "data.sequence_length": 16,
    "data.tokenizer.kind": "bytes",
}


@pytest.mark.parametrize(
    ("changes", "named", "cure"),
    [
        ({"model.hidden": 40}, r"model\.hidden .* 40, no multiple of 16", "multiple of 16"),
        ({"model.mlp_hidden": 40}, r"model\.mlp_hidden .* 40", "multiple of 16"),
        ({"model.head_size": 12}, r"model\.heads .* 24", "model.head_size = 16"),
        ({"model.heads": 4, "model.head_size": 4, "model.kv_heads": 1}, r"model\.kv_heads .* 24", "head_size = 16"),
        ({"data.sequence_length": 24}, r"data\.sequence_length .* 24", "multiple of 16"),
        ({"parallel.context": 2}, r"data\.sequence_length .* 8", "multiple of 32"),
        ({"parallel.tensor": 2}, r"parallel\.tensor = 2", "shard, replicate, context"),
        ({"parallel.pipeline": 2, "parallel.schedule": "zbv"}, r"parallel\.schedule = 'zbv'", "1f1b"),
        ({"model.layers": 2}, r"model\.layers = 2", "lower them"),
        ({"train.bf16_layers_at_end": 2}, r"bf16_layers_at_end = 2", "lower them"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str, cure: str) -> None:
    with pytest.raises(UserError, match=named) as error:
        configured(tmp_path, FITS | changes)
    assert cure in error.value.cure
    assert "train.precision = 'bf16'" in error.value.cure
    configured(tmp_path, FITS | changes | {"train.precision": "bf16"})
    configured(tmp_path, FITS)


@pytest.mark.parametrize(("start", "end", "expected"), [(1, 1, [1, 2]), (0, 0, [0, 1, 2, 3]), (0, 3, [0]), (3, 3, [])])
def test_first_and_last_blocks_stay_in_bf16(start: int, end: int, expected: list[int]) -> None:
    train = TrainConfig(steps=1, precision="fp8", bf16_layers_at_start=start, bf16_layers_at_end=end)
    assert list(train.fp8_layers(4)) == expected
    assert not TrainConfig(steps=1, precision="bf16").fp8_layers(4)


def test_a_gpu_without_it_is_refused() -> None:
    with pytest.raises(UserError, match=r"compute capability 8\.0; 8\.9 is needed") as error:
        device._require_fp8((8, 0))
    assert error.value.field == "train.precision"
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        device._require_fp8(capability)


def test_a_setting_without_effect_is_told() -> None:
    assert not TrainConfig(steps=1).ignored()
    told = TrainConfig(steps=1, bf16_layers_at_start=2).ignored()
    assert told == ["train.bf16_layers_at_start = 2 has no effect: train.precision is not fp8"]
    assert not TrainConfig(steps=1, precision="fp8", bf16_layers_at_start=2).ignored()
