"""What a run does when its state is found to be corrupt: say so, and end with an error that names the rank.

The rank that is to blame ends first, so that every launcher takes its end for the cause: the others wait to be ended.
Under `phalanx run` a rule for logs makes it a fault of its host, which is then checked. Where nobody is named, one of
those that differ ends as a program that failed, for which no host is evicted. The job goes on from the newest state
that is not suspect (`phalanx.detect.corruption.digest_file.suspect_spans`).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch

from phalanx.core.peers import PeerError
from phalanx.detect.corruption.copy_judge import CorruptionEvidence, CorruptionPolicy, judge_corruption
from phalanx.detect.corruption.digest_file import Record, UnlikeCopies, UnlikeReplays, append_digests
from phalanx.train.ranks import Ranks

_PATIENCE_S = 10.0
"""How long others let a launcher end them, before they end by themselves."""


def host_name() -> str:
    """Of this rank's host: as a driver names it (``PHALANX_HOST``), else as the machine does."""
    return os.environ.get("PHALANX_HOST") or socket.gethostname()


class SilentCorruptionError(RuntimeError):
    """State is not what it should be, of this rank or of one of its peers."""


class CorruptionResponse:
    """One rank's side; all ranks call it alike.

    Args:
        folder: of the run, where it becomes an incident.
        policy: ``telemetry.at_corruption``.
        note: shows a line to a person.
        is_stopping: whether this rank has been asked to end.
    """

    def __init__(
        self,
        ranks: Ranks,
        folder: Path,
        policy: Literal["stop", "report"],
        note: Callable[[str], None],
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._ranks, self._folder, self._policy = ranks, folder, policy
        self._note, self._is_stopping = note, is_stopping
        self._said: set[tuple[int, ...]] = set()

    def act(self, unlike: Sequence[UnlikeCopies | UnlikeReplays]) -> None:
        """Judge what differs, which the first rank alone knows, and do what the policy says.

        Raises:
            SilentCorruptionError: the run ends; on the ranks that are named, or on the first of those that differ.
            PeerError: the same, on all others.
        """
        verdict = judge_corruption(CorruptionEvidence(unlike=tuple(unlike)), CorruptionPolicy())
        then = verdict.detections[0].then[-1] if verdict.detections else ""
        lowest = min((min(one.digests) for one in unlike), default=0)
        # Ranks that do not compute alike round differently: that is the program's, and no reason to end it.
        stops = self._policy == "stop" and any(found.advice != "program" for found in verdict.detections)
        told = [list(verdict.blamed_ranks), lowest, f"{verdict.sentence} Now {then}.", stops]
        named, lowest, sentence, stops = self._ranks.peers.broadcast(told)
        # What is wrong once is found again at every check: it is said when it is new.
        if self._ranks.is_first and tuple(named) not in self._said:
            self._said.add(tuple(named))
            self._note(f"ranks hold, or compute, different bits: {sentence}")
            _note_incident(self._folder, unlike[0].step, sentence)
        if not stops:
            return
        rank = self._ranks.rank
        if rank in named:
            raise SilentCorruptionError(f"this rank is silently corrupted: {sentence}")
        if not named and rank == lowest:
            raise SilentCorruptionError(f"nobody can say which rank is silently corrupted: {sentence}")
        until_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s and not self._is_stopping():
            time.sleep(0.05)
        raise PeerError(f"ends with a peer, for silent data corruption: {sentence}")


def write_records(folder: Path, records: Sequence[Record], note: Callable[[str], None]) -> None:
    """Into the file of a run; what cannot be written ends no run, but where bits differ it is said."""
    try:
        append_digests(folder, records)
    except OSError as error:  # a full disk ends a run where it cannot save, not where it cannot check
        if any(isinstance(one, UnlikeCopies | UnlikeReplays) for one in records):
            note(
                f"which bits differ cannot be written ({error}), so the next start does not know which states are "
                "suspect: mend that before it begins"
            )


def _note_incident(folder: Path, step: int, sentence: str) -> None:
    """Spans of this time are kept, and curves of the run show a mark."""
    from phalanx.telemetry.span_writer import note_incident  # it imports Arrow

    with suppress(OSError):
        note_incident(folder / "telemetry", "silent corruption", time.time_ns(), step=step, title=sentence)


def program_of(device: torch.device) -> str:
    """What decides this rank's arithmetic besides weights and data."""
    if device.type == "cuda":
        return f"torch {torch.__version__}, {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    threads = torch.get_num_threads()
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {threads} threads"
