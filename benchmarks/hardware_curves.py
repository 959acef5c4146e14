"""Make the curves of `phalanx/plan/hardware` from measured products and collectives, and state their errors.

Reads the isolated kernels of ai-dynamo/aiconfigurator (Parquet files, Apache-2.0): nothing else is fitted to. Errors of
products are those of shapes that were held out: a random third of all, and everything with six of the widths, since the
widths of a model are seldom among the measured ones. Needs pyarrow. Example:

    python benchmarks/hardware_curves.py --data ../shared/data/hardware/aiconfigurator --write
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pyarrow.parquet
from support.harness import benchmark_parser
from support.tile_fit import Chip, Products, errors, fitted

import phalanx.plan.hardware as hardware
from phalanx.plan.hardware.device_model import LogCurve, TileGemm

HERE = Path(hardware.__file__).parent
CHIPS = {
    "a100_sxm": Chip("a100_sxm_80gb", 108, 312e12, 2.039e12),
    "h100_sxm": Chip("h100_sxm", 132, 989.4e12, 3.35e12),
    "h200_sxm": Chip("h200_sxm", 132, 989.4e12, 4.8e12),
}
LINKS = {"a100_sxm": "a100_nvlink", "h100_sxm": "h100_nvlink", "h200_sxm": "h200_nvlink"}
KINDS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
HELD_WIDTHS = (768, 1536, 2560, 3584, 5120, 7168)
CLASSES = (0.1, 1, 5, 20, 50, 100, 500, 2000, math.inf)
BEGIN, END = "# Made by benchmarks/hardware_curves.py:", "# So far made by benchmarks/hardware_curves.py."
LINES = ",\n  "
KNOWN = 'mark = "derived", source = "kernels" }'


def main() -> None:
    parser = benchmark_parser(__doc__, quick="a shorter search, and one device only")
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data/hardware/aiconfigurator"), help="Parquet files"
    )
    parser.add_argument("--devices", nargs="*", default=list(CHIPS), choices=list(CHIPS), help="default: all")
    parser.add_argument("--write", action="store_true", help="write the curves into phalanx/plan/hardware")
    given = parser.parse_args()
    if not given.data.exists():
        raise SystemExit(f"{given.data} is not there: give the folder of the Parquet files with --data")
    for device in given.devices[:1] if given.quick else given.devices:
        gemm = products(given.data, device, rounds=4 if given.quick else 30)
        tables = collectives(given.data, device)
        if given.write:
            write_gemm(CHIPS[device], gemm)
            write_links(LINKS[device], tables)


def products(data: Path, device: str, rounds: int) -> TileGemm:
    """Print the errors of products held out, and return the model fitted to all."""
    chip, measured = CHIPS[device], read_products(data / f"{device}_gemm.parquet")
    third = np.random.default_rng(0).random(len(measured.m)) < 1 / 3
    widths = np.isin(measured.n, HELD_WIDTHS) | np.isin(measured.k, HELD_WIDTHS)
    print(f"{chip.name}: {len(measured.m)} products")
    for name, held in (("a random third held out", third), ("six widths held out", widths)):
        show_errors(name, fitted(chip, measured.where(~held), rounds), measured.where(held))
    return fitted(chip, measured, rounds)


def read_products(path: Path) -> Products:
    """The bf16 products that are large enough to matter."""
    columns = pyarrow.parquet.read_table(path).to_pydict()
    rows = zip(*(columns[name] for name in ("m", "n", "k", "latency", "gemm_dtype")), strict=True)
    table = np.array([row[:4] for row in rows if row[4] == "bfloat16"], dtype=float).T
    found = Products(table[0], table[1], table[2], table[3] * 1e-3)
    return found.where((found.gflop >= 0.1) & (np.minimum(np.minimum(found.m, found.n), found.k) >= 64))


def show_errors(name: str, gemm: TileGemm, held: Products) -> None:
    print(f"  {name}      GFLOP  products  signed mean  signed median  mean  median  nine in ten under")
    error, least = errors(gemm, held), np.minimum(np.minimum(held.m, held.n), held.k)
    for low, high in itertools.pairwise(CLASSES):
        chosen = (held.gflop >= low) & (held.gflop < high) & (least >= 128)
        if chosen.any():
            show(f"{low:g} to {high:g}", error[chosen])
    show("all from 1 GFLOP on", error[held.counted])
    layers = (held.m >= 1024) & (np.minimum(held.n, held.k) >= 768)
    show("1,024 tokens, widths 768 or more", error[layers])


def show(name: str, error: np.ndarray) -> None:
    size = np.abs(error)
    numbers = (error.mean(), np.median(error), size.mean(), np.median(size), np.quantile(size, 0.9))
    print(f"  {name:>32} {len(error):9d}  " + "  ".join(f"{100 * number:+8.2f} %" for number in numbers))


def collectives(data: Path, device: str) -> dict[str, dict[int, tuple[list[float], list[float]]]]:
    """By kind and ranks: bytes and seconds at every other measured size; prints what those between say."""
    columns = pyarrow.parquet.read_table(data / f"{device}_nccl.parquet").to_pydict()
    found: dict[tuple[str, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    names = ("op_name", "num_gpus", "message_size", "nccl_dtype", "latency")
    for kind, ranks, elements, dtype, milliseconds in zip(*(columns[name] for name in names), strict=True):
        found[KINDS[kind], ranks][elements * (2 if dtype == "half" else 1)].append(milliseconds * 1e-3)
    tables: dict[str, dict[int, tuple[list[float], list[float]]]] = defaultdict(dict)
    for (kind, ranks), times in sorted(found.items()):
        sizes = sorted(times)
        seconds = np.maximum.accumulate([float(np.mean(times[size])) for size in sizes])
        kept = sizes[::2] if sizes[::2][-1] == sizes[-1] else [*sizes[::2], sizes[-1]]
        curve = LogCurve(kept, [float(seconds[sizes.index(size)]) for size in kept], grows=True)
        between = [(size, s) for size, s in zip(sizes, seconds, strict=True) if size not in kept]
        show(f"{kind}, {ranks} ranks, sizes between", np.array([math.log(curve.at(size) / s) for size, s in between]))
        tables[kind][ranks] = (kept, list(curve.ys))
    return tables


def write_gemm(chip: Chip, gemm: TileGemm) -> None:
    """Put the model into the file of its device, between the two comments."""
    tiles = listed(listed((t.rows, t.columns, t.splits, t.share, t.start_columns)) for t in gemm.tiles)
    correction = gemm.correction
    assert correction is not None
    lines = [
        "[gemm.half]",
        f"cores = {chip.cores}",
        f"tiles = {{ value = {tiles}, {KNOWN}",
        *(
            f"{key} = {{ value = {getattr(gemm, key):.4g}, {KNOWN}"
            for key in ("split_ratio", "memory_ratio", "softness", "launch_s")
        ),
        f"clock_slower_ratio = {{ value = {gemm.clock.slower_ratio:.4g}, {KNOWN}",
        f"clock_from_s = {{ value = {gemm.clock.from_s}, {KNOWN}",
        f"clock_to_s = {{ value = {gemm.clock.to_s}, {KNOWN}",
        f"correction_waves = {{ value = {listed(correction.axes[0])}, {KNOWN}",
        f"correction_columns = {{ value = {listed(correction.axes[1])}, {KNOWN}",
        f"correction_ratio = {{ value = {listed(map(listed, correction.rows), LINES)}, {KNOWN}",
    ]
    path = HERE / "devices" / f"{chip.name}.toml"
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}", encoding="utf-8")


def write_links(name: str, tables: dict[str, dict[int, tuple[list[float], list[float]]]]) -> None:
    """Put the collectives into the file of their links, between the two comments."""
    lines = []
    for kind, by_ranks in tables.items():
        sizes = next(iter(by_ranks.values()))[0]
        rows = [[LogCurve(*table, grows=True).at(size) for size in sizes] for table in by_ranks.values()]
        known = KNOWN.replace("derived", "measured")
        lines += [f"[{kind}]", f"message_bytes = {{ value = {listed(sizes)}, {known}"]
        lines += [f"ranks = {{ value = {listed(by_ranks)}, {known}"]
        lines += [f"time_s = {{ value = {listed(map(listed, rows), LINES)}, {known}", ""]
    path = HERE / "links" / f"{name}.toml"
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"{END}{after}", encoding="utf-8")


def listed(values: Iterable[object], between: str = ", ") -> str:
    form: Callable[[object], str] = lambda value: f"{value:.4g}" if isinstance(value, float) else str(value)  # noqa: E731
    return f"[{between.join(form(value) for value in values)}]"


if __name__ == "__main__":
    main()
