"""Kubernetes manifests of a job: names of its objects, the executors' Indexed Job, and what the driver needs.

A host that fails never comes again: its index has no restarts (``backoffLimitPerIndex: 0``), and the driver asks for a
new one, in a new Job, which keeps off the nodes that were given up meanwhile. Within one Job that could not be: a
template cannot be changed, a pod would come back under the same name, and only after a back-off of 10 s and more.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from phalanx.run.backends.kubernetes.kubernetes_options import KubernetesOptions, Quantities, workers_per_host
from phalanx.run.config import RunConfig, toml_value
from phalanx.telemetry.alerts.alert_receivers import require_no_address

DOMAIN = "phalanx-train"  # prefix of labels and annotations
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
    annotations = {"annotations": options.annotations} if options.annotations else {}
    owners = {"ownerReferences": [owner]} if owner else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": wave_name(base, wave), "labels": mine, **annotations, **owners},
        "spec": {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimitPerIndex": 0,
            "podReplacementPolicy": "Failed",
            **({"activeDeadlineSeconds": deadline_s} if deadline_s else {}),
            "template": {
                "metadata": {"labels": mine, **annotations},
                "spec": _executor_pod(base, options, settings, avoid),
            },
        },
    }


def _executor_pod(
    base: str, options: KubernetesOptions, settings: Mapping[str, Any], avoid: Collection[str]
) -> Manifest:
    extra = [{"name": f"volume-{place}", "mountPath": path} for place, path in enumerate(options.volumes)]
    executor = {
        **_container("executor", options, ["executor", json.dumps(settings, sort_keys=True)]),
        "resources": _resources(options.resources),
        "env": [
            {"name": "PHALANX_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "PHALANX_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ],
        "volumeMounts": [*_mounts(base), {"name": "shared-memory", "mountPath": "/dev/shm"}, *extra],
        **({"securityContext": {"capabilities": {"add": list(options.capabilities)}}} if options.capabilities else {}),
    }
    limit = {"sizeLimit": options.shared_memory} if options.shared_memory else {}
    volumes = [
        # Executors get the authority alone: the driver's key is the driver's.
        *_volumes(base, options, {"ca.crt": "ca.crt"}, options.claim if options.claim_is_shared else ""),
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", **limit}},
    ]
    for place, claim in enumerate(options.volumes.values()):
        volumes.append({"name": f"volume-{place}", "persistentVolumeClaim": {"claimName": claim}})
    affinity: Manifest = {}
    if avoid:
        # The API takes one name in each of these; those of a term have to hold together.
        fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in sorted(avoid)]
        terms = {"nodeSelectorTerms": [{"matchFields": fields}]}
        affinity["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    if options.one_per_node:
        others = {"matchLabels": labels(base, "executor")}
        apart = {"labelSelector": others, "topologyKey": "kubernetes.io/hostname"}
        affinity["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
    # How long a pod stays bound to a node that the cluster cannot reach, or that is not ready.
    bound = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": options.node_lost_s}
    lost = [{"key": f"node.kubernetes.io/{taint}", **bound} for taint in ("unreachable", "not-ready")]
    return {
        **_as_user(options),
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": options.grace_s,
        "containers": [executor],
        "volumes": volumes,
        "affinity": affinity,
        "tolerations": [*options.tolerations, *lost],
        **({"nodeSelector": options.node_selector} if options.node_selector else {}),
        **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if options.host_network else {}),
        **({"priorityClassName": options.priority_class} if options.priority_class else {}),
        **({"runtimeClassName": options.runtime_class} if options.runtime_class else {}),
        **({"schedulerName": options.scheduler} if options.scheduler else {}),
    }


# What the driver's pod has too


def _container(name: str, options: KubernetesOptions, arguments: list[str]) -> Manifest:
    from_secrets = [{"secretRef": {"name": name}} for name in options.environment_secrets]
    return {
        "name": name,
        "image": options.image,
        "command": [options.python, "-m", ENTRY, *arguments],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **({"imagePullPolicy": options.image_pull_policy} if options.image_pull_policy else {}),
        **({"envFrom": from_secrets} if from_secrets else {}),
    }


def _resources(amounts: Quantities) -> Manifest:
    """The same as request and limit, so that nothing is taken away later."""
    texts = {name: str(amount) for name, amount in amounts.items()}
    return {"requests": texts, "limits": texts} if texts else {}


def _mounts(base: str) -> list[Manifest]:
    """Of every container; several jobs can keep their run folders on one claim."""
    return [
        {"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True},
        {"name": "private", "mountPath": PRIVATE_FOLDER},
        {"name": "run", "mountPath": RUN_FOLDER, "subPath": base},
    ]


def _volumes(base: str, options: KubernetesOptions, tls: Mapping[str, str], claim: str) -> list[Manifest]:
    """Of every pod: the job's token with files for TLS, which only its user or group can read, and two folders."""
    token = {"name": base, "items": [{"key": "token", "path": "token"}]}
    certificates = {"name": options.tls_secret, "items": [{"key": key, "path": path} for key, path in tls.items()]}
    mode, sources = 0o440 if options.user else 0o400, [{"secret": token}, {"secret": certificates}]
    return [
        {"name": "secret", "projected": {"defaultMode": mode, "sources": sources}},
        {"name": "private", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": "run", **({"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}})},
    ]


def _as_user(options: KubernetesOptions) -> Manifest:
    """Who the pod's processes are, and what images are fetched with."""
    found: Manifest = {}
    if options.user:
        found["securityContext"] = {"runAsUser": options.user, "runAsGroup": options.user, "fsGroup": options.user}
    if options.image_pull_secrets:
        found["imagePullSecrets"] = [{"name": name} for name in options.image_pull_secrets]
    return found


JOB_FOLDER = "/etc/phalanx/job"
OWN_FOLDER = f"{PRIVATE_FOLDER}/own"

DRIVER_VARIABLE = "PHALANX_KUBERNETES_DRIVER"
"""Set in the driver's pod, to the name of its Job: there the command runs the job, elsewhere it submits it."""

_LAST_STATUSES = [1, 2, 3, 4, 5, 6]  # the job has ended: see docs/run_decisions.md
_MANY = 2**31 - 1


def for_driver(config: RunConfig, options: KubernetesOptions, namespace: str, token: str) -> list[Manifest]:
    """Every object that a job begins with, in the order in which they have to be made."""
    base = base_name(config.job_name)
    rights = [] if options.service_account else _rights(base, namespace, options.cordon)
    own = [
        {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "stringData": {"token": token}},
        {"apiVersion": "v1", "kind": "ConfigMap", "data": {"job.toml": _job_file(config, options, namespace)}},
        _service(base, options),
        _driver_job(base, config, options),
    ]
    return [*rights, *(_object(each, base, namespace) for each in own)]


def _job_file(config: RunConfig, options: KubernetesOptions, namespace: str) -> str:
    """The job as the driver in its pod reads it: the same settings, with paths of the pod."""
    require_no_address(config.alerts)
    given = config.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    own = options.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    port = config.http.rpartition(":")[2]
    changed: dict[str, Any] = {
        **given,
        "name": config.job_name,
        "folder": RUN_FOLDER,
        "workers_per_host": workers_per_host(config, options),
        "backend_options": {**own, "namespace": namespace},
        "listen": f"0.0.0.0:{options.port}",
        # Of the pod itself, which is where `kubectl port-forward` comes out.
        "http": f"127.0.0.1:{port if port != '0' else options.port + 1}",
        "token_file": f"{OWN_FOLDER}/token",
        "tls": {"certificate": f"{OWN_FOLDER}/tls.crt", "key": f"{OWN_FOLDER}/tls.key"},
    }
    lines = (f"{key} = {toml_value(value)}" for key, value in changed.items())
    return "[run]\n" + "\n".join(lines) + "\n"


def _object(manifest: Manifest, base: str, namespace: str, name: str = "") -> Manifest:
    place = {"namespace": namespace} if namespace else {}
    metadata = {"name": name or base, **place, "labels": labels(base, "driver")}
    head = {key: manifest[key] for key in ("apiVersion", "kind")}
    return {**head, "metadata": metadata, **{key: value for key, value in manifest.items() if key not in head}}


def _rights(base: str, namespace: str, cordon: bool) -> list[Manifest]:
    """An account for the driver, and what it may do: no more than the back end asks for."""
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "delete"]},
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get", "list", "create", "patch", "delete"]},
    ]
    rbac = {"apiVersion": "rbac.authorization.k8s.io/v1"}

    def binding(kind: str, name: str) -> Manifest:
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name}
        subjects = [{"kind": "ServiceAccount", "name": base, "namespace": namespace}]
        return {**rbac, "kind": f"{kind}Binding", "roleRef": role, "subjects": subjects}

    found = [
        _object({"apiVersion": "v1", "kind": "ServiceAccount"}, base, namespace),
        _object({**rbac, "kind": "Role", "rules": rules}, base, namespace),
        _object(binding("Role", base), base, namespace),
    ]
    if cordon:
        nodes = [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]}]
        name = f"{namespace}-{base}"  # these belong to no namespace
        found.append(_object({**rbac, "kind": "ClusterRole", "rules": nodes}, base, "", name))
        found.append(_object(binding("ClusterRole", name), base, "", name))
    return found


def _service(base: str, options: KubernetesOptions) -> Manifest:
    """A name for the driver, wherever its pod is; without an address of its own, so that no proxy is in between."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels(base, "driver"),
            "ports": [{"name": "executors", "port": options.port, "targetPort": options.port, "protocol": "TCP"}],
        },
    }


def _driver_job(base: str, config: RunConfig, options: KubernetesOptions) -> Manifest:
    """The driver: started again wherever it fails, until the job has ended; never two at a time."""
    rules = [
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": "driver", "operator": "In", "values": _LAST_STATUSES},
        },
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    container = {
        **_container("driver", options, ["driver"]),
        "resources": _resources(options.driver_resources),
        "env": [{"name": DRIVER_VARIABLE, "value": base}],
        "ports": [{"name": "executors", "containerPort": options.port}],
        "volumeMounts": [*_mounts(base), {"name": "job", "mountPath": JOB_FOLDER, "readOnly": True}],
    }
    pod = {
        **_as_user(options),
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "serviceAccountName": options.service_account or base,
        # Long enough to end the job in good order, ranks first.
        "terminationGracePeriodSeconds": int(config.policy.grace_s + config.policy.stop_s) + options.grace_s + 30,
        "containers": [container],
        "volumes": [
            *_volumes(base, options, {"tls.crt": "tls.crt", "tls.key": "tls.key"}, options.claim),
            {"name": "job", "configMap": {"name": base}},
        ],
        **({"nodeSelector": options.driver_node_selector} if options.driver_node_selector else {}),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "spec": {
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": _MANY,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": rules},
            **({"activeDeadlineSeconds": options.deadline_s} if options.deadline_s else {}),
            "template": {"metadata": {"labels": labels(base, "driver")}, "spec": pod},
        },
    }
