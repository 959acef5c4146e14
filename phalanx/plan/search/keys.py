"""A layout as text to paste into a config of `phalanx train`, and what of it such a config cannot say."""

from __future__ import annotations

import json
from dataclasses import replace

from phalanx.plan.jobs import settings_of
from phalanx.plan.types import Job, Strategy

# A bucket for each model chunk: more than any chunk has.
_WHOLE_CHUNK_BYTES = 1_000_000_000_000


def toml_keys(job: Job, strategy: Strategy) -> str:
    """The sections ``[parallel]`` and ``[train]`` that give `strategy`; settings with their defaults are left out.

    What `foreign` names is not in them.
    """
    one_bucket = strategy.bucket_bytes == 0
    settings = settings_of(replace(strategy, bucket_bytes=_WHOLE_CHUNK_BYTES) if one_bucket else strategy)
    settings["train.global_batch"] = job.global_batch
    sections: dict[str, list[str]] = {"parallel": [], "train": []}
    for key, value in settings.items():
        section, name = key.split(".")
        sections[section].append(f"{name} = {json.dumps(value)}")
    return "\n\n".join(f"[{section}]\n" + "\n".join(lines) for section, lines in sections.items() if lines) + "\n"


def foreign(strategy: Strategy) -> tuple[str, ...]:
    """What `phalanx train` cannot do of `strategy`, in words; empty where it can do all."""
    reasons = {
        "recompute = attention: phalanx train recomputes none, all but matrix products, the MLP's first too, or all": (
            strategy.recompute == "attention"
        ),
        "sequence_parallel = false: phalanx train always splits rows between tensor ranks": (
            strategy.tensor > 1 and not strategy.sequence_parallel
        ),
        "expert parallel: phalanx train has no mixtures of experts": strategy.expert > 1,
    }
    return tuple(reason for reason, holds in reasons.items() if holds)
