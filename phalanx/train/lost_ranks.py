"""What the launcher of a run's ranks leaves in the run folder where one of them ended without a word.

Of all processes of the run it alone knows which rank was killed, by what, and that the others only ended because of it.
It says so where whoever looks at the run reads: `ended.json`, the log of that rank, and `processes/`.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path

from phalanx.launch.rank_failures import Failure
from phalanx.telemetry.config import LoggingConfig
from phalanx.telemetry.run_list import Culprit, note_end
from phalanx.telemetry.run_log import ENDED, RunLog, log_path
from phalanx.telemetry.run_presence import Presence, presences, withdraw


class LostRanks:
    """Hears of the failures of one launch; made before its ranks are started."""

    def __init__(self, run: Path, world_size: int, config: LoggingConfig) -> None:
        self._run, self._world_size, self._config = run, world_size, config
        self._began_s = time.time()
        self._culprit: Culprit | None = None

    def failed(self, failure: Failure) -> None:
        """Ranks are being ended because of this; what the rank could say itself it has said."""
        self._culprit = None
        found = next((one for one in self._present() if one.rank == failure.rank), None)
        if found is None or failure.kind not in ("signal", "status"):
            return
        self._culprit = Culprit(found.rank, found.pid, found.start, failure.summary)
        note_end(self._run, None, self._culprit.why, found.start, self._culprit)
        self._log(found, f"{failure.summary}; the launcher ends the other ranks", "ERROR")

    def close(self) -> None:
        """All ranks are gone: those that the launcher had to kill are victims."""
        if self._culprit is None:
            return
        for one in self._present():
            if one.rank != self._culprit.rank:
                self._log(one, f"by the launcher, since {self._culprit.why}", "WARNING")
                withdraw(self._run, one.rank)
        # Once more, for figures that were written meanwhile are no newer than the end.
        note_end(self._run, None, self._culprit.why, self._culprit.start, self._culprit)

    def _present(self) -> list[Presence]:
        """Ranks of this launch that have not taken their leave."""
        return [one for one in presences(self._run) if one.began_unix_s >= self._began_s]

    def _log(self, of: Presence, text: str, level: str) -> None:
        config = self._config
        if config.file_bytes:
            path = log_path(self._run, of.rank, self._world_size, socket.gethostname())
            log = RunLog(path, of.rank, of.start, file_bytes=config.file_bytes, files=config.files)
            with suppress(OSError):
                log.note(ENDED + text, level)
            log.close()
