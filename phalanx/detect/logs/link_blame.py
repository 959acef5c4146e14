"""Whom a broken connection between two hosts points to: the end whose link is down, not the one that waited for it.

An adapter that gives up after its retries (InfiniBand's status 12 and 13, "no route to host") says that its PEER, or
the path to it, did not answer. Where the kernel of one host says that its link went down, that host is it; without such
a line either end may be, and a host that says nothing while others complain comes first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from phalanx.detect.logs.log_blame import Blame, named_hosts
from phalanx.detect.logs.log_digest import LogDigest, LogEvent

_NO_ANSWER = re.compile(
    r"(?:status|error)[ =]{1,2}1[23]\b|vendor err 129\b|retry (?:counter|count) exceeded|timed? ?out|no route to host|"
    r"unreachable|did not (?:answer|respond)|not responding",
    re.IGNORECASE,
)


def says_no_answer(event: LogEvent) -> bool:
    """Whether a line of a rank says that its peer did not answer."""
    is_network = event.rule is not None and event.rule.kind == "network error"
    return event.source == "output" and is_network and bool(_NO_ANSWER.search(event.text))


def blame_of_link(
    event: LogEvent, events: Sequence[LogEvent], digest: LogDigest, before_s: float, after_s: float
) -> tuple[LogEvent, Blame, float] | None:
    """The line that shows the cause, whom it points to, and how sure that is; None: links tell no more than the line.

    Args:
        events: all that may have to do with the failure.
        before_s, after_s: how long before and after `event` a kernel may speak of the same.
    """
    links = [
        one
        for one in events
        if one.source == "kernel" and one.host and one.rule is not None and one.rule.kind == "network error"
        and _is_between(one, event, before_s, after_s)
    ]  # fmt: skip
    hosts = {one.host for one in links}
    if event.host in hosts:
        return None
    if len(hosts) == 1:
        first = min(links, key=lambda one: (one.unix_s or 0.0, one.number))
        why = f"its kernel says so; {event.place} only found that its peer did not answer"
        return first, Blame((first.host,), digest.ranks_of(first.host), (why,), 1.0), 0.9
    peers = named_hosts(event, digest)
    silent = _silent_hosts(digest)
    peer = next((one for one in silent if one in peers), silent[0] if len(silent) == 1 else "")
    if not peer or not event.host:
        other = f" ({', '.join(peers)})" if peers else ""
        why = f"its peer{other} did not answer: the fault may be at either end or between them"
        blame = Blame((event.host,) if event.host else (), () if event.rank is None else (event.rank,), (why,), 0.5)
        return event, blame, 0.6
    own = () if event.rank is None else (event.rank,)
    why = f"its peer did not answer: the fault is at either end or between them, and {peer} says nothing"
    return event, Blame((peer, event.host), (*digest.ranks_of(peer), *own), (why,), 0.5), 0.6


def _silent_hosts(digest: LogDigest) -> list[str]:
    """Hosts that wrote lines none of which is trouble, where others complain."""
    writers = [writer for writer in digest.writers if writer.source == "output" and writer.host and writer.lines]
    complaining = {writer.host for writer in writers if writer.events}
    return sorted({writer.host for writer in writers} - complaining)


def _is_between(one: LogEvent, event: LogEvent, before_s: float, after_s: float) -> bool:
    if one.unix_s is None or event.unix_s is None:
        return True
    return event.unix_s - before_s <= one.unix_s <= event.unix_s + after_s
