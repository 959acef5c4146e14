"""The loader process of a host gives the batches of `Loader.stream`, to readers that agree, and tells what is wrong."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from host_loader_helpers import LIMIT_S, forked, heard, make_corpus, memory_descriptors, same, started
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.data.host_loader import HostLoaderClient, HostLoaderError, start_host_loader, why_no_host_loader
from phalanx.data.loader import Loader, LoaderState
from phalanx.data.prepare import prepare
from phalanx.data.sharing import loader_server

pytestmark = pytest.mark.skipif(why_no_host_loader() is not None, reason=str(why_no_host_loader()))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


class TestSameBatches:
    @pytest.mark.parametrize("method", ["fork", "exec"])
    def test_of_every_rank_with_growing_batches_and_from_a_state(self, corpus: Loader, method: str) -> None:
        counts = [4, 4, 8, 200, 12]
        with started(corpus, [0, 1, 0, 1], method=method) as host:
            clients = [HostLoaderClient(host.address, rank=rank, ranks=2) for rank in (0, 1, 0, 1)]
            for state in (None, LoaderState(7)):
                streams = [client.stream(state, counts=counts) for client in clients]
                alone = [corpus.stream(state, counts=counts, rank=rank, ranks=2) for rank in (0, 1)]
                for _ in counts:
                    wanted = [next(stream) for stream in alone]
                    for rank, stream in zip((0, 1, 0, 1), streams, strict=True):
                        batch, after = next(stream)
                        assert after == wanted[rank][1]
                        assert same(batch, wanted[rank][0])
                assert [list(stream) for stream in streams] == [[]] * 4
        assert host.close() == 0

    def test_hold_documents_and_weights_that_are_not_all_alike(self, corpus: Loader) -> None:
        """So that the comparison above compares something."""
        batch = corpus.batch(0, 200)
        assert batch.documents_BS is not None
        assert batch.documents_BS.max() > 0
        assert set(batch.weights_BS.flatten().tolist()) == {0.0, 1.0}

    def test_without_the_document_mask(self, corpus: Loader) -> None:
        config = corpus.config.model_copy(update={"document_mask": False})
        plain = Loader(corpus.prepared, config)
        with started(plain, [0]) as host, HostLoaderClient(host.address).stream(counts=6) as stream:
            for step in range(5):
                batch, _ = next(stream)
                assert batch.documents_BS is None
                assert same(batch, plain.batch(6 * step, 6))

    def test_another_seed_and_the_validation_split(self, corpus: Loader, tmp_path: Path) -> None:
        config = corpus.config.model_copy(update={"folder": str(tmp_path), "validation_fraction": 0.3})
        held = Loader(prepare(config, workers=1), config, split="validation", seed=5)
        with (
            started(held, [0], split="validation", seed=5) as host,
            HostLoaderClient(host.address).stream(counts=3) as stream,
        ):
            assert same(next(stream)[0], held.batch(0, 3))

    def test_of_an_index_whose_ranks_are_on_two_hosts(self, corpus: Loader) -> None:
        with started(corpus, [0, 1]) as one, started(corpus, [1, 2]) as other:
            places = [(one, 0), (one, 1), (other, 1), (other, 2)]
            for host, rank in places:
                with HostLoaderClient(host.address, rank=rank, ranks=3).stream(counts=6) as stream:
                    assert same(next(stream)[0], corpus.batch(2 * rank, 2))

    @given(counts=st.lists(st.integers(1, 40), max_size=6), ahead=st.integers(1, 4), start=st.integers(0, 3000))
    @settings(max_examples=12, deadline=None)
    def test_for_any_sizes(self, corpus: Loader, counts: list[int], ahead: int, start: int) -> None:
        with started(corpus, [0]) as host:
            stream = HostLoaderClient(host.address).stream(LoaderState(start), counts=iter(counts), ahead=ahead)
            for count, (batch, state) in zip(counts, stream, strict=True):
                assert same(batch, corpus.batch(start, count))
                start += count
                assert state == LoaderState(start)

    def test_of_ranks_that_read_as_fast_as_they_can(self, corpus: Loader) -> None:
        counts = [4, 8, 12] * 20

        def rank(index: int) -> Callable[[Connection], None]:
            def body(connection: Connection) -> None:
                begin, equal = 0, 0
                with HostLoaderClient(host.address, rank=index, ranks=2).stream(counts=counts) as stream:
                    for count, (batch, _) in zip(counts, stream, strict=True):
                        equal += same(batch, corpus.batch(begin + index * count // 2, count // 2))
                        begin += count
                connection.send(equal)

            return body

        with started(corpus, [0, 0, 1, 1, 1]) as host, contextlib.ExitStack() as stack:
            ranks = [stack.enter_context(forked(rank(index)))[1] for index in (0, 0, 1, 1, 1)]
            assert [heard(connection) for connection in ranks] == [60] * 5

    def test_are_copies_that_stay_valid(self, corpus: Loader) -> None:
        with started(corpus, [0]) as host:
            with HostLoaderClient(host.address).stream(counts=5, ahead=1) as stream:
                batches = [next(stream)[0] for _ in range(6)]
            batches[0].tokens_BS.add_(0)  # and writable
        assert all(same(batch, corpus.batch(5 * step, 5)) for step, batch in enumerate(batches))

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_in_page_locked_memory(self, corpus: Loader) -> None:
        with started(corpus, [0], method="exec") as host:
            with HostLoaderClient(host.address).stream(counts=5, pin_memory=True) as stream:
                batch, _ = next(stream)
            assert batch.tokens_BS.is_pinned()
            assert same(batch.to("cuda").to("cpu"), corpus.batch(0, 5))


class TestCounts:
    def test_a_step_that_ranks_cannot_share_is_refused_where_it_comes(self, corpus: Loader) -> None:
        with started(corpus, [0]) as host:
            stream = HostLoaderClient(host.address, ranks=2).stream(counts=[4, 5])
            assert len(next(stream)[0]) == 2
            with pytest.raises(ValueError, match="5 samples a step cannot be shared by 2 ranks"):
                next(stream)
            assert list(stream) == []

    def test_a_lazy_iterable_is_asked_no_more_than_ahead_steps_early(self, corpus: Loader) -> None:
        asked: list[int] = []

        def counts() -> Iterator[int]:
            for step in range(100):
                asked.append(step)
                yield 2

        with started(corpus, [0]) as host, HostLoaderClient(host.address).stream(counts=counts(), ahead=3) as stream:
            for step in range(5):
                next(stream)
                assert len(asked) == step + 4

    def test_an_error_of_the_counts_comes_where_its_batch_would_have(self, corpus: Loader) -> None:
        def counts() -> Iterator[int]:
            yield 2
            raise OSError("the plan is gone")

        with started(corpus, [0]) as host:
            stream = HostLoaderClient(host.address).stream(counts=counts(), ahead=3)
            assert len(next(stream)[0]) == 2
            with pytest.raises(OSError, match="the plan is gone"):
                next(stream)

    @pytest.mark.parametrize("ahead", [0, 129])
    def test_ahead_has_bounds(self, ahead: int) -> None:
        with pytest.raises(ValueError, match="must be 1 to 128"):
            HostLoaderClient("@nobody").stream(counts=1, ahead=ahead)


class TestSharing:
    def test_a_reader_is_ahead_of_another_by_the_slots_and_no_more(self, corpus: Loader) -> None:
        with started(corpus, [0, 0]) as host:
            fast, slow = (HostLoaderClient(host.address).stream(counts=2, ahead=3) for _ in range(2))
            next(slow)
            for _ in range(4):
                next(fast)
            got = threading.Event()
            thread = threading.Thread(target=lambda: (next(fast), got.set()))
            thread.start()
            assert not got.wait(0.05)  # it must not come; waiting longer could not prove more
            batch, _ = next(slow)
            assert got.wait(LIMIT_S)
            thread.join()
            assert same(batch, corpus.batch(2, 2))
            fast.close()
            slow.close()

    def test_readers_that_want_different_samples_are_told(self, corpus: Loader) -> None:
        with started(corpus, [0, 0]) as host:
            one = HostLoaderClient(host.address).stream(counts=2)
            next(one)
            other = HostLoaderClient(host.address).stream(LoaderState(6), counts=2)
            with pytest.raises(HostLoaderError, match="disagree on step 0: one asks for samples 6 to 8, another for 0"):
                next(other)
            third = HostLoaderClient(host.address, ranks=2).stream(counts=2)
            with pytest.raises(HostLoaderError, match="ranks=2, ahead=2 here, ranks=1, ahead=2 elsewhere"):
                next(third)
            for step in range(1, 6):
                assert same(next(one)[0], corpus.batch(2 * step, 2))
            one.close()

    def test_readers_it_was_not_told_of(self, corpus: Loader) -> None:
        with started(corpus, [0, 3]) as host:
            with pytest.raises(HostLoaderError, match="indices 0, 3 on this host, not 1"):
                next(HostLoaderClient(host.address, rank=1, ranks=4).stream(counts=4))
            first = HostLoaderClient(host.address, ranks=4).stream(counts=4)
            next(first)
            with pytest.raises(HostLoaderError, match=r"told of 1 readers of data-parallel index 0 .* one more came"):
                next(HostLoaderClient(host.address, ranks=4).stream(counts=4))
            assert same(next(first)[0], corpus.batch(4, 1))
            first.close()

    def test_memory_is_given_back_when_a_stream_is_over(self, corpus: Loader) -> None:
        with started(corpus, [0]) as host:
            client = HostLoaderClient(host.address)
            for _ in range(3):
                with client.stream(counts=4, ahead=4) as stream:
                    next(stream)
                    assert memory_descriptors(host.pid) > 0
                # It takes one message of each reader in turn: with each of these, one that the stream left behind
                # (what it wanted: 4 steps ahead and the next), and then its end.
                for _ in range(6):
                    with pytest.raises(HostLoaderError, match="not 5"):
                        next(HostLoaderClient(host.address, rank=5).stream(counts=4))
                assert memory_descriptors(host.pid) == 0


class TestErrors:
    def test_a_damaged_corpus_is_a_user_error_in_every_reader(self, corpus: Loader, tmp_path: Path) -> None:
        config = corpus.config.model_copy(update={"folder": str(tmp_path)})
        prepared = prepare(config, workers=1)
        loader = Loader(prepared, config)
        for path in tmp_path.rglob("*.tokens.npy"):
            path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(UserError) as alone:
            loader.batch(0, 4)
        with started(loader, [0, 0]) as host:
            streams = [HostLoaderClient(host.address).stream(counts=4) for _ in range(2)]
            for stream in streams:
                with pytest.raises(UserError) as error:
                    next(stream)
                assert str(error.value) == str(alone.value)
                assert (error.value.field, error.value.cure) == (alone.value.field, alone.value.cure)

    def test_too_few_tokens_are_refused_before_anything_starts(self, corpus: Loader) -> None:
        config = corpus.config.model_copy(update={"sequence_length": 1 << 20})
        with pytest.raises(UserError, match="a sample needs"):
            start_host_loader(corpus.prepared, config, indices=[0])

    def test_another_error_names_the_loader(self) -> None:
        error = loader_server.error_of(loader_server.failed_with(ValueError("no such thing")), "the loader")
        assert isinstance(error, HostLoaderError)
        assert str(error) == "the loader failed: ValueError: no such thing"

    def test_nobody_listens(self, corpus: Loader) -> None:
        with started(corpus, [0]) as host:
            address = host.address
        with pytest.raises(HostLoaderError, match=f"no loader listens at {address}"):
            HostLoaderClient(address).stream(counts=1)
