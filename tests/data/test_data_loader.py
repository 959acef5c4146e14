import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from data_helpers import END, lines, make_config, stored, write_jsonl, write_text
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.data.config import DataConfig, SourceConfig, TokenizerConfig
from phalanx.data.loader import Loader, LoaderState, Prefetcher
from phalanx.data.prepare import prepare
from phalanx.data.samples import SampleReader
from phalanx.data.sources import input_files
from phalanx.data.tokens.prepared_corpus import PreparedSource, PreparedSplit
from phalanx.data.tokens.shards import Mapped, TokenShard, TokenStream, npy_writer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpora")


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "MIN_UNIT_BYTES", 2048)


def make(folder: Path, **changes: object) -> Loader:
    path = folder / "text.txt"
    if not path.exists():
        write_text(path, lines(400))
    source = SourceConfig(kind="text", path=str(path), document_separator="\n")
    config = make_config(folder, source, **({"validation_fraction": 0.1} | changes))
    return Loader(prepare(config, workers=1), config)


def mixed(folder: Path, **changes: object) -> Loader:
    first, second = folder / "first.txt", folder / "second.txt"
    if not second.exists():
        write_text(first, ["a" * 30] * 100)
        write_text(second, ["b" * 30] * 100)
    parts = tuple(
        SourceConfig(kind="text", path=str(p), document_separator="\n", weight=w)
        for p, w in ((first, 3.0), (second, 1.0))
    )
    config = make_config(folder, **({"sources": parts} | changes))
    return Loader(prepare(config, workers=1), config)


def same(one: object, other: object) -> bool:
    return all(torch.equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True))


class TestOrder:
    def test_a_resumed_stream_equals_an_uninterrupted_one_and_batch(self, folder: Path) -> None:
        loader = mixed(folder)
        with loader.stream(counts=6) as stream:
            straight = [next(stream) for _ in range(8)]
        for number, (batch, state) in enumerate(straight):
            assert state == LoaderState(6 * (number + 1))
            assert same(batch, loader.batch(6 * number, 6))
            assert LoaderState.from_json(state.to_json()) == state
            with loader.stream(state, counts=6) as resumed:
                assert same(next(resumed)[0], loader.batch(6 * (number + 1), 6))

    @pytest.mark.parametrize("ranks", [1, 2, 3, 6])
    def test_ranks_share_each_step_in_order(self, folder: Path, ranks: int) -> None:
        loader = make(folder)
        wholes = [loader.batch(0, 6), loader.batch(6, 12)]
        streams = [loader.stream(counts=[6, 12], rank=rank, ranks=ranks) for rank in range(ranks)]
        for whole in wholes:
            parts = [next(stream) for stream in streams]
            assert torch.equal(torch.cat([batch.tokens_BS for batch, _ in parts]), whole.tokens_BS)
            assert len({state for _, state in parts}) == 1
        assert [list(stream) for stream in streams] == [[]] * ranks

    def test_a_step_that_ranks_cannot_share_is_refused(self, folder: Path) -> None:
        with make(folder).stream(counts=5, ranks=2) as stream, pytest.raises(ValueError, match="5 samples a step"):
            next(stream)

    @given(start=st.integers(0, 5000), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
    @settings(max_examples=20, deadline=None)
    def test_batch_is_pure_in_any_cut(self, folder: Path, start: int, sizes: list[int]) -> None:
        loader = mixed(folder)
        whole = loader.batch(start, sum(sizes))
        places = np.cumsum([0, *sizes]).tolist()
        parts = [mixed(folder).batch(start + p, n).tokens_BS for p, n in zip(places, sizes, strict=False)]
        assert torch.equal(torch.cat(parts), whole.tokens_BS)
        assert whole.sample_index_B.tolist() == list(range(start, start + sum(sizes)))

    def test_the_seed_is_the_order(self, folder: Path) -> None:
        loader = make(folder)
        other = Loader(loader.prepared, loader.config, seed=1)
        again = Loader(loader.prepared, loader.config, seed=0)
        assert not torch.equal(other.batch(0, 50).tokens_BS, loader.batch(0, 50).tokens_BS)
        assert torch.equal(again.batch(0, 50).tokens_BS, loader.batch(0, 50).tokens_BS)

    def test_epochs_differ_but_hold_the_same(self, folder: Path) -> None:
        loader = make(folder, random_offset=False)
        size = loader.samples_per_epoch
        first, second = loader.batch(0, size).tokens_BS, loader.batch(size, size).tokens_BS
        assert not torch.equal(first, second)
        assert sorted(first.tolist()) == sorted(second.tolist())

    def test_weights_are_kept(self, folder: Path) -> None:
        tokens = mixed(folder).batch(0, 400).tokens_BS
        assert ((tokens == ord("a")).any(1).sum().item(), (tokens == ord("b")).any(1).sum().item()) == (300, 100)

    def test_without_weights_every_token_counts_the_same(self, folder: Path) -> None:
        one = write_text(folder / "one.txt", ["a" * 30] * 300)
        other = write_text(folder / "other.txt", ["b" * 30] * 100)
        parts = tuple(SourceConfig(kind="text", path=str(p), document_separator="\n") for p in (one, other))
        loader = mixed(folder, sources=parts)
        tokens = loader.batch(0, 400).tokens_BS
        assert abs((tokens == ord("a")).any(1).sum().item() - 300) < 5


class TestPacking:
    def test_samples_in_order_are_the_corpus(self, folder: Path) -> None:
        loader = make(folder, random_offset=False)
        every = loader.batch(0, loader.samples_per_epoch)
        stream = stored(loader.prepared)
        pieces = stream[: loader.samples_per_epoch * 16].reshape(-1, 16)
        assert sorted(every.tokens_BS.tolist()) == sorted(pieces.tolist())
        targets = stream[1 : 1 + loader.samples_per_epoch * 16].reshape(-1, 16)
        assert sorted(every.targets_BS.tolist()) == sorted(targets.tolist())

    def test_a_shifted_epoch_is_the_corpus_from_the_shift_on(self, folder: Path) -> None:
        loader = make(folder)
        stream = stored(loader.prepared).tolist()
        shifts = set()
        for epoch in range(4):
            rows = loader.batch(epoch * loader.samples_per_epoch, loader.samples_per_epoch).tokens_BS.tolist()
            fits = [
                shift
                for shift in range(16)
                if sorted(rows) == sorted(stream[shift + 16 * k :][:16] for k in range(loader.samples_per_epoch))
            ]
            assert len(fits) == 1
            shifts.update(fits)
        assert len(shifts) > 1

    @given(length=st.integers(2, 40), total=st.integers(3, 200))
    @settings(max_examples=40, deadline=None)
    def test_any_length_fits(self, folder: Path, length: int, total: int) -> None:
        path = folder / "counted.txt"
        path.write_bytes(bytes(i % 251 + 1 for i in range(total)).replace(b"\x00", b"x"))
        source = SourceConfig(kind="text", path=str(path), bad_utf8="replace")
        config = make_config(folder, source, sequence_length=length)
        try:
            prepared = prepare(config, workers=1)
        except UserError as error:
            assert "a sample needs" in str(error)
            assert total <= 4 * length
            return
        loader, stream = Loader(prepared, config), stored(prepared).tolist()
        batch = loader.batch(0, 3 * loader.samples_per_epoch)
        text = " ".join(map(str, stream))
        for tokens, targets in zip(batch.tokens_BS.tolist(), batch.targets_BS.tolist(), strict=True):
            assert tokens[1:] == targets[:-1]
            assert " ".join(map(str, [*tokens, targets[-1]])) in text

    def test_documents_begin_at_end_of_text(self, folder: Path) -> None:
        batch = make(folder).batch(0, 200)
        assert batch.documents_BS is not None
        borders = (batch.tokens_BS == END).int()
        borders[:, 0] = 0
        assert torch.equal(batch.documents_BS, borders.cumsum(1).int())
        assert (batch.weights_BS == 1).all()

    def test_without_the_mask_there_are_no_documents(self, folder: Path) -> None:
        loader, masked = make(folder, document_mask=False), make(folder)
        assert loader.batch(0, 4).documents_BS is None
        assert torch.equal(loader.batch(0, 4).tokens_BS, masked.batch(0, 4).tokens_BS)

    def test_without_end_of_text_nothing_is_predicted_across_documents(self, folder: Path) -> None:
        tokenizer = TokenizerConfig(kind="bytes", end_of_text=False)
        loader = mixed(folder, tokenizer=tokenizer, random_offset=False)
        batch = loader.batch(0, 4 * loader.samples_per_epoch)
        assert batch.documents_BS is not None
        ids = torch.cat([batch.documents_BS, batch.documents_BS[:, -1:]], 1)
        crossing = (ids[:, 1:] != ids[:, :-1])[:, :-1]
        assert (batch.weights_BS[:, :-1][crossing] == 0).all()
        assert (batch.weights_BS[:, :-1][~crossing] == 1).all()
        # documents have 30 tokens and samples 16: every 15th border falls on the last target of a sample
        assert 0 < (batch.weights_BS[:, -1] == 0).float().mean() < 0.2

    def test_prompts_have_weight_zero(self, folder: Path) -> None:
        records = [{"q": "QQQQ", "text": "aaaa"} for _ in range(100)]
        source = SourceConfig(kind="jsonl", path=str(write_jsonl(folder / "qa.jsonl", records)), prompt_field="q")
        config = make_config(folder, source)
        batch = Loader(prepare(config, workers=1), config).batch(0, 50)
        assert ((batch.weights_BS == 0) == (batch.targets_BS == ord("Q"))).all()


class TestValidation:
    def test_a_pass_covers_every_held_out_token_once(self, folder: Path) -> None:
        loader = make(folder)
        batches = list(loader.validation_batches(7))
        assert {tuple(batch.tokens_BS.shape) for batch in batches} == {(7, 16)}
        kept = [batch.targets_BS[batch.weights_BS > 0] for batch in batches]
        assert torch.cat(kept).tolist() == stored(loader.prepared, "validation").tolist()[1:]

    def test_a_limited_pass_is_spread_and_never_repeats(self, folder: Path) -> None:
        loader = make(folder)
        few = list(loader.validation_batches(4, max_samples=12))
        index = torch.cat([batch.sample_index_B for batch in few]).tolist()
        full = len(stored(loader.prepared, "validation")) // 16
        assert len(set(index)) == 12
        assert index[0] == 0
        assert index[-1] > 0.8 * full
        assert all(same(a, b) for a, b in zip(few, loader.validation_batches(4, max_samples=12), strict=True))

    def test_a_limited_pass_looks_at_the_same_samples_in_batches_of_any_size(self, folder: Path) -> None:
        loader = make(folder)
        seen = []
        for size in (1, 4, 5, 16):
            batches = list(loader.validation_batches(size, max_samples=10))
            assert {len(batch) for batch in batches} == {size}
            kept = [batch.sample_index_B[batch.weights_BS.sum(1) > 0] for batch in batches]
            seen.append(torch.cat(kept).tolist())
        assert len(seen[0]) == 10 and all(indices == seen[0] for indices in seen)

    def test_sources_that_are_only_held_out(self, folder: Path) -> None:
        held = SourceConfig(kind="text", path=str(write_text(folder / "held.txt", ["v" * 100])))
        source = SourceConfig(kind="text", path=str(write_text(folder / "train.txt", ["t" * 100])))
        config = DataConfig(
            sequence_length=16,
            sources=(source,),
            validation_sources=(held,),
            tokenizer=TokenizerConfig(kind="bytes"),
            folder=str(folder / "prepared"),
        )
        loader = Loader(prepare(config, workers=1), config)
        assert set(loader.batch(0, 20).targets_BS.flatten().tolist()) == {ord("t")}
        kept = [b.targets_BS[b.weights_BS > 0] for b in loader.validation_batches(4)]
        assert torch.cat(kept).tolist() == [ord("v")] * 100

    def test_nothing_held_out(self, folder: Path) -> None:
        loader = mixed(folder)
        with pytest.raises(UserError, match="no text was held out"):
            next(loader.validation_batches(4))
        with pytest.raises(UserError, match="there are no validation tokens"):
            Loader(loader.prepared, loader.config, split="validation")


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=12), length=st.integers(1, 30), data=st.data())
@settings(max_examples=40, deadline=None)
def test_windows_over_any_shards(folder: Path, sizes: list[int], length: int, data: st.DataObject) -> None:
    total = sum(sizes)
    values, shards = np.arange(total, dtype=np.uint16), []
    starts = sorted(data.draw(st.sets(st.integers(0, total - 1))))
    for number, (begin, size) in enumerate(zip(np.cumsum([0, *sizes]).tolist(), sizes, strict=False)):
        tokens, first = folder / f"s{number}.tokens.npy", folder / f"s{number}.starts.npy"
        mine = np.array([s - begin for s in starts if begin <= s < begin + size], np.int64)
        for path, part in ((tokens, values[begin : begin + size]), (first, mine)):
            with npy_writer(path, part.dtype) as writer:
                writer.append(part)
        shards.append(TokenShard(tokens, "<u2", 128, size, first, 0, len(mine)))
    stream = TokenStream(shards)
    begins = np.array(data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=5)))
    out = np.full((len(begins), length), -1)
    stream.read_tokens(begins, out)
    wanted = begins[:, None] + np.arange(length)
    assert (out == np.where(wanted < total, wanted, -1)).all()
    found = set(zip(*stream.document_starts(begins, length), strict=True))
    assert found == {(r, s - b) for r, b in enumerate(begins.tolist()) for s in starts if b <= s < b + length}


def test_windows_stay_right_when_pages_are_let_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make(folder)
    before = loader.batch(0, 64)
    monkeypatch.setattr("phalanx.data.tokens.shards.KEEP_BYTES", 0)
    released: list[Mapped] = []
    real = Mapped.release
    monkeypatch.setattr(Mapped, "release", lambda mapped: released.append(mapped) or real(mapped))
    for _ in range(5):
        assert same(before, loader.batch(0, 64))
    assert released


def test_a_shard_that_is_cut_short_is_named(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.npy"
    with npy_writer(path, "<u2") as writer:
        writer.append(np.arange(100))
    path.write_bytes(path.read_bytes()[:-10])
    split = PreparedSplit(100, 0, 0, (TokenShard(path, "<u2", 128, 100),), 100)
    reader = SampleReader(PreparedSource("x", tmp_path, 0.0, {}, True, ""), split, make(folder).config)
    with pytest.raises(UserError, match=r"t.npy'.*missing or damaged.*318 bytes, 328 are needed"):
        reader.read(np.array([0]))


class TestPrefetcher:
    def test_an_exception_comes_where_its_item_would_have(self) -> None:
        def items() -> Iterator[int]:
            yield 1
            raise OSError("the disk is gone")

        with Prefetcher(items(), 3) as ahead:
            assert next(ahead) == 1
            with pytest.raises(OSError, match="the disk is gone"):
                next(ahead)
            with pytest.raises(StopIteration):
                next(ahead)

    def test_it_stays_ahead_but_not_too_far(self) -> None:
        made: list[int] = []
        reached = threading.Event()

        def items() -> Iterator[int]:
            for i in range(100):
                made.append(i)
                if i == 3:
                    reached.set()
                yield i

        with Prefetcher(items(), 2) as ahead:
            assert next(ahead) == 0
            assert reached.wait(120)
            assert len(made) <= 4

    def test_closing_ends_the_thread_of_an_endless_stream(self) -> None:
        before = set(threading.enumerate())
        ahead = Prefetcher(iter(int, 1), 2)
        assert next(ahead) == 0
        ahead.close()
        ahead.close()
        assert set(threading.enumerate()) <= before
        with pytest.raises(StopIteration):
            next(ahead)
