"""What the job file says of the cluster: ``[run.backend_options]``."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from phalanx.core.config import Config
from phalanx.core.errors import UserError
from phalanx.run.backends.backend import options_of
from phalanx.run.config import RunConfig
from phalanx.run.secrets import is_secret_name

Quantities = dict[str, str | int]

_DRIVER: Quantities = {"cpu": "1", "memory": "2Gi"}

_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?|Ki)?")
_LABEL_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class KubernetesOptions(Config):
    """What the back end needs to know beside the job."""

    image: str = Field(min_length=1, description="container image with phalanx, the script and what it imports")
    tls_secret: str = Field(min_length=1, description="Secret with tls.crt, tls.key and ca.crt; see below for its name")
    manifest: Literal["apply", "print"] = Field(
        "apply", description="from outside the cluster: apply what the job needs, or only print it"
    )
    context: str = Field("", description="of the kubeconfig, from outside the cluster; empty: the current one")
    namespace: str = Field("", description="where everything goes; empty: that of the context")
    python: str = Field("python3", min_length=1, description="interpreter in the image")
    image_pull_policy: Literal["", "Always", "IfNotPresent", "Never"] = Field(
        "", description="when nodes fetch the image; empty: as the cluster does by itself"
    )
    image_pull_secrets: tuple[str, ...] = Field((), description="Secrets with passwords of image registries")

    resources: Quantities = Field(
        default_factory=dict,
        description='what each executor gets (a table), such as {"nvidia.com/gpu" = 8, memory = "900Gi"}',
    )
    driver_resources: Quantities = Field(default_factory=_DRIVER.copy, description="what the driver gets (a table)")
    shared_memory: str = Field("", description="limit for /dev/shm of executors; empty: their memory is the limit")
    node_selector: dict[str, str] = Field(default_factory=dict, description="labels of nodes for executors (a table)")
    driver_node_selector: dict[str, str] = Field(default_factory=dict, description="labels of nodes for the driver")
    tolerations: tuple[dict[str, Any], ...] = Field((), description="taints that executors bear (tables)")
    one_per_node: bool = Field(True, description="no two executors of the job on one node")
    host_network: bool = Field(False, description="executors use the network of their node; needs one_per_node")
    capabilities: tuple[str, ...] = Field(
        (), description="Linux capabilities of executors: IPC_LOCK for RDMA, SYS_PTRACE for stacks by py-spy"
    )
    user: int | None = Field(None, ge=1, description="user and group id in all pods; absent: as the image has it")
    priority_class: str = Field("", description="of executors; empty: the default")
    runtime_class: str = Field("", description="of executors; empty: the default")
    scheduler: str = Field("", description="of executors; empty: the default")
    labels: dict[str, str] = Field(
        default_factory=dict, description="of the executors' Jobs and pods (a table), such as a queue's name"
    )
    annotations: dict[str, str] = Field(default_factory=dict, description="of the same (a table)")

    claim: str = Field(
        "", description="PersistentVolumeClaim for the run folder; empty: it is lost with the driver's pod"
    )
    claim_is_shared: bool = Field(False, description="it is ReadWriteMany: executors keep their logs there too")
    journal_may_be_lost: bool = Field(
        False, description="start although the journal is lost with the driver's pod, and the job with it"
    )
    volumes: dict[str, str] = Field(
        default_factory=dict,
        description="PersistentVolumeClaims in executors, by the folder that they appear at (a table)",
    )
    environment_secrets: tuple[str, ...] = Field(
        (), description="Secrets whose keys become variables of all pods and ranks, such as HF_TOKEN or PGPASSWORD"
    )
    service_account: str = Field("", description="of the driver; empty: one is made with the rights that it needs")

    port: int = Field(7700, ge=1, le=65_535, description="where executors reach the driver")
    cordon: bool = Field(False, description="cordon the node of an evicted host, for all jobs of the cluster")
    node_lost_s: int = Field(
        300, ge=0, description="how long a node may be unreachable before the cluster gives up its pod, seconds"
    )
    grace_s: int = Field(60, ge=1, description="what an executor has to end after SIGTERM, seconds")
    deadline_s: int = Field(0, ge=0, description="the cluster ends the job after so long, seconds; 0: never")
    stop_before_s: int = Field(300, ge=1, description="how long before that the job ends by itself, seconds")

    @field_validator("resources", "driver_resources")
    @classmethod
    def _quantities(cls, value: Quantities) -> Quantities:
        for name, amount in value.items():
            if not _QUANTITY.fullmatch(str(amount)) or isinstance(amount, bool):
                raise ValueError(f"{name} = {amount!r} is no quantity: write such as 8, 500m or 64Gi")
        return value

    @field_validator("shared_memory")
    @classmethod
    def _quantity(cls, value: str) -> str:
        if value and not _QUANTITY.fullmatch(value):
            raise ValueError(f"{value!r} is no quantity: write such as 64Gi")
        return value

    @field_validator("image_pull_secrets", "environment_secrets")
    @classmethod
    def _object_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        wrong = [name for name in value if not _LABEL_NAME.fullmatch(name)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is no name of a Secret: use lower-case letters, digits, '-' and '.'")
        return value

    @model_validator(mode="after")
    def _together(self) -> KubernetesOptions:
        if self.host_network and not self.one_per_node:
            raise ValueError("host_network = true needs one_per_node = true, or two executors take the same ports")
        if self.claim_is_shared and not self.claim:
            raise ValueError("claim_is_shared = true says nothing without claim: name the PersistentVolumeClaim")
        if self.deadline_s and self.stop_before_s >= self.deadline_s:
            raise ValueError(
                f"stop_before_s = {self.stop_before_s} is not below deadline_s = {self.deadline_s}: "
                "lower it, or raise that"
            )
        relative = [folder for folder in self.volumes if not folder.startswith("/")]
        if relative:
            raise ValueError(f"volumes has {relative[0]!r}: give absolute folders")
        return self


def read_options(config: RunConfig) -> KubernetesOptions:
    """The options of a job, checked together with it.

    Raises:
        UserError: one is missing or wrong, or the job has something that does not work in a cluster.
    """
    options = options_of(KubernetesOptions, config)
    if not options.claim and not config.journal.startswith("postgresql://") and not options.journal_may_be_lost:
        raise UserError(
            "the journal would be lost with the driver's pod, and the job with it",
            cure="name a PersistentVolumeClaim, or give run.journal = postgresql://…; to try something out, set "
            "run.backend_options.journal_may_be_lost=true",
            field="run.backend_options.claim",
            value=options.claim,
        )
    for name in config.environment:
        if is_secret_name(name):
            cure = "put it into a Secret, and name that in run.backend_options.environment_secrets"
            raise UserError("would be readable in the job's objects", cure=cure, field=f"run.environment.{name}")
    return options


def workers_per_host(config: RunConfig, options: KubernetesOptions) -> int:
    """How many ranks each host gets; what the driver's own machine has says nothing of it.

    Raises:
        UserError: the number cannot be known before the pods are there.
    """
    asked = config.workers_per_host
    gpus = sum(int(amount) for name, amount in options.resources.items() if name.endswith("/gpu"))
    if isinstance(asked, int):
        return asked
    if gpus and asked in ("gpu", "auto"):
        return gpus
    cure = "give a number, or with gpu how many each executor gets in run.backend_options.resources"
    raise UserError("cannot be known before the hosts are there", cure=cure, field="run.workers_per_host", value=asked)
