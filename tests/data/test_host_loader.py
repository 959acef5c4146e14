"""The loader process of a host: the batches of `Loader.stream`, and what happens when real processes die."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from data_helpers import lines, make_config, write_jsonl, write_text
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.data.batch import Batch
from phalanx.data.config import SourceConfig
from phalanx.data.host_loader import (
    HostLoader,
    HostLoaderClient,
    HostLoaderError,
    start_host_loader,
    why_no_host_loader,
)
from phalanx.data.loader import Loader, LoaderState
from phalanx.data.prepare import prepare
from phalanx.data.sharing import messages
from phalanx.data.sharing.rings import DisagreementError, Ring

pytestmark = pytest.mark.skipif(why_no_host_loader() is not None, reason=str(why_no_host_loader()))

LIMIT_S = 20.0  # for what must happen at once


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    """Two sources, one of them with prompts that have no loss, several documents in a sample."""
    folder = tmp_path_factory.mktemp("corpus")
    text = write_text(folder / "text.txt", lines(300))
    records = [{"q": f"question {i}", "text": f"answer {i}"} for i in range(200)]
    questions = write_jsonl(folder / "qa.jsonl", records)
    sources = (
        SourceConfig(kind="text", path=str(text), document_separator="\n", weight=2.0),
        SourceConfig(kind="jsonl", path=str(questions), prompt_field="q", weight=1.0),
    )
    config = make_config(folder, sources=sources)
    return Loader(prepare(config, workers=1), config)


def started(loader: Loader, indices: list[int], **settings: Any) -> HostLoader:
    settings = {"method": "fork"} | settings
    return start_host_loader(loader.prepared, loader.config, indices=indices, **settings)


def same(one: Batch, other: Batch) -> bool:
    pairs = list(zip(vars(one).values(), vars(other).values(), strict=True))
    return all(
        (a is None and b is None) or (a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)) for a, b in pairs
    )


def ended(pid: int) -> bool:
    """Wait until a process that may be nobody's child of ours is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with contextlib.closing(os.fdopen(descriptor)):
        return bool(select.select([descriptor], [], [], LIMIT_S)[0])


def count_of(folder: str) -> int:
    return len(list(Path(folder).iterdir()))


@contextlib.contextmanager
def forked(body: Callable[[Connection], None]) -> Iterator[tuple[int, Connection]]:
    """Run `body` in a fork of this process; its process id, and a connection to it. Killed at the end."""
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            body(theirs)
        finally:
            os._exit(0)
    theirs.close()
    try:
        yield pid, ours
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ours.close()


def heard(connection: Connection) -> Any:
    assert connection.poll(LIMIT_S), "nothing was said in time"
    return connection.recv()


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
            held = []
            for _ in range(5):
                with client.stream(counts=4, ahead=4) as stream:
                    next(stream)
                held.append(count_of(f"/proc/{host.pid}/fd"))
            assert max(held) - min(held) <= 9  # the newest may not be closed yet; five would be 32 more


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
        error = messages.error_of(messages.failed_with(ValueError("no such thing")), "the loader")
        assert isinstance(error, HostLoaderError)
        assert str(error) == "the loader failed: ValueError: no such thing"

    def test_nobody_listens(self, corpus: Loader) -> None:
        with started(corpus, [0]) as host:
            address = host.address
        with pytest.raises(HostLoaderError, match=f"no loader listens at {address}"):
            HostLoaderClient(address).stream(counts=1)


class TestEnds:
    def test_readers_of_a_killed_loader_get_what_was_ready_and_then_an_error(self, corpus: Loader) -> None:
        with started(corpus, [0, 0]) as host:
            one, other = (HostLoaderClient(host.address).stream(counts=2) for _ in range(2))
            next(one)
            next(other)
            os.kill(host.pid, signal.SIGKILL)
            assert ended(host.pid)
            for stream in (one, other):
                with pytest.raises(HostLoaderError, match=rf"process {host.pid}, .*index 0\) is gone"):
                    list(stream)
                assert list(stream) == []
            assert host.close() == -signal.SIGKILL

    def test_a_reader_that_waits_hears_at_once_that_the_loader_was_killed(self, corpus: Loader) -> None:
        def body(connection: Connection) -> None:
            stream = HostLoaderClient(host.address).stream(counts=2, ahead=1)
            next(stream)
            connection.send("one")
            try:
                next(stream)
                next(stream)  # for which the other reader would have to come
            except HostLoaderError as error:
                connection.send(str(error))

        with started(corpus, [0, 0]) as host, forked(body) as (_, connection):
            assert heard(connection) == "one"
            os.kill(host.pid, signal.SIGKILL)
            assert "is gone" in heard(connection)

    def test_others_go_on_when_a_reader_is_killed(self, corpus: Loader) -> None:
        def body(connection: Connection) -> None:
            stream = HostLoaderClient(host.address).stream(counts=2)
            next(stream)
            connection.send("one")
            connection.recv()

        with started(corpus, [0, 0]) as host:
            with forked(body) as (_, connection), contextlib.ExitStack() as stack:
                stream = stack.enter_context(HostLoaderClient(host.address).stream(counts=2))
                assert heard(connection) == "one"
                next(stream)
                pop = stack.pop_all()
            with pop:
                for step in range(1, 8):  # more steps than slots: those that the dead one held are free
                    assert same(next(stream)[0], corpus.batch(2 * step, 2))

    @pytest.mark.parametrize("method", ["fork", "exec"])
    def test_the_loader_is_killed_with_the_process_that_started_it(self, corpus: Loader, method: str) -> None:
        def body(connection: Connection) -> None:
            host = started(corpus, [0, 0], method=method)
            connection.send((host.pid, host.address))
            connection.recv()

        with forked(body) as (parent, connection):
            pid, address = heard(connection)
            stream = HostLoaderClient(address).stream(counts=2)
            next(stream)
            os.kill(parent, signal.SIGKILL)
            assert ended(pid)
            with pytest.raises(HostLoaderError, match="is gone"):
                list(stream)

    def test_started_by_another_thread_it_outlives_that_and_ends_by_its_pipe(self, corpus: Loader) -> None:
        """The kernel's signal would come when the thread ends, so it is not asked for."""
        hosts: list[HostLoader] = []
        thread = threading.Thread(target=lambda: hosts.append(started(corpus, [0], method="exec")))
        thread.start()
        thread.join()
        with hosts[0] as host, HostLoaderClient(host.address).stream(counts=2) as stream:
            assert same(next(stream)[0], corpus.batch(0, 2))
        assert host.close() == 0

    def test_signals_that_reach_all_processes_of_a_job_are_left_to_the_ranks(self, corpus: Loader) -> None:
        with started(corpus, [0]) as host, HostLoaderClient(host.address).stream(counts=2) as stream:
            next(stream)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                os.kill(host.pid, number)
            assert same(next(stream)[0], corpus.batch(2, 2))
            assert same(next(stream)[0], corpus.batch(4, 2))

    @pytest.mark.parametrize("method", ["fork", "exec"])
    def test_it_runs_on_the_cores_it_was_given(self, corpus: Loader, method: str) -> None:
        core = max(os.sched_getaffinity(0))
        with started(corpus, [0], cores=[core], method=method) as host:
            with HostLoaderClient(host.address).stream(counts=2) as stream:
                next(stream)
            assert os.sched_getaffinity(host.pid) == {core}

    def test_closing_waits_for_readers_a_while_and_no_longer(self, corpus: Loader) -> None:
        host = started(corpus, [0])
        stream = HostLoaderClient(host.address).stream(counts=2)
        next(stream)
        assert host.close(grace_s=0.05) == -signal.SIGKILL
        stream.close()

    def test_what_is_wanted_is_still_read_while_it_closes(self, corpus: Loader) -> None:
        host = started(corpus, [0])
        stream = HostLoaderClient(host.address).stream(counts=[2] * 10)
        next(stream)
        closing = threading.Thread(target=host.close, args=(LIMIT_S,))
        closing.start()
        assert len(list(stream)) == 9
        closing.join()
        assert host.close() == 0


class TestLeavesNothing:
    def test_no_memory_no_socket_no_descriptor(self, corpus: Loader) -> None:
        before = count_of("/proc/self/fd")
        with started(corpus, [0]) as host, HostLoaderClient(host.address).stream(counts=2) as stream:
            next(stream)
            assert host.address.removeprefix("@") in Path("/proc/net/unix").read_text()
            os.kill(host.pid, signal.SIGKILL)
            assert ended(host.pid)
        assert count_of("/proc/self/fd") == before
        assert not list(Path("/dev/shm").glob("*phalanx*"))
        assert host.address.removeprefix("@") not in Path("/proc/net/unix").read_text()

    def test_a_forked_loader_holds_no_descriptor_of_its_parent(self, corpus: Loader) -> None:
        ours, theirs = socket.socketpair()
        with ours, started(corpus, [0]):
            theirs.close()
            assert select.select([ours], [], [], LIMIT_S)[0]
            assert ours.recv(1) == b""

    def test_readers_cannot_write_to_what_others_read(self, corpus: Loader) -> None:
        with started(corpus, [0]) as host:
            connection = messages.connect(host.address)
            messages.send(connection, messages.Hello(messages.VERSION, 0, 1, 2, 0))
            welcome, descriptors = messages.receive(connection)
            assert welcome == messages.Welcome(host.pid)
            assert len(descriptors) == 2
            for descriptor in descriptors:
                with pytest.raises(OSError, match="Bad file descriptor"):
                    os.write(descriptor, b"x")
                os.close(descriptor)
            connection.close()

    def test_the_loader_process_needs_no_torch(self) -> None:
        program = "import phalanx.data.sharing.process, sys, json; print(json.dumps('torch' in sys.modules))"
        assert json.loads(subprocess.check_output([sys.executable, "-c", program], text=True)) is False


class TestRing:
    def test_steps_are_written_once_everybody_let_go(self) -> None:
        ring = Ring(index=0, ranks=1, ahead=2, expected=2)
        ring.join(7)
        assert ring.due() is None
        for step in range(3):
            ring.want(7, step, step * 4, 4)
        assert ring.due() == (0, 0, 4)
        ring.wrote()
        assert ring.due() == (1, 4, 4)
        ring.wrote()
        assert ring.due() is None  # the one that has not come yet will want step 0 first
        ring.join(8)
        assert ring.want(8, 0, 0, 4)
        assert ring.want(8, 1, 4, 4)
        assert ring.due() is None
        assert not ring.want(8, 2, 8, 4)
        assert ring.due() == (2, 8, 4)

    def test_a_step_that_nobody_waits_for_any_more_is_not_written(self) -> None:
        ring = Ring(index=0, ranks=1, ahead=2, expected=1)
        ring.join(1)
        ring.want(1, 0, 0, 4)
        ring.leave(1)
        assert ring.due() is None
        assert ring.is_over

    def test_a_step_out_of_turn(self) -> None:
        ring = Ring(index=0, ranks=1, ahead=2, expected=1)
        ring.join(1)
        with pytest.raises(DisagreementError, match="step 1 was asked for, step 0 was expected"):
            ring.want(1, 1, 0, 4)

    @given(data=st.data(), readers=st.integers(1, 4), ahead=st.integers(1, 3))
    @settings(max_examples=40, deadline=None)
    def test_nobody_ever_reads_a_slot_that_was_filled_again(
        self, data: st.DataObject, readers: int, ahead: int
    ) -> None:
        """Readers join, ask, read and leave in any order; all that stay come to the end."""
        ring, slots, steps = Ring(index=0, ranks=1, ahead=ahead, expected=readers), [-1] * ahead, 6
        read = dict.fromkeys(range(readers), -1)  # -1: has not come
        asked = dict.fromkeys(range(readers), 0)
        alive = set(range(readers))
        for _ in range(400):
            moves = [(r, "join") for r in alive if read[r] < 0]
            moves += [(r, "ask") for r in alive if read[r] >= 0 and asked[r] < min(steps, read[r] + ahead)]
            moves += [(r, "read") for r in alive if 0 <= read[r] < asked[r] and read[r] < ring.written]
            moves += [(0, "write")] if ring.due() else []
            if not moves:
                break
            reader, move = data.draw(st.sampled_from(moves))
            if move == "join":
                ring.join(reader)
                read[reader] = 0
            elif move == "ask":
                ring.want(reader, asked[reader], 4 * asked[reader], 4)
                asked[reader] += 1
            elif move == "write":
                slots[ring.written % ahead] = ring.written
                ring.wrote()
            else:
                assert slots[read[reader] % ahead] == read[reader]
                read[reader] += 1
                if data.draw(st.integers(0, 20)) == 0:
                    alive.discard(reader)
                    ring.leave(reader)
        assert all(read[reader] == steps for reader in alive)
