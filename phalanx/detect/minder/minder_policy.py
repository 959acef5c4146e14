"""Numbers of the judge of machines that a user may set: `phalanx detect machines … continuity_s=120`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from phalanx.core.config import Config
from phalanx.detect.monitoring.metric_catalogue import CATALOGUE


class MinderPolicy(Config):
    """How long and how much a machine must differ from the others before it is called faulty."""

    continuity_s: float = Field(
        240.0, ge=8, le=86_400, description="s for which a machine must differ before it is called faulty"
    )
    gap_s: float = Field(30.0, ge=0, le=600, description="s for which it may look like the others in between")
    share: float = Field(
        0.4, ge=0, le=1, description="of the samples of that time in which it must differ by more than the threshold"
    )
    sensitivity: float = Field(
        1.0,
        gt=0,
        le=100,
        description="factor on differences: 2 finds half as large ones",
    )
    settle_s: float = Field(
        60.0, ge=16, le=3600, description="s at the beginning in which each machine's own habits are learnt, not judged"
    )
    memory_s: float = Field(
        600.0, ge=60, le=86_400, description="s over which its habits fade, so that slow drifts are no fault"
    )
    smoothing_s: float = Field(6.0, ge=1, le=120, description="s over which differences are averaged")
    long_smoothing_s: float = Field(30.0, ge=1, le=600, description="s over which they are averaged to find small ones")
    vanished_s: float = Field(
        240.0, ge=8, le=86_400, description="s for which a metric that the others have must be lacking"
    )
    fill_s: float = Field(10.0, ge=0, le=300, description="s over which the last value stands for missing ones")
    together_s: float = Field(
        45.0, ge=0, le=3600, description="s within which machines that begin to differ are one incident"
    )
    at_once_s: float = Field(
        4.0, ge=0, le=600, description="s within which machines must begin to differ to be blamed together"
    )
    spread_s: float = Field(
        240.0, ge=0, le=3600, description="s after an incident in which others that show the same follow from it"
    )
    alike: float = Field(
        0.5, ge=0, le=1, description="of the largest difference among them, that a machine must show to be blamed too"
    )
    most_at_once: float = Field(
        0.34, gt=0, lt=0.5, description="share of the machines; where more differ the job has changed, not they"
    )
    most_blamed: float = Field(
        0.125, gt=0, lt=0.5, description="share of the machines that one incident may blame, such as those of a switch"
    )
    evict_from: float = Field(
        0.95, gt=0, le=1, description="confidence from which the advice is to take a machine out, not to check it"
    )
    pause_s: float = Field(
        600.0, ge=0, le=86_400, description="s for which one machine may evaluate or save while all others wait"
    )
    machines: int = Field(4, ge=3, description="fewer are not compared")
    metrics: tuple[str, ...] = Field(
        (), description="names of the catalogue that are compared, in this order; empty: those that the tree learnt"
    )
    threads: int = Field(0, ge=0, le=256, description="that judge metrics; 0: as many as cores")

    @field_validator("metrics", mode="before")
    @classmethod
    def _names(cls, given: Any) -> Any:
        """One name, or several with commas, without the brackets of a list."""
        return [one.strip() for one in given.split(",") if one.strip()] if isinstance(given, str) else given

    @field_validator("metrics")
    @classmethod
    def _known(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [one for one in given if one not in CATALOGUE]:
            raise ValueError(f"{unknown[0]!r} is no metric of the catalogue; use some of {', '.join(CATALOGUE)}")
        return given
