"""Resume: all ranks take back the newest state that can be trusted, from the nearest place that has it.

In this order: the memory of a rank's own host, that of another host, durable storage; then older states in the same
order (see `phalanx.checkpoint.keeper_contract` for which is newer). All ranks restore the same state. A damaged copy is
refused with one line that says where and why, and all tensors are filled again from the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from phalanx.checkpoint.all_ranks import agreed, everywhere
from phalanx.checkpoint.format.dcp import Block, held
from phalanx.checkpoint.format.manifest import cover_fault
from phalanx.checkpoint.format.shard_plan import SnapshotId, parse_state
from phalanx.checkpoint.keeper.keeper_client import KeeperClient
from phalanx.checkpoint.keeper_contract import RestorableSnapshot, newest_first, restorable
from phalanx.checkpoint.replicas.fetch import PeerCopies
from phalanx.checkpoint.restoring.compatibility import CURE, SOURCE, Differences, SavedBlocks, read_items, require_fit
from phalanx.checkpoint.restoring.durable_source import DurableCheckpoints, DurableSource
from phalanx.checkpoint.restoring.memory_source import KeeperHosts, MemorySource, describe, look
from phalanx.checkpoint.restoring.source import (
    Kind,
    Rate,
    ReadFault,
    ReadReport,
    Restored,
    Sharing,
    agree,
    give,
    readers,
    together,
)
from phalanx.checkpoint.storage.checkpoint_store import Store
from phalanx.core.errors import UserError
from phalanx.core.layout import Shard
from phalanx.core.peers import ALONE, Copies, Peers

_SHOWN = 8

Source = MemorySource | DurableSource


class NoneGoodError(UserError):
    """Durable checkpoints are there, or were, and none can be used: to begin anew would in time delete what is left."""

    def __init__(self, unusable: list[str], url: str, *, is_filled: bool) -> None:
        lines = "; ".join(unusable[:_SHOWN]) + (f"; and {len(unusable) - _SHOWN} more" if unusable[_SHOWN:] else "")
        spoilt = ", and the tensors hold parts of a damaged one" if is_filled else ""
        super().__init__(
            f"no good state is left{spoilt}: {lines}",
            cure="bring back what is missing or damaged, or give another folder; to begin anew in this one, remove its "
            "step-* and latest-*.json",
            field=url,
        )


class SpoiltError(UserError):
    """All that was found is damaged, which was seen only while it was read: the tensors hold parts of it."""

    def __init__(self, refusals: list[str]) -> None:
        super().__init__(
            f"no good state is left, and the tensors hold parts of a damaged one: {'; '.join(refusals[-3:])}",
            cure="make model and optimizer anew and begin in an empty folder, or bring back a whole checkpoint",
        )


class Targets(NamedTuple):
    """What of a state is to be filled, in place, on any device.

    Attributes:
        tensors: by the names under which they were saved.
        shards: which block of its logical tensor each of `tensors` is; those not named here are whole.
        check: called with the names on one side only, on every rank, before anything is changed; what it raises ends
            the restore.
        cure: what a person should do where shapes or dtypes do not fit.
    """

    tensors: Mapping[str, Tensor]
    shards: Mapping[str, Shard] | None = None
    check: Callable[[Differences], None] | None = None
    cure: str = CURE


class Opened:
    """A state that was found and is not taken yet; made by `restore`. Its methods are called by all ranks together.

    If it turns out to be damaged, they end the call of `wanted`, which is called again with the next one.
    """

    def __init__(self, source: Source, peers: Peers, report: Callable[[str], None]) -> None:
        self.source, self._peers, self._report = source, peers, report
        self.step: int = source.step
        self.state: Any = source.state  # what training had given besides tensors
        self.config: Mapping[str, Any] = source.config  # of the run that kept it; empty where that is not known
        self.tensors: Mapping[str, SavedBlocks] = source.tensors
        self._checked: ReadReport | None = None
        self._is_beside_checked = False

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill fresh tensors, to know from them what else to fill; UserError: one is not there, or does not fit."""
        blocks: dict[str, Block] = {}
        agreed(self._peers, lambda: blocks.update(held(tensors, {})))
        fit = partial(require_fit, strict=False, cast=False, misses_empty=True, words=SOURCE)
        absent = fit(_title(self.source), self.source.tensors, blocks, self._peers).missing

        def require_all() -> None:
            if absent:
                cure = "restore with what wrote it"
                raise UserError(f"lacks {', '.join(absent)}", cure=cure, field=_title(self.source))

        agreed(self._peers, require_all)
        self.fill(blocks, None)

    def verify(self) -> None:
        """Read and check all of it, so that what follows from its step or state is not taken back later."""
        self.check()
        self._through(self._check_beside, self.source.verify)

    def check(self) -> ReadReport:
        """Check what cannot be checked while it is read; once, before anything is read."""
        if self._checked is None:
            self._checked = _everyone(self._peers, self.source.check)
        if self._checked.faults:
            raise _DamagedError(self._checked)
        return self._checked

    def fill(self, blocks: Mapping[str, Block], sharing: Sharing | None) -> ReadReport:
        """Fill the blocks of all ranks."""
        checked, source = self.check(), self.source
        wanted = read_items(source.tensors, blocks)
        # Files that nothing is restored from come after the weights, and not at all where those are damaged.
        if sharing is None:
            reading = self._through(lambda: source.read(wanted), self._check_beside)
        else:
            # What all members of the group want alike, one of them reads, and then broadcasts.
            ranks = sharing.ranks
            shared = [part for part in wanted if part.name in sharing.names]
            by = readers(shared, len(ranks), lambda member, holder: source.distance(ranks[member], holder))
            given = [(reader, part) for reader, part in zip(by, shared, strict=True) if reader is not None]
            elsewhere = {id(part) for reader, part in given if reader != sharing.copies.index}
            mine = [part for part in wanted if id(part) not in elsewhere]
            reading = self._through(lambda: source.read(mine), self._check_beside)
            give(sharing, [(reader, part.out) for reader, part in given])
        return ReadReport(rates=checked.rates + reading.rates)

    def _check_beside(self) -> ReadReport:
        """Check the files that nothing is restored from, once, and after those that are waited for."""
        if self._is_beside_checked:
            return ReadReport()
        self._is_beside_checked = True
        return self.source.check_beside()

    def _through(self, *works: Callable[[], ReadReport]) -> ReadReport:
        """Let all ranks do `works`, one after the other, each rank until it meets damage."""

        def done() -> ReadReport:
            reading = ReadReport()
            for work in works:
                if not reading.faults:
                    reading.extend(work())
            return reading

        reading = _everyone(self._peers, done)
        for note in reading.notes:
            self._report(note)
        if reading.faults:
            raise _DamagedError(reading)
        return reading


Wanted = Mapping[str, Tensor] | Callable[[Opened], Targets]
"""What is to be filled, or a function that returns it for each state that is tried; called on all ranks alike."""


class _DamagedError(Exception):
    """The same on all ranks."""

    def __init__(self, reading: ReadReport) -> None:
        super().__init__(reading.faults[0].cause)
        self.reading = reading


def restore(
    wanted: Wanted,
    *,
    keeper: KeeperClient | None,
    store: Store | None,
    report: Callable[[str], None],
    shards: Mapping[str, Shard] | None = None,
    peers: Peers = ALONE,
    copies: Copies | None = None,
    remote: PeerCopies | None = None,
    accept: Callable[[Opened], None] | None = None,
    distrust: Callable[[int, int], str] | None = None,
    strict: bool = True,
    cast: bool = False,
    select: Callable[[str], bool] | None = None,
    verify: bool = True,
    refused: RefusedStates | None = None,
) -> Restored | None:
    """Fill tensors in place with the newest state that is whole and good, in whatever layout it was saved.

    Called by all ranks together. Nothing is changed on any rank if what is found does not fit on one of them. Every
    restore, of whatever, goes through this function.

    Args:
        wanted: tensors by the names under which they were saved, on any device; or a function that is called with each
            state that is tried.
        keeper: of this rank's host; None where there is none.
        store: durable storage, the same on all ranks; None where nothing is durable.
        report: called with one line for each refusal, and for damage that nothing is refused for, on rank 0.
        shards: of `wanted`, where that is not a function; see `Targets`.
        copies: the data-parallel group of this rank: what all its members need is read by one of them; None on all
            ranks: each reads for itself.
        remote: reads what keepers of other hosts hold; None on all ranks: only own hosts' copies are used.
        accept: called with each state that is tried, on every rank alike, before anything else; what it raises ends the
            restore.
        distrust: called with the attempt and the step of each state that is found, on every rank alike: why it is not
            to be used, although it is whole; empty: it may be.
        strict: every name must be on both sides, see `Differences`.
        cast: convert where dtypes differ instead of refusing.
        select: restore only the tensors whose names it accepts (weights only …); others are neither changed nor missed.
        verify: check durable checkpoints; what lies in memory always is.
        refused: what calls before this one have refused, which is not tried again; grows.

    Returns:
        What was restored, or None where there is nothing, or nothing good in memory and never anything durable.

    Raises:
        UserError: what was found does not fit, listing what is missing, unexpected, or of another shape or dtype; or
            nothing good is in memory and the storage cannot be read.
        NoneGoodError: durable checkpoints are there, or the pointer says that they were, and none can be used.
        SpoiltError: all that was found, in memory only, is damaged, and this was seen only while it was read.
        ValueError: a shard has not the size of its tensor.
    """
    began_s = time.monotonic()
    refused = refused or RefusedStates()
    log = _Log(report, peers.rank, refused.reported)
    # A tensor without elements has no bytes in a snapshot, so it is not missed.
    fit = partial(require_fit, strict=strict, cast=cast, select=select, misses_empty=False, words=SOURCE)
    states = _States(keeper, remote, store, verify, peers, refused, log)
    while (source := states.next()) is not None:
        if distrust is not None and (cause := distrust(source.attempt, source.step)):
            states.pass_over(source, cause)
            continue
        opened, is_filling = Opened(source, peers, log.note), False
        try:
            if accept is not None:
                agreed(peers, partial(accept, opened))
            targets = wanted(opened) if callable(wanted) else Targets(wanted, shards)
            blocks, sharing, is_any = _blocks(targets, select, peers, copies)
            # Everything that may be refused without touching a tensor comes first: names and shapes, then damage.
            differences = fit(_title(source), source.tensors, blocks, peers, cure=targets.cure)
            if targets.check is not None:
                agreed(peers, partial(targets.check, differences))
            opened.check()
            is_filling = is_any
            filled = opened.fill(blocks, sharing)
        except _DamagedError as damage:
            # Seen only while it was read: the next state fills all of it again, from an older step if need be.
            log.rates += damage.reading.rates
            log.filled_in_vain |= is_filling
            states.refuse(source, damage.reading.faults)
        else:
            log.rates += filled.rates
            states.mark_suspect()
            return _restored(source, differences, log, filled, time.monotonic() - began_s)
    # To begin anew beside checkpoints that cannot be used would in time prune them, so it must be a person's decision.
    unusable = states.unusable()
    if store is not None and unusable:
        raise NoneGoodError(unusable, store.url, is_filled=log.filled_in_vain)
    if log.filled_in_vain:
        raise SpoiltError(log.refusals)
    return None


def _blocks(
    targets: Targets, select: Callable[[str], bool] | None, peers: Peers, copies: Copies | None
) -> tuple[dict[str, Block], Sharing | None, bool]:
    """The memory to be filled on this rank, what of it all members of its group want alike, and whether there is any
    on any rank."""
    chosen = {name: tensor for name, tensor in targets.tensors.items() if select is None or select(name)}
    shards = targets.shards or {}
    blocks: dict[str, Block] = {}
    is_any = any(everywhere(peers, lambda: blocks.update(held(chosen, shards)) or bool(blocks)))
    if copies is None or copies.size == 1:
        return blocks, None, is_any
    return blocks, agree(copies, peers.rank, chosen, blocks, shards), is_any


@dataclass
class RefusedStates:
    """What was found to be damaged, so that it is not tried again, and the lines about it, so that each comes once."""

    durable: dict[str, str] = field(default_factory=dict)  # identities of checkpoints, and the damage; rank 0's
    copies: set[tuple[SnapshotId, str, int]] = field(default_factory=set)  # in memory: snapshot, host, rank
    reported: set[str] = field(default_factory=set)


@dataclass
class _Log:
    """What was refused, and what was read in vain too."""

    report: Callable[[str], None]
    rank: int
    reported: set[str]
    refusals: list[str] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    filled_in_vain: bool = False

    def refuse(self, line: str) -> None:
        self.refusals.append(line)
        self.note(line)

    def note(self, line: str) -> None:
        if self.rank == 0 and line not in self.reported:
            self.report(line)
        self.reported.add(line)


class _States:
    """The states there are, newest first; every method is called by all ranks together."""

    def __init__(
        self,
        keeper: KeeperClient | None,
        remote: PeerCopies | None,
        store: Store | None,
        verify: bool,
        peers: Peers,
        refused: RefusedStates,
        log: _Log,
    ) -> None:
        self._keeper, self._remote, self._peers, self._log = keeper, remote, peers, log
        self._refused, self._has_suspect = refused, False
        self._hosts: KeeperHosts = look(keeper, remote is not None, peers)
        for name, cause in self._hosts.lost.items():
            log.refuse(f"the keeper of host {name} does not answer ({cause}); what it holds is not used")
        self._choices: list[RestorableSnapshot] = []
        for choice in restorable(self._hosts.held):
            bad = {(host, rank) for snapshot, host, rank in refused.copies if snapshot == choice.snapshot}
            self._choices.append(choice.without(bad))
        reports = (log.refuse, log.note)
        self._durable = None if store is None else DurableCheckpoints(store, verify, peers, refused.durable, *reports)

    def next(self) -> Source | None:
        """The newest that was not refused; UserError: nothing in memory is left, and the storage cannot be read."""
        # Memory first, unless storage has something newer: of equal states memory is nearer, and read at its speed.
        while self._choices:
            choice = self._choices[0]
            if not choice.is_whole:
                self._choices.remove(choice)
                continue
            if self._has_newer(choice):
                break
            source = self._open(choice)
            if source is not None:
                return source
        if self._durable is None or self._durable.peek() is None:
            return None
        return self._durable.take()

    def refuse(self, source: Source, faults: list[ReadFault]) -> None:
        """Do not use what is at fault again."""
        if isinstance(source, MemorySource):
            self._refuse_copies(source.choice, faults)
        else:
            assert self._durable is not None
            self._durable.refuse(faults[0].cause)

    def pass_over(self, source: Source, cause: str) -> None:
        """Do not use a state that is whole, in none of its copies."""
        if isinstance(source, MemorySource):
            self._choices.remove(source.choice)
            self._log.refuse(f"the snapshot of step {source.step} in memory is passed over ({cause})")
        else:
            assert self._durable is not None
            self._durable.pass_over(cause)
            self._has_suspect = True

    def mark_suspect(self) -> None:
        """What was passed over in storage is to be kept by no rule of retention."""
        if self._has_suspect and self._durable is not None:
            self._durable.mark_suspect()

    def unusable(self) -> list[str]:
        """Why no durable checkpoint can be used, where there is or was one."""
        return [] if self._durable is None else self._durable.unusable()

    def _has_newer(self, choice: RestorableSnapshot) -> bool:
        """Whether durable storage has what is newer than `choice`."""
        try:
            found = None if self._durable is None else self._durable.peek()
        except UserError as error:
            # What lies in memory may be older than what cannot be seen, but it is whole, and there.
            line = f"{error.problem}; restoring from memory"
            if line not in self._log.refusals:
                self._log.refuse(line)
            return False
        mine = newest_first(choice.snapshot.attempt, choice.snapshot.step)
        return found is not None and newest_first(found.attempt, found.step) > mine

    def _open(self, choice: RestorableSnapshot) -> Source | None:
        rows, faults = describe(choice, self._hosts, self._keeper, self._peers)
        if faults:
            self._refuse_copies(choice, faults)
            return None
        state, config = next((parse_state(text) for _, _, text in rows if text), (None, {}))
        tables = {rank: table for rank, table, _ in rows}
        source = MemorySource(choice, self._hosts, self._keeper, self._remote, self._peers, tables, state, config)
        for name, tensor in source.tensors.items():
            fault = cover_fault(tensor.shape, tensor.blocks)
            if fault is not None:
                self._log.refuse(f"the snapshot of step {choice.snapshot.step} in memory is refused ({name}: {fault})")
                self._choices.remove(choice)
                return None
        return source

    def _refuse_copies(self, choice: RestorableSnapshot, faults: list[ReadFault]) -> None:
        bad = {(fault.host, fault.holder) for fault in faults if fault.holder >= 0}
        self._refused.copies |= {(choice.snapshot, *copy) for copy in bad}
        # A lost keeper takes its copies of all steps with it; a bad copy counts for its own step alone.
        lost = {fault.host for fault in faults if fault.holder < 0}
        gone = {(host, rank) for host in lost for each in self._choices for rank in each.hosts}
        self._choices = [  # a copy of another step may be good where this one is not
            each.without(gone | bad if each.snapshot == choice.snapshot else gone) for each in self._choices
        ]
        following = "another host's" if choice.without(gone | bad).is_whole else "durable storage or an older state"
        lines: set[str] = set()
        for fault in faults:
            what = "all copies" if fault.holder < 0 else f"the copy of rank {fault.holder}"
            line = f"step {choice.snapshot.step}: {what} in memory of host {fault.host}"
            if line not in lines:  # several ranks may have met the same
                lines.add(line)
                refused = "are refused" if fault.holder < 0 else "is refused"
                self._log.refuse(f"{line} {refused} ({fault.cause}); trying {following}")


def _title(source: Source) -> str:
    return source.name or f"the snapshot of step {source.step} in memory"


def _everyone(peers: Peers, work: Callable[[], ReadReport]) -> ReadReport:
    """What came of `work` on all ranks, on every rank."""

    def done() -> list[Any]:
        reading = work()
        return [[list(fault) for fault in reading.faults], [list(rate) for rate in reading.rates], reading.notes]

    # Every rank must come to the same verdict: with damage on one of them, all go on to the next state.
    answers = everywhere(peers, done)
    faults = [ReadFault(*fault) for theirs, _, _ in answers for fault in theirs]
    rates = [Rate(*rate) for _, theirs, _ in answers for rate in theirs]
    return ReadReport(faults, rates, [note for *_, notes in answers for note in notes])


def _restored(source: Source, differences: Differences, log: _Log, filled: ReadReport, seconds: float) -> Restored:
    rates = together(log.rates)
    kinds = {rate.kind for rate in filled.rates}
    sums: dict[Kind, int] = {}
    for rate in rates:
        sums[rate.kind] = sums.get(rate.kind, 0) + rate.bytes
    return Restored(
        step=source.step,
        attempt=source.attempt,
        state=source.state,
        source="durable" if source.name else "peer" if "peer" in kinds else "memory",
        name=source.name,
        seconds=seconds,
        bytes_by_kind=sums,
        rates=rates,
        refusals=tuple(log.refusals),
        differences=differences,
    )
