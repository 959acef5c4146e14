"""What the keepers of this job know each other by: out of the secret that each host was given, or agreed on here.

Nothing secret goes through the ranks' own connections, which anybody on the network can read: what all are told of a
given secret is a *mark* of it, out of which it cannot be computed, to see that they were given the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from phalanx.checkpoint.together import at_first, everywhere
from phalanx.core.peers import Peers
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
