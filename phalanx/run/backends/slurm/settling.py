"""Where a driver in an allocation listens, when the job file does not say it. Torch-free."""

from __future__ import annotations

import os
import socket
import subprocess
from typing import Any

from phalanx.core.errors import UserError
from phalanx.launch.slurm import expand_hosts
from phalanx.run.backends.slurm.commands import COMMAND_S, in_allocation
from phalanx.run.certificates import ensure_certificate
from phalanx.run.config import RunConfig, TlsConfig
from phalanx.run.secrets import ensure_token, is_loopback
from phalanx.run.wire.addresses import address_towards


def settle(config: RunConfig) -> RunConfig:
    """Listen where the allocation's nodes reach this one, with a certificate made for it; what is given stays.

    Raises:
        UserError: Slurm does not say where its nodes are, or the certificate cannot be made.
    """
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    if not in_allocation(os.environ) or not nodes or "listen" in config.model_fields_set:
        return config
    here = address_towards(_address_of(next(expand_hosts(nodes))))
    if is_loopback(here):  # a cluster on one machine
        return config
    changes: dict[str, Any] = {"listen": _written(here)}
    if "http" not in config.model_fields_set:
        changes["http"] = _written(here)
    if config.tls.files is None:
        changes["tls"] = _own_tls(config, here)
    return config.model_copy(update=changes)


def _address_of(node: str) -> str:
    """As Slurm reaches it."""
    command = ["sinfo", "-h", "-N", "-n", node, "-o", "%o"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=True)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        cure = "see whether sinfo works here, or give run.listen and run.tls"
        raise UserError(f"Slurm does not say where it is ({error})", cure=cure, field="node", value=node) from None


def _own_tls(config: RunConfig, here: str) -> TlsConfig:
    token = config.token_path.absolute()
    ensure_token(token)  # makes the folder, or refuses one that others can enter
    try:
        files = ensure_certificate(token.parent, [here, "127.0.0.1", socket.gethostname()])
    except OSError as error:
        cure = "give run.token_file a place in a folder of yours, or run.tls certificates"
        raise UserError(f"no certificate can be made ({error.strerror})", cure=cure, value=str(token.parent)) from None
    pem = str(files.certificate)
    return TlsConfig(certificate=pem, key=pem, authority=pem)


def _written(host: str) -> str:
    return f"[{host}]:0" if ":" in host else f"{host}:0"
