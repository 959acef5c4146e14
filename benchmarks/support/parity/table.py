"""The tables of the parity benchmark: as rows of text, on the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from support.parity.compare import Difference
from support.parity.reshard import Moved
from support.parity.task import Case

Row = tuple[str, ...]


def parity_row(name: str, case: Case, kind: str, ways: str, found: Difference) -> Row:
    """A layout and how far it is from a single process."""
    return (
        name,
        str(case.spread.layout.world_size),
        kind,
        "; ".join(part for part in (ways, _model(case)) if part),
        "equal" if found.weights_equal else "DIFFER",
        f"{found.gradients:.0e}",
        f"{found.losses:.0e}",
        f"{found.norms:.0e}",
        "equal" if found.passes else "FAILS",
    )


def reshard_row(moved: Moved) -> Row:
    """A pair of layouts, and what came of a run that moved from one to the other."""
    state = "equal" if not moved.different else "DIFFERS: " + ", ".join(moved.different[:3])
    verdict = "equal" if moved.passes else "FAILS"
    return moved.saved, moved.loaded, state, f"{moved.losses:.0e}", f"{moved.norms:.0e}", verdict


def shown(heads: Sequence[str], rows: Sequence[Row]) -> Table:
    table = Table(*heads)
    for row in rows:
        table.add_row(*row, style="" if row[-1] == "equal" else "red")
    return table


def markdown(heads: Sequence[str], rows: Sequence[Row]) -> str:
    lines = [tuple(heads), ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _model(case: Case) -> str:
    """What is not the plain model: a serial block, full attention, uneven masks and documents, no dropout."""
    model = case.model
    parts = [
        "parallel block" if model.get("block") == "parallel" else "",
        "windows and full" if "full" in model.get("attention", ()) else "windows" if "window" in model else "",
        "grouped heads" if "kv_heads" in model else "",
        "dropout" if "dropout" in model else "",
        "tied" if "tie_embeddings" in model else "",
        "GPT (biases, LayerNorm, learned positions)" if "bias" in model else "",
        "8 layers" if model.get("layers") == 8 else "",
        "recompute" if case.recompute != "none" else "",
        "" if case.masked else "even weights, no documents",
    ]
    return ", ".join(part for part in parts if part)
