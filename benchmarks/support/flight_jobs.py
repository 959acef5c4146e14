"""Jobs that hang, as NCCL sees them: each rank runs its program, some stop at some place, and all leave dumps.

A host launches instruction after instruction until it has to wait for its GPU. A GPU runs kernels and collectives of
its stream in order; each group has a stream of its own, and each pair of ranks that exchange without a batch. What is
said of a job here is only what these rules say: the run goes on until nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

EARLY = ("broadcast",)
"""Done at its root (the first rank) before the others have begun, since it fits into a buffer."""


@dataclass(frozen=True)
class Do:
    """One instruction of a host.

    Attributes:
        kind: ``kernel``, ``call`` (a collective), ``move`` (transfers), ``join`` (the stream waits for the last call or
            move with this `tag`), ``sync`` (the host waits for its stream).
        moves: peers; positive for a send to rank - 1, negative for a receive from -rank - 1.
        tag: not empty: the stream does not wait before it joins.
        batched: the moves are one launch on the group's communicator.
    """

    kind: str
    group: str = ""
    op: str = ""
    size: tuple[int, ...] = (16, 8)
    moves: tuple[int, ...] = ()
    tag: str = ""
    batched: bool = False


def send(peer: int) -> int:
    return peer + 1


def recv(peer: int) -> int:
    return -peer - 1


@dataclass
class Groups:
    """Process groups in the order in which all ranks make them; the name is that order."""

    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    descriptions: dict[str, str] = field(default_factory=dict)

    def make(self, description: str, members: Iterable[int]) -> str:
        name = str(len(self.members))
        self.members[name], self.descriptions[name] = tuple(members), description
        return name

    def of(self, rank: int, description: str) -> str:
        return next(n for n, d in self.descriptions.items() if d == description and rank in self.members[n])


@dataclass
class Job:
    groups: Groups
    programs: list[list[Do]]

    @property
    def ranks(self) -> range:
        return range(len(self.programs))


def megatron(
    tp: int,
    pp: int,
    dp: int,
    ep: int,
    *,
    layers: int = 1,
    micro_batches: int = 3,
    steps: int = 2,
    batched: bool = False,
    overlap: bool = False,
    moe_sync: bool = True,
) -> Job:
    """1F1B over stages of transformer layers with experts; rank = (stage * dp + replica) * tp + part."""
    count = tp * pp * dp
    groups = Groups()

    def rank(stage: int, replica: int, part: int) -> int:
        return (stage * dp + replica) * tp + part

    groups.make("default_pg", range(count))
    for stage in range(pp):
        for part in range(tp):
            groups.make("DATA_PARALLEL_GROUP", [rank(stage, replica, part) for replica in range(dp)])
    for stage in range(pp):
        for replica in range(dp):
            groups.make("TENSOR_MODEL_PARALLEL_GROUP", [rank(stage, replica, part) for part in range(tp)])
    for replica in range(dp):
        for part in range(tp):
            groups.make("PIPELINE_MODEL_PARALLEL_GROUP", [rank(stage, replica, part) for stage in range(pp)])
    for stage in range(pp):
        flat = [rank(stage, replica, part) for replica in range(dp) for part in range(tp)]
        for at in range(0, len(flat), ep):
            groups.make("EXPERT_MODEL_PARALLEL_GROUP", flat[at : at + ep])
    programs = []
    for one in range(count):
        stage = one // (dp * tp)
        make = _Stage(groups, one, stage, pp, dp * tp, layers, batched, overlap, moe_sync)
        program: list[Do] = []
        for _ in range(steps):
            program += make.step(micro_batches)
        programs.append(program)
    return Job(groups, programs)


@dataclass
class _Stage:
    groups: Groups
    rank: int
    stage: int
    pp: int
    stride: int
    layers: int
    batched: bool
    overlap: bool
    moe_sync: bool

    def step(self, micro_batches: int) -> list[Do]:
        warm = min(self.pp - 1 - self.stage, micro_batches)
        done: list[Do] = []
        for _ in range(warm):
            done += [*self.move(recv, -1), *self.forward(), *self.move(send, 1)]
        for number in range(micro_batches - warm):
            if number == 0:
                done += self.move(recv, -1)
            done += self.forward()
            done += self.both((send, 1), (recv, 1))
            done += self.backward()
            more = number + 1 < micro_batches - warm
            done += self.both((send, -1), (recv, -1)) if more else self.move(send, -1)
        for _ in range(warm):
            done += [*self.move(recv, 1), *self.backward(), *self.move(send, -1)]
        return [*done, *self.update()]

    def call(self, description: str, op: str, *size: int, tag: str = "") -> list[Do]:
        group = self.groups.of(self.rank, description)
        if len(self.groups.members[group]) < 2:
            return []
        return [Do("call", group, op, size or (16, 8), tag=tag)]

    def tensor(self, op: str) -> list[Do]:
        return self.call("TENSOR_MODEL_PARALLEL_GROUP", op)

    def experts(self) -> list[Do]:
        tokens = 10 + self.rank % 3
        to_all = self.call("EXPERT_MODEL_PARALLEL_GROUP", "all_to_all", tokens, 8)
        return [*to_all, *([Do("sync")] if self.moe_sync else []), Do("kernel"), *to_all]

    def forward(self) -> list[Do]:
        done = self.tensor("broadcast") if self.stage == 0 else []
        for _ in range(self.layers):
            done += [
                *self.tensor("_all_gather_base"),
                Do("kernel"),
                *self.tensor("_reduce_scatter_base"),
                *self.experts(),
            ]
        return done

    def backward(self) -> list[Do]:
        done: list[Do] = []
        for _ in range(self.layers):
            done += [
                *self.experts(),
                *self.tensor("_all_gather_base"),
                Do("kernel"),
                *self.tensor("_reduce_scatter_base"),
            ]
        if self.overlap:
            done += self.call("DATA_PARALLEL_GROUP", "_reduce_scatter_base", 64, tag="gradients")
        return done

    def update(self) -> list[Do]:
        return [
            *([Do("join", tag="gradients")] if self.overlap else self.call("DATA_PARALLEL_GROUP", "all_reduce", 64)),
            *self.call("default_pg", "all_reduce", 1),
            Do("sync"),
            Do("kernel"),
            *self.call("DATA_PARALLEL_GROUP", "_all_gather_base", 32),
        ]

    def move(self, what: Any, to: int) -> list[Do]:
        return self.both((what, to))

    def both(self, *moves: tuple[Any, int]) -> list[Do]:
        group = self.groups.of(self.rank, "PIPELINE_MODEL_PARALLEL_GROUP")
        # Even stages send first and odd ones receive first, as in Megatron: a pair has one stream, in order.
        ordered = sorted(moves, key=lambda move: (move[0] is send) == (self.stage % 2 == 1))
        real = tuple(what(self.rank + to * self.stride) for what, to in ordered if 0 <= self.stage + to < self.pp)
        if self.batched:
            return [Do("move", group, moves=real, batched=True)] if real else []
        # As Megatron does it: launched without waiting, and joined at once.
        done = [Do("move", group, moves=(one,), tag=f"move {place}") for place, one in enumerate(real)]
        return [*done, *(Do("join", tag=one.tag) for one in done)]


def data_parallel(count: int, *, steps: int = 3, buckets: int = 3) -> Job:
    """As DDP: buckets are reduced while the backward pass goes on."""
    groups = Groups()
    world = groups.make("default_pg", range(count))
    step = [Do("kernel")]
    for bucket in range(buckets):
        step += [Do("kernel"), Do("call", world, "all_reduce", (100 + bucket,), tag="bucket")]
    step += [Do("join", tag="bucket"), Do("kernel"), Do("sync")]
    return Job(groups, [list(step) * steps for _ in range(count)])


@dataclass(frozen=True)
class Fault:
    """What befalls a rank at an instruction.

    Attributes:
        kind: ``host`` (it launches nothing more), ``gpu`` (this kernel never ends), ``dead`` (both, and no dump),
            ``empty`` (as host, and the dump has nothing), ``blind`` (the GPU fails: what has been done since some
            launches is not seen any more, and nothing more runs).
    """

    rank: int
    at: int
    kind: str


@dataclass
class _Item:
    """Something on a stream.

    Attributes:
        number: of its group's collectives, or of its pair's or group's transfers.
    """

    do: Do
    place: int
    number: int = 0
    reached: bool = False
    begun: bool = False
    done: bool = False


class Run:
    """Runs a job until nothing moves."""

    def __init__(self, job: Job, faults: Sequence[Fault] = ()) -> None:
        self.job = job
        self.faults = {fault.rank: fault for fault in faults}
        self.launched: list[list[_Item]] = [[] for _ in job.ranks]
        self.next = [0 for _ in job.ranks]
        self.struck: set[int] = set()
        self._at = [0 for _ in job.ranks]  # of the stream
        self._lanes: dict[tuple[int, Any], list[_Item]] = {}
        self._by_number: dict[tuple[Any, int, int], _Item] = {}
        while sum(self._turn(rank) for rank in job.ranks):  # all of them, each time
            pass

    def _turn(self, rank: int) -> bool:
        return sum((self._host(rank), self._stream(rank), self._begin(rank), self._end(rank))) > 0

    def _host(self, rank: int) -> bool:
        moved, program, fault = False, self.job.programs[rank], self.faults.get(rank)
        while self.next[rank] < len(program):
            place = self.next[rank]
            if fault is not None and fault.at == place and fault.kind != "gpu":
                self.struck.add(rank)
                break
            do = program[place]
            if do.kind == "sync" and self._at[rank] < len(self.launched[rank]):
                break
            self.next[rank], moved = place + 1, True
            if do.kind != "sync":
                self._launch(rank, do, place)
        return moved

    def _launch(self, rank: int, do: Do, place: int) -> None:
        item = _Item(do, place)
        self.launched[rank].append(item)
        for lane in self._lanes_of(rank, do):
            items = self._lanes.setdefault((rank, lane), [])
            item.number = len(items)
            self._by_number[lane, rank, item.number] = item
            items.append(item)

    def _lanes_of(self, rank: int, do: Do) -> list[Any]:
        if do.kind == "call":
            return [do.group]
        if do.kind == "move":
            pairs = [(min(rank, self.peer(one)), max(rank, self.peer(one))) for one in do.moves]
            return [(do.group, *pair, do.batched) for pair in dict.fromkeys(pairs)]
        return []

    @staticmethod
    def peer(move: int) -> int:
        return abs(move) - 1

    def _is_dead(self, rank: int, place: int) -> bool:
        """The GPU does nothing of this."""
        fault = self.faults.get(rank)
        if fault is None:
            return False
        if fault.kind == "gpu" and place == fault.at:
            self.struck.add(rank)
            return True
        return fault.kind in ("dead", "blind") and rank in self.struck and place >= fault.at - 3

    def _stream(self, rank: int) -> bool:
        moved = False
        while self._at[rank] < len(self.launched[rank]):
            item = self.launched[rank][self._at[rank]]
            if self._is_dead(rank, item.place):
                break
            item.reached = True
            if item.do.kind == "kernel":
                item.done = True
            elif item.do.kind == "join":
                if any(
                    not one.done
                    for one in self.launched[rank][: self._at[rank]]
                    if one.do.tag == item.do.tag and one.do.kind != "join"
                ):
                    break
                item.done = True
            elif not item.do.tag and not item.done:
                break
            self._at[rank], moved = self._at[rank] + 1, True
        return moved

    def _begin(self, rank: int) -> bool:
        moved = False
        for item in self.launched[rank]:
            if item.reached and not item.begun and item.do.kind in ("call", "move"):
                before = [
                    one
                    for lane in self._lanes_of(rank, item.do)
                    for one in self._lanes[rank, lane]
                    if one.place < item.place
                ]
                if all(one.done for one in before):
                    item.begun = moved = True
        return moved

    def _end(self, rank: int) -> bool:
        moved = False
        for item in self.launched[rank]:
            if item.begun and not item.done and not self._is_dead(rank, item.place) and self._has_ended(rank, item):
                item.done = moved = True
        return moved

    def _has_ended(self, rank: int, item: _Item) -> bool:
        if item.do.kind == "move":
            return all(self._peer_began(rank, item, one) for one in item.do.moves)
        members = self.job.groups.members[item.do.group]
        if item.do.op in EARLY:
            members = members[:1]
        others = [self._by_number.get((item.do.group, other, item.number)) for other in members]
        return all(one is not None and one.begun and self._fits(one.do, item.do) for one in others)

    @staticmethod
    def _fits(one: Do, other: Do) -> bool:
        return one.op == other.op and (one.size == other.size or one.op == "all_to_all")

    def _peer_began(self, rank: int, item: _Item, move: int) -> bool:
        """The transfers of a pair match in order, each way."""
        peer, back = self.peer(move), (recv(rank) if move > 0 else send(rank))
        (lane,) = {lane for lane in self._lanes_of(rank, item.do) if {lane[1], lane[2]} == {rank, peer}}
        mine = [one for one in self._lanes[rank, lane] if move in one.do.moves]
        theirs = [one for one in self._lanes.get((peer, lane), []) if back in one.do.moves]
        turn = mine.index(item)
        return turn < len(theirs) and theirs[turn].begun

    # What is known of it

    def has_hung(self) -> bool:
        return any(done < len(self.job.programs[rank]) for rank, done in enumerate(self.next))

    def waited_for(self) -> set[int]:
        """Ranks that have not launched what another one waits in."""
        found: set[int] = set()
        for rank in self.job.ranks:
            for item in self.launched[rank]:
                if item.begun and not item.done and item.do.kind == "call":
                    members = self.job.groups.members[item.do.group]
                    found |= {m for m in members if (item.do.group, m, item.number) not in self._by_number}
        return found

    def waited_for_at_last(self, ranks: Iterable[int]) -> set[int]:
        """The same of what is the very last that one of these ranks has launched, so that every record of it tells."""
        found: set[int] = set()
        for rank in ranks:
            item = next((one for one in reversed(self.launched[rank]) if one.do.kind in ("call", "move")), None)
            if item is not None and item.do.kind == "call" and not item.done:
                members = self.job.groups.members[item.do.group]
                found |= {m for m in members if (item.do.group, m, item.number) not in self._by_number}
        return found

    def is_idle(self, rank: int) -> bool:
        """It has nothing under way."""
        return all(item.done for item in self.launched[rank])

    def dump(
        self, rank: int, *, ring: int = 2000, timing: bool = False, only_active: bool = False, made_before: int = 0
    ) -> dict[str, Any] | None:
        """As torch writes it, version 2.9; None: the rank writes none."""
        fault = self.faults.get(rank) if rank in self.struck else None
        if fault is not None and fault.kind == "dead":
            return None
        used = {item.do.group for item in self.launched[rank]}
        groups = {
            name: members for name, members in self.job.groups.members.items() if rank in members and name in used
        }
        config = {
            name: {"name": name, "desc": self.job.groups.descriptions[name], "ranks": str(list(members))}
            for name, members in groups.items()
        }
        whole = {"version": "2.9", "nccl_version": "2.27.3", "pg_config": config}
        if fault is not None and fault.kind == "empty":
            return whole | {"pg_status": {}, "entries": []}
        writer = _Writer(rank, groups, self.job.groups.descriptions, timing, made_before)
        blind_from = max(0, len(self.launched[rank]) - 6) if fault is not None and fault.kind == "blind" else 1 << 30
        for place, item in enumerate(self.launched[rank]):
            if item.do.kind in ("call", "move"):
                writer.write(item, item.done and place < blind_from)
        entries = writer.entries[-ring:]
        if only_active:
            entries = [one for one in entries if one["state"] != "completed"]
        return whole | {"pg_status": writer.status, "entries": entries}


class _Writer:
    def __init__(
        self, rank: int, groups: dict[str, tuple[int, ...]], said: dict[str, str], timing: bool, made_before: int
    ) -> None:
        self.entries: list[dict[str, Any]] = []
        self.status: dict[str, dict[str, int]] = {}
        self._rank, self._groups, self._said, self._timing = rank, groups, said, timing
        self._ids = {name: str(made_before + place) for place, name in enumerate(groups)}
        self._calls: dict[str, int] = dict.fromkeys(groups, 0)
        self._moves: dict[str, int] = dict.fromkeys(groups, 0)

    def write(self, item: _Item, done: bool) -> None:
        do, group = item.do, item.do.group
        begun = item.begun and self._timing
        state = "completed" if done else "started" if begun else "scheduled"
        if do.kind == "call":
            self._calls[group] += 1
            self._entry(group, f"nccl:{do.op}", [list(do.size)], "BFloat16", state, False)
            self._count(group, self._calls[group], done)
            return
        self._moves[group] += 1
        for move in do.moves:
            members = self._groups[group]
            own, peer = members.index(self._rank), members.index(abs(move) - 1)
            name = f"nccl:send {own}->{peer}" if move > 0 else f"nccl:recv {own}<-{peer}"
            self._entry(group, name, [[16, 8]], "BFloat16", "scheduled" if do.batched else state, True)
        if do.batched:
            self._entry(group, "nccl:coalesced", [], "", state, True)
        self._count(group, self._moves[group], done)

    def _count(self, group: str, number: int, done: bool) -> None:
        last = self.status.setdefault(self._ids[group], _status())
        last["last_enqueued_collective"] = number
        if done:
            last["last_completed_collective"] = number

    def _entry(self, group: str, name: str, sizes: list[list[int]], dtype: str, state: str, is_p2p: bool) -> None:
        at_ns = 1_758_610_505_000_000_000 + len(self.entries) * 1_000_000
        started = at_ns + 1 if self._timing and state != "scheduled" else None
        self.entries.append(
            {
                "record_id": len(self.entries),
                "pg_id": int(self._ids[group]),
                "process_group": (group, self._said[group]),
                "thread_name": "python3",
                "thread_id": "23456244340032",
                "collective_seq_id": self._calls[group],
                "p2p_seq_id": self._moves[group],
                "op_id": len(self.entries),
                "profiling_name": name,
                "time_created_ns": at_ns,
                "input_sizes": sizes,
                "input_dtypes": [dtype] * len(sizes),
                "output_sizes": sizes,
                "output_dtypes": [dtype] * len(sizes),
                "state": state,
                "time_discovered_started_ns": started,
                "time_discovered_completed_ns": at_ns + 2 if state == "completed" else None,
                "retired": state == "completed",
                "timeout_ms": 600_000,
                "is_p2p": is_p2p,
            }
        )


def _status() -> dict[str, int]:
    return {"last_enqueued_collective": -1, "last_started_collective": -1, "last_completed_collective": -1}
