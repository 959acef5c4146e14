"""Token files, TLS contexts, and what is written down of environments."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.run.secrets import (
    HIDDEN,
    TlsFiles,
    Token,
    client_context,
    ensure_token,
    is_loopback,
    is_secret_name,
    read_token,
    require_tls_unless_loopback,
    scrub,
    scrub_arguments,
    scrub_text,
    server_context,
    without_tokens,
)

SECRET_NAMES = [
    "HF_TOKEN",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_ACCESS_KEY_ID",
    "DB_PASSWORD",
    "PGPASSWORD",
    "my_passwd",
    "apikey",
    "OPENAI_KEYS",
    "GITHUBTOKEN",
    "SSH_KEY_PASSPHRASE",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "HTTP_AUTH",
    "MYSQL_PWD",
    "session-cookie",
]
OTHER_NAMES = [
    "PATH",
    "PWD",
    "OLDPWD",
    "TOKENIZERS_PARALLELISM",
    "SSH_AUTH_SOCK",
    "HOME",
    "LANG",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_DEBUG",
    "KEYBOARD",
    "AUTHOR",
    "OMP_NUM_THREADS",
]

SECRET = "0123456789abcdef" * 4


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    return tmp_path / "secret" / "token"


def test_a_token_is_made_once_and_only_its_owner_can_read_it(token_file: Path) -> None:
    token = ensure_token(token_file)
    assert re.fullmatch("[0-9a-f]{64}", token.reveal())
    assert token_file.stat().st_mode & 0o777 == 0o600
    assert token_file.parent.stat().st_mode & 0o777 == 0o700
    assert ensure_token(token_file) == token == read_token(token_file)
    assert [file.name for file in token_file.parent.iterdir()] == ["token"]
    assert ensure_token(token_file.with_name("other")) != token


def test_many_who_make_it_at_once_have_the_same(token_file: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        tokens = set(pool.map(ensure_token, [token_file] * 64))
    assert len(tokens) == 1
    assert [file.name for file in token_file.parent.iterdir()] == ["token"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_token_that_others_can_read_is_refused_without_being_shown(token_file: Path, mode: int) -> None:
    token = ensure_token(token_file)
    token_file.chmod(mode)
    for reader in (read_token, ensure_token):
        with pytest.raises(UserError, match=rf"mode {mode:o}.*remove it") as caught:
            reader(token_file)
        assert token.reveal() not in str(caught.value)


def test_a_folder_that_others_can_enter_is_refused(token_file: Path) -> None:
    token_file.parent.mkdir(mode=0o700)
    token_file.parent.chmod(0o755)
    with pytest.raises(UserError, match=r"run\.token_file.*mode 755.*chmod 700"):
        ensure_token(token_file)
    with pytest.raises(UserError, match=r"--token-file.*mode 755") as caught:
        ensure_token(token_file, "--token-file")
    assert "run.token_file" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_belongs_to_somebody_else_is_refused(token_file: Path) -> None:
    ensure_token(token_file)
    os.chown(token_file, 65534, 65534)
    with pytest.raises(UserError, match="somebody else"):
        read_token(token_file)
    os.chown(token_file.parent, 65534, 65534)
    with pytest.raises(UserError, match="folder belongs to somebody else"):
        ensure_token(token_file)


def test_links_pipes_folders_and_nothing_are_no_tokens(token_file: Path) -> None:
    ensure_token(token_file)
    folder = token_file.parent
    (folder / "link").symlink_to(token_file)
    os.mkfifo(folder / "pipe", 0o600)
    (folder / "folder").mkdir(mode=0o700)
    for name in ("link", "pipe", "folder", "nothing"):
        with pytest.raises(UserError, match=rf"run.token_file = .*{name}"):
            read_token(folder / name)


@pytest.mark.parametrize("content", ["", "short", SECRET[:-1], SECRET + "0", SECRET.upper(), "\xff" * 64])
def test_other_content_is_no_token_and_is_not_shown(token_file: Path, content: str) -> None:
    ensure_token(token_file)
    token_file.write_bytes(content.encode("latin1"))
    with pytest.raises(UserError, match="holds no token") as caught:
        read_token(token_file)
    assert not content or content not in str(caught.value)


def test_a_token_does_not_show_itself(caplog: pytest.LogCaptureFixture) -> None:
    token = Token(SECRET)
    logging.getLogger("test").warning("%s %r", token, {"token": token})
    shown = f"{token} {token!r} {[token]} {caplog.text}"
    assert SECRET not in shown
    with pytest.raises(TypeError):
        pickle.dumps(token)
    with pytest.raises(TypeError):
        json.dumps(token)
    assert token.header() == f"Bearer {SECRET}"


@pytest.mark.parametrize(
    ("header", "admitted"),
    [
        (f"Bearer {SECRET}", True),
        (f"bearer  {SECRET} ", True),
        (f"Basic {SECRET}", False),
        (SECRET, False),
        ("Bearer", False),
        ("Bearer ", False),
        ("", False),
        (None, False),
        (f"Bearer {SECRET[:-1]}", False),
        (f"Bearer {SECRET}0", False),
        ("Bearer ü€\udcff", False),
    ],
)
def test_only_the_token_is_admitted(header: str | None, admitted: bool) -> None:
    assert Token(SECRET).admits(header) is admitted


@given(st.text())
def test_nothing_else_is_admitted(header: str) -> None:
    assert not Token(SECRET).admits(header)
    assert not Token(SECRET).admits(f"Bearer {header}")


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.0.0.1:80", True),
        ("127.8.9.10:80", True),
        ("localhost", True),
        ("LOCALHOST.:80", True),
        ("::1", True),
        ("[::1]:80", True),
        ("[::ffff:127.0.0.1]:80", True),
        ("0.0.0.0", False),
        ("0.0.0.0:80", False),
        ("::", False),
        ("[::]:80", False),
        ("", False),
        (":80", False),
        ("10.0.0.1:80", False),
        ("[fe80::1%eth0]:80", False),
        ("localhost.evil.org", False),
        ("127.0.0.1.evil.org:80", False),
        ("[::ffff:10.0.0.1]", False),
        ("2130706433", False),
    ],
)
def test_loopback_addresses(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback
    require_tls_unless_loopback(address, TlsFiles())
    if loopback:
        require_tls_unless_loopback(address, None)
    else:
        cure = r"needs TLS; give a certificate and its key \(run.tls.certificate, run.tls.key\), or use 127"
        with pytest.raises(UserError, match=cure):
            require_tls_unless_loopback(address, None)


@given(st.text(max_size=30))
def test_any_text_may_be_asked_about(address: str) -> None:
    is_loopback(address)


class Certificates:
    def __init__(self, folder: Path) -> None:
        authority, stranger = trustme.CA(), trustme.CA()
        self.authority = folder / "ca.pem"
        authority.cert_pem.write_to_path(self.authority)
        self.server = self._issue(folder, "server", authority)
        self.client = self._issue(folder, "client", authority)
        self.stranger = self._issue(folder, "stranger", stranger)

    def _issue(self, folder: Path, name: str, authority: trustme.CA) -> TlsFiles:
        issued = authority.issue_cert("localhost", "127.0.0.1")
        certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
        certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        key.chmod(0o600)
        return TlsFiles(certificate, key, self.authority)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


def talk(server: TlsFiles, client: TlsFiles, name: str = "localhost") -> bytes:
    """What a client hears from a server after a handshake."""
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    theirs.settimeout(60)

    def serve() -> None:
        try:
            with server_context(server).wrap_socket(theirs, server_side=True) as connection:
                connection.sendall(b"hello")
        except (ssl.SSLError, OSError):
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client_context(client).wrap_socket(ours, server_hostname=name) as connection:
            return connection.recv(5)
    finally:
        ours.close()
        thread.join(60)


def test_both_sides_show_certificates(certificates: Certificates) -> None:
    assert talk(certificates.server, certificates.client) == b"hello"


def test_a_client_without_a_certificate_is_not_served_where_one_is_asked_for(certificates: Certificates) -> None:
    with pytest.raises((ssl.SSLError, OSError)):
        assert talk(certificates.server, TlsFiles(authority=certificates.authority)) == b"hello"
    without = TlsFiles(certificates.server.certificate, certificates.server.key)
    assert talk(without, TlsFiles(authority=certificates.authority)) == b"hello"


def test_strangers_are_not_served_nor_believed(certificates: Certificates) -> None:
    with pytest.raises((ssl.SSLError, OSError)):
        assert talk(certificates.server, certificates.stranger) == b"hello"
    with pytest.raises(ssl.SSLError):
        talk(certificates.stranger, certificates.client)
    with pytest.raises(ssl.SSLError):
        talk(certificates.server, certificates.client, name="other.host")
    with pytest.raises(ssl.SSLError):  # signed by nobody whom the system knows
        talk(certificates.server, TlsFiles())


def test_a_key_that_others_can_read_is_refused(certificates: Certificates) -> None:
    key = certificates.server.key
    assert key is not None
    key.chmod(0o644)
    with pytest.raises(UserError, match=r"run.tls.key = .*mode 644.*chmod 600"):
        server_context(certificates.server)
    key.chmod(0o640)
    server_context(certificates.server)


def test_files_that_do_not_serve_are_named(certificates: Certificates, tmp_path: Path) -> None:
    server, text = certificates.server, tmp_path / "text"
    text.write_text("hello")
    text.chmod(0o600)
    for files, words in (
        (TlsFiles(key=server.key), "run.tls: a server needs run.tls.certificate"),
        (TlsFiles(server.certificate), "run.tls: a server needs run.tls.key"),
        (TlsFiles(tmp_path / "none", server.key), "run.tls.certificate = .*none.*: cannot be read"),
        (TlsFiles(server.certificate, text), "server.pem and .*text cannot be used"),
        (TlsFiles(text, server.key), "text and .*server.key cannot be used"),
        (TlsFiles(server.certificate, certificates.client.key), "cannot be used .*mismatch"),
        (TlsFiles(server.certificate, server.key, text), "run.tls.authority = .*text.*: holds no certificate"),
    ):
        with pytest.raises(UserError, match=words):
            server_context(files)
    with pytest.raises(UserError, match="go together"):
        client_context(TlsFiles(server.certificate))


def test_a_key_with_a_passphrase_is_refused_and_nothing_is_asked_at_the_terminal(
    certificates: Certificates, tmp_path: Path
) -> None:
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    assert certificates.server.key is not None
    key = serialization.load_pem_private_key(certificates.server.key.read_bytes(), None)
    locked = tmp_path / "locked"
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    locked.write_bytes(key.private_bytes(*form, serialization.BestAvailableEncryption(b"passphrase")))
    locked.chmod(0o600)
    with pytest.raises(UserError, match="passphrase"):
        server_context(TlsFiles(certificates.server.certificate, locked))


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "PWD",
        "OLDPWD",
        "TOKENIZERS_PARALLELISM",
        "SSH_AUTH_SOCK",
        "HOME",
        "LANG",
        "CUDA_VISIBLE_DEVICES",
        "NCCL_DEBUG",
        "KEYBOARD",
        "AUTHOR",
        "OMP_NUM_THREADS",
    ],
)
def test_names_of_nothing_secret(name: str) -> None:
    assert not is_secret_name(name)


def test_an_environment_is_recorded_without_its_secrets() -> None:
    environ = {
        "HF_TOKEN": "hf_abc",
        "EMPTY_TOKEN": "",
        "DATABASE_URL": "postgresql://me:word@host/x?y=1 http://a.b:80/c",
        "ODD": f"before {SECRET} after",
        "PATH": "/bin",
        "INTERNAL": "mine",
    }
    shown = scrub(environ, known=[Token(SECRET)])
    assert shown == {
        "HF_TOKEN": HIDDEN,
        "EMPTY_TOKEN": "",
        "DATABASE_URL": f"postgresql://me:{HIDDEN}@host/x?y=1 http://a.b:80/c",
        "ODD": f"before {HIDDEN} after",
        "PATH": "/bin",
        "INTERNAL": "mine",
    }
    assert scrub(environ, words=["INTERNAL"])["INTERNAL"] == HIDDEN
    assert scrub(environ, words=["INTERNAL"])["HF_TOKEN"] == "hf_abc"


def test_a_command_line_is_recorded_without_its_secrets() -> None:
    given = ["train.py", "--hf-token", "abc", "--api_key=def", "wandb.key=ghi", "--key", "--lr", "0.1", "s3://a:b@c"]
    assert scrub_arguments(given) == [
        *("train.py", "--hf-token", HIDDEN, f"--api_key={HIDDEN}", f"wandb.key={HIDDEN}"),
        *("--key", "--lr", "0.1", f"s3://a:{HIDDEN}@c"),
    ]


@given(st.text(), st.text(min_size=8), st.text())
def test_a_known_secret_goes_wherever_it_stands(before: str, secret: str, after: str) -> None:
    if secret not in HIDDEN and HIDDEN not in secret:
        shown = scrub_text(before + secret + after, [secret])
        assert secret not in shown.replace(HIDDEN, "\0")


def test_workers_get_their_secrets_but_not_ours() -> None:
    environ = {"HF_TOKEN": "abc", "PHALANX_TOKEN": "def", "PHALANX_TOKEN_FILE": "/x", "PHALANX_RANK": "0"}
    assert without_tokens(environ) == {"HF_TOKEN": "abc", "PHALANX_RANK": "0"}
