"""What the driver needs in a cluster, as manifests. Pure functions, torch-free."""

from __future__ import annotations

from typing import Any

from phalanx.run.backends.kubernetes.names import base_name, labels
from phalanx.run.backends.kubernetes.options import KubernetesOptions, workers_per_host
from phalanx.run.backends.kubernetes.pods import (
    PRIVATE_FOLDER,
    RUN_FOLDER,
    Manifest,
    as_user,
    container,
    mounts,
    resources,
    run_folder,
    secrets,
)
from phalanx.run.config import RunConfig, toml_value

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
    return [*rights, *(_object(each, base, namespace) for each in _own(base, config, options, namespace, token))]


def _own(base: str, config: RunConfig, options: KubernetesOptions, namespace: str, token: str) -> list[Manifest]:
    return [
        {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "stringData": {"token": token}},
        {"apiVersion": "v1", "kind": "ConfigMap", "data": {"job.toml": job_file(config, options, namespace)}},
        _service(base, options),
        _job(base, config, options),
    ]


def job_file(config: RunConfig, options: KubernetesOptions, namespace: str) -> str:
    """The job as the driver in its pod reads it: the same settings, with paths of the pod."""
    given = config.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    told = options.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    port = config.http.rpartition(":")[2]
    changed: dict[str, Any] = {
        **given,
        "name": config.job_name,
        "folder": RUN_FOLDER,
        "workers_per_host": workers_per_host(config, options),
        "backend_options": {**told, "namespace": namespace},
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
    subject = {"kind": "ServiceAccount", "name": base, "namespace": namespace}
    found = [
        _object({"apiVersion": "v1", "kind": "ServiceAccount"}, base, namespace),
        _object({**rbac, "kind": "Role", "rules": rules}, base, namespace),
        _object({**rbac, "kind": "RoleBinding", **_binds("Role", base, subject)}, base, namespace),
    ]
    if cordon:
        nodes = [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]}]
        name = f"{namespace}-{base}"  # these belong to no namespace
        found.append(_object({**rbac, "kind": "ClusterRole", "rules": nodes}, base, "", name))
        binding = {**rbac, "kind": "ClusterRoleBinding", **_binds("ClusterRole", name, subject)}
        found.append(_object(binding, base, "", name))
    return found


def _binds(kind: str, name: str, subject: Manifest) -> Manifest:
    return {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
        "subjects": [subject],
    }


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


def _job(base: str, config: RunConfig, options: KubernetesOptions) -> Manifest:
    """The driver: started again wherever it fails, until the job has ended; never two at a time."""
    ended = {"containerName": "driver", "operator": "In", "values": _LAST_STATUSES}
    moved = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "spec": {
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": _MANY,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    {"action": "FailJob", "onExitCodes": ended},
                    {"action": "Ignore", "onPodConditions": moved},
                ]
            },
            **({"activeDeadlineSeconds": options.deadline_s} if options.deadline_s else {}),
            "template": {
                "metadata": {"labels": labels(base, "driver")},
                "spec": _driver_pod(base, config, options),
            },
        },
    }


def _driver_pod(base: str, config: RunConfig, options: KubernetesOptions) -> Manifest:
    driver = {
        **container("driver", options, ["driver"]),
        "resources": resources(options.driver_resources),
        "env": [{"name": DRIVER_VARIABLE, "value": base}],
        "ports": [{"name": "executors", "containerPort": options.port}],
        "volumeMounts": [*mounts(base), {"name": "job", "mountPath": JOB_FOLDER, "readOnly": True}],
    }
    return {
        **as_user(options),
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "serviceAccountName": options.service_account or base,
        # Long enough to end the job in good order, ranks first.
        "terminationGracePeriodSeconds": int(config.policy.grace_s + config.policy.stop_s) + options.grace_s + 30,
        "containers": [driver],
        "volumes": [
            secrets(base, options, {"tls.crt": "tls.crt", "tls.key": "tls.key"}),
            {"name": "private", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            run_folder(options.claim),
            {"name": "job", "configMap": {"name": base}},
        ],
        **({"nodeSelector": options.driver_node_selector} if options.driver_node_selector else {}),
    }
