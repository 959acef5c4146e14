"""From outside the cluster: have the driver's pod made, or show what would be."""

from __future__ import annotations

import os
import secrets
import sys

from phalanx.core.errors import UserError
from phalanx.run.backends.kubernetes.cluster_api import ClusterApi, ClusterError, connect, current_namespace
from phalanx.run.backends.kubernetes.kubernetes_options import read_options
from phalanx.run.backends.kubernetes.manifests import DRIVER_VARIABLE, Manifest, base_name, for_driver
from phalanx.run.config import RunConfig
from phalanx.run.secrets import TOKEN_BYTES

_IN_NO_NAMESPACE = ("ClusterRole", "ClusterRoleBinding")


def submit(config: RunConfig) -> int | None:
    """Start the job's driver in the cluster, and return an exit status; None: this is the driver's pod.

    Raises:
        UserError: an option is wrong, the client is not installed, or the cluster refuses.
    """
    if os.environ.get(DRIVER_VARIABLE):
        return None
    options = read_options(config)
    namespace = options.namespace or current_namespace(options.context)
    manifests = for_driver(config, options, namespace, secrets.token_hex(TOKEN_BYTES))
    if options.manifest == "print":
        import yaml  # comes with the client

        sys.stdout.write(str(yaml.safe_dump_all(manifests, sort_keys=False)))
        return 0
    try:
        make_all(connect(options.context, namespace, is_inside=False), manifests)
    except ClusterError as error:
        cure = "see what it says; nothing was left behind"
        raise UserError(f"the cluster refuses: {error}", cure=cure, field="run.backend", value="kubernetes") from None
    name = base_name(config.job_name)
    sys.stdout.write(
        f"job {config.job_name} is in namespace {namespace} as {name}\n"
        f"what it says:  kubectl -n {namespace} logs -f job/{name}\n"
        f"its hosts:     kubectl -n {namespace} get pods -l app.kubernetes.io/instance={name}\n"
        f"to end it:     kubectl -n {namespace} delete job {name}\n"
    )
    return 0


def make_all(api: ClusterApi, manifests: list[Manifest]) -> None:
    """Make every object; all belong to the Job, so that they go when it goes. The Job begins when they are there.

    Raises:
        UserError: the job is there already.
        ClusterError: the API refuses, or does not answer; then what was made is removed again.
    """
    job = next(manifest for manifest in manifests if manifest["kind"] == "Job")
    name = job["metadata"]["name"]
    if not api.create({**job, "spec": {**job["spec"], "suspend": True}}):
        cure = f"give another run.name, or: kubectl -n {api.namespace} delete job {name}"
        raise UserError("this job is in the cluster already", cure=cure, field="run.name", value=name)
    try:
        made = api.job(name) or {}
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": made["metadata"]["uid"]}
        for manifest in manifests:
            if manifest is job:
                continue
            kind, metadata = manifest["kind"], manifest["metadata"]
            owned = {} if kind in _IN_NO_NAMESPACE else {"ownerReferences": [owner]}
            is_new = api.create({**manifest, "metadata": {**metadata, **owned}})
            # Rights of a job of the same name that were left may stay, since they are the same.
            if not is_new and kind in ("Secret", "ConfigMap", "Service"):
                cure = f"remove it: kubectl -n {api.namespace} delete {kind.lower()} {metadata['name']}"
                problem = f"a {kind} of this name is there already"
                raise UserError(problem, cure=cure, field="run.name", value=metadata["name"])
        api.begin_job(name)
    except BaseException:
        api.delete_job(name)
        raise
