"""What rank 0 does with the tables of a checkpoint of many ranks, and what all ranks exchange: no tensor is written.

    python benchmarks/checkpoint_tables.py              # 2,048 and 12,288 ranks
    python benchmarks/checkpoint_tables.py --ranks 256  # another number of them, a multiple of 64
    python benchmarks/checkpoint_tables.py --quick      # 64 ranks

The table of every rank of pp8·tp8 with ZeRO over the rest is made as `save` makes it (96 layers of eight tensors, with
two moments each, a stage's rows in one run cut evenly), then goes the way it goes in a run: gathered as text, read,
merged, checked for gaps and overlaps, written as DCP's index and as the manifest, packed and read again on another
rank. CPU seconds of this process.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

from support.harness import benchmark_parser

from phalanx.checkpoint import all_ranks, snapshot_plans
from phalanx.checkpoint.format import manifest
from phalanx.checkpoint.format.dcp_index import index_bytes
from phalanx.checkpoint.format.manifest import FORMAT_VERSION, Chunk, FileEntry, Manifest
from phalanx.checkpoint.snapshot_plans import Written

STAGES, TENSOR, LAYERS, WIDTH = 8, 8, 96, 12288
MATRICES = ("attention.q", "attention.k", "attention.v", "attention.o", "mlp.gate", "mlp.up", "mlp.down")
KEYS = ("model.{}", "optim.{}.exp_avg", "optim.{}.exp_avg_sq")
ARCHIVE_BYTES = 1600
ROW = "{:>7} {:>8} {:>12} {:>14} {:>16} {:>18} {:>22}"


def main() -> None:
    parser = benchmark_parser(__doc__, quick="64 ranks")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2048, 12288])
    arguments = parser.parse_args()
    sizes = (".metadata s, MB", "manifest s, MB", "to others MB, read s")
    heads = ("ranks", "chunks", "gathered MB", "put together s", *sizes)
    print(ROW.format(*heads))
    for ranks in [64] if arguments.quick else arguments.ranks:
        measure(ranks)


def measure(ranks: int) -> None:
    texts = [snapshot_plans.to_text(table(rank, ranks)) for rank in range(ranks)]
    began = time.process_time()
    parts = [snapshot_plans.from_text(text) for text in texts]
    tensors = snapshot_plans.merge(parts)
    merged_s = time.process_time() - began
    began = time.process_time()
    content = index_bytes(tensors)
    index = FileEntry(name=".metadata", size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    index_s = time.process_time() - began
    began = time.process_time()
    whole = describe(tensors, [index, *(part.file for part in parts if part.file)])
    content = manifest.encode(whole)
    encode_s = time.process_time() - began
    packed = all_ranks.pack(content.decode())
    began = time.process_time()
    assert manifest.decode(all_ranks.unpack(packed).encode(), Path()) == whole
    decode_s = time.process_time() - began
    chunks = sum(len(entry.chunks) for entry in tensors.values())
    texts_mb = sum(map(len, texts)) / 1e6
    pairs = (f"{index_s:.1f}, {index.size_bytes / 1e6:.1f}", f"{encode_s:.1f}, {len(content) / 1e6:.1f}")
    last = f"{len(packed) / 1e6:.1f}, {decode_s:.1f}"
    print(ROW.format(ranks, chunks, f"{texts_mb:.1f}", f"{merged_s:.1f}", *pairs, last))


def table(rank: int, ranks: int) -> Written:
    """What this rank writes: its run of the rows of its stage and tensor part."""
    parts = ranks // (STAGES * TENSOR)
    stage, rest = divmod(rank, TENSOR * parts)
    part, tensor = divmod(rest, TENSOR)
    file = f"__{rank}_0.distcp"
    written: dict[str, tuple[str, list[int], Chunk | None]] = {}
    total = sum(rows for _, rows, _ in stage_rows(stage))
    first, last = total * part // parts, total * (part + 1) // parts
    at = offset = 0
    for name, rows, split in stage_rows(stage):
        low, high = max(first, at), min(last, at + rows)
        if low < high and (split or tensor == 0):
            start = low - at + (tensor * rows if split else 0)
            for key in KEYS:
                length = (high - low) * WIDTH * 4 + ARCHIVE_BYTES
                chunk = Chunk(offsets=[start, 0], sizes=[high - low, WIDTH], file=file, offset=offset, length=length)
                written[key.format(name)] = ("float32", [rows * TENSOR if split else rows, WIDTH], chunk)
                offset += length
        at += rows
    return Written(FileEntry(name=file, size_bytes=offset, sha256=f"{rank:064x}"), written)


def stage_rows(stage: int) -> Iterator[tuple[str, int, bool]]:
    """Logical name, rows on one tensor rank, and whether they are split over tensor."""
    each = LAYERS // STAGES
    for layer in range(stage * each, (stage + 1) * each):
        yield f"layers.{layer}.norm", 1, False
        for name in MATRICES:
            yield f"layers.{layer}.{name}", WIDTH // TENSOR, True


def describe(tensors: dict[str, manifest.TensorEntry], files: list[FileEntry]) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        step=1,
        created="",
        phalanx_version="",
        torch_version="",
        attempt=1,
        config_sha256="",
        config={},
        state=None,
        tensors=tensors,
        files=files,
    )


if __name__ == "__main__":
    main()
