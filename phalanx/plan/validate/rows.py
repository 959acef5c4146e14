"""Published measurements of whole training steps, as they stand in the tables of this folder."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import UserError

TABLES = Path(__file__).parent / "tables"

_COLUMNS = (
    *("row_id", "layers", "hidden", "heads", "vocab", "seq", "global_batch", "micro_batch"),
    *("n_gpus", "tp", "pp", "vpp", "dp", "recompute", "seq_parallel", "iter_time_s"),
)
"""Those that a table must have; kv_heads, ffn, cp and shard it may have."""


@dataclass(frozen=True)
class Row:
    """One measured step.

    Attributes:
        micro_batch: 0 where it is not published.
        recompute: ``full``, ``selective``, ``elementwise``, ``none``, or empty where it is not published.
        sequence_parallel: None where it is not published.
        kv_heads, mlp_width: 0 where they follow from heads and hidden width.
        shard: data-parallel ranks that split state; 0: all.
    """

    row_id: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    global_batch: int
    micro_batch: int
    devices: int
    tensor: int
    pipeline: int
    chunks: int
    data: int
    recompute: str
    sequence_parallel: bool | None
    step_s: float
    kv_heads: int = 0
    mlp_width: int = 0
    context: int = 1
    shard: int = 0


def read_table(path: Path) -> list[Row]:
    """The rows of a CSV table; lines that start with # say where it comes from.

    Raises:
        UserError: there is no such table, or a column is missing or no number.
    """
    if not path.is_file():
        raise UserError("there is no such table", cure="give a folder of CSV tables", field="--tables", value=str(path))
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(line for line in file if not line.startswith("#"))
        missing = [column for column in _COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            raise UserError(
                f"the table has no column {', '.join(missing)}",
                cure=f"give it the columns {', '.join(_COLUMNS)}",
                field=str(path),
            )
        return [_row(path, line) for line in reader]


def _row(path: Path, line: dict[str, str]) -> Row:
    try:
        return Row(
            row_id=line["row_id"],
            layers=int(line["layers"]),
            hidden=int(line["hidden"]),
            heads=int(line["heads"]),
            vocab=int(line["vocab"]),
            sequence=int(line["seq"]),
            global_batch=int(line["global_batch"]),
            micro_batch=int(line["micro_batch"] or 0),
            devices=int(line["n_gpus"]),
            tensor=int(line["tp"]),
            pipeline=int(line["pp"]),
            chunks=int(line["vpp"]),
            data=int(line["dp"]),
            recompute=line["recompute"],
            sequence_parallel={"yes": True, "no": False}.get(line["seq_parallel"]),
            step_s=float(line["iter_time_s"]),
            kv_heads=int(line.get("kv_heads") or 0),
            mlp_width=int(line.get("ffn") or 0),
            context=int(line.get("cp") or 1),
            shard=int(line.get("shard") or 0),
        )
    except ValueError as error:
        raise UserError(
            f"row {line['row_id']} is not made of numbers: {error}", cure="correct the table", field=str(path)
        ) from None
