import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.kernels import attention as kernels_attention
from phalanx.kernels import attention_aten
from phalanx.kernels.attention import AttentionDropout, attention, blocked_attention, choose_backend
from phalanx.kernels.counter import keep_mask, make_key
from phalanx.kernels.masks import AttentionMask


def explicit_mask(S, K, window, documents):
    i, j = torch.arange(K - S, K)[:, None], torch.arange(K)[None]
    seen = j <= i
    if window is not None:
        seen = seen & (i - j < window)
    seen = seen[None, None]
    if documents is not None:
        seen = seen & (documents[:, None, K - S :, None] == documents[:, None, None, :])
    return seen


def reference(q, k, v, seen, scale=None):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)


def inputs(B, H, G, S, K, E, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, S, H, E), (B, K, G, E), (B, K, G, E))
    return [torch.randn(s, dtype=dtype, generator=generator).transpose(1, 2).requires_grad_() for s in shapes]


def compare(got, expected, tensors, rtol, atol):
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
    grad = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(1))
    grad = grad.to(expected.device)
    for a, b in zip(
        torch.autograd.grad(got, tensors, grad.to(got.dtype)), torch.autograd.grad(expected, tensors, grad), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


@st.composite
def cases(draw):
    K = draw(st.integers(1, 70))
    S = draw(st.sampled_from([K, K, draw(st.integers(1, K))]))
    B, G, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    window = draw(st.none() | st.integers(1, 80))
    documents = None
    if draw(st.booleans()):
        cuts = torch.tensor([[draw(st.booleans()) for _ in range(K)] for _ in range(B)])
        documents = cuts.int().cumsum(1).int()
    return B, G * group, G, S, K, draw(st.sampled_from([8, 16])), window, documents


BACKENDS = ("auto", "sdpa", "chunked", "math")


@settings(max_examples=60, deadline=None)
@given(
    cases(), st.sampled_from(BACKENDS), st.sampled_from([torch.float64, torch.float32]), st.sampled_from([8, 17, None])
)
def test_values_and_gradients_equal_masked_sdpa(case, backend, dtype, chunk):
    B, H, G, S, K, E, window, documents = case
    tensors = inputs(B, H, G, S, K, E, dtype)
    expected = reference(*tensors, explicit_mask(S, K, window, documents))
    got = attention(*tensors, window=window, documents_BS=documents, backend=backend, chunk=chunk)
    tolerance = 1e-11 if dtype == torch.float64 else 3e-5
    compare(got, expected, tensors, tolerance, tolerance)


@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from(["flash", "matmul"]), st.sampled_from([8, 17, 100]))
def test_both_block_engines_are_exact(case, engine, chunk):
    B, H, G, S, K, E, window, documents = case
    tensors = inputs(B, H, G, S, K, E, torch.float64)
    mask = AttentionMask(S, K, window=window, documents_BS=documents)
    got = blocked_attention(*tensors, mask, scale=0.3, chunk=chunk, engine=engine)
    compare(got, reference(*tensors, explicit_mask(S, K, window, documents), scale=0.3), tensors, 1e-11, 1e-11)


@pytest.mark.parametrize("past", [0, 5])
@pytest.mark.parametrize("elements", [0, 1 << 13, 1 << 24])
def test_blocks_joined_in_one_call_are_exact(monkeypatch, elements, past):
    """A window much shorter than the sequence: most blocks have one shape and go to the kernel together."""
    monkeypatch.setattr(kernels_attention, "_RUN_ELEMENTS", elements)
    calls = []
    forward = attention_aten.cpu_forward
    monkeypatch.setattr(attention_aten, "cpu_forward", lambda *args: calls.append(args[0].shape) or forward(*args))
    tensors = inputs(2, 4, 2, 100 - past, 100, 16, torch.float64)
    mask = AttentionMask(100 - past, 100, window=11)
    got = blocked_attention(*tensors, mask, scale=0.25, chunk=8, engine="flash")
    compare(got, reference(*tensors, explicit_mask(100 - past, 100, 11, None), scale=0.25), tensors, 1e-11, 1e-11)
    assert (max(shape[0] for shape in calls) > 2) == (elements > 0)


@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("length", [64, 256])
def test_bf16_is_as_accurate_as_sdpa_in_bf16(window, length):
    """Measured against fp64: no back end is further off than twice what torch's own bf16 kernel is."""
    wide = inputs(2, 4, 2, length, length, 32, torch.float64)
    narrow = [x.detach().bfloat16().requires_grad_() for x in wide]
    grad = torch.randn(2, 4, length, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    seen = explicit_mask(length, length, window, None)
    truth = torch.autograd.grad(reference(*wide, seen), wide, grad)

    def errors(out):
        grads = torch.autograd.grad(out, narrow, grad.bfloat16())
        return [(a.double() - b).norm() / b.norm() for a, b in zip(grads, truth, strict=True)]

    theirs = errors(reference(*narrow, seen))
    for backend in BACKENDS:
        ours = errors(attention(*narrow, window=window, backend=backend))
        assert all(a <= 2 * b for a, b in zip(ours, theirs, strict=True)), backend


def test_a_mask_is_built_once_and_shared():
    q, k, v = inputs(1, 2, 2, 40, 40, 8, torch.float32)
    mask = AttentionMask(40, 40, window=8)
    first = attention(q, k, v, mask=mask, backend="sdpa")
    made = mask.dense(q.device)
    assert torch.equal(attention(q, k, v, mask=mask, backend="sdpa"), first)
    assert mask.dense(q.device) is made
    torch.testing.assert_close(first, attention(q, k, v, window=8, backend="math"))


def test_steps_with_a_cache_equal_one_pass():
    q, k, v = inputs(2, 4, 2, 30, 30, 8, torch.float64)
    for window in (None, 7):
        whole = attention(q, k, v, window=window)
        steps = [attention(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], window=window) for t in range(30)]
        torch.testing.assert_close(torch.cat(steps, dim=2), whole)


def test_dropout_is_the_counter_hash_and_is_replayed():
    q, k, v = inputs(2, 4, 2, 12, 12, 8, torch.float64)
    rows = torch.arange(100, 124).view(2, 12)
    drop = AttentionDropout(0.25, make_key(3, "attention"), rows)
    got = attention(q, k, v, dropout=drop)
    heads = torch.arange(4)[None, :, None]
    keep = keep_mask(drop.key, rows[:, None] * 4 + heads, 12, 0.25)
    scores = (q @ k.repeat_interleave(2, 1).transpose(-1, -2)) * 8**-0.5
    p = scores.masked_fill(~explicit_mask(12, 12, None, None), float("-inf")).softmax(-1)
    expected = (p * keep / 0.75) @ v.repeat_interleave(2, 1)
    compare(got, expected, (q, k, v), 1e-12, 1e-12)


def test_dropout_of_a_slice_of_heads_equals_slice_of_the_whole():
    q, k, v = inputs(1, 4, 4, 12, 12, 8, torch.float64)
    rows = torch.arange(12)[None]
    whole = attention(q, k, v, dropout=AttentionDropout(0.5, 9, rows))
    part = attention(*(x[:, 1:3] for x in (q, k, v)), dropout=AttentionDropout(0.5, 9, rows, first_head=1, num_heads=4))
    torch.testing.assert_close(part, whole[:, 1:3])


@pytest.mark.parametrize("backend", ["sdpa", "chunked", "flex"])
def test_a_back_end_that_cannot_drop_says_so(backend):
    q, k, v = inputs(1, 1, 1, 4, 4, 8, torch.float32)
    with pytest.raises(UserError, match="only the math back end"):
        attention(q, k, v, dropout=AttentionDropout(0.5, 9, torch.arange(4)[None]), backend=backend)


def test_zero_dropout_is_no_dropout():
    q, k, v = inputs(1, 1, 1, 4, 4, 8, torch.float32)
    drop = AttentionDropout(0.0, 9, torch.arange(4)[None])
    assert torch.equal(attention(q, k, v, dropout=drop, backend="sdpa"), attention(q, k, v, backend="sdpa"))


def test_flex_on_a_cpu_is_refused():
    q, k, v = inputs(1, 1, 1, 4, 4, 8, torch.float32)
    with pytest.raises(UserError, match="CUDA only"):
        attention(q, k, v, backend="flex")


def test_shapes_that_do_not_fit_are_refused():
    q, k, v = inputs(1, 3, 2, 4, 4, 8, torch.float32)
    with pytest.raises(UserError, match="do not divide 3 query heads"):
        attention(q, k, v)
    with pytest.raises(UserError, match="do not fit"):
        attention(k, k, v[:, :, 1:])
    with pytest.raises(UserError, match="more than 3 keys"):
        attention(k, k[:, :, 1:], v[:, :, 1:])
    with pytest.raises(UserError, match="window = 0"):
        attention(k, k, v, window=0)
    with pytest.raises(UserError, match="do not name 4 key positions"):
        attention(k, k, v, documents_BS=torch.zeros(1, 5))


def test_auto_chooses_what_honours_the_request():
    q = torch.empty(1, 1, 4096, 64)
    assert choose_backend(q, AttentionMask(4096, 4096), has_dropout=True) == "math"
    assert choose_backend(q, AttentionMask(4096, 4096)) == "sdpa"
    assert choose_backend(q, AttentionMask(4096, 4096, window=256)) == "chunked"
    assert choose_backend(q[:, :, :1], AttentionMask(1, 4096)) == "sdpa"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["auto", "sdpa", "flex", "math"])
@pytest.mark.parametrize("window", [None, 100])
def test_cuda_back_ends(backend, window):
    tensors = [x.detach().cuda().requires_grad_() for x in inputs(2, 4, 2, 256, 256, 64, torch.float32)]
    documents = (torch.arange(256).expand(2, 256) // 90).cuda()
    expected = reference(*tensors, explicit_mask(256, 256, window, documents.cpu()).cuda())
    compare(attention(*tensors, window=window, documents_BS=documents, backend=backend), expected, tensors, 2e-3, 2e-3)
