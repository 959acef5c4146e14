"""Names of the job's objects in a cluster, and of its hosts. Pure functions, torch-free."""

from __future__ import annotations

import hashlib
import re
from typing import Any

DOMAIN = "phalanx-train"
"""Prefix of labels and annotations."""

WAVE = f"{DOMAIN}/wave"
EVICTED = f"{DOMAIN}/evicted-nodes"
CORDONED_BY = f"{DOMAIN}/cordoned-by"
INDEX = "batch.kubernetes.io/job-completion-index"

_LONGEST = 50  # so that BASE-w999-99999, the host name of a pod, has no more than 63 characters


def base_name(job: str) -> str:
    """Name of a job's objects: ``phalanx-`` and the job's name, with a mark where that had to be changed."""
    plain = re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")
    name = f"phalanx-{plain}"
    if plain == job and len(name) <= _LONGEST:
        return name
    mark = hashlib.sha256(job.encode()).hexdigest()[:6]
    return f"{name[: _LONGEST - len(mark) - 1].rstrip('-')}-{mark}"


def labels(base: str, component: str) -> dict[str, str]:
    """Of all objects of a job, or of one component: driver or executor."""
    return {
        "app.kubernetes.io/name": "phalanx",
        "app.kubernetes.io/instance": base,
        "app.kubernetes.io/component": component,
    }


def selector(base: str, component: str) -> str:
    """For listing them."""
    return ",".join(f"{key}={value}" for key, value in labels(base, component).items())


def service_host(base: str, namespace: str) -> str:
    """Where executors reach the driver; the certificate has to be for this name."""
    return f"{base}.{namespace}.svc"


def wave_name(base: str, wave: int) -> str:
    """The Job with the hosts that were asked for together."""
    return f"{base}-w{wave}"


def host_name(base: str, wave: int, index: int) -> str:
    """A host: also the host name of its pod, since those of an Indexed Job are called JOB-INDEX."""
    return f"{wave_name(base, wave)}-{index}"


def wave_of(metadata: dict[str, Any]) -> int:
    """Which wave an object belongs to; 0: none."""
    text = (metadata.get("labels") or {}).get(WAVE, "")
    return int(text) if text.isdecimal() else 0


def host_of_pod(base: str, metadata: dict[str, Any]) -> str | None:
    """Which host a pod is; None: it is none of this job's."""
    index = (metadata.get("annotations") or {}).get(INDEX, "")
    wave = wave_of(metadata)
    return host_name(base, wave, int(index)) if wave and index.isdecimal() else None
