"""Checkpoints on an object store whose every request takes 20 ms: how soon a restore of 1,000 ranks reads weights, what
it asks for, and how much of the link one object takes.

    python benchmarks/checkpoint_objects.py                  # 1,000 ranks; an object of 512 MiB over 8 x 5 MB/s
    python benchmarks/checkpoint_objects.py --ranks 12288    # more of them, with less of a shard each
    python benchmarks/checkpoint_objects.py --quick          # 40 ranks, and objects of 64 MiB

A server speaks S3 over HTTP on loopback, in a process of its own, with that latency for each request and a limit for
each stream and for the link. The checkpoint is that of all ranks: a file of tensors and a part of each, manifest and
index, as the persisters leave it. Some of the ranks restore for real, through the code of a run, each with a client of
its own: rank 0, which looks for all, and others; what the rest would say is what the real ones say, and what they would
ask for is counted from them. Making a client is timed beside it, since here they share two cores, and each rank has its
own. The upload is one shard through the store of a run, the download one rank's restore of it.
"""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoint_tables import describe
from support.harness import benchmark_parser
from support.leaving import nothing_left
from support.object_server import Request, Server, serving

from phalanx.checkpoint import snapshot_plans
from phalanx.checkpoint.format import dcp, manifest
from phalanx.checkpoint.format.checkpoint_files import Span
from phalanx.checkpoint.format.dcp import Block
from phalanx.checkpoint.format.dcp_index import index_bytes
from phalanx.checkpoint.format.manifest import MANIFEST, SUMS, Chunk, FileEntry
from phalanx.checkpoint.format.run_sums import RunSums
from phalanx.checkpoint.restoring.restore import restore
from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.checkpoint.storage.latest import advance, claim
from phalanx.checkpoint.storage.location import open_store
from phalanx.core.layout import Shard
from phalanx.core.peers import Peers

LATENCY_S = 0.02
STREAMS = 8
NAME = "step-00000001.a1-aa"
KEYS = ("model.{}", "optim.{}.exp_avg", "optim.{}.exp_avg_sq")
WIDTH = 1024
PART_BYTES = 900  # of the record of a rank, which nothing is restored from
PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Case:
    """Ranks, rows of the shard of each in each of three tensors, and how many of them restore for real."""

    ranks: int
    rows: int
    real: int


def main() -> None:
    parser = benchmark_parser(__doc__, quick="40 ranks, and objects of 64 MiB")
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--real", type=int, default=8, help="ranks that restore for real")
    parser.add_argument("--stream-mb-per-s", type=float, default=5.0, help="limit of a stream; the link has 8 times it")
    parser.add_argument("--size-mib", type=int, default=512, help="of the object that is sent and fetched")
    given = parser.parse_args()
    ranks, size_mib = (40, 64) if given.quick else (given.ranks, given.size_mib)
    case = Case(ranks, max(1, 32_000 // ranks), min(given.real, ranks))
    stream = given.stream_mb_per_s * 1e6
    with nothing_left(), tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        make(folder / "bucket" / "many", case.ranks, case.rows)
        make(folder / "bucket" / "one", 1, size_mib * (1 << 20) // (3 * 4 * WIDTH))
        limits = f"{LATENCY_S * 1e3:.0f} ms a request, {stream / 1e6:.0f} MB/s a stream, {STREAMS} of them the link"
        print(f"{limits}")
        with serving(folder, LATENCY_S, stream, STREAMS * stream) as server:
            measure_restore(server, case)
            measure_parts(server, case)
            measure_link(server, size_mib << 20, STREAMS * stream)


def make(root: Path, ranks: int, rows: int) -> None:
    """A checkpoint as the persisters leave it, and the pointer to it."""
    folder = root / NAME
    folder.mkdir(parents=True)
    values = torch.arange(rows, dtype=torch.float32)[:, None].expand(-1, WIDTH)
    written, parts = [], []
    for rank in range(ranks):
        shard = shard_of(rank, ranks, rows)
        written.append(write(folder, rank, {key.format("w"): Block(values + rank, shard) for key in KEYS}))
        content = json.dumps({"rank": rank, "record": "x" * PART_BYTES}).encode()
        (folder / f"part-{rank}.json").write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        parts.append(FileEntry(name=f"part-{rank}.json", size_bytes=len(content), sha256=sha256))
    tensors = snapshot_plans.merge(written)
    index = index_bytes(tensors)
    (folder / ".metadata").write_bytes(index)
    entry = FileEntry(name=".metadata", size_bytes=len(index), sha256=hashlib.sha256(index).hexdigest())
    files = [entry, *(one.file for one in written if one.file is not None), *parts]
    content = manifest.encode(describe(tensors, files))
    digest = hashlib.sha256(content).hexdigest()
    (folder / MANIFEST).write_bytes(content)
    (folder / SUMS).write_bytes(manifest.sums_text(files, digest))
    claim(LocalStore(root))
    advance(LocalStore(root), 1, 1, NAME, digest)


def write(folder: Path, rank: int, blocks: dict[str, Block]) -> snapshot_plans.Written:
    """The file of a rank: an archive for each block, back to back."""
    name, content, sums, table = f"__{rank}_0.distcp", io.BytesIO(), RunSums(), {}
    for key, block in blocks.items():
        start = content.tell()
        torch.save(block.tensor.clone(), content)
        sums.cut()
        sums.update(content.getbuffer()[start:])
        place = {"file": name, "offset": start, "length": content.tell() - start}
        chunk = Chunk(offsets=list(block.shard.offsets), sizes=list(block.shard.sizes), **place)
        table[key] = (dcp.dtype_name(block.tensor), list(block.shard.shape), chunk)
    whole = content.getvalue()
    (folder / name).write_bytes(whole)
    digest = hashlib.sha256(whole).hexdigest()
    return snapshot_plans.Written(FileEntry(name=name, size_bytes=len(whole), sha256=digest, sums=sums.finish()), table)


def shard_of(rank: int, ranks: int, rows: int) -> Shard:
    return Shard.whole((rows * ranks, WIDTH)).rows(rank * rows, rows, ("shard",))


class SomePeers:
    """One of the ranks that are real; the others say what one of these says."""

    def __init__(self, number: int, case: Case, said: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = number * case.ranks // case.real, case.ranks
        self._number, self._real, self._said, self._barrier = number, case.real, said, barrier

    def gather(self, value: Any) -> list[Any]:
        self._said[self._number] = value
        self._barrier.wait()
        told = [self._said[rank * self._real // self.size] for rank in range(self.size)]
        self._barrier.wait()
        return told

    def collect(self, value: Any) -> list[Any] | None:
        told = self.gather(value)
        return None if self.rank else told

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]

    def lowest(self, value: Any) -> Any:
        return min((one for one in self.gather(value) if one is not None), default=None)

    def barrier(self) -> None:
        self._barrier.wait()

    def ask_highest(self, value: int) -> Callable[[], int]:
        highest = max(self.gather(value))
        return lambda: highest


def measure_restore(server: Server, case: Case) -> None:
    """Restore, and say when each real rank had read the first of its weights, and what it asked for."""
    said: list[Any] = [None] * case.real
    barrier = threading.Barrier(case.real)
    failures: list[BaseException] = []
    began_s = time.monotonic()
    stores = [open_store("s3://bucket/many", server.options(n * case.ranks // case.real)) for n in range(case.real)]
    for store in stores:
        store.get("latest-00000001.json")
    client_s = (time.monotonic() - began_s) / case.real

    def rank(number: int) -> None:
        peers: Peers = SomePeers(number, case, said, barrier)
        store = stores[number]
        shard = shard_of(peers.rank, case.ranks, case.rows)
        target = {key.format("w"): torch.zeros(shard.sizes) for key in KEYS}
        shards = dict.fromkeys(target, shard)
        try:
            restore(target, keeper=None, store=store, report=print, shards=shards, peers=peers)
            assert all(torch.equal(one[:, 0], torch.arange(case.rows) + peers.rank) for one in target.values())
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    server.take_log()
    threads = [threading.Thread(target=rank, args=(number,)) for number in range(case.real)]
    began_s = time.time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    seconds = time.time() - began_s
    show_restore(case, server.take_log(), began_s, seconds)
    print(f"  making a client, before      {client_s:.2f} s each")


def measure_parts(server: Server, case: Case) -> None:
    """Read the parts of all ranks as the publisher does when they are there."""
    store = open_store("s3://bucket/many", server.options(0))
    began_s = time.monotonic()
    sizes = store.at(NAME).sizes()
    names = [name for name in sizes if name.startswith("part-")]
    with store.at(NAME).ahead([Span(name, 0, sizes[name]) for name in names], sizes) as files:
        read_bytes = sum(len(files.read(name)) for name in names)
    assert len(names) == case.ranks and read_bytes == sum(sizes[name] for name in names)
    print(f"  parts of all ranks           read by the publisher in {time.monotonic() - began_s:.2f} s")


def show_restore(case: Case, log: list[Request], began_s: float, seconds: float) -> None:
    of_rank = {rank: [one for one in log if one.rank == rank] for rank in {one.rank for one in log}}
    before = {rank: list(until_weights(requests)) for rank, requests in of_rank.items()}
    firsts = [min(one.ended_s for one in requests if is_weights(one)) - began_s for requests in of_rank.values()]
    first, others = of_rank[0], [len(requests) for rank, requests in of_rank.items() if rank]
    total = len(first) + round(sum(others) / max(len(others), 1) * (case.ranks - 1))
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(Counter(one.method for one in before[0]).items()))
    most = max((len(requests) for rank, requests in before.items() if rank), default=0)
    print(f"restore at {case.ranks:,} ranks, {len(of_rank)} of them real")
    print(f"  first weights read after     {max(firsts):.2f} s (the last of the ranks), all after {seconds:.2f} s")
    print(f"  requests before its weights  rank 0: {len(before[0])} ({kinds}); any other rank: at most {most}")
    print(
        f"  requests in all              rank 0: {len(first)}; another: {max(others, default=0)}; all ranks: {total:,}"
    )


def until_weights(requests: list[Request]) -> Iterator[Request]:
    for one in requests:
        if is_weights(one):
            return
        yield one


def is_weights(one: Request) -> bool:
    return one.key.endswith(".distcp") and one.method == "GET"


def measure_link(server: Server, size_bytes: int, link_bytes_per_s: float) -> None:
    """Send an object, and restore one rank from one of its size."""
    store = open_store("s3://bucket/sent", server.options(0))
    area = store.begin(1, 1, "aa")
    piece = bytes(range(256)) * (PIECE_BYTES // 256)
    began_s = time.monotonic()
    store.write(area, "__0_0.distcp", (piece for _ in range(size_bytes // PIECE_BYTES)))
    show_link("upload", size_bytes, time.monotonic() - began_s, link_bytes_per_s)
    store = open_store("s3://bucket/one", server.options(0))
    rows = size_bytes // (3 * 4 * WIDTH)
    target = {key.format("w"): torch.zeros(rows, WIDTH) for key in KEYS}
    server.take_log()
    began_s, began_unix_s = time.monotonic(), time.time()
    restore(target, keeper=None, store=store, report=print)
    seconds = time.monotonic() - began_s
    weights = [one for one in server.take_log() if is_weights(one)]
    fetched_bytes = sum(one.size_bytes for one in weights)
    show_link("download", fetched_bytes, seconds, link_bytes_per_s)
    print(f"  of which the weights came within {max(one.ended_s for one in weights) - began_unix_s:.2f} s")


def show_link(what: str, size_bytes: int, seconds: float, link_bytes_per_s: float) -> None:
    rate = size_bytes / seconds
    share = rate / link_bytes_per_s
    print(f"{what:9} {size_bytes / 1e6:,.0f} MB in {seconds:.2f} s: {rate / 1e6:.0f} MB/s, {share:.0%} of the link")


if __name__ == "__main__":
    main()
