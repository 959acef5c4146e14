"""Whom lines point to when their writers only notice that something is wrong elsewhere.

A rank that waits in a collective says so; the one that was missing mostly says nothing. So: who is silent while the
others complain, who is named by them (a rank, a host, an address), whose collectives are behind, and what torchrun saw
end first.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phalanx.detect.logs.log_digest import LogDigest, LogEvent

_TOKEN = re.compile(r"[A-Za-z][\w-]*\d[\w-]*")
_OUTSIDE = re.compile(
    r"(?:host=['\"]|https?://)(?!(?:\d{1,3}\.){3}|localhost)[\w-]{1,63}(?:\.[\w-]{1,63}){1,6}", re.ASCII
)  # a server that is none of the job's hosts
_KILLED = ("-9", "-7", "-11", "137", "139")  # how a process ends by itself or by the kernel; -6 is a watchdog's doing
_BEHIND, _NAMED, _SILENT, _ENDED = 4.0, 3.0, 2.0, 2.0


@dataclass(frozen=True)
class Blame:
    """Who it points to; empty: nobody stands out. `share`: of all votes."""

    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    why: tuple[str, ...] = ()
    share: float = 0.0


def named_hosts(event: LogEvent, digest: LogDigest) -> tuple[str, ...]:
    """Other hosts that a line names, by name, by address or by a rank that runs there."""
    by_label = {host.partition(".")[0]: host for host in digest.hosts}
    hosts = [event.named_host] if event.named_host else []
    hosts += [by_label[token] for token in _TOKEN.findall(event.text) if token in by_label]
    if not _OUTSIDE.search(event.text):  # else an address is that server's
        hosts += [digest.addresses[address] for address in event.addresses if address in digest.addresses]
    hosts += [host for rank in event.named_ranks if rank != event.rank and (host := digest.host_of(rank))]
    return tuple(dict.fromkeys(host for host in hosts if host and host != event.host))


def blame_by_notices(events: Sequence[LogEvent], digest: LogDigest) -> Blame:
    """Of lines whose writers only noticed."""
    votes: dict[str, float] = defaultdict(float)
    ranks: Counter[int] = Counter()
    why: list[str] = []
    complaining = {event.writer_key for event in events}
    for add in (_by_names, _by_silence, _by_order, _by_end):
        add(events, digest, complaining, votes, ranks, why)
    if not votes:
        (rank, count), *others = ranks.most_common() or [(-1, 0)]
        if rank >= 0 and (not others or count > others[0][1]):
            return Blame((), (rank,), tuple(why), count / sum(ranks.values()))
        return Blame(why=tuple(why))
    (host, most), *rest = sorted(votes.items(), key=lambda vote: -vote[1])
    share = most / sum(votes.values())
    if rest and most < 1.3 * rest[0][1]:
        return Blame(why=tuple(why), share=share)
    own = [rank for rank, _ in ranks.most_common() if digest.host_of(rank) == host]
    top = [rank for rank in own if ranks[rank] >= 0.6 * ranks[own[0]]]
    return Blame((host,), tuple(sorted(top)), tuple(why), share)


def _by_names(
    events: Iterable[LogEvent], digest: LogDigest, complaining: set[str],
    votes: dict[str, float], ranks: Counter[int], why: list[str],
) -> None:  # fmt: skip
    by_host: dict[str, set[str]] = {}
    by_rank: dict[int, set[str]] = {}
    for event in events:
        for host in named_hosts(event, digest):
            by_host.setdefault(host, set()).add(event.writer_key)
        for rank in event.named_ranks:
            if rank != event.rank and event.rank is not None:
                by_rank.setdefault(rank, set()).add(event.writer_key)
    total = max(len(complaining), 1)
    for host, who in by_host.items():
        votes[host] += _NAMED * len(who) / total
    for rank, whose in by_rank.items():
        ranks[rank] += len(whose)
    if by_host:
        host = max(by_host, key=lambda one: len(by_host[one]))
        why.append(f"{len(by_host[host])} of {total} that complain name {host}")


def _by_silence(
    events: Iterable[LogEvent], digest: LogDigest, complaining: set[str],
    votes: dict[str, float], ranks: Counter[int], why: list[str],
) -> None:  # fmt: skip
    """Ranks without a complaint, where most have one."""
    writers = [writer for writer in digest.writers if writer.rank is not None and writer.source == "output"]
    silent = [writer for writer in writers if writer.key not in complaining]
    if not silent or len(silent) * 2 > len(writers):
        return
    ranks_of = Counter(writer.host for writer in writers)
    shares = {host: count / ranks_of[host] for host, count in Counter(one.host for one in silent).items() if host}
    for host, share in shares.items():  # a host that is silent as a whole before one that has a silent rank
        votes[host] += _SILENT * (1.0 if share == 1.0 else 0.8) * share / max(shares.values()) / len(shares)
    for writer in silent:
        if writer.rank is not None:
            ranks[writer.rank] += 1
    names = ", ".join(f"{writer.rank}" for writer in silent[:8])
    why.append(f"{len(writers) - len(silent)} ranks complain and rank {names} says nothing")


def _by_order(
    events: Iterable[LogEvent], digest: LogDigest, complaining: set[str],
    votes: dict[str, float], ranks: Counter[int], why: list[str],
) -> None:  # fmt: skip
    """Ranks whose collectives are behind those of the others."""
    there = [writer for writer in digest.writers if writer.enqueued is not None]
    if len(there) < 3:
        return
    usual = sorted(writer.enqueued or 0 for writer in there)[len(there) // 2]
    behind = [writer for writer in there if (writer.enqueued or 0) < usual]
    if not behind or len(behind) * 2 >= len(there):
        return
    least = min(behind, key=lambda writer: writer.enqueued or 0)
    if least.host:
        votes[least.host] += _BEHIND
    if least.rank is not None:
        ranks[least.rank] += 3
    why.append(f"rank {least.rank} was at collective {least.enqueued}, the others at {usual}")


def _by_end(
    events: Iterable[LogEvent], digest: LogDigest, complaining: set[str],
    votes: dict[str, float], ranks: Counter[int], why: list[str],
) -> None:  # fmt: skip
    """What torchrun saw end first, unless that was a watchdog's doing."""
    root = digest.root_cause
    if root.exit_code not in _KILLED:
        return
    host = root.host.partition(".")[0]
    host = next((one for one in digest.hosts if one.partition(".")[0] == host), root.host)
    if not host and root.rank is not None:
        host = digest.host_of(root.rank)
    if host:
        votes[host] += _ENDED
    if root.rank is not None:
        ranks[root.rank] += 2
    why.append(f"torchrun saw rank {root.rank} end first, with exit code {root.exit_code}")


def blame_named_by_others(kind: str, events: Sequence[LogEvent], digest: LogDigest) -> Blame:
    """The one host that other lines of the same failure name, as a scheduler's do."""
    same = [event for event in events if event.rule is not None and event.rule.kind == kind]
    hosts = {event.named_host for event in same if event.named_host}
    if len(hosts) != 1:
        return Blame()
    host = hosts.pop()
    return Blame((host,), digest.ranks_of(host), ("another line of the same failure names it",), 0.75)
