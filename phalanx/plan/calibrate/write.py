"""What was measured, as files beside each other: the cluster's, its links', and one of the device for each number of
ranks that share the host."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import UserError
from phalanx.core.files import write_bytes
from phalanx.plan.calibrate.cluster_file import cluster_text, links_text
from phalanx.plan.calibrate.device_file import device_text
from phalanx.plan.calibrate.found import Found
from phalanx.plan.calibrate.ratios import host_compiled_launch_s, host_launch_s, ratios
from phalanx.plan.hardware.device import Device
from phalanx.plan.hardware.load import load_cluster, load_device


@dataclass(frozen=True)
class Machine:
    """What was measured, in words for the sources of numbers.

    Attributes:
        host: its name.
        kind: of the device, as its file says it.
        date: of measuring, ISO.
    """

    host: str
    kind: str
    date: str

    def where(self, found: Found) -> str:
        """The source of numbers."""
        texts = found.answer.texts
        ranks = "1 process" if found.ranks == 1 else f"{found.ranks} processes at once"
        threads = "1 thread" if found.threads == 1 else f"{found.threads} threads"
        name = f"{texts['device']}, torch {texts['torch']}"
        return f"phalanx plan calibrate on {self.host}, {name}, {ranks} of {threads}"


def write_cluster(path: Path, found: Sequence[Found], machine: Machine) -> list[Path]:
    """Write the file of the cluster to `path` and the others beside it; each takes the place of an older one at once.

    Args:
        found: for different numbers of ranks, ascending.

    Returns:
        All files; the cluster's comes last, so that it never names one that is not there.

    Raises:
        UserError: they cannot be written there.
    """
    stem = path.name.removesuffix(".toml")
    devices = {each.ranks: f"{stem}.{each.ranks}.device.toml" for each in found}
    links, together = f"{stem}.links.toml", [each for each in found if each.ranks > 1]
    texts = {devices[each.ranks]: described(each, machine) for each in found}
    where = machine.where(found[-1])
    texts[links] = links_text(together, where, machine.date)
    texts[path.name] = cluster_text(devices, links, found[-1], where, machine.date)
    try:
        for name, text in texts.items():
            write_bytes(path.with_name(name), text.encode())
    except OSError as error:
        cure = "give --output another name, in a folder that is there"
        raise UserError(f"cannot be written: {error.strerror}", cure=cure, field=str(path)) from error
    for each in found:
        load_cluster(path, each.ranks)  # what was written can be read
    return [path.with_name(name) for name in texts]


def described(found: Found, machine: Machine) -> str:
    """The text of a device's file."""
    where = machine.where(found)
    plain = _loaded(device_text(found, machine.kind, where, machine.date))
    known = ratios(found, plain)
    kernels = _loaded(device_text(found, machine.kind, where, machine.date, ratios=known))
    host = host_launch_s(found, kernels), host_compiled_launch_s(found, kernels)
    return device_text(found, machine.kind, where, machine.date, *host, known)


def _loaded(text: str) -> Device:
    with tempfile.TemporaryDirectory(prefix="phalanx-device-") as folder:
        path = Path(folder) / "plain.toml"
        path.write_text(text, encoding="utf-8")
        return load_device(path)
