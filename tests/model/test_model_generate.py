from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from model_builders import VARIANTS, build, tiny, tokens

from phalanx.core.errors import UserError
from phalanx.model.generate import generate


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cuts", [(1, 2, 3, 16), (7, 16), (5, 11, 12, 13, 14, 15, 16)])
def test_cached_hidden_states_are_the_uncached_ones(variant: str, cuts: tuple[int, ...]) -> None:
    config = tiny(variant)
    model, ids = build(config), tokens(config)
    cache = model.new_cache(2, 16)
    with torch.no_grad():
        whole = model(ids)
        pieces = [model(ids[:, a:b], cache=cache) for a, b in pairwise((0, *cuts))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-5)
    assert cache.length == 16


@pytest.mark.parametrize("variant", ["llama", "windows"])
def test_greedy_is_the_likeliest_token_of_the_uncached_model(variant: str) -> None:
    config = tiny(variant)
    model, seen = build(config), [3, 1, 4]
    for token in generate(model, [3, 1, 4], max_new_tokens=20, temperature=0):
        logits = model.logits(model(torch.tensor([seen])))[0, -1, : config.vocab_size]
        assert token == int(logits.argmax())
        seen.append(token)
    assert len(seen) == 23


def test_a_seed_repeats_and_leaves_the_global_generator_alone() -> None:
    model = build(tiny())
    state = torch.get_rng_state()
    first = list(generate(model, [1], max_new_tokens=20, seed=5))
    assert first == list(generate(model, [1], max_new_tokens=20, seed=5))
    assert first != list(generate(model, [1], max_new_tokens=20, seed=6))
    assert torch.equal(state, torch.get_rng_state())


def test_padding_rows_are_never_sampled() -> None:
    config = tiny()
    model = build(config)
    with torch.no_grad():
        model.head.weight[config.vocab_size :] = 100 * model.head.weight[: config.vocab_rows - config.vocab_size]
    assert max(generate(model, [1], max_new_tokens=20, temperature=5.0)) < config.vocab_size


def test_it_stops_at_end_of_text() -> None:
    model = build(tiny())
    whole = list(generate(model, [1], max_new_tokens=20, seed=5))
    stop = whole[6]
    assert list(generate(model, [1], max_new_tokens=20, seed=5, stop={stop})) == whole[: whole.index(stop)]


def test_it_leaves_no_inference_mode_behind() -> None:
    for _ in generate(build(tiny()), [1], max_new_tokens=2):
        assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [(1.0, 0, [0, 1, 2, 3]), (0.5, 0, [1]), (0.51, 0, [1, 3]), (0.85, 0, [1, 3, 0]), (1.0, 2, [1, 3]), (1e-9, 0, [1])],
)
def test_truncation_keeps_the_nucleus(top_p: float, top_k: int, kept: list[int]) -> None:
    probabilities = torch.tensor([0.15, 0.5, 0.05, 0.3])
    out = truncate(probabilities, top_p, top_k)
    expected = torch.zeros(4)
    expected[kept] = probabilities[kept]
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("prompt", "settings", "named"),
    [
        ([], {}, "nothing to continue"),
        ([61], {}, "token = 61"),
        ([-1], {}, "token = -1"),
        ([1], {"top_p": 0.0}, "top_p = 0.0"),
        ([1], {"temperature": -1.0}, "temperature = -1.0"),
        ([1], {"top_k": -1}, "top_k = -1"),
        ([1], {"max_new_tokens": 24}, r"max_sequence \(24\)"),
    ],
)
def test_bad_requests_are_refused_at_the_call(prompt: list[int], settings: dict[str, float], named: str) -> None:
    with pytest.raises(UserError, match=named):
        generate(build(tiny()), prompt, **{"max_new_tokens": 4, **settings})
