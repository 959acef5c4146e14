"""Which node gets the next host, and what is remembered of them in the run folder. Torch-free.

A host is a name that is given once: a node's name, and ``n3.2`` where node n3 is used for the second time. What is
started is written down before, so that the next driver, also that of a requeued job, knows it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.files import write_json
from phalanx.core.watched import Identity

FIRST_REST_S = 5.0
LONGEST_REST_S = 300.0


@dataclass
class Started:
    """A host that has been started.

    Attributes:
        node: it runs on.
        srun: process that keeps its step, on the machine `machine`; None: it was not started yet.
    """

    node: str
    srun: Identity | None = None
    machine: str = ""


@dataclass
class Notes:
    """A file of the run folder.

    Attributes:
        hosts: that may be there.
        uses: how often each node has been used.
        evicted: nodes that are not used again for this job, and why.
    """

    path: Path
    hosts: dict[str, Started] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=dict)
    evicted: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Notes:
        """What an earlier driver has left; nothing, at the first start.

        Raises:
            OSError, ValueError: the file cannot be read.
        """
        if not path.exists():
            return cls(path)
        found: dict[str, Any] = json.loads(path.read_text())
        hosts = {name: _started(fields) for name, fields in found["hosts"].items()}
        return cls(path, hosts, dict(found["uses"]), dict(found["evicted"]))

    def write(self) -> None:
        """Keep it; raises OSError."""
        hosts = {name: asdict(started) for name, started in self.hosts.items()}
        write_json(self.path, {"hosts": hosts, "uses": self.uses, "evicted": self.evicted})

    def begin(self, node: str) -> str:
        """The name of a new host on this node."""
        count = self.uses[node] = self.uses.get(node, 0) + 1
        name = node if count == 1 else f"{node}.{count}"
        self.hosts[name] = Started(node)
        return name

    @property
    def busy(self) -> set[str]:
        """Nodes on which there is a host, or its end is not certain yet."""
        return {started.node for started in self.hosts.values()}


@dataclass
class Rests:
    """Nodes that have failed or been given back rest, the longer the more often; others are taken first.

    Attributes:
        until_s: monotonic.
    """

    until_s: dict[str, float] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)

    def rest(self, node: str, now_s: float) -> None:
        """Let it rest."""
        count = self.times[node] = self.times.get(node, 0) + 1
        self.until_s[node] = now_s + min(FIRST_REST_S * 2.0 ** (count - 1), LONGEST_REST_S)

    def wake(self, node: str) -> None:
        """It has brought a host that works: what was before does not count."""
        self.times.pop(node, None)

    def ready(self, nodes: list[str], now_s: float) -> list[str]:
        """Of `nodes`, those that do not rest; those that have rested least often come first."""
        awake = [node for node in nodes if self.until_s.get(node, 0.0) <= now_s]
        return sorted(awake, key=lambda node: self.times.get(node, 0))  # stable: else in Slurm's order


def _started(fields: dict[str, Any]) -> Started:
    srun = fields["srun"]
    return Started(fields["node"], None if srun is None else Identity(**srun), fields["machine"])
