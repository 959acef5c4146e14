"""Opening a session: the keeper of this host, the number of the attempt, and what all ranks have to know alike."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.keeper.client import connect as connect_to
from phalanx.checkpoint.keeper.contract import Keeper, KeeperLostError
from phalanx.checkpoint.keeper.main import host_name
from phalanx.checkpoint.keeper.start import address_for, ensure_keeper
from phalanx.checkpoint.persist.contract import Destination
from phalanx.checkpoint.policy.adapting import AutoInterval
from phalanx.checkpoint.session.agenda import Agenda
from phalanx.checkpoint.session.job import Job
from phalanx.checkpoint.session.link import Link
from phalanx.checkpoint.session.secret import agree, disagreement, given_secret, mark_of, without_secret
from phalanx.checkpoint.session.session import Session
from phalanx.checkpoint.storage.latest import claim
from phalanx.checkpoint.storage.location import open_store
from phalanx.checkpoint.together import at_first, everywhere
from phalanx.core.errors import UserError
from phalanx.core.files import current_umask
from phalanx.core.layout import Layout
from phalanx.core.peers import ALONE, Copies, Peers
from phalanx.core.points import NO_POINTS, Points

_ENDING_KEEPERS = 3


def open_session(
    destination_url: str,
    config: CheckpointConfig,
    *,
    peers: Peers = ALONE,
    copies: Copies | None = None,
    layout: Layout | str = "1",
    run_config: Mapping[str, Any] | None = None,
    report: Callable[[str], None] = print,
    points: Points = NO_POINTS,
    storage_options: Mapping[str, Any] | None = None,
    host: str | None = None,
    connect: Callable[[], Keeper] | None = None,
) -> Session:
    """Begin an attempt of a run; called by all ranks together.

    The keeper of each host is started if there is none; `phalanx.checkpoint.keeper.start.prepare_keeper` does that
    beforehand.
    From here on, whatever is left of earlier attempts cannot write checkpoints any more.

    Args:
        destination_url: a folder, or a URL that fsspec knows; the same on all ranks.
        config: of checkpoints.
        peers: all ranks.
        copies: the data-parallel group of this rank, which shares what is read from durable storage.
        layout: of the ranks; a text for people where it is none of ours.
        run_config: the resolved config of the run, as JSON values; kept in every checkpoint.
        report: is given lines for people: what was refused, lost, put right.
        points: where faults are injected.
        storage_options: for fsspec.
        host: name of this host; None: as the system has it, with the keeper's address where ``PHALANX_KEEPER`` sets
            one, so that several keepers of one machine are several hosts.
        connect: gives a connection to the keeper; None: to the one that belongs to the destination.

    Raises:
        UserError: the storage cannot be reached or written, or no keeper can be started; on all ranks.
    """
    options = dict(storage_options or config.storage_options)
    links: list[Link] = []
    given: list[bytes | None] = []

    def greet() -> list[Any]:
        given.append(given_secret(os.environ) if config.replicas is not False else None)
        links.append(_linked(connect or _connecting(destination_url, config, peers), report))
        seen = links[0].ask(lambda keeper: keeper.last_attempt, 0)
        return [host or host_name(), config.rack_of(os.environ), seen, mark_of(given[0])]

    hosts, racks, seen, marks = zip(*everywhere(peers, greet), strict=True)

    def begin() -> list[Any]:
        return [_claimed(destination_url, options, max(seen), report), secrets.token_hex(4)]

    attempt, nonce = at_first(peers, begin)
    secret = _secret(config, peers, hosts, marks, given[0], report)
    destination = _destination(destination_url, options, nonce, config)
    about = (dict(run_config or {}), report, points)
    job = Job(config, destination, attempt, secret, hosts, racks, peers, copies, layout, *about)
    agenda = Agenda(config, AutoInterval(config, len(set(hosts))), decides=peers.rank == 0)
    return Session(job, links[0], agenda)


def _secret(
    config: CheckpointConfig,
    peers: Peers,
    hosts: Sequence[str],
    marks: Sequence[str],
    given: bytes | None,
    report: Callable[[str], None],
) -> bytes | None:
    """What keepers of this job know each other by, the same on all ranks; None: there are no replicas."""
    if not config.replicated(len(set(hosts))):
        return None
    why = disagreement(hosts, marks)
    if not why:
        return given
    if config.insecure_replicas:
        return agree(peers)
    if peers.rank == 0:
        report(without_secret(why))
    return None


def _connecting(destination_url: str, config: CheckpointConfig, peers: Peers) -> Callable[[], Keeper]:
    address = address_for(destination_url, os.environ)

    def connect() -> Keeper:
        ensure_keeper(address, ttl_s=config.keeper_ttl_s)
        return connect_to(address, peers.rank, peers.size)

    def try_again() -> Keeper:
        for _ in range(_ENDING_KEEPERS):
            with suppress(KeeperLostError):  # it was that of a run that has just ended, and ends too
                return connect()
        return connect()

    return try_again


def _linked(connect: Callable[[], Keeper], report: Callable[[str], None]) -> Link:
    try:
        return Link(connect, report)
    except (KeeperLostError, OSError) as error:
        cure = "see to that, or set checkpoint.mode=blocking, which needs no keeper"
        raise UserError(f"no keeper can be started on this host ({error})", cure=cure) from error


def _claimed(url: str, options: Mapping[str, Any], seen: int, report: Callable[[str], None]) -> int:
    try:
        return claim(open_store(url, options), seen, report)
    except OSError as error:
        mend = "see to bucket, credentials (in the environment) and network" if "://" in url else "make it writable"
        cure = f"{mend}, or set checkpoint.folder to another place"
        problem = f"checkpoints cannot be written there ({error})"
        raise UserError(problem, cure=cure, field="checkpoint.folder", value=url) from error


def _destination(url: str, options: dict[str, Any], nonce: str, config: CheckpointConfig) -> Destination:
    return Destination(
        url=url,
        options=options,
        nonce=nonce,
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        keep_best=config.keep_best,
        best_metric=config.best_metric,
        budget_bytes=config.budget_bytes,
        umask=current_umask(),
    )
