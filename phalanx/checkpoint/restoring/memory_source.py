"""Snapshots in the memory of hosts as a place to restore from: this host's keeper first, those of other hosts next.

Every chunk is checked against the sums of its record before it goes into a tensor.
"""

from __future__ import annotations

import io
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, BinaryIO, cast

import numpy as np
from typing_extensions import Buffer
from xxhash import xxh3_64

from phalanx.checkpoint.all_ranks import everywhere, pack, unpack
from phalanx.checkpoint.format.dcp import read_rows
from phalanx.checkpoint.format.run_sums import BadSumError, chunk_fault, first_fault, record_fault
from phalanx.checkpoint.format.shard_plan import CHUNK_BYTES, Record, ShardPlan
from phalanx.checkpoint.keeper.keeper_client import KeeperClient
from phalanx.checkpoint.keeper.keeper_start import host_name
from phalanx.checkpoint.keeper_contract import Endpoint, KeeperLostError, RestorableSnapshot, brief
from phalanx.checkpoint.replicas.fetch import PeerCopies
from phalanx.checkpoint.restoring.compatibility import ReadItem, SavedBlock, SavedBlocks
from phalanx.checkpoint.restoring.source import Rate, ReadFault, ReadReport
from phalanx.core.peers import Peers

SHARE_BYTES = 32 << 20  # work is divided among threads in pieces of about this size
STREAMS = 2  # connections at once to another host: while one receives, the other sums and copies
_BLOCK_BYTES = 1 << 18  # stays in the cache of a core
_MAX_THREADS = 8

Table = list[list[Any]]
"""Of each piece of a shard: name, dtype, shape, offsets, sizes, first byte, length."""


class CheckedCopy(io.RawIOBase):
    """The elements of a copy as a file, to be read from front to back; what `readinto` gave is good when it returns.
    `chunk` gives the chunk of a number, and is called with rising numbers."""

    def __init__(self, record: Record, plan: ShardPlan, chunk: Callable[[int], Buffer]) -> None:
        self._record, self._plan, self._chunk = record, plan, chunk
        self._at, self._number = 0, -1
        self._current = np.empty(0, np.uint8)

    def seekable(self) -> bool:
        """Yes."""
        return True

    def readable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """From the beginning only."""
        assert whence == io.SEEK_SET
        self._at = offset
        return offset

    def readinto(self, buffer: Buffer) -> int:
        """Fill `buffer`, or as much of it as there is; BadSumError: naming chunk and tensors."""
        target = np.frombuffer(memoryview(buffer), np.uint8)[: max(0, self._record.data_bytes - self._at)]
        done = 0
        while done < target.size:
            number, skipped = divmod(self._at, CHUNK_BYTES)
            first, end = chunk_place(number, self._record)
            if not skipped and end - first <= target.size - done and number != self._number:
                count = self._take_whole(number, target[done : done + end - first])
            else:
                if number != self._number:
                    data = self._chunk(number)
                    fault = chunk_fault(data, number, self._record, self._plan)
                    if fault is not None:
                        raise BadSumError(fault)
                    self._current, self._number = np.frombuffer(memoryview(data), np.uint8), number
                part = self._current[skipped:][: target.size - done]
                count = part.size
                target[done : done + count] = part  # numpy copies without Python's lock, memoryviews with it
            done += count
            self._at += count
        return done

    def _take_whole(self, number: int, target: np.ndarray[Any, Any]) -> int:
        """Copy a chunk and take the sum of what has arrived, block by block, while it is in the cache."""
        data, run = np.frombuffer(memoryview(self._chunk(number)), np.uint8), xxh3_64()
        for start in range(0, target.size, _BLOCK_BYTES):
            block = target[start : start + _BLOCK_BYTES]
            block[:] = data[start : start + _BLOCK_BYTES]
            run.update(block.data)
        if run.intdigest() != self._record.sums[number]:
            raise BadSumError(chunk_fault(target.data, number, self._record, self._plan) or f"chunk {number} changes")
        return target.size


def fill_from_memory(
    memory: memoryview, record: Record, plan: ShardPlan, wanted: Sequence[ReadItem], threads: int = 1
) -> None:
    """Fill the targets of `wanted`, parts of this shard, from the memory of its slot; BadSumError: it is not what was
    written."""
    _require_whole(record, plan, memory.nbytes)

    def work(share: Sequence[ReadItem]) -> None:
        _fill(CheckedCopy(record, plan, lambda n: memory[slice(*chunk_place(n, record))]), share)

    each(copy_shares(wanted, threads), work)


def _fill(copy: CheckedCopy, wanted: Iterable[ReadItem]) -> None:
    file = cast(BinaryIO, copy)
    for part in wanted:
        if part.block.sizes:
            read_rows(file, part.block.start_bytes, (part.block.sizes, part.dtype), part.start, part.out)
        else:
            read_rows(file, part.block.start_bytes, ((1,), part.dtype), (0,), part.out.view(1))


def _require_whole(record: Record, plan: ShardPlan, length_bytes: int) -> None:
    """Check plan, state and number of sums of a record, and the length of the memory, before any chunk."""
    fault = record_fault(record, length_bytes, plan)
    if fault is None and plan.data_bytes != record.data_bytes:
        fault = f"the record says {record.data_bytes} bytes and its plan {plan.data_bytes}"
    if fault is not None:
        raise BadSumError(fault)


def chunk_place(number: int, record: Record) -> tuple[int, int]:
    """Where a chunk begins and ends."""
    return number * CHUNK_BYTES, min((number + 1) * CHUNK_BYTES, record.data_bytes)


def chunks_of(wanted: Iterable[ReadItem]) -> list[int]:
    """Numbers of the chunks that hold the rows of `wanted`, rising."""
    runs = (part.run for part in wanted if part.out.numel())
    return sorted({n for first, end in runs for n in range(first // CHUNK_BYTES, -(-end // CHUNK_BYTES))})


def copy_shares(wanted: Sequence[ReadItem], threads: int) -> list[list[ReadItem]]:
    """`wanted` in at most `threads` runs of about as many bytes."""
    pieces = [piece for part in wanted for piece in part.split(SHARE_BYTES)]
    limit = sum(piece.nbytes for piece in pieces) / max(1, threads)
    found: list[list[ReadItem]] = []
    done = 0
    for piece in pieces:
        if not found or (done >= limit * len(found) and len(found) < threads):
            found.append([])
        found[-1].append(piece)
        done += piece.nbytes
    return found


def each(parted: Sequence[Sequence[ReadItem]], work: Callable[[Sequence[ReadItem]], None]) -> None:
    """Do `work` on every share, each in a thread; the first error is raised when all have ended."""
    if len(parted) < 2:
        for share in parted:
            work(share)
        return
    with ThreadPoolExecutor(len(parted)) as pool:
        for future in [pool.submit(work, share) for share in parted]:
            future.result()


@dataclass(frozen=True)
class KeeperHosts:
    """Which hosts have a keeper, and what it holds; the same on all ranks."""

    of_rank: tuple[str, ...]  # name of each rank's host; empty where it has no keeper
    endpoints: Mapping[str, Endpoint]  # of the keepers, by host
    held: Mapping[str, Sequence[Record]]  # records of their copies, by host
    lost: Mapping[str, str]  # hosts whose keeper did not answer, and why


def look(keeper: KeeperClient | None, others: bool, peers: Peers) -> KeeperHosts:
    """Ask every keeper, by one rank of its host, what it holds; called by all ranks together. With `others`, copies can
    be read from other hosts, and keepers begin to listen for that."""

    def introduce() -> list[Any]:
        end = Endpoint("" if keeper is None else host_name(), (), 0)
        try:
            if keeper is not None and others:
                end = keeper.endpoint
        except KeeperLostError:
            end = Endpoint("", (), 0)
        except OSError:
            pass  # it cannot listen; its own ranks can read what it has
        return [end.host, list(end.addresses), end.port, end.interface, end.interface_bits_per_s]

    rows = everywhere(peers, introduce)
    of_rank = tuple(row[0] for row in rows)
    endpoints = {row[0]: Endpoint(row[0], tuple(row[1]), *row[2:]) for row in reversed(rows) if row[0]}

    def ask() -> list[Any] | None:
        own = of_rank[peers.rank]
        if keeper is None or not own or of_rank.index(own) != peers.rank:
            return None
        try:
            return [pack([brief(copy.record) for copy in keeper.held()]), ""]
        except (KeeperLostError, OSError) as error:
            return [pack([]), str(error) or type(error).__name__]

    answers = {of_rank[rank]: answer for rank, answer in enumerate(everywhere(peers, ask)) if answer is not None}
    held = {name: [Record.from_text(text) for text in unpack(rows)] for name, (rows, lost) in answers.items()}
    return KeeperHosts(of_rank, endpoints, held, {name: lost for name, (_, lost) in answers.items() if lost})


class MemorySource:
    """One snapshot, the `choice`, of which keepers of `hosts` have copies; `config` is of the run that kept it."""

    def __init__(
        self,
        choice: RestorableSnapshot,
        hosts: KeeperHosts,
        keeper: KeeperClient | None,
        remote: PeerCopies | None,
        peers: Peers,
        tables: Mapping[int, Table],
        state: Any,
        config: Mapping[str, Any],
    ) -> None:
        self.choice, self._hosts, self._keeper, self._remote, self._peers = choice, hosts, keeper, remote, peers
        self.state, self.config = state, config
        self.step, self.attempt, self.name = choice.snapshot.step, choice.snapshot.attempt, ""
        self.tensors: dict[str, SavedBlocks] = {}
        for rank, table in tables.items():
            for name, dtype, shape, offsets, sizes, start, length in table:
                saved = self.tensors.setdefault(name, SavedBlocks(dtype, tuple(shape), []))
                saved.blocks.append(SavedBlock(tuple(offsets), tuple(sizes), rank, start, length))

    def distance(self, rank: int, holder: int) -> int:
        """0 where the host of `rank` has a copy of the shard."""
        return 0 if self._hosts.of_rank[rank] in self.choice.hosts[holder] else 1

    def check(self) -> ReadReport:
        """Nothing: everything is checked while it is read."""
        return ReadReport()

    def check_beside(self) -> ReadReport:
        """Nothing: a snapshot has only what is restored."""
        return ReadReport()

    def verify(self) -> ReadReport:
        """Take the sums of the copies on this rank's host; one rank checks each shard."""
        reading = ReadReport()
        own = self._hosts.of_rank[self._peers.rank]
        for rank, hosts in self.choice.hosts.items():
            near = [peer for peer, host in enumerate(self._hosts.of_rank) if host in hosts]
            if self._keeper is None or near[rank % len(near)] != self._peers.rank:
                continue
            with (
                _faults(reading, self.choice, own, rank),
                self._keeper.read(self.choice.snapshot, rank) as (record, plan, memory),
            ):
                _require_same(self.choice, rank, record)
                fault = first_fault(memory, record, plan)
                if fault is not None:
                    raise BadSumError(fault)
        return reading

    def read(self, wanted: Sequence[ReadItem]) -> ReadReport:
        """Fill the targets of `wanted`, which are in the order of their shards."""
        reading = ReadReport()
        for rank, group in groupby(wanted, key=lambda part: part.block.holder):
            # Copies on other hosts are shared out, so that not all ranks read from the same one.
            own, hosts = self._hosts.of_rank[self._peers.rank], self.choice.hosts[rank]
            host = own if own in hosts else hosts[self._peers.rank % len(hosts)]
            with _faults(reading, self.choice, host, rank):
                if host == own:
                    self._copy(rank, list(group), reading)
                else:
                    self._fetch(host, rank, list(group), reading)
        return reading

    def _copy(self, rank: int, wanted: list[ReadItem], reading: ReadReport) -> None:
        assert self._keeper is not None
        own = self._hosts.of_rank[self._peers.rank]
        threads = (os.process_cpu_count() if hasattr(os, "process_cpu_count") else len(os.sched_getaffinity(0))) or 1
        began_s = time.monotonic()
        with self._keeper.read(self.choice.snapshot, rank) as (record, plan, memory):
            _require_same(self.choice, rank, record)
            threads_here = max(1, min(_MAX_THREADS, threads // self._hosts.of_rank.count(own)))
            try:
                fill_from_memory(memory, record, plan, wanted, threads_here)
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # they have views of the memory, which is let go of next
                raise
        reading.add(Rate("memory", "this host", sum(p.nbytes for p in wanted), time.monotonic() - began_s))

    def _fetch(self, host: str, rank: int, wanted: list[ReadItem], reading: ReadReport) -> None:
        if self._remote is None:
            raise LookupError("nothing here reads from other hosts")
        remote, endpoint = self._remote, self._hosts.endpoints[host]
        began_s = time.monotonic()

        def work(share: Sequence[ReadItem]) -> None:
            with remote.open(endpoint, self.choice.snapshot, rank) as copy:
                _require_same(self.choice, rank, copy.record)
                _require_whole(copy.record, copy.plan, copy.plan.data_bytes)
                numbers = chunks_of(share)
                coming = zip(numbers, copy.chunks(numbers), strict=False)  # they come in this order

                def chunk(number: int) -> memoryview:
                    for next_number, data in coming:
                        if next_number == number:
                            return data
                    raise BadSumError(f"chunk {number} did not come")

                _fill(CheckedCopy(copy.record, copy.plan, chunk), share)

        shares = copy_shares(wanted, STREAMS)
        each(shares, work)
        # Whole chunks have come, each as often as shares need it; the last of the shard may be shorter.
        end = max((part.run[1] for part in wanted), default=0)
        came_bytes = sum(len(chunks_of(share)) for share in shares) * CHUNK_BYTES - (-end % CHUNK_BYTES)
        bits = endpoint.interface_bits_per_s
        place = f"{endpoint.interface or ', '.join(endpoint.addresses[:1])} of host {host}"
        reading.add(Rate("peer", place, came_bytes, time.monotonic() - began_s, bits / 8 if bits else None))


def describe(
    choice: RestorableSnapshot, hosts: KeeperHosts, keeper: KeeperClient | None, peers: Peers
) -> tuple[list[Any], list[ReadFault]]:
    """The table of every shard, with the state, or which copies were refused; called by all ranks together. The first
    rank of the first host that has a shard reads it."""

    def offer() -> list[Any]:
        own = hosts.of_rank[peers.rank]
        is_first = hosts.of_rank.index(own) == peers.rank
        mine = [rank for rank, names in choice.hosts.items() if names[0] == own and is_first]
        reading = ReadReport()
        rows: list[Any] = []
        for rank in mine if keeper is not None else []:
            with _faults(reading, choice, own, rank):
                assert keeper is not None
                with keeper.read(choice.snapshot, rank) as (record, plan, memory):
                    _require_same(choice, rank, record)
                    _require_whole(record, plan, memory.nbytes)
                    pieces = plan.pieces
                    table = [
                        [p.name, p.dtype, p.shape, p.offsets, p.sizes, p.start_bytes, p.length_bytes] for p in pieces
                    ]
                    rows.append([rank, table, record.state])
        return [pack(rows), [list(fault) for fault in reading.faults]]

    answers = everywhere(peers, offer)
    faults = [ReadFault(*fault) for _, theirs in answers for fault in theirs]
    return [row for rows, _ in answers for row in unpack(rows)], faults


@contextmanager
def _faults(reading: ReadReport, choice: RestorableSnapshot, host: str, rank: int) -> Iterator[None]:
    """What makes a copy unusable becomes a fault; all else is an error."""
    try:
        yield
    except KeeperLostError as error:
        reading.faults.append(ReadFault(host, -1, f"its keeper is gone ({error})"))
    except (BadSumError, LookupError, OSError) as error:
        cause = str(error.args[0]) if isinstance(error, LookupError) and error.args else str(error)
        reading.faults.append(ReadFault(host, rank, cause or type(error).__name__))


def _require_same(choice: RestorableSnapshot, rank: int, record: Record) -> None:
    if (record.snapshot, record.rank, record.plan_sha256) != (choice.snapshot, rank, choice.plans[rank]):
        raise LookupError(f"another one lies there now, of step {record.step}, rank {record.rank}")
