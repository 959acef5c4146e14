"""A session in the background, or one for which training stands still, as the settings want it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.session.blocking import BlockingSession
from phalanx.checkpoint.session.opening import open_session
from phalanx.checkpoint.session.session import Session
from phalanx.core.layout import Layout
from phalanx.core.peers import ALONE, Copies, Peers
from phalanx.core.points import NO_POINTS, Points

Saver = Session | BlockingSession
"""What takes the checkpoints of a training loop and takes them up again; both have the same methods."""


def open_saver(
    destination_url: str,
    config: CheckpointConfig,
    *,
    peers: Peers = ALONE,
    copies: Copies | None = None,
    layout: Layout | str = "1",
    run_config: Mapping[str, Any] | None = None,
    report: Callable[[str], None] = print,
    points: Points = NO_POINTS,
) -> Saver:
    """Begin an attempt of a run, as ``checkpoint.mode`` wants it; called by all ranks together.

    Args and raises: as `phalanx.checkpoint.session.opening.open_session`.
    """
    begin: Callable[..., Saver] = BlockingSession if config.mode == "blocking" else open_session
    return begin(
        destination_url,
        config,
        peers=peers,
        copies=copies,
        layout=layout,
        run_config=run_config,
        report=report,
        points=points,
    )
