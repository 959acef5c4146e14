"""Which step is to be written next into a ring of slots, and who may read it. Pure; knows no memory and no sockets."""

from __future__ import annotations

from dataclasses import dataclass, field


class DisagreementError(ValueError):
    """A reader asked for something other than the readers it shares its batches with."""


@dataclass
class Ring:
    """The slots of one stream of one data-parallel index, and the readers that share them.

    A reader that wants step s has let go of step ``s - ahead``, which had the same slot. So step s is written as soon
    as somebody wants it and everybody who will ever read this ring has let go of what lies there; those are `expected`
    readers, also while some of them have not come yet. A reader that has left holds nothing any more.

    Attributes:
        index: the data-parallel rank whose samples these are, among `ranks`.
        ahead: slots.
        expected: readers that this host has for `index`.
        written: steps that have been written.
    """

    index: int
    ranks: int
    ahead: int
    expected: int
    written: int = 0
    _joined: int = 0
    _wanted: dict[int, int] = field(default_factory=dict)
    _plan: dict[int, tuple[int, int]] = field(default_factory=dict)

    def join(self, reader: int) -> None:
        """`reader` shares this ring from now on.

        Raises:
            DisagreementError: more readers come than are expected.
        """
        if self._joined == self.expected:
            told = f"the loader was told of {self.expected} readers of data-parallel index {self.index} on this host"
            raise DisagreementError(f"{told}, and one more came")
        self._joined += 1
        self._wanted[reader] = 0

    def leave(self, reader: int) -> None:
        """`reader` is gone, and holds nothing any more."""
        self._wanted.pop(reader, None)

    @property
    def is_over(self) -> bool:
        """Whether all readers have come and gone."""
        return self._joined == self.expected and not self._wanted

    def want(self, reader: int, step: int, start: int, count: int) -> bool:
        """`reader` wants samples ``start..start+count`` as `step`; returns whether they have been written already.

        Raises:
            DisagreementError: another reader wanted other samples as this step.
        """
        if step != self._wanted[reader]:
            raise DisagreementError(f"step {step} was asked for, step {self._wanted[reader]} was expected")
        asked = self._plan.setdefault(step, (start, count))
        if asked != (start, count):
            others, mine = (f"{s} to {s + n}" for s, n in (asked, (start, count)))
            who = f"ranks that share the batches of data-parallel index {self.index}"
            raise DisagreementError(f"{who} disagree on step {step}: one asks for samples {mine}, another for {others}")
        self._wanted[reader] += 1
        return step < self.written

    def due(self) -> tuple[int, int, int] | None:
        """(step, start, count) of the step that is to be written now; None while there is none."""
        step = self.written
        if not self.wanting(step):
            return None
        everybody = self._joined == self.expected and all(wanted > step for wanted in self._wanted.values())
        return (step, *self._plan[step]) if step < self.ahead or everybody else None

    def wanting(self, step: int) -> list[int]:
        """The readers that have asked for `step`, and have not left."""
        return [reader for reader, wanted in self._wanted.items() if wanted > step]

    def wrote(self) -> None:
        """The step that was due is in its slot now."""
        self._plan.pop(self.written - self.ahead, None)
        self.written += 1
