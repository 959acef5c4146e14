"""The loader process of a host when real processes die, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
from host_loader_helpers import LIMIT_S, count_of, ended, forked, heard, make_corpus, same, started

from phalanx.data.host_loader import HostLoader, HostLoaderClient, HostLoaderError, why_no_host_loader
from phalanx.data.loader import Loader
from phalanx.data.sharing import loader_server
from phalanx.data.sharing.loader_process import fork_is_safe
from phalanx.ipc import local_socket

pytestmark = pytest.mark.skipif(why_no_host_loader() is not None, reason=str(why_no_host_loader()))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


class TestEnds:
    def test_readers_of_a_killed_loader_get_what_was_ready_and_then_an_error(self, corpus: Loader) -> None:
        with started(corpus, [0, 0]) as host:
            one, other = (HostLoaderClient(host.address).stream(counts=2) for _ in range(2))
            next(one)
            next(other)
            os.kill(host.pid, signal.SIGKILL)
            assert ended(host.pid)
            for stream in (one, other):
                with pytest.raises(HostLoaderError, match=rf"process {host.pid}, .*index 0\) is gone") as error:
                    list(stream)
                assert isinstance(error.value.__cause__, ConnectionResetError)  # by which launch knows it for a sequel
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
        with hosts[0] as host:
            with HostLoaderClient(host.address).stream(counts=2) as stream:
                assert same(next(stream)[0], corpus.batch(0, 2))
            assert host.close(LIMIT_S) == 0

    def test_a_process_with_threads_is_not_forked(self) -> None:
        def body(connection: Connection) -> None:
            stop = threading.Event()
            connection.send(fork_is_safe())
            thread = threading.Thread(target=stop.wait)
            thread.start()
            connection.send(fork_is_safe())
            stop.set()
            thread.join()

        with forked(body) as (_, connection):
            assert [heard(connection), heard(connection)] == [True, False]

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
    def test_no_socket_no_descriptor(self, corpus: Loader) -> None:
        before = count_of("/proc/self/fd")
        with started(corpus, [0]) as host, HostLoaderClient(host.address).stream(counts=2) as stream:
            next(stream)
            assert host.address.removeprefix("@") in Path("/proc/net/unix").read_text()
            os.kill(host.pid, signal.SIGKILL)
            assert ended(host.pid)
        assert count_of("/proc/self/fd") <= before  # fewer: a test before this one has left something behind
        assert host.address.removeprefix("@") not in Path("/proc/net/unix").read_text()

    def test_a_forked_loader_holds_no_descriptor_of_its_parent(self, corpus: Loader) -> None:
        ours, theirs = socket.socketpair()
        with ours, started(corpus, [0]):
            theirs.close()
            assert wait([ours], LIMIT_S)
            assert ours.recv(1) == b""

    def test_readers_cannot_write_to_what_others_read(self, corpus: Loader) -> None:
        with started(corpus, [0]) as host:
            connection = loader_server.connect(host.address)
            local_socket.send(connection, loader_server.Hello(loader_server.VERSION, 0, 1, 2, 0))
            welcome, descriptors = loader_server.receive(connection)
            assert welcome == loader_server.Welcome(host.pid)
            assert len(descriptors) == 2
            for descriptor in descriptors:
                with pytest.raises(OSError, match="Bad file descriptor"):
                    os.write(descriptor, b"x")
                os.close(descriptor)
            connection.close()

    def test_the_loader_process_needs_no_torch(self) -> None:
        program = "import phalanx.data.sharing.loader_process, sys, json; print(json.dumps('torch' in sys.modules))"
        assert json.loads(subprocess.check_output([sys.executable, "-c", program], text=True)) is False
