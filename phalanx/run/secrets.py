"""Tokens, certificates, and what must not be written down.

A token stands in a file that only its owner can read. It is compared in constant time, it appears in no message of this
room, and workers get neither it nor the name of its file.

Where its hosts share the run folder with it, a driver makes a certificate for itself. Since it is read from a folder
that only the job's owner can write to, it needs no authority: it is its own. Both sides show it, so that a stranger
without the key is not even asked for the token.
"""

from __future__ import annotations

import contextlib
import datetime
import hmac
import ipaddress
import os
import re
import secrets
import ssl
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from phalanx.core.addresses import is_loopback
from phalanx.core.errors import UserError
from phalanx.core.files import fsync_folder, write_bytes
from phalanx.ipc.handshake import openness

TOKEN_BYTES = 32
CERTIFICATE = "driver.pem"
_DAYS = 365

OWN_VARIABLES = ("PHALANX_TOKEN", "PHALANX_TOKEN_FILE")
"""Where a driver, an executor or a command finds the token; workers never get these variables."""

HIDDEN = "(hidden)"

SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "PWD", "KEY", "CREDENTIAL", "AUTH", "COOKIE")
"""A variable whose name has one of these words, or ends with one, is not recorded."""

_NOT_SECRET = ("PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "SSH_AUTH_SOCK")
_PASSWORD_IN_URL = re.compile(r"(?P<before>[A-Za-z][A-Za-z0-9+.-]*://[^\s/:@]*:)[^\s/@]+(?=@)")
_TOKEN_TEXT = re.compile(rf"[0-9a-f]{{{2 * TOKEN_BYTES}}}")


class Token:
    """A secret that does not show itself."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The secret itself, to be sent and to nothing else."""
        return self._text

    def header(self) -> str:
        """The value of an ``Authorization`` header."""
        return f"Bearer {self._text}"

    def admits(self, header: str | None) -> bool:
        """Whether an ``Authorization`` header holds this token; takes the same time wherever they differ."""
        scheme, _, given = (header or "").partition(" ")
        is_bearer = scheme.lower() == "bearer"
        is_equal = hmac.compare_digest(given.strip().encode(errors="replace"), self._text.encode())
        return is_bearer and is_equal

    def __repr__(self) -> str:
        return f"Token({HIDDEN})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Token) and hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash((Token, self._text))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a token is not pickled")


def ensure_token(path: Path, field: str = "run.token_file") -> Token:
    """The token at `path`; a new one if there is none. Any number of processes may call this at once.

    Args:
        field: the setting or option that names it, for errors.

    Raises:
        UserError: it cannot be made, or others can read it.
    """
    folder = path.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        problem = f"the token's folder cannot be made ({error.strerror})"
        raise _bad(folder, problem, "give another path", field) from None
    # No other user may put another file into it.
    if found.st_uid != os.geteuid():
        raise _bad(folder, "the token's folder belongs to somebody else", "give a path in a folder of yours", field)
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        problem = f"the token's folder has the mode {mode:o}, others can enter it"
        raise _bad(folder, problem, f"chmod 700 {folder}, or give a path in a folder of your own", field)
    if not path.exists():
        # Under another name first, then linked: a token is there whole or not at all, and the first of two stays.
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(TOKEN_BYTES) + "\n")
                file.flush()
                os.fsync(descriptor)
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
            fsync_folder(path.parent)
        except OSError as error:
            problem = f"no token can be made there ({error.strerror})"
            raise _bad(path, problem, "give a folder you can write to", field) from None
        finally:
            aside.unlink(missing_ok=True)
    return read_token(path, field)


def read_token(path: Path, field: str = "run.token_file") -> Token:
    """The token at `path`. Raises UserError: there is none, it belongs to somebody else, or others can read it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise _bad(path, "there is no such token file", "start the driver first, or check the path", field) from None
    except OSError as error:
        problem = f"the token cannot be read ({error.strerror})"
        raise _bad(path, problem, "give the path of a plain file", field) from None
    try:
        problem = openness(descriptor)
        if problem:
            cure = "give a token file of yours; if others may have read it, remove it: a new one is made"
            raise _bad(path, problem, cure, field)
        text = os.read(descriptor, 4 * TOKEN_BYTES).decode(errors="replace").strip()
    finally:
        os.close(descriptor)
    if not _TOKEN_TEXT.fullmatch(text):
        problem = f"holds no token ({2 * TOKEN_BYTES} hexadecimal digits)"
        raise _bad(path, problem, "remove it: a new one is made", field)
    return Token(text)


def _bad(path: Path, problem: str, cure: str, field: str) -> UserError:
    return UserError(problem, cure=cure, field=field, value=str(path))


# TLS


@dataclass(frozen=True)
class TlsFiles:
    """PEM files. With `authority`, both sides show certificates and each checks the other's.

    Attributes:
        certificate: of this side, with those between it and the authority.
        key: readable by its owner, at most by its group.
        authority: certificates that the other side's has to be signed by; None: the system's for a client, and a server
            asks for none.
    """

    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """TLS 1.2 or later for a server.

    Raises:
        UserError: a file is missing, is no such thing, or its key can be read by others.
    """
    if files.certificate is None or files.key is None:
        missing = "certificate" if files.certificate is None else "key"
        raise UserError(f"a server needs run.tls.{missing}", cure="give a PEM file", field="run.tls")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_own(context, files.certificate, files.key)
    if files.authority is not None:
        _load_authority(context, files.authority)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """TLS 1.2 or later for a client, which checks certificate and name of the server.

    Raises:
        UserError: a file is missing, is no such thing, or its key can be read by others.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if files.authority is None:
        context.load_default_certs()
    else:
        _load_authority(context, files.authority)
    if (files.certificate is None) != (files.key is None):
        raise UserError("certificate and key go together", cure="give both or none", field="run.tls")
    if files.certificate is not None and files.key is not None:
        _load_own(context, files.certificate, files.key)
    return context


def _load_own(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    _readable(certificate, "certificate")
    mode = stat.S_IMODE(_readable(key, "key").st_mode)
    if mode & 0o027:
        problem = f"has the mode {mode:o}: others can read it, or its group can change it"
        raise UserError(problem, cure=f"chmod 600 {key}", field="run.tls.key", value=str(key))
    try:
        context.load_cert_chain(certificate, key, password=_no_password)  # else Python would ask at the terminal
    except (ssl.SSLError, ValueError) as error:  # a ValueError: it has a passphrase, for which there is none
        cure = "give PEM files that belong together, the key without a passphrase"
        problem = f"{certificate} and {key} cannot be used ({_reason(error)})"
        raise UserError(problem, cure=cure, field="run.tls") from None


def _load_authority(context: ssl.SSLContext, authority: Path) -> None:
    _readable(authority, "authority")
    try:
        context.load_verify_locations(cafile=authority)
    except ssl.SSLError as error:
        problem = f"holds no certificate ({_reason(error)})"
        raise UserError(problem, cure="give a PEM file", field="run.tls.authority", value=str(authority)) from None


def _no_password() -> str:
    raise ValueError("the key has a passphrase")


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or str(error) or "no PEM"
    return str(reason).replace("_", " ").lower()


def _readable(path: Path, name: str) -> os.stat_result:
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno())
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise UserError(problem, cure="check the path", field=f"run.tls.{name}", value=str(path)) from None


def require_tls_unless_loopback(address: str, tls: object | None, field: str = "run.listen") -> None:
    """Refuse to listen, or to send a token, where others could listen in.

    Args:
        tls: a context or files; None or False: none.

    Raises:
        UserError: the address is not a loopback address and there is no TLS.
    """
    if not tls and not is_loopback(address):
        raise UserError(
            "other hosts can reach this address, so it needs TLS",
            cure="give a certificate and its key (run.tls.certificate, run.tls.key), or use 127.0.0.1",
            field=field,
            value=address,
        )


# What is written down


def is_secret_name(name: str, words: Sequence[str] = SECRET_WORDS) -> bool:
    """Whether a variable of this name likely holds a secret: ``HF_TOKEN``, ``AWS_SECRET_ACCESS_KEY``, ``apikey``."""
    upper = name.upper()
    if upper in _NOT_SECRET:
        return False
    parts = [part.removesuffix("S") for part in re.split(r"[^A-Z0-9]+", upper)]
    return any(part.endswith(word.upper().removesuffix("S")) for part in parts if part for word in words)


def scrub_text(text: str, known: Iterable[Token | str] = ()) -> str:
    """`text` without passwords in URLs and without the secrets that are known."""
    for secret in known:
        value = secret.reveal() if isinstance(secret, Token) else secret
        if len(value) >= 4:  # of anything shorter too much would go
            text = text.replace(value, HIDDEN)
    return _PASSWORD_IN_URL.sub(rf"\g<before>{HIDDEN}", text)


def scrub(
    environ: Mapping[str, str], *, words: Sequence[str] = SECRET_WORDS, known: Iterable[Token | str] = ()
) -> dict[str, str]:
    """An environment as it may be written into journals and reports: every name, but no secret value.

    Args:
        known: secrets whose values go wherever they stand.
    """
    secrets_known = tuple(known)
    return {
        name: HIDDEN if is_secret_name(name, words) and value else scrub_text(value, secrets_known)
        for name, value in environ.items()
    }


def scrub_arguments(
    arguments: Sequence[str], *, words: Sequence[str] = SECRET_WORDS, known: Iterable[Token | str] = ()
) -> list[str]:
    """A command line as it may be written down: ``--hf-token=…`` and what follows ``--hf-token`` are hidden."""
    secrets_known, shown, hide_next = tuple(known), [], False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        is_secret = is_secret_name(name.lstrip("-"), words) and (bool(equals) or argument.startswith("-"))
        if hide_next and not argument.startswith("-"):
            shown.append(HIDDEN)
        elif is_secret and equals and value:
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(scrub_text(argument, secrets_known))
        hide_next = is_secret and not equals
    return shown


def without_tokens(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment as workers may see it: without the job's token. Their other secrets are theirs."""
    return {name: value for name, value in environ.items() if name not in OWN_VARIABLES}


def ensure_certificate(folder: Path, hosts: Sequence[str]) -> TlsFiles:
    """Key and certificate in one file of `folder`; made anew where there is none that serves for these names.

    Args:
        hosts: IP addresses and names of the server.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / CERTIFICATE
    if not _serves(path, hosts):
        old = os.umask(0o077)
        try:
            write_bytes(path, make_certificate(hosts))
        finally:
            os.umask(old)
    return TlsFiles(path, path, path)


def make_certificate(hosts: Sequence[str]) -> bytes:
    """A key and a certificate of its own for these IP addresses and names, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "driver of a phalanx run")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks of hosts differ
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName([_name(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    secret = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain)
    return secret + built.public_bytes(encoding)


def _serves(path: Path, hosts: Sequence[str]) -> bool:
    try:
        text = path.read_bytes()
        found = x509.load_pem_x509_certificate(text[text.index(b"-----BEGIN CERTIFICATE") :])
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        ssl.create_default_context().load_cert_chain(path)
    except (OSError, ValueError, x509.ExtensionNotFound):
        return False
    left = found.not_valid_after_utc - datetime.datetime.now(datetime.UTC)  # a job may run for half of its time
    return all(_name(host) in names for host in hosts) and left > datetime.timedelta(days=_DAYS / 2)


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
