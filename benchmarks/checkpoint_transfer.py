"""How fast a shard comes back from memory: from this host's keeper, from a peer's, and to a peer.

    python benchmarks/checkpoint_transfer.py                    # 512 MB, 9 repeats
    python benchmarks/checkpoint_transfer.py --mb 2048 --json FILE
    python benchmarks/checkpoint_transfer.py --quick            # 32 MB, 3 repeats

Every way of moving the bytes takes its turn in each repeat, into the same destination, whose pages have been touched,
so that all see the same machine. The figures are medians over the repeats: GB/s, and the ratio to the plain way within
a repeat (a copy between two pieces of memory; sendall and recv_into over loopback, by two threads).

The bars: reading what this host's keeper holds, sums checked, at 0.8 of a plain copy; fetching what a peer's holds at
0.8 of a plain transfer. The peer's keeper is a process of its own; in "sent" its replica is committed and acknowledged.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from xxhash import xxh3_64_intdigest

from phalanx.checkpoint.format.plan import Piece, ShardPlan
from phalanx.checkpoint.format.record import CHUNK_BYTES, Record, SnapshotId
from phalanx.checkpoint.format.sums import chunk_sums
from phalanx.checkpoint.keeper.vault import MemoryVault
from phalanx.checkpoint.replicas.contract import Endpoint, Replicated
from phalanx.checkpoint.replicas.fetch import PeerCopies, fetch
from phalanx.checkpoint.replicas.link import new_token
from phalanx.checkpoint.replicas.service import ReplicaService

Ways = dict[str, Callable[[], None]]
SNAPSHOT = SnapshotId(1, 1, "set")
WAIT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=512, help="size of the shard in 1,000,000 bytes")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="32 MB, 3 repeats")
    arguments = parser.parse_args()
    size, repeats = (32, 3) if arguments.quick else (arguments.mb, arguments.repeats)
    rows = [*from_keeper(size * 10**6, repeats), *from_peer(size * 10**6, repeats)]
    if arguments.json:
        arguments.json.write_text(json.dumps({"mb": size, "repeats": repeats, "rows": rows}, indent=1))


def from_keeper(size: int, repeats: int) -> list[dict[str, Any]]:
    vault = MemoryVault()
    record = commit(vault, make_plan(size))
    destination = touched(size)
    with vault.pin(SNAPSHOT, 0) as (_, _, descriptor):
        source = memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ))

        def plain() -> None:
            destination[:] = source

        ways: Ways = {"plain copy": plain}
        for threads in (1, 2):
            ways[f"checked copy, {threads} thread(s)"] = partial(checked, source, destination, record, threads)
        ways["only its sums, 1 thread"] = lambda: check_sums(source, record, 0, len(record.sums), None)
        rows = measure("memory of this host", ways, size, repeats)
        assert destination == source
    return rows


def checked(source: memoryview, destination: memoryview, record: Record, threads: int) -> None:
    """Sum every chunk, then copy it while it is in the cache."""
    edges = [len(record.sums) * i // threads for i in range(threads + 1)]
    spans = list(pairwise(edges))
    if threads == 1:
        check_sums(source, record, *spans[0], destination)
        return
    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(check_sums, source, record, low, high, destination) for low, high in spans]:
            future.result()


def check_sums(source: memoryview, record: Record, low: int, high: int, destination: memoryview | None) -> None:
    for number in range(low, high):
        where = slice(number * CHUNK_BYTES, min((number + 1) * CHUNK_BYTES, record.data_bytes))
        assert xxh3_64_intdigest(source[where]) == record.sums[number]
        if destination is not None:
            destination[where] = source[where]


def from_peer(size: int, repeats: int) -> list[dict[str, Any]]:
    vault, token, told = MemoryVault(), new_token(), SimpleQueue[Replicated]()
    plan = make_plan(size)
    commit(vault, plan)
    destination = touched(size)
    service = ReplicaService(vault, told.put)
    service.use_token(token)
    with vault.pin(SNAPSHOT, 0) as (record, _, descriptor), peer(token) as endpoint:
        source = memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ))

        def send() -> None:
            service.send(plan, SNAPSHOT, endpoint)
            problem = told.get(timeout=WAIT_S).problem
            assert not problem, problem

        send()
        send()  # both slots there are allocated now
        ways: Ways = {"plain transfer": lambda: transfer(source, destination), "sent, and committed there": send}
        for streams in (1, 2, 4):
            ways[f"fetched, {streams} stream(s)"] = partial(fetched, endpoint, token, destination, streams)
        ways["chunks, summed and copied here"] = lambda: by_chunks(endpoint, token, destination, record)
        rows = measure("memory of another host, over loopback", ways, size, repeats)
        assert destination == source
    service.close()
    return rows


def fetched(endpoint: Endpoint, token: str, destination: memoryview, streams: int) -> None:
    fetch(endpoint, token, SNAPSHOT, 0, destination, streams=streams)


def by_chunks(endpoint: Endpoint, token: str, destination: memoryview, record: Record) -> None:
    """As restoring does it where what is wanted is not a run of bytes."""
    with PeerCopies(token).open(endpoint, SNAPSHOT, 0) as copy:
        for number, chunk in enumerate(copy.chunks(range(len(record.sums)))):
            assert xxh3_64_intdigest(chunk) == record.sums[number]
            destination[number * CHUNK_BYTES : number * CHUNK_BYTES + len(chunk)] = chunk


def transfer(source: memoryview, destination: memoryview) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sending = socket.create_connection(server.getsockname())
        receiving, _ = server.accept()
    thread = threading.Thread(target=sending.sendall, args=(source,))
    thread.start()
    done = 0
    while done < len(destination):
        done += receiving.recv_into(destination[done : done + (1 << 20)])
    thread.join()
    sending.close()
    receiving.close()


@contextmanager
def peer(token: str) -> Iterator[Endpoint]:
    """A host in a process of its own."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=keep, args=(there, token))
    process.start()
    try:
        yield Endpoint(**here.recv())
    finally:
        here.send("end")
        process.join()


def keep(pipe: Any, token: str) -> None:
    service = ReplicaService(MemoryVault(), lambda replicated: None, host="peer")
    service.use_token(token)
    pipe.send(asdict(service.start_listening()))
    pipe.recv()
    service.close()


def make_plan(size: int) -> ShardPlan:
    return ShardPlan(0, 1, (Piece("w", "uint8", (size,), (0,), (size,), "trained", 0, size),))


def commit(vault: MemoryVault, plan: ShardPlan) -> Record:
    """Random bytes as the snapshot of a rank of this host."""
    vault.lease(plan, 1)
    number = vault.free(0)
    assert number is not None
    vault.writing(0, number)
    memory = vault.taken(plan, number, SNAPSHOT).block.memory
    for start in range(0, len(memory), CHUNK_BYTES):
        memory[start : start + CHUNK_BYTES] = os.urandom(min(CHUNK_BYTES, len(memory) - start))
    sums = chunk_sums(memory, plan.data_bytes)
    record = Record(*SNAPSHOT, 0, 1, plan.sha256, plan.data_bytes, sums)
    vault.commit_own(number, record)
    return record


def touched(size: int) -> memoryview:
    memory = memoryview(mmap.mmap(-1, size))
    memory[:] = bytes(size)
    return memory


def measure(title: str, ways: Ways, size: int, repeats: int) -> list[dict[str, Any]]:
    """Each way once in every repeat; the first of them is what the others are compared with."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    plain = next(iter(seconds.values()))
    print(f"{title}, {size / 1e6:g} MB, medians of {repeats}\n  {'':32} {'GB/s':>6} {'of plain':>9}")
    rows = []
    for name, own in seconds.items():
        rate = size / statistics.median(own) / 1e9
        ratio = statistics.median(p / o for p, o in zip(plain, own, strict=True))
        print(f"  {name:32} {rate:6.2f} {ratio:9.2f}")
        rows.append({"from": title, "way": name, "gb_per_s": rate, "of_plain": ratio, "seconds": own})
    return rows


if __name__ == "__main__":
    main()
