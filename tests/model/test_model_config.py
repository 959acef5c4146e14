from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from phalanx.core.config import validate
from phalanx.core.errors import UserError
from phalanx.model.config import ModelConfig


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"hidden": 100, "heads": 6}, ("heads = 6", "hidden = 100", "multiple of heads")),
        ({"heads": 12, "kv_heads": 5}, ("kv_heads = 5", "heads = 12", "1, 2, 3, 4, 6, 12")),
        ({"hidden": 21, "heads": 3}, ("head_size = 7", "position = 'rotary'", "even")),
        ({"attention": ["window", "full"]}, ("attention", "window = 0", "set window")),
        ({"window": 64}, ("window = 64", "attention", "add")),
        ({"attention_dropout": 0.1}, ("attention_dropout = 0.1", "attention_backend = 'auto'", "'math'")),
        ({"merged_projections": True}, ("merged_projections", "block = 'serial'", "'parallel'")),
        ({"position": "learned", "rope_scaling": {"kind": "yarn"}}, ("rope_scaling", "position = 'learned'", "rotary")),
        ({"rope_scaling": {"kind": "llama3", "low_freq_factor": 4}}, ("low_freq_factor", "high_freq_factor", "make")),
    ],
)
def test_settings_that_do_not_fit_name_both_fields_and_the_cure(
    settings: dict[str, Any], named: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as caught:
        validate(ModelConfig, settings)
    assert all(part in str(caught.value) for part in named), str(caught.value)


@pytest.mark.parametrize("field", ["dropout", "attention_dropout"])
def test_a_rate_of_one_is_refused(field: str) -> None:
    with pytest.raises(UserError, match=field):
        validate(ModelConfig, {field: 1.0, "attention_backend": "math"})


def test_derived_sizes() -> None:
    config = ModelConfig(hidden=1024, heads=16, kv_heads=4, vocab_size=50257, vocab_multiple=64)
    assert (config.head_dim, config.num_kv_heads, config.vocab_rows) == (64, 4, 50304)
    assert config.mlp_width == 2752  # 8/3 * 1024 = 2730.7, up to the next multiple of 64
    assert ModelConfig(hidden=1024, heads=16, activation="gelu").mlp_width == 4096
    assert ModelConfig(mlp_hidden=1000).mlp_width == 1000


def test_the_attention_pattern_repeats_over_depth() -> None:
    config = ModelConfig(attention=("window", "window", "full"), window=7)
    assert [config.window_of(layer) for layer in range(5)] == [7, 7, None, 7, 7]


def test_only_parallel_blocks_merge() -> None:
    assert not ModelConfig().merged
    assert not ModelConfig(block="parallel").merged
    assert ModelConfig(block="parallel", merged_projections=True).merged


def test_config_and_shapes_do_not_import_torch() -> None:
    code = "import phalanx.model.shapes, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
