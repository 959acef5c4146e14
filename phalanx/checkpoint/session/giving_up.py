"""Telling the persisters of all hosts that a rank's part of a checkpoint will not come, where its keeper cannot."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from phalanx.checkpoint.persist.ending import withdraw
from phalanx.checkpoint.persist.parts import Writing
from phalanx.checkpoint.session.job import Job
from phalanx.checkpoint.storage.base import SupersededError
from phalanx.checkpoint.storage.location import open_store
from phalanx.core.errors import UserError


@dataclass
class GivingUp:
    """What this rank has to say; storage is written beside training.

    Without a word the publisher would wait for the part until `Destination.timeout_s` is over, and others, where the
    publisher itself is gone, twice as long; no other checkpoint could be made durable until then.

    Args:
        job: whose checkpoints.

    Attributes:
        set_id: of the present snapshots.
    """

    job: Job
    set_id: str = ""
    _telling: list[threading.Thread] = field(default_factory=list)

    def tell(self, step: int, problem: str) -> None:
        """The part of this rank of the checkpoint of `step` does not come because of `problem`; does not wait."""
        writing = Writing(step, self.job.attempt, self.set_id, self.job.destination.nonce)
        thread = threading.Thread(target=self._tell, args=(writing, problem), name="giving up", daemon=True)
        self._telling = [one for one in self._telling if one.is_alive()] + [thread]
        thread.start()

    def settle(self, timeout_s: float) -> None:
        """Wait until all is told, or for `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._telling:
            thread.join(max(deadline_s - time.monotonic(), 0.0))

    def _tell(self, writing: Writing, problem: str) -> None:
        destination = self.job.destination
        try:
            withdraw(open_store(destination.url, destination.options), writing, self.job.peers.rank, problem)
        except SupersededError:
            pass  # then nobody waits for it
        except (OSError, UserError) as error:
            self.job.report(
                f"snapshot of step {writing.step}: the persisters of other hosts cannot be told that it will not be "
                f"durable ({error}); they wait for it for up to {2 * destination.timeout_s:.0f} s"
            )
