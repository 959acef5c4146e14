"""The job file: ``[run]`` of a TOML file, with ``key=value`` pairs beside it; see docs/run_config.md."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from phalanx.core.addresses import host_of
from phalanx.core.config import Config, Loaded, load
from phalanx.core.errors import UserError
from phalanx.core.units import parse_size
from phalanx.ipc import handshake
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.flags import Training, training_of, with_folder
from phalanx.run.judge.interface_traffic import TrafficConfig
from phalanx.run.judge.step_limits import LimitConfig
from phalanx.run.judge.stragglers import SlowConfig
from phalanx.run.secrets import OWN_VARIABLES, TlsFiles, require_tls_unless_loopback
from phalanx.telemetry.alerts.alert_config import AlertsConfig

Devices = Literal["auto", "gpu", "cpu"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]/]+):(\d{1,5})")
_OURS = re.compile(r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")


class PolicyConfig(Config):
    """How recoveries are decided; see `phalanx.run.decide.policy.Policy`."""

    advise_only: bool = Field(False, description="take no action, but write and report what would be done")
    when_missing: Literal["wait", "shrink"] = Field(
        "wait", description="without a replacement for a host: wait for one, or shrink to fewer hosts"
    )
    replace_wait_s: float = Field(
        300.0, ge=0, description="with shrink: how long a replacement is waited for first, seconds"
    )
    give_up_s: float = Field(1800.0, ge=0, description="how long hosts are waited for, seconds; 0: for ever")
    grow: bool = Field(True, description="a job that has shrunk goes on with more hosts when they are there")
    replace_slow: bool = Field(False, description="replace a host that is found slow, when a spare is ready")
    slow_factor: float = Field(
        1.1, ge=1.01, description="from how many times the usual step time on a slow host is replaced"
    )
    replace_faulty: bool = Field(
        False, description="replace a host that the judge of machines advises to evict, when a spare is ready"
    )
    faulty_per_hour: int = Field(2, ge=1, description="so many of those in an hour; of more people are told")
    joining_check: Literal["passive", "quick", "full"] = Field(
        "quick", description="what a host has to pass before it may take part"
    )
    active_check: Literal["quick", "full"] = Field(
        "quick", description="what a suspect has to pass before it may take part again"
    )
    settle_s: float = Field(
        0.4, ge=0, description="how long the culprit's own word is waited for after a failure that may follow, seconds"
    )
    refusal_s: float = Field(
        10.0,
        ge=0,
        description="how long other ranks are waited for where one ends with exit status 2 before any step: all, and "
        "it is bad input, seconds",
    )
    evidence_s: float = Field(3.0, ge=0.05, description="limit for evidence and its judgement, seconds")
    store_s: float = Field(10.0, ge=0.05, description="limit for opening a rendezvous store, seconds")
    start_s: float = Field(120.0, ge=0.05, description="limit for starting the processes of an attempt, seconds")
    stop_s: float = Field(15.0, ge=0.05, description="limit for their end, with device memory given back, seconds")
    unknown_stop_s: float = Field(
        3.0, ge=0.05, description="the same for a host that has not been heard of for a while, seconds"
    )
    cut_off_s: float = Field(
        300.0,
        ge=0.05,
        description="how long most hosts that do not answer at once are waited for: the driver may be cut off, seconds",
    )
    grace_s: float = Field(
        30.0, ge=0, description="between SIGTERM and SIGKILL when a person stops the job or time is short, seconds"
    )
    passive_check_s: float = Field(5.0, ge=0.05, description="limit for the answer of a passive check, seconds")
    quick_check_s: float = Field(30.0, ge=0.05, description="limit for the answer of a quick check, seconds")
    full_check_s: float = Field(600.0, ge=0.05, description="limit for the answer of a full check, seconds")
    max_restarts_without_step: int = Field(
        3, ge=1, description="restarts in a row without progress before the job ends with status 4"
    )
    healthy_s: float = Field(
        1200.0,
        ge=0.05,
        description="an attempt that makes steps for so long is no crash loop, where the script does not number its "
        "steps, seconds",
    )
    max_restarts: int = Field(0, ge=0, description="recoveries in all before it does; 0: no limit")
    backoff_s: float = Field(
        2.0, ge=0, description="pause before the second restart without progress, seconds; doubles with each"
    )
    backoff_limit_s: float = Field(60.0, ge=0, description="to which that pause grows, seconds")
    fault_window_s: float = Field(
        21_600.0, ge=0.05, description="how long a fault counts against a host or a group, seconds"
    )

    def to_policy(self) -> Policy:
        """What the decision function takes."""
        return Policy(**self.model_dump())

    @model_validator(mode="after")
    def _in_order(self) -> PolicyConfig:
        _below(self, "passive_check_s", "quick_check_s")
        _below(self, "quick_check_s", "full_check_s")
        _below(self, "backoff_s", "backoff_limit_s")
        _below(self, "settle_s", "evidence_s")
        _below(self, "settle_s", "refusal_s")
        _below(self, "unknown_stop_s", "stop_s")
        _below(self, "stop_s", "cut_off_s")
        if self.give_up_s and self.when_missing == "shrink":
            _below(self, "replace_wait_s", "give_up_s")
        return self


class TlsConfig(Config):
    """PEM files for connections that leave a host."""

    certificate: str = Field("", description="certificate of the driver; empty: no TLS, on loopback only")
    key: str = Field("", description="its key, readable by its owner only")
    authority: str = Field(
        "", description="certificates that those of both sides have to be signed by; empty: only the driver shows one"
    )

    @property
    def files(self) -> TlsFiles | None:
        """For `phalanx.run.secrets`; None: no TLS."""
        given = (Path(name) if name else None for name in (self.certificate, self.key, self.authority))
        return TlsFiles(*given) if self.certificate else None

    @model_validator(mode="after")
    def _together(self) -> TlsConfig:
        if bool(self.certificate) != bool(self.key) or (self.authority and not self.certificate):
            raise ValueError(
                f"certificate = {self.certificate!r} and key = {self.key!r} go together, and before authority: "
                "give certificate and key, or none of the three"
            )
        return self


class LogsConfig(Config):
    """Log files of ranks."""

    folder: str = Field("", description="where they go; empty: logs in the run folder")
    segment_bytes: int = Field(
        32 << 20, ge=4096, description='size at which a file is followed by the next: bytes, or such as "32 MiB"'
    )
    kept_bytes: int = Field(
        512 << 20, ge=4096, description='room for all files of one rank on a host: bytes, or such as "1 GiB"'
    )

    @field_validator("segment_bytes", "kept_bytes", mode="before")
    @classmethod
    def _read_size(cls, value: Any) -> Any:
        return parse_size(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _in_order(self) -> LogsConfig:
        _below(self, "segment_bytes", "kept_bytes")
        return self


class PreviousConfig(Config):
    """An earlier version of the code, to go back to before the job is given up."""

    script: str = Field("", description="script or module of the earlier version; empty: the same")
    working_folder: str = Field("", description="folder that it is run in, such as a checkout; empty: the same")
    arguments: tuple[str, ...] | None = Field(None, description="its arguments; absent: the same")


class PrometheusConfig(Config):
    """Monitoring data of the job's hosts, by which the judge of machines follows them."""

    url: str = Field(
        "",
        pattern=r"^(https?://[^/\s?#]+(/[^\s?#]*)?)?$",
        description="http or https address of the server, without a password; empty: none is asked",
    )
    host_label: str = Field(
        "instance", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="label of its series that names hosts"
    )
    hosts: dict[str, str] = Field(
        default_factory=dict,
        description="names of hosts in that label (a table), where they are neither those of the job nor addresses",
    )
    selector: str = Field("", description='further matchers of every query: cluster="a", job=~"dcgm|node"')
    scrape_s: float = Field(1.0, gt=0, le=3600, description="how often it scrapes its exporters, seconds")
    every_s: float = Field(5.0, ge=0.2, le=3600, description="how often it is asked for what is new, seconds")
    token_file: str = Field("", description="file with a bearer token; empty: none")
    user: str = Field("", description="name for basic authentication; empty: none")
    password_file: str = Field("", description="file with its password")
    ca_file: str = Field("", description="certificates that sign the server's (PEM); empty: the system's")
    policy: dict[str, Any] = Field(
        default_factory=dict, description="numbers of the judge (a table), such as continuity_s; see its page"
    )


class JudgesConfig(Config):
    """Judges of `phalanx detect` beside the job, in a process of their own: what they find is told and advised."""

    every_s: float = Field(
        300.0,
        ge=0,
        description="how often judges look at what the run records while it trains, seconds; 0: none is asked at all",
    )
    limit_s: float = Field(120.0, ge=1, description="a look that takes longer is given up, seconds")
    history: tuple[str, ...] = Field(
        (),
        description="earlier jobs, folders of jobs and tables of incidents, by which repeat offenders are named "
        "when they join; empty: the jobs beside the run folder, where hosts are machines",
    )
    prometheus: PrometheusConfig = Field(
        default_factory=PrometheusConfig, description="the server that has the metrics of the job's hosts"
    )


class ChecksConfig(Config):
    """Self-tests of hosts; see `phalanx check`."""

    skip: tuple[str, ...] = Field((), description="names of checks that are left out")


class RunConfig(Config):
    """Everything `phalanx run` needs to know of a job; the same for every back end."""

    name: str = Field("", description="name of the job; empty: from the script's, or a training's")
    script: str = Field("", description="the script, or with run.module the module, that every rank runs")
    module: bool = Field(False, description="run.script is the name of a module, as after python -m")
    arguments: tuple[str, ...] = Field((), description="what the script is given on its command line")
    working_folder: str = Field("", description="folder that ranks run in; empty: where the command was given")
    environment: dict[str, str] = Field(
        default_factory=dict,
        description="variables for the ranks (a table); those named like secrets are not recorded",
    )
    start: Literal["auto", "fresh", "warm"] = Field(
        "auto",
        description="fresh: each rank of each attempt is a new Python, as under torchrun; warm: a fork of a process "
        "that has imported what it needs; auto: warm where the script is phalanx train, else fresh",
    )
    preload: tuple[str, ...] = Field(
        (),
        description="modules imported before the first attempt of a warm start; those that the script imports are "
        "learnt anyway",
    )
    folder: str = Field(
        "", description="run folder: journal, logs, incidents; empty: that of a training, else runs/<name>"
    )

    checkpoints: str = Field(
        "",
        description="folder or URL where the script's checkpoints go, so that hosts test it before they take part; "
        "empty: not known",
    )

    hosts: int = Field(1, ge=1, description="hosts that take part")
    spares: int = Field(0, ge=0, description="hosts that are kept started, checked and connected beside those")
    workers_per_host: int | Devices = Field(
        1, description="ranks on each host: a number, gpu (one per GPU), cpu (one per core), or auto (GPUs, else cores)"
    )
    allowed_hosts: tuple[int, ...] = Field(
        (), description="smaller numbers of hosts that the job may shrink to; empty: every divisor of run.hosts"
    )
    backend: str = Field("local", min_length=1, description="who gives hosts: local, slurm, kubernetes, …")
    backend_options: dict[str, Any] = Field(
        default_factory=dict, description="what that back end wants to know (a table); see its page"
    )

    heartbeat_s: float = Field(1.0, ge=0.05, le=60, description="how often each host reports, seconds")
    driver_lost_s: float = Field(
        3600.0, ge=1.0, description="how long a host without running ranks waits for a driver before it leaves, seconds"
    )
    policy: PolicyConfig = Field(default_factory=PolicyConfig, description="how recoveries are decided")
    limits: LimitConfig = Field(default_factory=LimitConfig, description="how long the job may make no step")
    slow: SlowConfig = Field(default_factory=SlowConfig, description="what counts as a slow rank")
    traffic: TrafficConfig = Field(
        default_factory=TrafficConfig, description="when the training interfaces carry too little"
    )
    judges: JudgesConfig = Field(default_factory=JudgesConfig, description="judges that look at the job as it goes on")
    rules: tuple[str, ...] = Field((), description="TOML files with log rules beside those that come along")
    checks: ChecksConfig = Field(default_factory=ChecksConfig, description="self-tests of hosts")
    previous: PreviousConfig = Field(
        default_factory=PreviousConfig, description="an earlier version of the code, to go back to"
    )

    journal: str = Field(
        "", description="path, sqlite:////PATH or postgresql://USER@HOST/DATABASE; empty: journal.db in the run folder"
    )
    logs: LogsConfig = Field(default_factory=LogsConfig, description="log files of ranks")
    listen: str = Field("127.0.0.1:0", description="HOST:PORT where executors reach the driver; port 0: any")
    http: str = Field("127.0.0.1:0", description="HOST:PORT of the interface for people; port 0: any")
    tls: TlsConfig = Field(default_factory=TlsConfig, description="certificates")
    token_file: str = Field("", description="file with the job's token; empty: secret/token in the run folder")
    webhook: str = Field("", description="URL that incidents are posted to; empty: none")
    alerts: AlertsConfig = Field(
        default_factory=AlertsConfig,
        description="who hears of trouble; of a training, where nothing is set here, as its config file has it",
    )

    @property
    def job_name(self) -> str:
        """The name, resolved."""
        base = self.script.rpartition(".")[2] if self.module else Path(self.script).stem
        base = self.training.name if self.training is not None else base
        return self.name or re.sub(r"[^A-Za-z0-9._-]+", "-", base).strip("-._")[:63] or "job"

    @property
    def run_folder(self) -> Path:
        """The folder, resolved; that of a training is the job's too."""
        if not self.folder and not self.name and self.training is not None and self.training.folder:
            return Path(self.working_folder) / self.training.folder
        return Path(self.folder or f"runs/{self.job_name}")

    @property
    def training(self) -> Training | None:
        """What the job trains, where it is `phalanx train`."""
        return training_of(self.script, self.module, self.arguments)

    @property
    def starts_warm(self) -> bool:
        """Whether ranks are forked from a process that has imported what they need."""
        return self.start == "warm" or (self.start == "auto" and self.training is not None)

    @property
    def script_arguments(self) -> tuple[str, ...]:
        """Arguments of the script; a training without a folder of its own goes where its job does."""
        training = self.training
        is_own = not (self.folder or self.name or self.working_folder)  # the training's own default is the same
        if training is None or is_own or training.names_folder(self.working_folder):
            return self.arguments
        return (*self.arguments, with_folder(self.run_folder.absolute()))

    @property
    def checkpoint_place(self) -> str:
        """Where checkpoints go, resolved from the folder that the script runs in; empty: unknown."""
        if not self.checkpoints or "://" in self.checkpoints:
            return self.checkpoints
        return str((Path(self.working_folder or ".") / Path(self.checkpoints).expanduser()).absolute())

    @property
    def journal_url(self) -> str:
        """The journal, resolved."""
        return self.journal or str(self.run_folder / "journal.db")

    @property
    def token_path(self) -> Path:
        """The token's file, resolved."""
        return Path(self.token_file) if self.token_file else self.run_folder / "secret" / "token"

    @property
    def log_folder(self) -> Path:
        """Where the logs of ranks go, resolved."""
        return Path(self.logs.folder) if self.logs.folder else self.run_folder / "logs"

    def to_job(self, workers_per_host: int) -> Job:
        """What the decision function takes; `workers_per_host`: from `workers_on`."""
        return Job(self.job_name, self.hosts, workers_per_host, self.spares, self.allowed_hosts, self.previous_version)

    @property
    def previous_version(self) -> str:
        """A name for the earlier version of the code; empty: there is none."""
        previous = self.previous
        return previous.script or previous.working_folder or ("given" if previous.arguments is not None else "")

    @field_validator("workers_per_host", mode="before")
    @classmethod
    def _number_or_devices(cls, value: Any) -> Any:
        if isinstance(value, bool) or not (isinstance(value, int) or value in ("auto", "gpu", "cpu")):
            raise ValueError(f"{value!r} is no number of ranks: give 1 or more, gpu, cpu or auto")
        return value

    @model_validator(mode="after")
    def _names(self) -> RunConfig:
        if not self.script:
            raise ValueError("script is not given: name the script after --, or set run.script")
        if self.name and not _NAME.fullmatch(self.name):
            raise ValueError(f"name = {self.name!r} is no name: use up to 63 letters, digits, '.', '_' and '-'")
        if self.preload and not self.starts_warm:
            cure = 'set start = "warm", or remove preload'
            raise ValueError(f"preload = {list(self.preload)} is for ranks that start warm: {cure}")
        for variable in self.environment:
            if _OURS.fullmatch(variable) or variable in (*OWN_VARIABLES, handshake.VARIABLE):
                raise ValueError(f"environment.{variable} is set for each rank by phalanx run: remove it")
        return self

    @model_validator(mode="after")
    def _counts(self) -> RunConfig:
        if isinstance(self.workers_per_host, int) and self.workers_per_host < 1:
            raise ValueError(f"workers_per_host = {self.workers_per_host} is too few: give 1 or more, or auto")
        wrong = [count for count in self.allowed_hosts if not 1 <= count <= self.hosts]
        if wrong:
            raise ValueError(f"allowed_hosts has {wrong[0]}, and hosts = {self.hosts}: give numbers from 1 to that")
        return self

    @model_validator(mode="after")
    def _timing(self) -> RunConfig:
        if self.limits.margin_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"limits.margin_s = {self.limits.margin_s} is less than two heartbeats of heartbeat_s = "
                f"{self.heartbeat_s}, so a step would seem late when its report is: raise the one or lower the other"
            )
        if self.limits.floor_s > self.limits.patience_s:
            raise ValueError(
                f"limits.floor_s = {self.limits.floor_s} is above limits.patience_s = {self.limits.patience_s}, at "
                "which people are told in any case: lower the one or raise the other"
            )
        return self

    @model_validator(mode="after")
    def _addresses(self) -> RunConfig:
        for name in ("listen", "http"):
            address = getattr(self, name)
            found = _ADDRESS.fullmatch(address)
            if not found or int(found[2]) > 65_535:
                raise ValueError(f"{name} = {address!r} is no address: write HOST:PORT, such as 127.0.0.1:0")
            try:
                require_tls_unless_loopback(host_of(address), self.tls.files)
            except UserError as error:
                raise ValueError(f"{name} = {address!r}; {error.problem}: {error.cure}") from None
        return self


class JobFile(Config):
    """A TOML file for `phalanx run`."""

    run: RunConfig = Field(description="the job")


def load_job(
    path: Path | None, overrides: Sequence[str] = (), changes: Mapping[str, Any] | None = None
) -> Loaded[JobFile]:
    """Read a job file, then apply what flags changed, then ``run.key=value`` pairs.

    Args:
        changes: dotted keys and plain values, from `phalanx.run.flags`.

    Raises:
        UserError: something is wrong with one of them.
    """
    given = [f"{key}={toml_value(value)}" for key, value in (changes or {}).items()]
    return load(JobFile, path, [*given, *overrides])


def toml_value(value: Any) -> str:
    """A plain value as TOML writes it on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_value(str(key))} = {toml_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def workers_on(setting: int | Devices, cores: int, gpus: int) -> int:
    """How many ranks a host of so many cores and GPUs gets.

    Raises:
        UserError: it has no GPU, and gpu is asked for.
    """
    if isinstance(setting, int):
        return setting
    if setting == "gpu" and not gpus:
        raise UserError(
            "this host has no GPU", cure="give a number, or auto", field="run.workers_per_host", value=setting
        )
    return cores if setting == "cpu" or not gpus else gpus


def _below(config: Config, soft: str, hard: str) -> None:
    """See that one limit is not above another, which would hide it."""
    low, high = getattr(config, soft), getattr(config, hard)
    if low > high:
        raise ValueError(f"{soft} = {low} is above {hard} = {high}: lower {soft} or raise {hard}")
