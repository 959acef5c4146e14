"""Generation: the cache against whole passes, batches against single prompts, samples against their probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from model_builders import VARIANTS, build, tiny, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.core.errors import UserError
from phalanx.kernels.counter import column_states
from phalanx.model import generate as generating
from phalanx.model.decoder import Decoder
from phalanx.model.generate import Sampler, Sampling, candidates, choose, generate, generate_batch, streams

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LENGTHS = (1, 9, 4, 13, 2, 12, 7, 1)


def _prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    return [tokens(tiny(), 1, length, seed=i)[0].tolist() for i, length in enumerate(lengths)]


def _likeliest(model: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy continuation by whole passes, without a cache."""
    seen = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = model.logits(model(torch.tensor([seen], device=model.embedding.weight.device)))[0, -1]
            seen.append(int(logits.argmax()))
    return seen[len(prompt) :]


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
    [
        (1.0, 0, [0, 1, 2, 3]),
        (0.5, 0, [1]),
        (0.51, 0, [1, 3]),
        (0.85, 0, [1, 3, 0]),
        (1.0, 2, [1, 3]),
        (1e-9, 0, [1]),
        (0.85, 2, [1, 3]),
        (0.5, 3, [1]),
        (1.0, 9, [0, 1, 2, 3]),
    ],
)
def test_truncation_keeps_the_nucleus(top_p: float, top_k: int, kept: list[int]) -> None:
    probabilities = torch.tensor([[0.15, 0.5, 0.05, 0.3]])
    likely, ids = candidates(probabilities.log(), Sampling(1.0, top_p, top_k))
    ids = torch.arange(4)[None] if ids is None else ids
    expected = torch.zeros(1, 4)
    expected[:, kept] = probabilities[:, kept]
    torch.testing.assert_close(torch.zeros(1, 4).scatter(1, ids, likely), expected)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(0.7, seed=1),
        Sampling(1.6, top_p=0.9),
        Sampling(1.0, top_k=5, seed=3),
        Sampling(0.9, top_p=0.8, top_k=7),
    ],
    ids=str,
)
def test_samples_have_their_exact_probabilities(sampling: Sampling) -> None:
    """Pearson's chi-square of 200,000 draws, at 8 standard deviations of its distribution."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(2))
    expected = torch.softmax(logits.double() / sampling.temperature, 0)
    ordered, order = expected.sort(descending=True)
    if sampling.top_k:
        ordered[sampling.top_k :] = 0
    ordered[(ordered.cumsum(0) - ordered) >= sampling.top_p] = 0
    expected = torch.zeros_like(expected).scatter(0, order, ordered / ordered.sum())
    draws, columns = 200_000, column_states(generating._KEY, torch.arange(40))
    noise = torch.arange(draws) + streams([[3, 1]], sampling.seed)[0]
    chosen = choose(logits.expand(draws, -1), sampling, noise, columns)
    found = torch.bincount(chosen, minlength=40).double()
    assert not found[expected == 0].any()
    found, wanted = found[expected > 0], draws * expected[expected > 0]
    freedom = len(found) - 1
    assert ((found - wanted).square() / wanted).sum() < freedom + 8 * (2 * freedom) ** 0.5 + 8


def test_a_tiny_temperature_is_greedy_and_not_nan() -> None:
    logits = torch.tensor([[3.0, 9.0, 8.999, -torch.inf]])
    columns = column_states(generating._KEY, torch.arange(4))
    for temperature in (1e-6, 2e-38, 1e-38, 1e-300, 5e-324):
        assert choose(logits, Sampling(temperature), torch.tensor([7]), columns).tolist() == [1]


def test_the_likeliest_of_one_is_greedy() -> None:
    model = build(tiny())
    greedy = list(generate(model, [3, 1, 4], max_new_tokens=20, temperature=0))
    assert list(generate(model, [3, 1, 4], max_new_tokens=20, top_k=1, seed=3)) == greedy


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_of_prompts_is_each_of_them_alone(variant: str) -> None:
    model, prompts = build(tiny(variant)), _prompts()
    found = list(generate_batch(model, prompts, max_new_tokens=11, temperature=0))
    assert found == [_likeliest(model, prompt, 11) for prompt in prompts]
    sampled = list(generate_batch(model, prompts, max_new_tokens=11, temperature=2.0, top_p=0.95, seed=5))
    alone = [list(generate(model, p, max_new_tokens=11, temperature=2.0, top_p=0.95, seed=5)) for p in prompts]
    assert sampled == alone
    assert sampled != found


@pytest.mark.parametrize("variant", ["llama", "windows", "gpt2"])
def test_prompts_in_several_passes_are_those_in_one(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = build(tiny(variant)), _prompts()
    whole = list(generate_batch(model, prompts, max_new_tokens=11, temperature=0))
    for tokens_at_once in (8 * 5, 8):
        monkeypatch.setattr(generating, "_PREFILL_TOKENS", tokens_at_once)
        assert list(generate_batch(model, prompts, max_new_tokens=11, temperature=0)) == whole


def test_a_text_depends_neither_on_its_batch_nor_on_its_neighbours() -> None:
    model, prompts = build(tiny()), _prompts()
    whole = list(generate_batch(model, prompts, max_new_tokens=9, seed=4))
    for batch in (1, 3, 5):
        assert list(generate_batch(model, prompts, max_new_tokens=9, seed=4, batch=batch)) == whole
    back = list(generate_batch(model, prompts[::-1][1:], max_new_tokens=9, seed=4, batch=2))
    assert back == whole[::-1][1:] and prompts[0] != prompts[7]


def test_a_prompt_that_comes_again_is_continued_in_another_way() -> None:
    model, (prompt,) = build(tiny()), _prompts([5])
    found = list(generate_batch(model, [prompt] * 4, max_new_tokens=12, seed=2, batch=3))
    assert found[0] == list(generate(model, prompt, max_new_tokens=12, seed=2))
    assert len(set(map(tuple, found))) == 4


def test_rows_end_for_themselves_and_a_full_sequence_waits_for_the_others() -> None:
    model, prompts = build(tiny("windows")), _prompts((23, 3, 24, 1, 14))
    limits = [1, 21, 0, 23, 4]
    whole = [_likeliest(model, prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    assert list(generate_batch(model, prompts, max_new_tokens=limits, temperature=0)) == whole
    stop = whole[3][2]
    cut = [text[: text.index(stop)] if stop in text else text for text in whole]
    assert list(generate_batch(model, prompts, max_new_tokens=limits, temperature=0, stop={stop})) == cut
    assert list(generate_batch(model, [], max_new_tokens=4)) == []


@pytest.mark.parametrize("variant", ["llama", "gpt2", "windows", "qwen", "merged_biased"])
def test_bf16_takes_a_token_that_whole_passes_find_as_likely(variant: str) -> None:
    """Up to the rounding of products in bf16: its 8 bits leave ties."""
    model, prompts = build(tiny(variant), compute_dtype=torch.bfloat16), _prompts()
    for prompt, text in zip(prompts, generate_batch(model, prompts, max_new_tokens=11, temperature=0), strict=True):
        with torch.no_grad():
            logits = model.logits(model(torch.tensor([prompt + text[:-1]])))[0, len(prompt) - 1 :]
        taken = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert (taken >= logits.amax(1) - 0.03 * logits[:, :61].abs().amax()).all()


@pytest.mark.parametrize("variant", ["llama", "windows", "gpt2"])
def test_a_step_repeats_shapes_and_addresses_and_never_waits(variant: str) -> None:
    """All that a CUDA graph needs: the same operators on the same buffers, and no value that the host would read."""
    sampler = Sampler(build(tiny(variant)), Sampling(0.8, top_p=0.9), batch=3, max_length=24)
    with torch.inference_mode():
        sampler.begin(_prompts((9, 1, 5)), [1, 2, 3])
        buffers = [sampler.token_B, sampler.cache.length_B, *sampler.cache.layers]
        before = [buffer.data_ptr() for buffer in buffers]
        seen = []
        for _ in range(10):
            with _Watched() as watched:
                sampler.step()
            seen.append(watched.operators)
    assert [buffer.data_ptr() for buffer in buffers] == before
    assert seen[0] == seen[-1] and all(each == seen[0] for each in seen)
    waits = {"aten._local_scalar_dense", "aten.nonzero", "aten.item", "aten.is_nonzero", "aten.masked_select"}
    assert not waits & {name for name, _ in seen[0]}
    assert sampler.cache.length_B.tolist() == [19, 11, 15] and len(sampler._steps) == 1


class _Watched(TorchDispatchMode):
    """Operators as they are called, with the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = tuple(tuple(x.shape) for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor))
        self.operators.append((str(func.overloadpacket), shapes))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_reads_no_value_of_a_tensor(variant: str) -> None:
    """On the meta device there are none."""
    model = Decoder(tiny(variant), device="meta", compute_dtype=torch.bfloat16)
    for sampling in (Sampling(0), Sampling(0.8, top_p=0.9), Sampling(top_k=4)):
        sampler = Sampler(model, sampling, batch=3, max_length=24)
        with torch.inference_mode():
            sampler.begin(_prompts((9, 1, 5)), [1, 2, 3])
            sampler.step()
        assert sampler.cache.length == 10


def test_a_capture_may_run_a_step_before_it_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CudaGraphs does; each length of attention is captured once, whatever the number of batches."""
    model, prompts = build(tiny("windows", max_sequence=200)), _prompts((40, 3, 70, 1, 11))
    captured = []

    def capture(step: Callable[[], None], changed: Sequence[Tensor]) -> Callable[[], None]:
        before = [tensor.clone() for tensor in changed]
        for _ in range(3):
            step()
            for tensor, was in zip(changed, before, strict=True):
                tensor.copy_(was)
        captured.append(step)
        return step

    sampler = Sampler(model, Sampling(0), batch=2, max_length=130, capture=capture)
    found = []
    for first in range(0, 5, 2):
        part = prompts[first : first + 2]
        found += list(zip(*sampler.run(part, [0] * len(part), 60), strict=True))[: len(part)]
    assert [list(text) for text in found] == [_likeliest(model, prompt, 60) for prompt in prompts]
    assert len(captured) == 3  # of 64, 128 and 192 keys


def test_tokens_looked_at_in_arrears_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(build(tiny()), Sampling(seed=3), batch=2, max_length=24)
    prompts, noise = _prompts((3, 1)), [5, 6]
    at_once = list(sampler.run(prompts, noise, 20))
    sampler._arrears = 8
    sampler._host = sampler._host.new_zeros(1, 8, 2)
    assert list(sampler.run(prompts, noise, 20)) == at_once


def _refuse(*_: Any) -> Any:
    raise AssertionError("generation ran what was put on the model for training")


def _compiled(model: Decoder) -> None:
    model.compile(backend=_refuse)


def _compiled_whole(model: Decoder) -> None:
    torch.nn.Module.compile(model, backend=_refuse)


def _replaced_forward(model: Decoder) -> None:
    for block in model.layers:
        block.forward = _refuse


def _hooked(model: Decoder) -> None:
    model.layers[0].register_forward_pre_hook(_refuse)


@pytest.mark.parametrize("prepare", [_compiled, _compiled_whole, _replaced_forward, _hooked])
def test_what_is_put_on_a_model_for_training_stays_out_of_generation(prepare: Callable[[Decoder], None]) -> None:
    model, plain = build(tiny(tie_embeddings=True)), build(tiny(tie_embeddings=True))
    prepare(model)
    with torch.compiler.set_stance("fail_on_recompile"):
        found = list(generate(model, [3, 1], max_new_tokens=9, temperature=0))
    assert found == list(generate(plain, [3, 1], max_new_tokens=9, temperature=0))
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_are_cast_once_and_everything_else_is_shared(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(tiny("gpt2", tie_embeddings=tied), compute_dtype=torch.bfloat16)
    copy = generating.inference_copy(model)
    assert copy.head.weight.dtype == copy.layers[0].mlp_input.weight.dtype == torch.bfloat16
    assert copy.embedding.weight.data_ptr() == model.embedding.weight.data_ptr()
    assert copy.norm.weight.data_ptr() == model.norm.weight.data_ptr()
    monkeypatch.setattr(generating, "_has_room", lambda *_: False)
    shared = generating.inference_copy(model)
    of_model = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    assert {name: tensor.data_ptr() for name, tensor in shared.state_dict().items()} == of_model
    ids = tokens(model.config)
    with torch.no_grad():
        expected = model.logits(model(ids))
        assert torch.equal(copy.logits(copy(ids)), expected)
        assert torch.equal(shared.logits(shared(ids)), expected)


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


@pytest.mark.parametrize(
    ("prompts", "settings", "named"),
    [
        ([[1], []], {}, "prompt 2: there is nothing to continue"),
        ([[1], [1, 61]], {}, "prompt 2: token = 61"),
        ([[1], [1] * 22], {}, r"prompt 2: prompt \(22 tokens\) and new tokens \(4\)"),
        ([[1]], {"max_new_tokens": [-1]}, "max_new_tokens = -1"),
        ([[1]], {"batch": 0}, "batch = 0"),
    ],
)
def test_bad_batches_are_refused_at_the_call(prompts: list[list[int]], settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        generate_batch(build(tiny()), prompts, **{"max_new_tokens": 4, **settings})


def _on_cuda(variant: str, **how: Any) -> tuple[Decoder, Decoder]:
    """A model on the CPU, and the same on the GPU."""
    config = tiny(variant, max_sequence=1200)
    here, there = build(config, **how), Decoder(config, device="cuda", **how)
    there.load_state_dict(here.state_dict())
    return here, there


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("variant", VARIANTS)
def test_graphs_give_the_tokens_of_plain_steps_and_of_the_cpu(variant: str) -> None:
    here, there = _on_cuda(variant)
    prompts, same = _prompts((500, 1, 9, 20)), 0
    for sampling in (Sampling(0), Sampling(1.2, top_p=0.9, seed=3), Sampling(top_k=5)):
        noise, texts = streams(prompts, sampling.seed), []
        for model, capture in ((here, None), (there, None), (there, generating._plain)):
            sampler = Sampler(model, sampling, batch=4, max_length=560, capture=capture)
            texts.append(list(sampler.run(prompts, noise, 40)))
        assert texts[1] == texts[2]
        same += sum(a == b for a, b in zip(zip(*texts[0], strict=True), zip(*texts[1], strict=True), strict=True))
    assert same >= 11  # of 12: another order of sums may turn one where two tokens are all but equally likely


@pytest.mark.gpu
@needs_cuda
def test_graphs_are_captured_once_for_each_length_and_nothing_waits_or_grows() -> None:
    _, model = _on_cuda("windows", compute_dtype=torch.bfloat16)
    sampler = Sampler(model, Sampling(0.8, top_p=0.9), batch=4, max_length=1100)
    prompts = _prompts((500, 1, 9, 20))
    whole = list(sampler.run(prompts, [1, 2, 3, 4], 600))
    graphs = sampler._capture
    assert isinstance(graphs, generating.CudaGraphs) and graphs.captured == 3  # 512, 1,024 and 1,152 keys
    held = torch.cuda.memory_allocated()
    steps = sampler.run(prompts, [1, 2, 3, 4], 600)
    again = [next(steps)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        again += list(steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert again == whole
    assert graphs.captured == 3
    assert torch.cuda.memory_allocated() <= held + (64 << 10)


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_without_room_casts_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = _on_cuda("llama", compute_dtype=torch.bfloat16)
    whole = list(generate_batch(model, _prompts(), max_new_tokens=30, temperature=0))
    monkeypatch.setattr(generating, "_has_room", lambda *_: False)
    assert list(generate_batch(model, _prompts(), max_new_tokens=30, temperature=0)) == whole
