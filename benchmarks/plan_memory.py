"""Memory as the planner predicts it, beside that of real training steps on this CPU.

    python benchmarks/plan_memory.py            # all layouts: up to four processes at a time, a few minutes
    python benchmarks/plan_memory.py --quick    # a few
    python benchmarks/plan_memory.py --only pipeline

Every rank follows the tensors that its operators make until they are freed (`support/memory/tracker.py`). Parameters,
gradients, optimizer and activations are weighed at the end of passes, where nothing is in the middle of a computation;
the peak is after any operator of the step's forward and backward passes. The second of two steps counts. Printed is the
rank that is farthest off in each kind, and MiB are of that rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from support.harness import benchmark_parser
from support.memory.layouts import LAYOUTS, Layout
from support.memory.runs import Seen, one_process, several_processes

from phalanx.plan.memory.rank import rank_memory
from phalanx.plan.types import RankMemory

KINDS = ("parameters", "gradients", "optimizer", "activations", "loss_head", "communication", "peak")
BAR = 0.05
_MIB = 1 << 20
_SMALL = 1e-3
"""Share of the peak below which a kind is not compared: it is made of single numbers."""


@dataclass(frozen=True)
class Compared:
    """One kind of memory on one rank, bytes."""

    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return self.predicted / self.measured - 1 if self.measured else 0.0


def measured(layouts: Sequence[Layout]) -> list[tuple[Layout, list[Seen]]]:
    """All ranks of all layouts; those of one size share their processes."""
    found = [(layout, one_process(layout)) for layout in layouts if layout.ranks == 1]
    for count in sorted({layout.ranks for layout in layouts} - {1}):
        some = [layout for layout in layouts if layout.ranks == count]
        found += zip(some, several_processes(some), strict=True)
    return found


def compared(layout: Layout, seen: Sequence[Seen]) -> dict[str, Compared]:
    """For each kind the rank that is farthest off."""
    job, strategy = layout.planned()
    planned = rank_memory(job, strategy)
    stride = len(seen) // len(planned)
    pairs = [(planned[one.rank // stride], one) for one in seen]
    return {kind: max((_compare(kind, *pair) for pair in pairs), key=lambda c: abs(c.error)) for kind in KINDS}


def _compare(kind: str, planned: RankMemory, seen: Seen) -> Compared:
    predicted = planned.total if kind == "peak" else getattr(planned, kind)
    actual = getattr(seen, kind)
    return Compared(0.0, 0.0) if max(predicted, actual) < _SMALL * seen.peak else Compared(predicted, actual)


def table(rows: Iterable[tuple[Layout, dict[str, Compared]]]) -> Table:
    """Predicted and measured MiB, and the error."""
    out = Table("layout", *KINDS, title="MiB predicted / measured, and error", header_style="bold")
    for layout, kinds in rows:
        cells = [
            f"{c.predicted / _MIB:.2f} / {c.measured / _MIB:.2f} {c.error:+.1%}" if c.measured else "-"
            for c in kinds.values()
        ]
        out.add_row(layout.name, *cells)
    return out


def main() -> None:
    """Measure, and print the table."""
    parser = benchmark_parser(__doc__, quick="a few layouts")
    parser.add_argument("--only", default="", help="layouts whose name has this in it")
    parser.add_argument("--ranks", type=int, default=0, help="layouts of so many processes; 0: all")
    arguments = parser.parse_args()
    chosen = [one for one in LAYOUTS if arguments.only in one.name and (one.quick or not arguments.quick)]
    chosen = [one for one in chosen if arguments.ranks in (0, one.ranks)]
    rows = [(layout, compared(layout, seen)) for layout, seen in measured(chosen)]
    console = Console(width=200)
    console.print(table(rows))
    for kind in KINDS:
        errors = [abs(kinds[kind].error) for _, kinds in rows if kinds[kind].measured]
        if errors:
            mean = sum(errors) / len(errors)
            within = sum(e <= BAR for e in errors)
            console.print(f"{kind}: mean {mean:.1%}, largest {max(errors):.1%}, within 5 %: {within} of {len(errors)}")


if __name__ == "__main__":
    main()
