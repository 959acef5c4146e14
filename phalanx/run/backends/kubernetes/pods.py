"""The executors' manifest: an Indexed Job for hosts that are asked for together. Pure functions, torch-free.

A host that fails never comes again: its index has no restarts (``backoffLimitPerIndex: 0``), and the driver asks for a
new one, in a new Job, which keeps off the nodes that were given up meanwhile. Within one Job that could not be: a
template cannot be changed, a pod would come back under the same name, and only after a back-off of 10 s and more.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from phalanx.run.backends.kubernetes.names import WAVE, labels, wave_name
from phalanx.run.backends.kubernetes.options import KubernetesOptions, Quantities

SECRET_FOLDER = "/etc/phalanx/secret"
PRIVATE_FOLDER = "/run/phalanx"
RUN_FOLDER = "/var/lib/phalanx"

ENTRY = "phalanx.run.backends.kubernetes.entry"

Manifest = dict[str, Any]


def executors(
    base: str,
    wave: int,
    count: int,
    options: KubernetesOptions,
    settings: Mapping[str, Any],
    *,
    avoid: Collection[str] = (),
    owner: Manifest | None = None,
    deadline_s: int = 0,
) -> Manifest:
    """The Job for `count` hosts.

    Args:
        settings: of `entry.run_executor`, the same for all.
        avoid: names of nodes that they must not be placed on.
        owner: reference to the driver's Job, with which they end; None: they have no owner.
        deadline_s: from now the cluster ends them after so long; 0: never.
    """
    mine = {**options.labels, **labels(base, "executor"), WAVE: str(wave)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": wave_name(base, wave),
            "labels": mine,
            **({"annotations": options.annotations} if options.annotations else {}),
            **({"ownerReferences": [owner]} if owner else {}),
        },
        "spec": {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimitPerIndex": 0,
            "podReplacementPolicy": "Failed",
            **({"activeDeadlineSeconds": deadline_s} if deadline_s else {}),
            "template": {
                "metadata": {"labels": mine, **({"annotations": options.annotations} if options.annotations else {})},
                "spec": _executor_pod(base, options, settings, avoid),
            },
        },
    }


def _executor_pod(
    base: str, options: KubernetesOptions, settings: Mapping[str, Any], avoid: Collection[str]
) -> Manifest:
    return {
        **as_user(options),
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": options.grace_s,
        "containers": [_executor_container(base, options, settings)],
        "volumes": _executor_volumes(base, options),
        "affinity": _affinity(base, options, avoid),
        "tolerations": [*options.tolerations, *(_outlasts(options.node_lost_s))],
        **({"nodeSelector": options.node_selector} if options.node_selector else {}),
        **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if options.host_network else {}),
        **({"priorityClassName": options.priority_class} if options.priority_class else {}),
        **({"runtimeClassName": options.runtime_class} if options.runtime_class else {}),
        **({"schedulerName": options.scheduler} if options.scheduler else {}),
    }


def _executor_container(base: str, options: KubernetesOptions, settings: Mapping[str, Any]) -> Manifest:
    extra = [{"name": f"volume-{place}", "mountPath": path} for place, path in enumerate(options.volumes)]
    return {
        **container("executor", options, ["executor", json.dumps(settings, sort_keys=True)]),
        "resources": resources(options.resources),
        "env": [
            {"name": "PHALANX_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "PHALANX_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ],
        "volumeMounts": [*mounts(base), {"name": "shared-memory", "mountPath": "/dev/shm"}, *extra],
        **({"securityContext": {"capabilities": {"add": list(options.capabilities)}}} if options.capabilities else {}),
    }


def _executor_volumes(base: str, options: KubernetesOptions) -> list[Manifest]:
    limit = {"sizeLimit": options.shared_memory} if options.shared_memory else {}
    return [
        # Executors get the authority alone: the driver's key is the driver's.
        secrets(base, options, {"ca.crt": "ca.crt"}),
        {"name": "private", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        run_folder(options.claim if options.claim_is_shared else ""),
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", **limit}},
        *(
            {"name": f"volume-{place}", "persistentVolumeClaim": {"claimName": claim}}
            for place, claim in enumerate(options.volumes.values())
        ),
    ]


def _affinity(base: str, options: KubernetesOptions, avoid: Collection[str]) -> Manifest:
    found: Manifest = {}
    if avoid:
        # The API takes one name in each of these; those of a term have to hold together.
        fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in sorted(avoid)]
        terms = {"nodeSelectorTerms": [{"matchFields": fields}]}
        found["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    if options.one_per_node:
        apart = {
            "labelSelector": {"matchLabels": labels(base, "executor")},
            "topologyKey": "kubernetes.io/hostname",
        }
        found["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
    return found


def _outlasts(node_lost_s: int) -> list[Manifest]:
    """How long a pod stays bound to a node that the cluster cannot reach, or that is not ready."""
    return [
        {
            "key": f"node.kubernetes.io/{taint}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": node_lost_s,
        }
        for taint in ("unreachable", "not-ready")
    ]


# What the driver's pod has too


def container(name: str, options: KubernetesOptions, arguments: list[str]) -> Manifest:
    """A container that runs our entry."""
    from_secrets = [{"secretRef": {"name": name}} for name in options.environment_secrets]
    return {
        "name": name,
        "image": options.image,
        "command": [options.python, "-m", ENTRY, *arguments],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **({"imagePullPolicy": options.image_pull_policy} if options.image_pull_policy else {}),
        **({"envFrom": from_secrets} if from_secrets else {}),
    }


def resources(amounts: Quantities) -> Manifest:
    """The same as request and limit, so that nothing is taken away later."""
    texts = {name: str(amount) for name, amount in amounts.items()}
    return {"requests": texts, "limits": texts} if texts else {}


def mounts(base: str) -> list[Manifest]:
    """Of every container; several jobs can keep their run folders on one claim."""
    return [
        {"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True},
        {"name": "private", "mountPath": PRIVATE_FOLDER},
        {"name": "run", "mountPath": RUN_FOLDER, "subPath": base},
    ]


def secrets(base: str, options: KubernetesOptions, tls: Mapping[str, str]) -> Manifest:
    """A volume with the job's token and files for TLS; no one but the pod's user, or its group, can read them."""
    mode = 0o440 if options.user else 0o400
    return {
        "name": "secret",
        "projected": {
            "defaultMode": mode,
            "sources": [
                {"secret": {"name": base, "items": [{"key": "token", "path": "token"}]}},
                {
                    "secret": {
                        "name": options.tls_secret,
                        "items": [{"key": key, "path": path} for key, path in tls.items()],
                    }
                },
            ],
        },
    }


def run_folder(claim: str) -> Manifest:
    """A volume for the run folder."""
    return {"name": "run", **({"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}})}


def as_user(options: KubernetesOptions) -> Manifest:
    """Who the pod's processes are, and what images are fetched with."""
    found: Manifest = {}
    if options.user:
        found["securityContext"] = {"runAsUser": options.user, "runAsGroup": options.user, "fsGroup": options.user}
    if options.image_pull_secrets:
        found["imagePullSecrets"] = [{"name": name} for name in options.image_pull_secrets]
    return found
