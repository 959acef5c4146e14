"""A certificate that a driver makes for itself, where its hosts share the run folder with it. Torch-free.

Whoever reads it out of a folder that only the job's owner can write to needs no authority: it is its own. Both sides
show it, so that nobody without the key comes as far as being asked for the token.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from phalanx.core.files import write_bytes
from phalanx.run.secrets import TlsFiles

NAME = "driver.pem"
_DAYS = 365


def ensure_certificate(folder: Path, hosts: Sequence[str]) -> TlsFiles:
    """Key and certificate in one file of `folder`; made anew where there is none that serves for these names.

    Args:
        folder: that only its owner can enter, as `secrets.ensure_token` makes it.
        hosts: IP addresses and names of the server.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / NAME
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
    """Whether the certificate there is for all of these, and for half of its time yet."""
    try:
        text = path.read_bytes()
        found = x509.load_pem_x509_certificate(text[text.index(b"-----BEGIN CERTIFICATE") :])
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        ssl.create_default_context().load_cert_chain(path)
    except (OSError, ValueError, x509.ExtensionNotFound):
        return False
    left = found.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    return all(_name(host) in names for host in hosts) and left > datetime.timedelta(days=_DAYS / 2)


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
