"""Settings of ``[alerts]``: who hears of what happens to a run, and from when on something counts as trouble.

An address may hold a secret, so no file, message or log shows more of it than its kind and, of a web address, its host.
``env:NAME`` takes it from a variable of the environment, so that it stands in no file at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, PlainSerializer, SecretStr

from phalanx.core.config import Config
from phalanx.core.errors import UserError
from phalanx.core.units import read_size

Kind = Literal[
    "stall",
    "not_finite",
    "loss_spike",
    "gradient_spike",
    "throughput",
    "slow_rank",
    "disk",
    "checkpoint",
    "incident",
    "detection",
    "failed",
    "stopped",
    "finished",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

HIDDEN = "*****"
_FROM_ENVIRONMENT = "env:"


def shown_address(address: SecretStr | str) -> str:
    """An address as it may be written down: ``https://hooks.example.org/*****``, ``mailto://*****``."""
    text = address.get_secret_value() if isinstance(address, SecretStr) else address
    if not text or text.startswith(_FROM_ENVIRONMENT):
        return text
    try:
        parts = urlsplit(text)
        host = parts.hostname if parts.scheme in ("http", "https") else ""
    except ValueError:
        return HIDDEN
    return f"{parts.scheme}://{host}/{HIDDEN}" if host else f"{parts.scheme}://{HIDDEN}" if parts.scheme else HIDDEN


Address = Annotated[SecretStr, PlainSerializer(shown_address, when_used="json")]


class AlertsConfig(Config):
    """Settings of ``[alerts]``; each alert is sent once, until what it reports is over."""

    webhook: Address = Field(
        SecretStr(""),
        description="http or https URL that alerts are posted to as JSON, or env:NAME; empty: none",
    )
    urls: tuple[Address, ...] = Field(
        (),
        description="addresses of mail and chat services as apprise writes them (mailto://, slack://, …), or env:NAME; "
        "needs the extra phalanx-train[alerts]",
    )
    command: tuple[str, ...] = Field(
        (), description="program and arguments to run, without a shell; it gets the alert as JSON on its stdin"
    )
    watch: bool = Field(
        False, description="look for trouble, and keep alerts in RUN/alerts, also where they are sent to nobody"
    )
    on: tuple[Kind, ...] = Field(KINDS, description="what is reported")
    link: str = Field(
        "",
        pattern=r"^(https?://[^/\s]+\S*)?$",
        description="web address of a dashboard, for the link of each alert; empty: the path of the run folder",
    )
    stall_s: float = Field(
        60.0,
        gt=0,
        description="a run without a step for so long stalls, where ten of its usual steps take less, seconds",
    )
    throughput_drop: float = Field(
        0.3, gt=0, lt=1, description="share of the run's usual tokens per second by which they have to fall"
    )
    throughput_for_s: float = Field(120.0, ge=0, description="for how long they have to stay that low, seconds")
    slow_rank_excess: float = Field(
        0.1, gt=0, description="how much longer than those that do the same a slow rank computes; 0.1 is 10 %"
    )
    slow_rank_for_s: float = Field(30.0, gt=0, description="for how long it has to be that slow, seconds")
    spike_sigma: float = Field(
        8.0, ge=3, description="by how many standard deviations of its recent values the loss has to rise"
    )
    disk_free_bytes: Annotated[int, BeforeValidator(read_size)] = Field(
        2 << 30,
        ge=0,
        description='a disk with less space than this, or than two checkpoints take, is nearly full: bytes, or "2 GiB"',
    )
    checkpoint_intervals: float = Field(
        3.0, ge=1, description="a checkpoint is overdue after so many times the interval that is asked for"
    )

    @property
    def is_on(self) -> bool:
        """Whether the run is watched for alerts."""
        return self.watch or self.has_receiver

    @property
    def has_receiver(self) -> bool:
        """Whether alerts are sent to anybody."""
        return bool(self.webhook.get_secret_value() or self.urls or self.command)


def require_web(text: str, field: str) -> None:
    """See that an address can be posted to.

    Raises:
        UserError: it cannot; the message does not hold it.
    """
    try:
        parts = urlsplit(text)
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_web = False
    if not is_web:
        raise UserError("is no web address", cure="write https://HOST/PATH, or env:NAME", field=field)


def resolved_address(address: SecretStr, environ: Mapping[str, str], field: str) -> str:
    """The address itself.

    Raises:
        UserError: it is to come from a variable that is not set, or a config.json gave it, which keeps none.
    """
    text = address.get_secret_value()
    name = text.removeprefix(_FROM_ENVIRONMENT)
    if name != text:
        text = environ.get(name, "")
        if not text:
            raise UserError(f"{name} is not set", cure=f"export {name}, or give the address", field=field)
    elif HIDDEN in text:
        raise UserError("is an address that was hidden", cure="give the address itself, or env:NAME", field=field)
    return text


def without_addresses(word: str) -> str:
    """A word of a command line as it may be written down: ``alerts.webhook=*****``."""
    key, equals, value = word.partition("=")
    secret = key.strip() in ("alerts", "alerts.webhook", "alerts.urls") or key.strip().startswith("alerts.urls.")
    return f"{key}={HIDDEN}" if equals and value and secret and not value.startswith(_FROM_ENVIRONMENT) else word
