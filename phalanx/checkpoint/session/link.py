"""The connection of a rank to the keeper of its host, made again in the background when it is lost. Torch-free."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from phalanx.checkpoint.keeper.contract import Keeper, KeeperLostError
from phalanx.checkpoint.replicas.contract import RefusedError
from phalanx.core.errors import UserError

T = TypeVar("T")
_PAUSE_S = 2.0  # between two attempts to connect


class Link:
    """A keeper that may come and go. Methods may be called from any thread.

    Args:
        connect: starts the keeper where there is none, and connects; may take a second.
        report: is given a line for people when the keeper is lost, and when there is one again.
    """

    def __init__(self, connect: Callable[[], Keeper], report: Callable[[str], None]) -> None:
        self._connect, self._report = connect, report
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._arrange: Callable[[Keeper], None] = lambda keeper: None
        self._again: threading.Thread | None = None
        self._keeper: Keeper | None = connect()
        self.losses = 0
        self.is_renewed = False
        """There is another keeper than before; whoever tells the other hosts puts it back to False."""

    @property
    def keeper(self) -> Keeper | None:
        """The present one, or None."""
        return self._keeper

    def ask(self, question: Callable[[Keeper], T], otherwise: T) -> T:
        """The keeper's answer, or `otherwise` where it is gone; it is then looked for in the background.

        Raises:
            UserError: a later attempt of the run has begun.
        """
        with self._lock:
            if self._keeper is None:
                return otherwise
            try:
                return question(self._keeper)
            except KeeperLostError as error:
                self._lose(error)
                return otherwise
            except RefusedError as error:
                raise _is_a_leftover(error) from error

    def arrange(self, arrangement: Callable[[Keeper], None]) -> None:
        """Do this with the keeper, and with every one that takes its place.

        Raises:
            UserError: as `ask`.
        """
        with self._lock:
            self._arrange = arrangement
            self.ask(arrangement, None)

    def close(self, *, clean: bool) -> None:
        """Hang up.

        Args:
            clean: the job has ended well; the keeper is not needed any more.
        """
        self._closing.set()
        if self._again is not None:
            self._again.join()
        with self._lock:
            if clean:
                self.ask(lambda keeper: keeper.finish(), None)
            if self._keeper is not None:
                _hang_up(self._keeper)
            self._keeper = None

    def _lose(self, error: KeeperLostError) -> None:
        assert self._keeper is not None
        _hang_up(self._keeper)
        self._keeper = None
        self.losses += 1
        self._report(f"the keeper of this host is lost ({error}): snapshots in its memory are gone, training goes on")
        if not self._closing.is_set():
            self._again = threading.Thread(target=self._reconnect, name="keeper", daemon=True)
            self._again.start()

    def _reconnect(self) -> None:
        told = ""
        while not self._closing.is_set():
            try:
                keeper = self._connect()
                with self._lock:
                    self._arrange(keeper)
                    self._keeper, self.is_renewed = keeper, True
                self._report("there is a keeper on this host again; snapshots are taken as before")
                return
            except RefusedError as error:
                self._report(str(_is_a_leftover(error)))
                return
            except (KeeperLostError, OSError, UserError) as error:
                if str(error) != told:
                    self._report(f"no keeper can be started on this host ({error}); it is tried again")
                told = str(error)
            self._closing.wait(_PAUSE_S)


def _hang_up(keeper: Keeper) -> None:
    with suppress(BufferError):  # a copy under way, or a view for the next one, still has the memory
        keeper.close()


def _is_a_leftover(error: RefusedError) -> UserError:
    return UserError(
        f"a later attempt of this run has begun ({error}), so this one must not write checkpoints any more",
        cure="let the later one go on; if it is not there any more either, start the run again",
    )
