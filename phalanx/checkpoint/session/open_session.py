"""Opening a session: the keeper of this host, the number of the attempt, and what all ranks have to know alike.

That includes the secret by which the keepers of this job know each other: each host was given it, or the ranks agree on
one here. Nothing secret goes through the ranks' own connections, which anybody on the network can read: of a given
secret the ranks exchange a *mark*, out of which it cannot be computed, to see that they were given the same.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from phalanx.checkpoint.all_ranks import at_first, everywhere
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.interval import AutoInterval
from phalanx.checkpoint.keeper.keeper_client import KeeperClient
from phalanx.checkpoint.keeper.keeper_start import address_for, ensure_keeper, host_name
from phalanx.checkpoint.keeper_contract import Destination, KeeperLostError
from phalanx.checkpoint.session.background_session import Session
from phalanx.checkpoint.session.blocking_session import BlockingSession
from phalanx.checkpoint.session.keeper_link import KeeperLink, SessionContext
from phalanx.checkpoint.snapshot_schedule import SnapshotSchedule
from phalanx.checkpoint.storage.location import claimed
from phalanx.core.errors import UserError
from phalanx.core.fault_points import NO_POINTS, Points
from phalanx.core.files import current_umask
from phalanx.core.layout import Layout
from phalanx.core.peers import ALONE, Copies, Peers
from phalanx.ipc.handshake import VARIABLE, derive, read_job_secret

_MARK_BYTES = 8
_ONCE = bytes(12)  # each key below seals one thing
_MOST_NAMED = 4  # hosts
_ENDING_KEEPERS = 3


def given_secret(environ: Mapping[str, str]) -> bytes | None:
    """The keepers' secret, derived from what this host was given; None: it was given nothing.

    Raises:
        UserError: as `phalanx.ipc.handshake.read_job_secret`.
    """
    secret = read_job_secret(environ)
    return None if secret is None else derive(secret, "keepers")


def mark_of(secret: bytes | None) -> str:
    """The mark of a given secret; empty: nothing was given."""
    return "" if secret is None else derive(secret, "mark")[:_MARK_BYTES].hex()


def disagreement(hosts: Sequence[str], marks: Sequence[str]) -> str:
    """Why the secrets that hosts were given are of no use; empty: all were given the same.

    Args:
        hosts, marks: of every rank.
    """

    def named(some: Sequence[str], verb: str, verbs: str) -> str:
        more = f" and {len(some) - _MOST_NAMED} more" if len(some) > _MOST_NAMED else ""
        one = len(some) == 1
        return f"{'host' if one else 'hosts'} {', '.join(some[:_MOST_NAMED])}{more} {verb if one else verbs}"

    mark_of_host = dict(zip(hosts, marks, strict=True))
    without = [host for host, mark in mark_of_host.items() if not mark]
    if len(without) == len(mark_of_host):
        return "no host was given a secret"
    if without:
        return f"{named(without, 'has', 'have')} no secret"
    first = mark_of_host[hosts[0]]
    others = [host for host, mark in mark_of_host.items() if mark != first]
    return f"{named(others, 'has', 'have')} another secret than {hosts[0]}" if others else ""


def agree_on_secret(peers: Peers) -> bytes:
    """A new secret that all ranks have and that who only listens has not; all together.

    Each rank shows a public key; the first seals the secret for each (X25519, AES-GCM). Who can change what ranks say
    to each other, or speak as one of them, can put his own key there.
    """
    own = X25519PrivateKey.generate()
    shown = everywhere(peers, lambda: own.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex())
    publics = [bytes.fromhex(public) for public in shown]
    secret = secrets.token_bytes(32)

    def cipher(public: bytes, other_rank: int) -> AESGCM:
        shared = own.exchange(X25519PublicKey.from_public_bytes(public))
        return AESGCM(derive(shared + publics[0] + publics[other_rank], "sealing"))

    def seal() -> list[str]:
        return [cipher(publics[rank], rank).encrypt(_ONCE, secret, None).hex() for rank in range(1, peers.size)]

    sealed = at_first(peers, seal)
    if peers.rank == 0:
        return secret
    return cipher(publics[0], peers.rank).decrypt(_ONCE, bytes.fromhex(sealed[peers.rank - 1]), None)


def _choose_secret(
    config: CheckpointConfig,
    peers: Peers,
    hosts: Sequence[str],
    marks: Sequence[str],
    given: bytes | None,
    report: Callable[[str], None],
) -> bytes | None:
    """The secret of this job's keepers, the same on all ranks; None: there are no replicas."""
    if not config.replicated(len(set(hosts))):
        return None
    why = disagreement(hosts, marks)
    if not why:
        return given
    if config.insecure_replicas:
        return agree_on_secret(peers)
    if peers.rank == 0:
        report(
            f"replicas are off: {why}, and without one anybody on the network could read and forge snapshots; "
            f"the loss of a host takes those in its memory. Start with `phalanx run`; or put the same file on every "
            f"host, readable by you alone (openssl rand -hex 32 > FILE; chmod 600 FILE), and set {VARIABLE} to it; or, "
            f"where you trust the network, set checkpoint.insecure_replicas=true"
        )
    return None


Saver = Session | BlockingSession
"""What takes the checkpoints of a training loop and takes them up again; both have the same methods."""


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
    host: str | None = None,
    connect: Callable[[], KeeperClient] | None = None,
) -> Saver:
    """Begin an attempt of a run, as ``checkpoint.mode`` wants it; called by all ranks together.

    In the background, the keeper of each host is started if there is none; `prepare_keeper` of
    `phalanx.checkpoint.keeper.keeper_start` does that beforehand. From here on, whatever is left of earlier attempts
    cannot write checkpoints any more.

    Args:
        destination_url: a folder, or a URL that fsspec knows; the same on all ranks. Without a keeper, a folder has to
            be on a file system that all ranks share.
        copies: the data-parallel group of this rank, which shares what is read from durable storage.
        layout: of the ranks; a text for people where it is none of ours.
        run_config: the resolved config of the run, as JSON values; kept in every checkpoint.
        report: is given lines for people: what was refused, lost, put right.
        host: name of this host; None: as the system has it, with the keeper's address where ``PHALANX_KEEPER`` sets
            one, so that several keepers of one machine are several hosts.
        connect: gives a connection to the keeper; None: to the one that belongs to the destination.

    Raises:
        UserError: the storage cannot be reached or written, or no keeper can be started; on all ranks.
    """
    destination = Destination(
        url=destination_url,
        options=dict(config.storage_options),
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        keep_best=config.keep_best,
        best_metric=config.best_metric,
        budget_bytes=config.budget_bytes,
        umask=current_umask(),
    )

    def claim(last_attempt: int) -> list[Any]:
        return [claimed(destination_url, destination.options, last_attempt, report), secrets.token_hex(4)]

    if config.mode == "blocking":
        attempt, _ = at_first(peers, lambda: claim(0))
        nowhere = ("",) * peers.size  # hosts and racks matter to keepers only
        about = (nowhere, nowhere, peers, copies, layout, dict(run_config or {}), report, points)
        schedule = SnapshotSchedule(config, AutoInterval(config), decides=peers.rank == 0)
        return BlockingSession(SessionContext(config, destination, attempt, None, *about), schedule)

    links: list[KeeperLink] = []
    given: list[bytes | None] = []

    def connect_here() -> list[Any]:
        given.append(given_secret(os.environ) if config.replicas is not False else None)
        try:
            links.append(KeeperLink(connect or _own_keeper(destination_url, config, peers), report))
        except (KeeperLostError, OSError) as error:
            cure = "see to that, or set checkpoint.mode=blocking, which needs no keeper"
            raise UserError(f"no keeper can be started on this host ({error})", cure=cure) from error
        last_attempt = links[0].ask(lambda keeper: keeper.last_attempt, 0)
        return [host or host_name(), config.rack_of(os.environ), last_attempt, mark_of(given[0])]

    hosts, racks, last_attempts, marks = zip(*everywhere(peers, connect_here), strict=True)
    attempt, nonce = at_first(peers, lambda: claim(max(last_attempts)))
    destination = replace(destination, nonce=nonce)
    secret = _choose_secret(config, peers, hosts, marks, given[0], report)
    about = (hosts, racks, peers, copies, layout, dict(run_config or {}), report, points)
    schedule = SnapshotSchedule(config, AutoInterval(config, len(set(hosts))), decides=peers.rank == 0)
    return Session(SessionContext(config, destination, attempt, secret, *about), links[0], schedule)


def _own_keeper(destination_url: str, config: CheckpointConfig, peers: Peers) -> Callable[[], KeeperClient]:
    address = address_for(destination_url, os.environ)

    def connect() -> KeeperClient:
        for left in reversed(range(_ENDING_KEEPERS + 1)):
            ensure_keeper(address, ttl_s=config.keeper_ttl_s)
            try:
                return KeeperClient(address, peers.rank, peers.size)
            except KeeperLostError:  # it was that of a run that has just ended, and ends too
                if not left:
                    raise
        raise AssertionError

    return connect
