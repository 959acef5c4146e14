"""What reading data costs: the loader per token, `data prepare` against `tokenizers` alone, memory against corpus size.

    python benchmarks/data.py                      # loader and prepare, a minute or two
    python benchmarks/data.py --synthetic-gb 2     # also memory on a synthetic corpus of 2 GB (needs 6 GB of disk)

Loader: CPU seconds of `Loader.batch` per token (all threads of the process), median of repeats. The bar, less than 1 %
of a step at 100k tokens/s, is 0.1 us a token.
Prepare: wall seconds of `prepare` with N processes against `Tokenizer.encode_batch` with N threads on the same text,
in alternation, median of the ratios of the pairs. Starting the processes and writing the files are included.
Memory: peak anonymous memory (RssAnon) and peak resident set of all processes, for a corpus and one 20 times smaller.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from support.harness import benchmark_parser, timed

from phalanx.data.config import DataConfig, SourceConfig, TokenizerConfig
from phalanx.data.prepare import prepare


def loader_cost(folder: Path, repeats: int) -> None:
    from phalanx.data.loader import Loader

    print("loader: CPU us per token (bar: below 0.1)")
    tokenizer = TokenizerConfig(kind="bytes")
    for length, count in ((64, 12), (256, 32), (1024, 8), (2048, 64)):
        for mask in (True, False):
            config = DataConfig(sequence_length=length, tokenizer=tokenizer, folder=str(folder), document_mask=mask)
            loader = Loader(prepare(config), config)
            steps = max(20, 400_000 // (length * count))
            costs = []
            for repeat in range(repeats):
                begin = time.process_time()
                for step in range(steps):
                    loader.batch((repeat * steps + step) * count, count)
                costs.append((time.process_time() - begin) * 1e6 / (steps * count * length))
            spread = f"{min(costs):.4f} to {max(costs):.4f}"
            name = f"{count} x {length}, document mask {'on' if mask else 'off'}"
            print(f"  {name:34} {statistics.median(costs):.4f} ({spread}, n={repeats})")


def prepare_speed(folder: Path, pairs: int, vocab_size: int) -> None:
    from tokenizers import Tokenizer

    source = SourceConfig(kind="python-stdlib")
    tokenizer = TokenizerConfig(kind="bpe", vocab_size=vocab_size, training_bytes=8 << 20)
    config = DataConfig(sources=(source,), tokenizer=tokenizer, folder=str(folder / "tokenizer"))
    first = prepare(config)
    path = next((folder / "tokenizer").glob("tokenizer-*/tokenizer.json"))
    documents = _documents(source)
    size = first.num_bytes("train") + first.num_bytes("validation")
    cores = len(os.sched_getaffinity(0))
    ratios = []
    print(f"prepare: {size / 1e6:.1f} MB of Python, BPE of {vocab_size}, {cores} cores (bar: 0.8)")
    print("  MB/s: ours, tokenizers, ratio")
    for number in range(pairs):
        fresh = config.model_copy(
            update={
                "tokenizer": TokenizerConfig(kind="file", path=str(path)),
                "folder": str(folder / f"prepared-{number}"),
            }
        )
        ours = timed(lambda fresh=fresh: prepare(fresh, workers=cores))
        alone = Tokenizer.from_file(str(path))
        theirs = timed(lambda alone=alone: alone.encode_batch(documents, add_special_tokens=False))
        ratios.append(theirs / ours)
        print(f"  {size / 1e6 / ours:6.2f} {size / 1e6 / theirs:6.2f} {ratios[-1]:5.2f}", flush=True)
        shutil.rmtree(fresh.folder)
    print(f"  median ratio {statistics.median(ratios):.2f} (n={pairs})")


def memory(folder: Path, gigabytes: float, kind: str) -> None:
    print(f"memory: tokenizer {kind}; MiB anonymous (peak over all processes), resident")
    for size in (gigabytes / 20, gigabytes):
        corpus = folder / "corpus.jsonl"
        _write_corpus(corpus, round(size * 1e9))
        for stage in ("prepare", "load"):
            command = [sys.executable, __file__, "--stage", stage, "--folder", str(folder), "--tokenizer", kind]
            begin = time.monotonic()
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            peak = _peaks(process)
            said = process.stdout.read().strip() if process.stdout else ""
            print(
                f"  {size:5.2f} GB {stage:8} anonymous {peak[0] / 1024:7.1f}  resident {peak[1] / 1024:7.1f}"
                f"  {time.monotonic() - begin:6.1f} s  {said}",
                flush=True,
            )
            if process.returncode:
                raise SystemExit(process.returncode)
        shutil.rmtree(folder / "big")
        corpus.unlink()


def stage(name: str, folder: Path, kind: str) -> None:
    """What the memory of a child is measured on: preparing the corpus, or reading an epoch of it."""
    source = SourceConfig(kind="jsonl", path=str(folder / "corpus.jsonl"))
    tokenizer = TokenizerConfig(kind=kind, training_bytes=4 << 20)  # type: ignore[arg-type]
    config = DataConfig(sequence_length=1024, sources=(source,), tokenizer=tokenizer, folder=str(folder / "big"))
    prepared = prepare(config)
    if name == "prepare":
        print(json.dumps({"tokens": prepared.num_tokens("train")}))
        return
    from phalanx.data.loader import Loader

    loader = Loader(prepared, config)
    steps = loader.samples_per_epoch // 64
    with loader.stream(counts=64) as stream:
        for _, (batch, _) in zip(range(steps), stream, strict=False):
            assert batch.tokens_BS.shape == (64, 1024)
    print(json.dumps({"tokens read": steps * 64 * 1024}))


def _documents(source: SourceConfig) -> list[str]:
    from phalanx.data.sources.input_files import list_files

    texts = []
    for file in list_files(source):
        try:
            texts.append(Path(file.path).read_bytes().decode())
        except UnicodeDecodeError:
            continue
    return texts


def _write_corpus(path: Path, size: int) -> None:
    """JSON lines of Python source, each document numbered so that no two are the same."""
    pieces = [t[:4000] for t in _documents(SourceConfig(kind="python-stdlib")) if len(t) > 2000]
    written = number = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            line = json.dumps({"text": f"# {number}\n{pieces[number % len(pieces)]}"}) + "\n"
            file.write(line)
            written += len(line)
            number += 1


def _peaks(process: subprocess.Popen[str]) -> tuple[int, int]:
    """Peak KiB, anonymous and resident, summed over a process and its children, looked at every 50 ms until it ends."""
    peak = [0, 0]
    done = threading.Event()
    while process.poll() is None:
        family = [process.pid, *_children(process.pid)]
        sums = [sum(_status(pid, key) for pid in family) for key in ("RssAnon", "VmRSS")]
        peak = [max(p, s) for p, s in zip(peak, sums, strict=True)]
        done.wait(0.05)
    return peak[0], peak[1]


def _children(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in path.read_text().split()]
        except OSError:
            continue
    return found


def _status(pid: int, key: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(key + ":")), 0)


def main() -> None:
    parser = benchmark_parser(__doc__, quick="one repeat, to see that it works", repeats=5)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--synthetic-gb", type=float, default=0.0)
    parser.add_argument("--tokenizer", choices=["bytes", "bpe"], default="bytes", help="of the synthetic corpus")
    parser.add_argument("--only", choices=["loader", "prepare", "memory"])
    parser.add_argument("--stage", choices=["prepare", "load"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.repeats = 1 if options.quick else options.repeats
    if options.stage:
        stage(options.stage, options.folder, options.tokenizer)
        return
    with tempfile.TemporaryDirectory() as name:
        if options.only in (None, "loader"):
            loader_cost(Path(name), options.repeats)
        if options.only in (None, "prepare"):
            prepare_speed(Path(name), options.repeats, options.vocab_size)
        if options.synthetic_gb and options.only in (None, "memory"):
            memory(Path(name), options.synthetic_gb, options.tokenizer)


if __name__ == "__main__":
    main()
