"""How fast a shard comes back from memory: from this host's keeper, from a peer's, and to a peer.

    python benchmarks/checkpoint_transfer.py                    # 512 MB, 9 repeats
    python benchmarks/checkpoint_transfer.py --mb 2048 --json FILE
    python benchmarks/checkpoint_transfer.py --quick            # 32 MB, 3 repeats

Every way of moving the bytes takes its turn in each repeat, into the same destination, whose pages have been touched,
so that all see the same machine. The figures are medians over the repeats: GB/s, the ratio to the plain way within a
repeat (a copy between two pieces of memory; sendall and recv_into over loopback, by two threads), and the CPU time of
this process: of both ends of a plain transfer, of our end of the others.

The bars: reading what this host's keeper holds, sums checked, at 0.8 of a plain copy; fetching what a peer's holds at
0.8 of a plain transfer. The peer's keeper is a process of its own; in "sent" its replica is committed and acknowledged.
Reading a durable checkpoint is reported beside them, without a bar.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import secrets
import socket
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from support.chunk_sums import chunk_sums
from support.harness import benchmark_parser, in_turns, ratio, timed, write_json
from xxhash import xxh3_64_intdigest

from phalanx.checkpoint.format.shard_plan import CHUNK_BYTES, Piece, Record, ShardPlan, SnapshotId
from phalanx.checkpoint.keeper_contract import Endpoint, Replicated
from phalanx.checkpoint.replicas.fetch import PeerCopies, fetch
from phalanx.checkpoint.replicas.replica_service import ReplicaService
from phalanx.checkpoint.restoring.compatibility import ReadItem, SavedBlock
from phalanx.checkpoint.restoring.memory_source import fill_from_memory
from phalanx.checkpoint.restoring.restore import restore
from phalanx.checkpoint.session.blocking_session import save
from phalanx.checkpoint.snapshot_slots import SnapshotMemory
from phalanx.checkpoint.storage.location import open_store

Ways = dict[str, Callable[[], None]]
SNAPSHOT = SnapshotId(1, 1, "set")
WAIT_S = 120.0
TENSOR_BYTES = 16 << 20


def main() -> None:
    parser = benchmark_parser(__doc__, quick="32 MB, 3 repeats", repeats=9, as_json=True)
    parser.add_argument("--mb", type=int, default=512, help="size of the shard in 1,000,000 bytes")
    arguments = parser.parse_args()
    size, repeats = (32, 3) if arguments.quick else (arguments.mb, arguments.repeats)
    rows = [*from_keeper(size * 10**6, repeats), *from_peer(size * 10**6, repeats), *from_disk(size * 10**6, repeats)]
    write_json(arguments.json, {"mb": size, "repeats": repeats, "rows": rows})


def from_keeper(size: int, repeats: int) -> list[dict[str, Any]]:
    """As a rank restores: tensor by tensor, every run of bytes held against its sum."""
    vault = SnapshotMemory()
    plan = make_plan(size)
    record = commit(vault, plan)
    destination = touched(size)
    with vault.pin(SNAPSHOT, 0) as (_, _, descriptor):
        source = memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ))
        wanted = parts_of(plan, destination)
        saved = parts_of(plan, source)
        each = [(to.out, of.out) for to, of in zip(wanted, saved, strict=True)]

        def plain() -> None:
            for to, of in each:
                to.copy_(of)

        def in_one_call() -> None:
            ctypes.memmove(destination_address, source_address, size)

        destination_address, source_address = wanted[0].out.data_ptr(), saved[0].out.data_ptr()
        torch.set_num_threads(1)
        ways: Ways = {"plain copy, tensor by tensor": plain, "plain copy in one call": in_one_call}
        for threads in (1, 2):
            ways[f"checked copy, {threads} thread(s)"] = partial(
                fill_from_memory, source, record, plan, wanted, threads
            )
        ways["only its sums, 1 thread"] = lambda: check_sums(source, record)
        rows = measure("memory of this host", ways, size, repeats)
        assert destination == source
    return rows


def parts_of(plan: ShardPlan, memory: memoryview) -> list[ReadItem]:
    """Every piece of the plan as a tensor where the plan puts it in `memory`."""
    with warnings.catch_warnings(action="ignore"):  # one of the two is not to be written, and is not
        whole = torch.frombuffer(memory, dtype=torch.uint8)
    found = []
    for piece in plan.pieces:
        block = SavedBlock((0,), piece.sizes, 0, piece.start_bytes, piece.length_bytes)
        out = whole[piece.start_bytes : piece.start_bytes + piece.length_bytes]
        found.append(ReadItem(piece.name, block, torch.uint8, (0,), out))
    return found


def check_sums(source: memoryview, record: Record) -> None:
    for number in range(len(record.sums)):
        where = slice(number * CHUNK_BYTES, min((number + 1) * CHUNK_BYTES, record.data_bytes))
        assert xxh3_64_intdigest(source[where]) == record.sums[number]


def from_peer(size: int, repeats: int) -> list[dict[str, Any]]:
    vault, secret, told = SnapshotMemory(), secrets.token_bytes(32), SimpleQueue[Replicated]()
    plan = make_plan(size)
    commit(vault, plan)
    destination = touched(size)
    service = ReplicaService(vault, told.put)
    service.use_secret(secret)
    with vault.pin(SNAPSHOT, 0) as (record, _, descriptor), peer(secret) as endpoint:
        source = memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ))

        def send() -> None:
            service.send(plan, SNAPSHOT, endpoint)
            problem = told.get(timeout=WAIT_S).problem
            assert not problem, problem

        send()
        send()  # both slots there are allocated now
        ways: Ways = {"plain transfer": lambda: transfer(source, destination), "sent, and committed there": send}
        for streams in (1, 2, 4):
            ways[f"fetched, {streams} stream(s)"] = partial(fetched, endpoint, secret, destination, streams)
        ways["chunks, summed and copied here"] = lambda: by_chunks(endpoint, secret, destination, record)
        rows = measure("memory of another host, over loopback", ways, size, repeats)
        assert destination == source
    service.close()
    return rows


def from_disk(size: int, repeats: int) -> list[dict[str, Any]]:
    """A durable checkpoint, of whose files nothing is in the page cache when a read begins."""
    with tempfile.TemporaryDirectory() as folder:
        tensors = {
            f"w{start}": torch.rand(min(TENSOR_BYTES, size - start) // 4) for start in range(0, size, TENSOR_BYTES)
        }
        checkpoint = save(Path(folder), 1, tensors)
        file = max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)
        wanted = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        destination = touched(file.stat().st_size)

        def plain() -> None:
            forget_pages(checkpoint)
            with file.open("rb", buffering=0) as stream:
                read = 0
                while read < len(destination):
                    read += stream.readinto(destination[read : read + CHUNK_BYTES])

        def restored() -> None:
            forget_pages(checkpoint)
            assert restore(wanted, keeper=None, store=open_store(folder), report=print) is not None

        rows = measure("disk, page cache dropped", {"plain read": plain, "restored, checked": restored}, size, repeats)
        assert all(torch.equal(wanted[name], tensor) for name, tensor in tensors.items())
    return rows


def forget_pages(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def fetched(endpoint: Endpoint, secret: bytes, destination: memoryview, streams: int) -> None:
    fetch(endpoint, secret, SNAPSHOT, 0, destination, streams=streams)


def by_chunks(endpoint: Endpoint, secret: bytes, destination: memoryview, record: Record) -> None:
    """As restoring does it where what is wanted is not a run of bytes."""
    with PeerCopies(secret).open(endpoint, SNAPSHOT, 0) as copy:
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
def peer(secret: bytes) -> Iterator[Endpoint]:
    """A host in a process of its own."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=keep, args=(there, secret))
    process.start()
    try:
        yield Endpoint(**here.recv())
    finally:
        here.send("end")
        process.join()


def keep(pipe: Any, secret: bytes) -> None:
    vault = SnapshotMemory()
    vault.begin(1)
    service = ReplicaService(vault, lambda replicated: None, host="peer")
    service.use_secret(secret)
    pipe.send(asdict(service.start_listening()))
    pipe.recv()
    service.close()


def make_plan(size: int) -> ShardPlan:
    """Of tensors of 16 MiB, one behind the other; the last is shorter."""
    starts = range(0, size, TENSOR_BYTES)
    lengths = [min(TENSOR_BYTES, size - start) for start in starts]
    pieces = [
        Piece(f"w{start}", "uint8", (length,), (0,), (length,), "trained", start, length)
        for start, length in zip(starts, lengths, strict=True)
    ]
    return ShardPlan(0, 1, tuple(pieces))


def commit(vault: SnapshotMemory, plan: ShardPlan) -> Record:
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

    def measured(way: Callable[[], None]) -> tuple[float, float]:
        busy_before_s = time.process_time()
        return timed(way), time.process_time() - busy_before_s

    turns = in_turns({name: partial(measured, way) for name, way in ways.items()}, repeats, warm_up=0)
    seconds = {name: [wall_s for wall_s, _ in found] for name, found in turns.items()}
    plain = next(iter(seconds.values()))
    print(f"{title}, {size / 1e6:g} MB, medians of {repeats}\n  {'':32} {'GB/s':>6} {'of plain':>9} {'CPU s/GB':>9}")
    rows = []
    for name, own in seconds.items():
        rate = size / statistics.median(own) / 1e9
        of_plain = ratio(plain, own)
        cpu = statistics.median(cpu_s for _, cpu_s in turns[name]) / size * 1e9
        print(f"  {name:32} {rate:6.2f} {of_plain:9.2f} {cpu:9.2f}")
        row = {"from": title, "way": name, "gb_per_s": rate, "of_plain": of_plain, "seconds": own}
        rows.append(row | {"cpu_s_per_gb": cpu})
    return rows


if __name__ == "__main__":
    main()
