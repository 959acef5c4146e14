"""The command of a case: the flags of ``phalanx run``, and the arguments of the script."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phalanx.faults.case_manifest import Manifest
from phalanx.faults.fault_schedule import KINDS
from phalanx.run.backends.local import Network
from phalanx.run.config import toml_value
from phalanx.run.secrets import ensure_certificate

DISK_BYTES = 320 << 20  # more than a test of a disk writes
PACE_S = 0.4
"""Rest in each step where something lasts for seconds, or nothing happens for minutes."""
QUICK_S = 0.05
"""Rest in all other steps: before the first fault, after a restart, and where steps are all that is waited for."""
QUIET = "quiet"
"""Name of the case in which nothing happens."""
SUBNET = "100.64.7.0/24"
_UNHURRIED = ("disk-full", "driver-killed", "driver-stopped", "link-cut", "link-silent", "link-delayed", "clock-jump")


@dataclass(frozen=True)
class CasePaths:
    """Files and folders of one run of a case; none of their names gives away what it is for."""

    folder: Path

    @property
    def run(self) -> Path:
        """The folder of the job."""
        return self.folder / "run"

    @property
    def script(self) -> Path:
        """Which is trained."""
        return self.folder / "train.py"

    @property
    def losses(self) -> Path:
        """What rank 0 writes of each step."""
        return self.folder / "losses.txt"

    @property
    def states(self) -> Path:
        """Checkpoints."""
        return self.folder / "states"

    @property
    def agenda(self) -> Path:
        """What workers do to themselves."""
        return self.folder / "notes.json"

    @property
    def doors(self) -> Path:
        """Where each host reaches the driver."""
        return self.folder / "doors"

    def disk(self, host: str) -> Path:
        """The small disk of a host."""
        return self.folder / "disks" / host

    def clock(self, host: str) -> Path:
        """The offset of a host's wall clock."""
        return self.folder / "clocks" / host


def kinds_of(case: Manifest) -> set[str]:
    """The kinds of a case's incidents."""
    return {incident.kind for incident in case.incidents}


def hosts_of(case: Manifest) -> list[str]:
    """Names of all machines, as the local back end gives them."""
    return [f"host-{number}" for number in range(1, case.cluster.hosts + case.cluster.spares + 1)]


def uses_links(case: Manifest) -> bool:
    """Whether hosts reach the driver through links that can be cut."""
    return any(incident.place.what == "links" for incident in case.incidents)


def uses_namespaces(case: Manifest) -> bool:
    """Whether each host has a network namespace of its own."""
    return "link-down" in kinds_of(case)


def _script_arguments(case: Manifest, places: CasePaths) -> list[str]:
    from_outside = any(
        incident.when.phase == "checkpoint" and not KINDS[incident.kind].is_inside for incident in case.incidents
    )
    arguments = [str(case.steps), "--losses", str(places.losses), "--states", str(places.states)]
    arguments += [*_pace(case), "--saving", "0.5" if from_outside else "0"]
    arguments += ["--work", "20"] if "slow" in kinds_of(case) else []
    return arguments


def _pace(case: Manifest) -> list[str]:
    """How long steps rest: no longer than what the case waits for needs."""
    if case.id == QUIET:
        return ["--pace", "0"]
    if case.id.startswith("healthy"):
        return ["--pace", str(PACE_S)]
    kinds = kinds_of(case)
    if "slow" in kinds:  # how long a step takes has to be known before one is slow
        return ["--pace", "0.1", "--quick", str(QUICK_S)]
    lasting = any(incident.lasts.unit == "seconds" for incident in case.incidents) or kinds & {*_UNHURRIED}
    if not lasting:
        return ["--pace", str(QUICK_S)]
    first = min(incident.when.step for incident in case.incidents)
    return ["--pace", str(PACE_S), "--quick", str(QUICK_S), "--from", str(first)]


def command(case: Manifest, places: CasePaths) -> list[str]:
    """Of ``phalanx run``, after the program's name."""
    cluster = case.cluster
    words = [
        "run",
        "--no-supervisor",
        "--start",
        "warm",
        "--hosts",
        str(cluster.hosts),
        "--spares",
        str(cluster.spares),
    ]
    words += ["--workers-per-host", str(cluster.workers_per_host), "--folder", str(places.run)]
    for name, value in _settings(case, places).items():
        words += ["--set", f"{name}={toml_value(value)}"]
    return [*words, "--", str(places.script), *_script_arguments(case, places)]


def _settings(case: Manifest, places: CasePaths) -> dict[str, object]:
    settings: dict[str, object] = {
        "run.environment": {"PHALANX_AGENDA": str(places.agenda), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        "run.policy.replace_slow": True,
        "run.backend_options": _backend(case, places),
    }
    if uses_namespaces(case):
        files = ensure_certificate(places.folder, [Network(places.run, SUBNET).address])
        settings |= {"run.listen": f"{SUBNET.rpartition('.')[0]}.1:0"}
        settings |= {f"run.tls.{name}": str(path) for name, path in vars(files).items()}
    if case.cluster.may_shrink:
        settings |= {"run.policy.when_missing": "shrink", "run.policy.replace_wait_s": 20.0}
    elif any(response.action == "wait" for response in case.expected.responses):
        settings |= {"run.policy.give_up_s": 10.0}
    if "slow" in kinds_of(case):
        # Eight ranks share few cores, so that own times vary much: what is 1.1 times as slow cannot be told from that.
        settings |= {"run.heartbeat_s": 0.5, "run.slow.ratio": 2.0}
    if "spare-bad" in kinds_of(case):
        settings |= {"run.policy.start_s": 90.0}
    return settings


def _backend(case: Manifest, places: CasePaths) -> dict[str, object]:
    options: dict[str, object] = {"total_hosts": len(hosts_of(case))}
    environment: dict[str, dict[str, str]] = {host: {} for host in hosts_of(case)}
    for host, variables in environment.items():
        if "disk-full" in kinds_of(case):
            variables["TMPDIR"] = str(places.disk(host))
        if "clock-jump" in kinds_of(case):
            variables["PHALANX_CLOCK"] = str(places.clock(host))
    if any(environment.values()):
        options["environment"] = environment
    if uses_links(case):
        options["driver_files"] = str(places.doors)
    if uses_namespaces(case):
        options |= {"network": "namespaces", "subnet": SUBNET}
    return options
