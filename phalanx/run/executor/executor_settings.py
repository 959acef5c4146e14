"""What an executor is started with: the driver, which writes it down, needs nothing else of an executor."""

from __future__ import annotations

import msgspec

from phalanx.run.logs.log_files import KEPT_BYTES, SEGMENT_BYTES


class ExecutorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an executor is started with; nothing in it is secret.

    Attributes:
        driver: file in which the driver says where it listens.
        token: file with the job's token.
        address: where workers of other hosts reach this one; ``auto``: from where this one reaches the driver.
        rack: what it may fail together with; empty: from PHALANX_RACK, else SLURM_TOPOLOGY_ADDR.
        segment_bytes, kept_bytes: of a rank's log files: of one, and of all.
        checkpoints: where checkpoints go, an absolute path or a URL; empty: not known.
        hosts: that take part; 0: not known. The ranks of a single one meet where no other host comes.
        is_only_host: the job has no other machine.
        driver_lost_s: how long it waits for a driver when nothing runs here.
        uses_tls: to the driver.
        authority: file with certificates that the driver's has to be signed by; empty: those of the system.
        certificate, key: files with what this side shows; empty: nothing.
    """

    job: str
    host: str
    folder: str
    driver: str
    token: str
    logs: str
    address: str = "127.0.0.1"
    rack: str = ""
    segment_bytes: int = SEGMENT_BYTES
    kept_bytes: int = KEPT_BYTES
    rules: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    checkpoints: str = ""
    hosts: int = 0
    is_only_host: bool = False
    driver_lost_s: float = 3600.0
    uses_tls: bool = False
    authority: str = ""
    certificate: str = ""
    key: str = ""
