"""Hosts as the job names them: spans and counters carry the names of machines, and which ranks were on them.

A back end may call its hosts otherwise than the machine does (the local one: all are one machine), and only what has
the job's name can be checked, excluded or replaced. Ranks are the link: who has which rank is known for one attempt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from phalanx.core.errors import UserError
from phalanx.detect.detection import Culprit, Detection

OF_SPANS = ("stragglers", "drift", "hang")
"""Judges that name ranks by spans of one attempt."""


class Placement(msgspec.Struct, frozen=True):
    """Which host has which ranks.

    Attributes:
        hosts: in the order of their ranks.
        since_unix_s: since when ranks make steps there.
    """

    hosts: tuple[str, ...] = ()
    per_host: int = 1
    since_unix_s: float = 0.0

    def host_of(self, rank: int) -> str | None:
        """None: there is no such rank."""
        place = rank // self.per_host
        return self.hosts[place] if 0 <= place < len(self.hosts) else None


def ranks_by_machine(run: Path, since_unix_s: float) -> dict[str, list[int]]:
    """Ranks of the newest attempt that has spans, by machine; empty: it has made no step since then, or has none."""
    from phalanx.telemetry.queries import Trace  # opens a database

    query = """
        select host, list(distinct rank order by rank) as ranks from all_steps
        where attempt = (select max(attempt) from all_steps) group by host having max(end_ns) >= $since_ns
    """
    try:
        rows = Trace.open(run).ask(query, parameters={"since_ns": round(since_unix_s * 1e9)}).to_pylist()
    except UserError:  # without spans nobody is named by them
        return {}
    return {row["host"]: row["ranks"] for row in rows}


def with_hosts(found: Detection, host_of: Callable[[int], str | None]) -> Detection:
    """The same, with the hosts of ranks that are named without any."""
    who = tuple(one if one.hosts else replace(one, hosts=_hosts_of(one.ranks, host_of)) for one in found.who)
    return replace(found, who=who)


def as_job_names(
    found: Detection, judge: str, placement: Placement, machines: Mapping[str, Sequence[int]]
) -> Detection:
    """The same, with hosts of the job in the place of machines, in its words too.

    Args:
        machines: ranks of the present attempt on each.
    """
    whole = {machine: _hosts_of(ranks, placement.host_of) for machine, ranks in machines.items()}
    names = {machine: hosts[0] for machine, hosts in whole.items() if len(hosts) == 1}
    who = tuple(_renamed(one, judge, placement, names) for one in found.who)
    said: dict[str, set[str]] = {}
    for old, new in zip(found.who, who, strict=True):
        for host in old.hosts:
            said.setdefault(host, set()).update(new.hosts if len(old.hosts) == 1 else {names.get(host, host)})
    # Where several hosts of the job are one machine, words say that machine still.
    words = {old: next(iter(new)) for old, new in said.items() if len(new) == 1}

    def text(line: str) -> str:
        pattern = "|".join(re.escape(old) for old in sorted(words, key=len, reverse=True))
        return re.sub(rf"(?<![\w.-])({pattern})(?![\w-])", lambda at: words[at[0]], line) if words else line

    why, then = tuple(map(text, found.why)), tuple(map(text, found.then))
    return replace(found, sentence=text(found.sentence), who=who, why=why, then=then)


def _renamed(one: Culprit, judge: str, placement: Placement, names: Mapping[str, str]) -> Culprit:
    # A host that the job knows was named by the rank itself; a machine may be called like another host of the job.
    if judge not in OF_SPANS and set(one.hosts) & set(placement.hosts):
        return one
    hosts = _hosts_of(one.ranks, placement.host_of)
    hosts = hosts or tuple(dict.fromkeys(names.get(host, host) for host in one.hosts))
    is_host = one.kind == "host" and len(hosts) == 1
    return replace(one, name=hosts[0] if is_host else one.name, hosts=hosts)


def _hosts_of(ranks: Sequence[int], host_of: Callable[[int], str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(host for rank in ranks if (host := host_of(rank))))
