"""Whether layers are compiled, and why not."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.train.config import RunConfig
from phalanx.train.derived import kernel_choice
from phalanx.train.derived.kernel_choice import Compiling, decide_compiling, lacking_for_a_gpu

TENSOR = {"parallel": {"tensor": 2}}
ZERO_BUBBLE = {"parallel": {"pipeline": 2, "schedule": "zbv"}}
DROPOUT = {"model": {"dropout": 0.1}}
CHUNKED = {"model": {"attention_backend": "chunked"}}


def _config(settings: dict[str, Any], **train: Any) -> RunConfig:
    text = {"sources": [{"kind": "text", "path": "here"}]}
    return RunConfig.model_validate(settings | {"train": {"steps": 1} | train, "data": text})


def test_auto_compiles_on_a_gpu_alone() -> None:
    assert decide_compiling(_config({}), on_gpu=True) == Compiling(True)
    assert decide_compiling(_config({}), on_gpu=False) == Compiling(False)
    assert decide_compiling(_config({}, compile=True), on_gpu=False) == Compiling(True)
    assert decide_compiling(_config({}, compile=False), on_gpu=True) == Compiling(False)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (TENSOR, "parallel.tensor = 2"),
        ({"parallel": {"context": 2}}, "parallel.context = 2"),
        (ZERO_BUBBLE, "parallel.schedule = 'zbv'"),
        (DROPOUT, "model.dropout = 0.1"),
        (CHUNKED, "model.attention_backend = 'chunked'"),
    ],
)
def test_what_no_compiler_sees_is_named(settings: dict[str, Any], named: str) -> None:
    on, why = decide_compiling(_config(settings), on_gpu=True)
    assert on and why == f"layers are compiled in pieces, around {named}"
    on, why = decide_compiling(_config(settings, recompute="selective"), on_gpu=True)
    assert not on and "train.recompute = 'selective'" in why and named in why
    with pytest.raises(ValueError, match=r"set train\.compile = false, or train\.recompute to none or full"):
        _config(settings, recompute="selective", compile=True)


def test_a_gpu_without_a_c_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(kernel_choice.importlib.util, "find_spec", lambda name: name)
    on, why = decide_compiling(_config({}), on_gpu=True, lacking=lacking_for_a_gpu())
    assert not on and "there is no C compiler here" in why
    assert decide_compiling(_config({}, compile=True), on_gpu=True, lacking=why).on


def test_a_gpu_without_triton_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice.importlib.util, "find_spec", lambda name: None)
    assert "no package triton" in decide_compiling(_config({}), on_gpu=True, lacking=lacking_for_a_gpu()).why


def test_compile_is_one_of_three() -> None:
    with pytest.raises(ValueError, match="Input should be 'auto', True or False") as told:
        _config({}, compile="maybe")
    assert str(told.value).count("input_value") == 1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model": {"attention_backend": "cudnn"}}, "model.attention_backend = 'cudnn'"),
        ({"parallel": {"tensor": 2, "tensor_overlap": "fused"}}, "parallel.tensor_overlap = 'fused'"),
    ],
)
def test_what_needs_a_gpu_is_refused_on_a_cpu(settings: dict[str, Any], named: str) -> None:
    assert _config(settings).asks_for_a_gpu() == named
    with pytest.raises(ValueError, match=f"{named} needs a GPU, and train.device = 'cpu' is none"):
        _config(settings, device="cpu")
