"""FlexAttention's block mask without a dense one, and its kernel in training and evaluation."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, create_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.kernels.attention import attention, flex_attend, one_kernel, prepare
from phalanx.kernels.masks import AttentionMask, block_mask, flex_mask
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import DecoderPart

CPU = torch.device("cpu")


def seen_by(mask):
    """A mask_mod that says which keys are seen by the dense mask alone."""
    dense = mask.dense(CPU)[:, 0]
    return lambda b, h, i, j: dense[b, i, j]


def columns(numbers, indices):
    """The set of blocks that is listed, by row."""
    rows = zip(numbers.flatten().tolist(), indices.flatten(0, -2).tolist(), strict=True)
    return [sorted(row[:count]) for count, row in rows]


LISTS = [
    ("kv_num_blocks", "kv_indices"),
    ("full_kv_num_blocks", "full_kv_indices"),
    ("q_num_blocks", "q_indices"),
    ("full_q_num_blocks", "full_q_indices"),
]


def require_same_blocks(mask):
    batch = None if mask.documents_BS is None else len(mask.documents_BS)
    # What lies behind the last position counts as unseen in both.
    expected = create_block_mask(seen_by(mask), batch, None, mask.query_length, mask.key_length, device="cpu")
    found = flex_mask(mask, CPU)
    assert found.seq_lengths == expected.seq_lengths
    assert found.BLOCK_SIZE == expected.BLOCK_SIZE
    for numbers, indices in LISTS:
        ours, theirs = (columns(getattr(x, numbers), getattr(x, indices)) for x in (found, expected))
        assert ours == theirs, numbers
        assert getattr(found, numbers).dtype == getattr(found, indices).dtype == torch.int32


def rising_documents(batch, length, cuts, seed):
    generator = torch.Generator().manual_seed(seed)
    borders = torch.zeros(batch, length, dtype=torch.int32)
    for row in borders:
        row[torch.randint(1, max(length, 2), (cuts,), generator=generator).clamp(max=length - 1)] = 1
    return borders.cumsum(1).int()


@settings(max_examples=60)
@given(
    length=st.integers(1, 700),
    queries=st.integers(1, 700),
    window=st.none() | st.integers(1, 800),
    batch=st.integers(1, 2),
    cuts=st.none() | st.integers(0, 12),
    seed=st.integers(0, 99),
)
@example(length=512, queries=512, window=None, batch=2, cuts=3, seed=0)
@example(length=512, queries=512, window=129, batch=1, cuts=None, seed=0)
@example(length=640, queries=300, window=200, batch=2, cuts=4, seed=1)
def test_blocks_equal_those_of_torch(length, queries, window, batch, cuts, seed):
    documents = None if cuts is None else rising_documents(batch, length, cuts, seed)
    require_same_blocks(AttentionMask(min(queries, length), length, window=window, documents_BS=documents))


def test_the_mask_within_a_block_is_the_dense_one():
    documents = rising_documents(2, 300, 5, 3)
    mask = AttentionMask(200, 300, window=70, documents_BS=documents)
    dense = create_mask(flex_mask(mask, CPU).mask_mod, 2, 1, 200, 300, device="cpu")
    assert torch.equal(dense, mask.dense(CPU))


def test_documents_in_any_order_lose_nothing():
    """Numbers that come again, and fall: whole blocks are whole, and no block that is seen in part is left out."""
    documents = torch.randint(0, 3, (2, 600), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    documents[:, 128:300] = 1
    mask = AttentionMask(600, 600, documents_BS=documents)
    expected, found = create_block_mask(seen_by(mask), 2, None, 600, 600, device="cpu"), flex_mask(mask, CPU)
    assert columns(found.full_kv_num_blocks, found.full_kv_indices) == columns(
        expected.full_kv_num_blocks, expected.full_kv_indices
    )
    ours, theirs = (columns(x.kv_num_blocks, x.kv_indices) for x in (found, expected))
    assert all(set(one) >= set(other) for one, other in zip(ours, theirs, strict=True))


class LargestTensor(TorchDispatchMode):
    """Notes how many bytes the largest tensor that is made takes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, torch.Tensor):
                self.bytes = max(self.bytes, each.nbytes)
        return out


def test_a_mask_of_131072_positions_takes_megabytes():
    documents = rising_documents(1, 131072, 40, 0)
    with LargestTensor() as made:
        flex_mask(AttentionMask(131072, 131072, documents_BS=documents), CPU)
    assert made.bytes <= 8 * (131072 // 128) ** 2  # 8 MiB of block numbers; the dense mask would be 16 GiB


@pytest.mark.parametrize("window", [None, 100])
def test_flex_with_these_blocks_is_exact(window):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 300, 16, generator=generator) for h in (4, 2, 2))
    documents = rising_documents(2, 300, 4, 5)
    mask = AttentionMask(300, 300, window=window, documents_BS=documents)
    with torch.inference_mode():
        found = flex_attend(q, k, v, mask, None, torch.compile(flex_attention, backend="eager"))
    torch.testing.assert_close(found, attention(q, k, v, mask=mask, backend="math"), rtol=1e-4, atol=1e-5)


def test_masks_of_one_shape_share_a_kernel():
    """Documents differ from batch to batch; the function is compiled for the shape alone."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    flex = torch.compile(flex_attention, dynamic=False, backend=counter)
    q, k, v = torch.zeros(3, 2, 2, 256, 16).unbind()
    for seed in range(3):
        mask = AttentionMask(256, 256, documents_BS=rising_documents(2, 256, 4, seed))
        with torch.inference_mode():
            flex_attend(q, k, v, mask, None, flex)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("window", [None, 50])
def test_a_compiled_block_takes_every_mask(monkeypatch, backend, window):
    """One graph without a break, and no second one: masks of other documents are inputs of it."""
    torch._dynamo.reset()
    config = ModelConfig(
        vocab_size=8, max_sequence=256, layers=1, hidden=32, heads=2, kv_heads=1, window=window or 0,
        attention=("window",) if window else ("full",), attention_backend="flex",
    )  # fmt: skip
    part = DecoderPart(config, first=True, last=False).requires_grad_(False)  # there is no backward on a CPU
    for parameter in part.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    by_flex = lambda q, k, v, mask, scale: flex_attend(q, k, v, mask, scale, flex_attention)  # noqa: E731
    monkeypatch.setattr("phalanx.kernels.attention._flex", by_flex)
    compiled = torch.compile(part.layers[0].forward, backend=backend, fullgraph=True)
    tokens, x = torch.zeros(2, 256, dtype=torch.int64), torch.randn(512, 32)
    for seed in range(4):
        context = part.context(tokens, documents_BS=rising_documents(2, 256, 4, seed))
        for mask in context.masks.values():
            flex_mask(mask, CPU)  # as `prepare` does on a GPU
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = compiled(x, context)
        monkeypatch.setattr("phalanx.kernels.attention._flex", attend_by_math)
        expected = part.layers[0](x, context)
        monkeypatch.setattr("phalanx.kernels.attention._flex", by_flex)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def attend_by_math(q, k, v, mask, scale):
    return attention(q, k, v, mask=mask, scale=scale, backend="math")


PIECES = [(range(200, 400), range(200)), (range(200, 400), range(200, 400)), (range(400, 600), range(200))]


@pytest.mark.parametrize("window", [None, 70, 250])
@pytest.mark.parametrize("has_documents", [False, True])
def test_blocks_of_a_ring(window, has_documents):
    documents = rising_documents(2, 600, 5, 2) if has_documents else None
    dense = AttentionMask(600, 600, window=window, documents_BS=documents).dense(CPU)
    for queries, keys in PIECES:
        found = block_mask(queries, keys, window, documents, CPU)
        expected = dense[:, :, queries.start : queries.stop, keys.start : keys.stop]
        by_pairs = create_mask(found.mask_mod, len(dense), 1, 200, 200, device="cpu")
        assert torch.equal(by_pairs, expected)
        blocks = F.pad(expected, (0, 56, 0, 56)).unflatten(3, (2, 128)).unflatten(2, (2, 128))
        some, whole = blocks.any(5).any(3), blocks.all(5).all(3)
        listed = [
            columns(found.kv_num_blocks, found.kv_indices),
            columns(found.full_kv_num_blocks, found.full_kv_indices),
        ]
        for have, kinds in zip(listed, (some & ~whole, whole), strict=True):
            assert have == [row.nonzero().flatten().tolist() for row in kinds.flatten(0, -2)]


def test_blocks_of_a_ring_share_a_kernel():
    """Wherever they lie: a position that the compiler saw as a number would be compiled anew for each."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    flex = torch.compile(flex_attention, dynamic=False, backend=counter)
    q, k, v = torch.randn(3, 2, 2, 200, 16).unbind()
    for seed in range(2):
        documents = rising_documents(2, 600, 5, seed)
        for queries, keys in PIECES:
            with torch.inference_mode():
                flex(
                    q, k, v, block_mask=block_mask(queries, keys, 250, documents, CPU), return_aux=AuxRequest(lse=True)
                )
    assert counter.frame_count == 1


def test_evaluation_attends_by_the_kernel_of_training():
    """Neither a call without gradients nor one among models that run as they are written has another compiled."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    attend = torch.compile(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, dynamic=False, backend=counter)
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, 8, 4).unbind())
    trained = one_kernel(attend, q, k, v)
    assert trained.requires_grad
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        evaluated = one_kernel(attend, *(x.detach() for x in (q, k, v)))
    assert not evaluated.requires_grad
    assert torch.equal(evaluated, trained)
    assert counter.frame_count == 1


def test_a_mask_is_prepared_where_flex_will_ask_for_it(monkeypatch):
    made = []
    monkeypatch.setattr("phalanx.kernels.attention.flex_mask", lambda mask, device: made.append(mask))
    documents, cuda = torch.zeros(1, 8, dtype=torch.int32), torch.device("cuda", 0)
    mask = AttentionMask(8, 8, documents_BS=documents)
    prepare(AttentionMask(8, 8), cuda)
    prepare(mask, CPU)
    prepare(mask, cuda, "sdpa")
    prepare(mask, cuda, has_dropout=True)
    assert not made
    prepare(mask, cuda)
    assert made == [mask]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_mask_on_a_gpu_takes_little_memory():
    documents = rising_documents(1, 16384, 9, 0).cuda()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flex_mask(AttentionMask(16384, 16384, documents_BS=documents), documents.device)
    assert torch.cuda.max_memory_allocated() - before < 16 << 20  # a dense one: 2.6 GiB
