"""What keepers know each other by: handed out on each host or agreed on, never in what ranks say to each other."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import pytest
from session_helpers import FakeKeeper
from thread_ranks import Exchange, ThreadPeers, run_ranks

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.keeper_contract import Endpoint
from phalanx.checkpoint.session.background_session import Session
from phalanx.checkpoint.session.open_session import agree_on_secret, disagreement, given_secret, mark_of, open_session
from phalanx.core.errors import UserError
from phalanx.ipc.handshake import VARIABLE, derive, hand_out, read_job_secret


class Recording(Exchange):
    """Keeps all that ranks say to each other."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.said: list[str] = []


class Heard(ThreadPeers):
    """A rank whose words are kept."""

    def gather(self, value: Any) -> list[Any]:
        found = super().gather(value)
        assert isinstance(self._exchange, Recording)
        self._exchange.said.append(repr(found))
        return found


class Told(FakeKeeper):
    """A keeper that remembers by which secret it is to know others."""

    secret: bytes | None = None

    def replicate_to(self, peer: Endpoint | None, attempt: int, secret: bytes) -> None:
        super().replicate_to(peer, attempt, secret)
        self.secret = secret


class Opened:
    """Two hosts of a rank each that have opened a session."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.keepers = [Told(), Told()]
        self.lines: list[list[str]] = [[], []]
        self.exchange = Recording(2)
        config = CheckpointConfig(**settings)

        def body(peers: ThreadPeers) -> Session:
            rank = peers.rank
            session = open_session(
                str(folder),
                config,
                peers=Heard(rank, 2, self.exchange),
                report=self.lines[rank].append,
                host=f"host-{rank}",
                connect=lambda: self.keepers[rank],
            )
            session._replica_peer.exchange()
            return session

        self.sessions = run_ranks(2, body)

    @property
    def said(self) -> str:
        """Between ranks, all of it."""
        return "".join(self.exchange.said)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def given(private: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A secret that every host was handed."""
    secret = secrets.token_bytes(32)
    for name, value in hand_out(private, secret).items():
        monkeypatch.setenv(name, value)
    return secret


def test_keepers_use_what_was_handed_out_and_ranks_do_not_say_it(tmp_path: Path, given: bytes) -> None:
    opened = Opened(tmp_path / "checkpoints")
    assert not any(isinstance(session, BaseException) for session in opened.sessions)
    assert all(session.job.secret for session in opened.sessions)  # type: ignore[union-attr]
    first, second = (keeper.secret for keeper in opened.keepers)
    assert first is not None and first == second != given
    for secret in (first, given, bytes.fromhex(given.hex())):
        assert secret.hex() not in opened.said
        assert repr(secret)[2:-1] not in opened.said
    assert first.hex() not in repr(opened.sessions[0].job)  # type: ignore[union-attr]
    assert not any("replicas are off" in line for lines in opened.lines for line in lines)


def test_without_a_secret_replicas_are_off_which_is_said_once_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    opened = Opened(tmp_path / "checkpoints")
    assert not any(session.job.secret for session in opened.sessions)  # type: ignore[union-attr]
    assert [keeper.secret for keeper in opened.keepers] == [None, None]
    (line,) = [line for lines in opened.lines for line in lines if "replicas are off" in line]
    cures = ("phalanx run", VARIABLE, "chmod 600", "checkpoint.insecure_replicas=true")
    assert all(words in line for words in ("no host was given a secret", *cures))


def test_insecure_replicas_have_a_secret_all_the_same_which_who_listens_does_not_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    opened = Opened(tmp_path / "checkpoints", insecure_replicas=True)
    first, second = (keeper.secret for keeper in opened.keepers)
    assert first is not None and first == second
    assert first.hex() not in opened.said
    assert Opened(tmp_path / "others", insecure_replicas=True).keepers[0].secret != first


def test_all_ranks_agree_on_one_secret() -> None:
    for size in (1, 2, 5):
        found = run_ranks(size, agree_on_secret)
        assert len(set(found)) == 1
        assert isinstance(found[0], bytes) and len(found[0]) == 32


def test_on_one_host_nothing_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    lines: list[str] = []
    session = open_session(str(tmp_path / "c"), CheckpointConfig(), report=lines.append, connect=FakeKeeper)
    assert not session.job.secret
    assert lines == []


@pytest.mark.parametrize(
    ("marks", "why"),
    [
        (["", "", ""], "no host was given a secret"),
        (["x", "x", ""], "host c has no secret"),
        (["x", "", ""], "hosts b, c have no secret"),
        (["x", "x", "y"], "host c has another secret than a"),
        (["x", "x", "x"], ""),
    ],
)
def test_which_host_was_not_given_the_same_is_said(marks: list[str], why: str) -> None:
    assert disagreement(["a", "b", "c"], marks) == why


def test_a_mark_tells_secrets_apart_and_is_none_of_their_bytes() -> None:
    secret = secrets.token_bytes(32)
    assert mark_of(secret) == mark_of(bytes(secret)) != mark_of(secrets.token_bytes(32))
    assert mark_of(None) == ""
    assert bytes.fromhex(mark_of(secret)) not in secret + derive(secret, "keepers")


def test_what_is_handed_out_only_its_user_can_read(private: Path) -> None:
    environ = hand_out(private, bytes(32))
    path = Path(environ[VARIABLE])
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_job_secret(environ) == read_job_secret(hand_out(private, bytes(32)))
    assert given_secret({}) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666])
def test_a_file_that_others_can_read_is_refused(private: Path, mode: int) -> None:
    environ = hand_out(private, bytes(32))
    Path(environ[VARIABLE]).chmod(mode)
    with pytest.raises(UserError, match=rf"{VARIABLE} = .*has the mode {mode:o}.*chmod 600"):
        read_job_secret(environ)


def test_a_file_that_is_not_there_or_can_be_guessed_is_refused(private: Path) -> None:
    path = private / "mine"
    with pytest.raises(UserError, match=r"cannot be read \(No such file"):
        read_job_secret({VARIABLE: str(path)})
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(descriptor, b"password\n")
    os.close(descriptor)
    with pytest.raises(UserError, match=r"holds 8 bytes, fewer than 32.*openssl rand -hex 32"):
        read_job_secret({VARIABLE: str(path)})
    with pytest.raises(UserError, match="is no plain file"):
        read_job_secret({VARIABLE: str(private)})


def _kept(path: Path, content: bytes) -> dict[str, str]:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.write(content)
    return {VARIABLE: str(path)}


@pytest.mark.parametrize("edge", [b"\n", b" ", b"\t", b"\r\n", b"\x0b\x0c"])
def test_every_byte_of_a_binary_secret_counts(private: Path, edge: bytes) -> None:
    """32 random bytes end in what is a space in text one time in 43, and are no shorter for it."""
    middle = b"\xff" * (32 - 2 * len(edge))
    told = read_job_secret(_kept(private / "mine", edge + middle + edge))
    assert told is not None
    assert told != read_job_secret(_kept(private / "mine", edge + b"\xff" * len(edge) + middle))
    assert told != read_job_secret(_kept(private / "mine", edge + middle + edge + b"\n"))
    with pytest.raises(UserError, match="holds 31 bytes"):
        read_job_secret(_kept(private / "mine", edge + middle[:-1] + edge))


def test_a_secret_of_text_is_the_same_with_and_without_its_last_line_break(private: Path) -> None:
    text = secrets.token_hex(32).encode()
    told = {read_job_secret(_kept(private / "mine", text + end)) for end in (b"", b"\n", b"\r\n")}
    assert len(told) == 1
    assert read_job_secret(_kept(private / "mine", b" " + text)) not in told
    with pytest.raises(UserError, match="holds 31 bytes"):
        read_job_secret(_kept(private / "mine", text[:31] + b"\n"))
