"""Opening a session: the keeper of this host, the number of the attempt, and what all ranks have to know alike.

That includes the secret by which the keepers of this job know each other: each host was given it, or the ranks agree on
one here. Nothing secret goes through the ranks' own connections, which anybody on the network can read: of a given
secret the ranks exchange a *mark*, out of which it cannot be computed, to see that they were given the same.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from phalanx.checkpoint.all_ranks import at_first, everywhere
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.interval import AutoInterval
from phalanx.checkpoint.keeper.keeper_client import connect as connect_to
from phalanx.checkpoint.keeper.keeper_start import address_for, ensure_keeper
from phalanx.checkpoint.keeper.main import host_name
from phalanx.checkpoint.keeper_contract import Destination, Keeper, KeeperLostError
from phalanx.checkpoint.session.background_session import Session
from phalanx.checkpoint.session.blocking_session import BlockingSession
from phalanx.checkpoint.session.keeper_link import KeeperLink, SessionContext
from phalanx.checkpoint.snapshot_schedule import SnapshotAgenda
from phalanx.checkpoint.storage.location import claimed
from phalanx.core.errors import UserError
from phalanx.core.fault_points import NO_POINTS, Points
from phalanx.core.files import current_umask
from phalanx.core.layout import Layout
from phalanx.core.peers import ALONE, Copies, Peers
from phalanx.ipc.handshake import VARIABLE, derive, read_job_secret

_MARK_BYTES = 8
_ONCE = bytes(12)  # each key below seals one thing


def given_secret(environ: Mapping[str, str]) -> bytes | None:
    """What keepers are to use, out of what this host was given; None: nothing was.

    Raises:
        UserError: as `phalanx.ipc.handshake.read_job_secret`.
    """
    secret = read_job_secret(environ)
    return None if secret is None else derive(secret, "keepers")


def mark_of(secret: bytes | None) -> str:
    """Of what was given; empty: nothing was."""
    return "" if secret is None else derive(secret, "mark")[:_MARK_BYTES].hex()


def disagreement(hosts: Sequence[str], marks: Sequence[str]) -> str:
    """Why what hosts were given is of no use; empty: all were given the same.

    Args:
        hosts, marks: of every rank.
    """
    of_host = dict(zip(hosts, marks, strict=True))
    without = [host for host, mark in of_host.items() if not mark]
    if len(without) == len(of_host):
        return "no host was given a secret"
    if without:
        return f"{_named(without)} {'has' if len(without) == 1 else 'have'} no secret"
    first = next(iter(of_host.values()))
    others = [host for host, mark in of_host.items() if mark != first]
    return f"{_named(others)} {'has' if len(others) == 1 else 'have'} another secret than {hosts[0]}" if others else ""


def without_secret(why: str) -> str:
    """What is said where replicas are off for want of a secret."""
    return (
        f"replicas are off: {why}, and without one anybody on the network could read and forge snapshots; "
        f"the loss of a host takes those in its memory. Start with `phalanx run`; or put the same file on every host, "
        f"readable by you alone (openssl rand -hex 32 > FILE; chmod 600 FILE), and set {VARIABLE} to it; or, where you "
        f"trust the network, set checkpoint.insecure_replicas=true"
    )


def agree(peers: Peers) -> bytes:
    """A new secret that all ranks have and that who only listens has not; all together.

    Each rank shows a public key; the first seals the secret for each (X25519, AES-GCM). Who can change what ranks say
    to each other, or speak as one of them, can put his own key there.
    """
    own = X25519PrivateKey.generate()
    shown = everywhere(peers, lambda: own.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex())
    publics = [bytes.fromhex(public) for public in shown]
    made = secrets.token_bytes(32)

    def sealed() -> list[str]:
        keys = (_between(own, public, publics[0] + public) for public in publics[1:])
        return [AESGCM(key).encrypt(_ONCE, made, None).hex() for key in keys]

    given = at_first(peers, sealed)
    if peers.rank == 0:
        return made
    key = _between(own, publics[0], publics[0] + publics[peers.rank])
    return AESGCM(key).decrypt(_ONCE, bytes.fromhex(given[peers.rank - 1]), None)


def _between(own: X25519PrivateKey, public: bytes, both: bytes) -> bytes:
    return derive(own.exchange(X25519PublicKey.from_public_bytes(public)) + both, "sealing")


def _named(hosts: Sequence[str], most: int = 4) -> str:
    more = f" and {len(hosts) - most} more" if len(hosts) > most else ""
    return f"{'host' if len(hosts) == 1 else 'hosts'} {', '.join(hosts[:most])}{more}"


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

    The keeper of each host is started if there is none; `phalanx.checkpoint.keeper.keeper_start.prepare_keeper` does
    that beforehand. From here on, whatever is left of earlier attempts cannot write checkpoints any more.

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
    links: list[KeeperLink] = []
    given: list[bytes | None] = []

    def greet() -> list[Any]:
        given.append(given_secret(os.environ) if config.replicas is not False else None)
        links.append(_linked(connect or _connecting(destination_url, config, peers), report))
        seen = links[0].ask(lambda keeper: keeper.last_attempt, 0)
        return [host or host_name(), config.rack_of(os.environ), seen, mark_of(given[0])]

    hosts, racks, seen, marks = zip(*everywhere(peers, greet), strict=True)

    def begin() -> list[Any]:
        return [claimed(destination_url, options, max(seen), report), secrets.token_hex(4)]

    attempt, nonce = at_first(peers, begin)
    secret = _secret(config, peers, hosts, marks, given[0], report)
    destination = _destination(destination_url, options, nonce, config)
    about = (dict(run_config or {}), report, points)
    job = SessionContext(config, destination, attempt, secret, hosts, racks, peers, copies, layout, *about)
    agenda = SnapshotAgenda(config, AutoInterval(config, len(set(hosts))), decides=peers.rank == 0)
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


def _linked(connect: Callable[[], Keeper], report: Callable[[str], None]) -> KeeperLink:
    try:
        return KeeperLink(connect, report)
    except (KeeperLostError, OSError) as error:
        cure = "see to that, or set checkpoint.mode=blocking, which needs no keeper"
        raise UserError(f"no keeper can be started on this host ({error})", cure=cure) from error


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


Saver = Session | BlockingSession
"""What takes the checkpoints of a training loop and takes them up again; both have the same methods."""


def open_saver(
    destination_url: str,
    config: CheckpointConfig,
    *,
    peers: Peers = ALONE,
    copies: Copies | None = None,
    layout: Layout | str = "1",
    run_config: Mapping[str, Any] | None = None,
    report: Callable[[str], None] = print,
    points: Points = NO_POINTS,
) -> Saver:
    """Begin an attempt of a run, as ``checkpoint.mode`` wants it; called by all ranks together.

    Args and raises: as `phalanx.checkpoint.session.open_session.open_session`.
    """
    begin: Callable[..., Saver] = BlockingSession if config.mode == "blocking" else open_session
    return begin(
        destination_url,
        config,
        peers=peers,
        copies=copies,
        layout=layout,
        run_config=run_config,
        report=report,
        points=points,
    )
