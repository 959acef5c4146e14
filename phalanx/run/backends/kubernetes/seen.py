"""What a pod or a Job of the API says. Pure functions, torch-free."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]


def is_over(pod: Object) -> bool:
    """Whether its containers have ended for good."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def node_of(pod: Object) -> str:
    """Where it was placed; empty: nowhere yet."""
    return str((pod.get("spec") or {}).get("nodeName") or "")


def is_leaving(pod: Object) -> bool:
    """Whether somebody has it ended."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def grace_s(pod: Object) -> float:
    """What it has to end, once it is leaving."""
    return float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)


def why_gone(pod: Object) -> str:
    """Why a pod has ended, as far as the cluster says."""
    status = pod.get("status") or {}
    parts = [_disruption(status), _reason(status), *_containers(status)]
    where = f" on {node_of(pod)}" if node_of(pod) else ""
    said = "; ".join(part for part in parts if part)
    return f"pod {pod['metadata']['name']}{where} has ended{': ' + said if said else ''}"


def why_leaving(pod: Object) -> str:
    """Why a pod is being ended that nobody has heard of again."""
    said = _disruption(pod.get("status") or {})
    where = f"node {node_of(pod)}" if node_of(pod) else "the cluster"
    why = f" ({said})" if said else ""
    return f"pod {pod['metadata']['name']} was to end{why}, and {where} has not confirmed it in time"


def why_waiting(pod: Object) -> str:
    """What keeps a pod from starting, if it is something that a person may have to change; else empty."""
    status = pod.get("status") or {}
    for each in status.get("conditions") or []:
        if each.get("type") == "PodScheduled" and each.get("reason") == "Unschedulable":
            return f"it cannot be placed: {each.get('message', '')}"
    for each in status.get("containerStatuses") or []:
        waiting = (each.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "", "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {waiting.get('message', '')}"
    return ""


def indexes(text: str | None) -> set[int]:
    """Those that ``1,3-5`` stands for, as a Job's status lists its finished ones."""
    found: set[int] = set()
    for part in (text or "").split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


def finished_indexes(job: Object) -> set[int]:
    """Those of a Job's that have ended, either way."""
    status = job.get("status") or {}
    return indexes(status.get("completedIndexes")) | indexes(status.get("failedIndexes"))


def has_ended(job: Object) -> bool:
    """Whether a Job is over, or somebody has ended it."""
    conditions = (job.get("status") or {}).get("conditions") or []
    ends = ("Complete", "Failed", "FailureTarget", "SuccessCriteriaMet", "Suspended")
    is_over = any(each.get("type") in ends and each.get("status") == "True" for each in conditions)
    return is_over or bool(job["metadata"].get("deletionTimestamp"))


def _disruption(status: Object) -> str:
    """What the cluster itself does to a pod: a drained node, a lost one, preemption."""
    for each in status.get("conditions") or []:
        if each.get("type") == "DisruptionTarget" and each.get("status") == "True":
            return f"{each.get('reason', '')}: {each.get('message', '')}".strip(": ")
    return ""


def _reason(status: Object) -> str:
    return f"{status.get('reason') or ''}: {status.get('message') or ''}".strip(": ")


def _containers(status: Object) -> list[str]:
    found = []
    for each in status.get("containerStatuses") or []:
        ended = (each.get("state") or {}).get("terminated")
        if ended:
            reason = ended.get("reason") or ""
            last = (ended.get("message") or "").strip().splitlines()[-1:]
            number = f"signal {ended['signal']}" if ended.get("signal") else f"exit status {ended.get('exitCode')}"
            found.append(", ".join([f"{reason} ({number})" if reason else number, *last]))
    return found
