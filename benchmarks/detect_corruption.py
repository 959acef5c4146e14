"""Silent data corruption in real runs of several processes: what is found, who is named, and what looking costs.

    python benchmarks/detect_corruption.py                    # all parts, twenty minutes on two cores
    python benchmarks/detect_corruption.py --part flips       # or: healthy, detectors, cost
    python benchmarks/detect_corruption.py --quick            # whether it works; figures mean little

Each part is made of runs of `phalanx train` over gloo, as a person would start them, in which one rank does wrong:

- flips: after the update of every step one bit of one tensor flips on one rank, all three drawn by chance, and is
  mended after the check of the step. Found: there is a verdict at that step that names this rank and no other.
- healthy: runs of many layouts, precisions and optimizers, with dropout, in which nothing is wrong, so nothing may be
  found.
- detectors: one bit flips in a weight, or in what a layer computes, of one rank and for one step; each detector of
  `phalanx.train` looks at the same step. Then the step is made again without the fault.
- cost: CPU time of a check, and of a replay, over that of the step in which it was made (ten million parameters).
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from support import tiny
from support.harness import benchmark_parser, machine, write_json

from phalanx.core.config import load
from phalanx.data.batch import Batch
from phalanx.detect.corruption.copy_judge import CorruptionEvidence, CorruptionPolicy, judge_corruption, judge_run
from phalanx.detect.corruption.digest_file import UnlikeCopies, UnlikeReplays, read_records
from phalanx.detect.corruption.norm_spikes import NormHistory
from phalanx.launch.environment import Worker
from phalanx.launch.local_ranks import launch_local
from phalanx.parallel.engine import Engine
from phalanx.train import session
from phalanx.train.config import RunConfig
from phalanx.train.corruption_response import CorruptionResponse
from phalanx.train.replays import Replays
from phalanx.train.state_digests import USUALLY_EVERY, StateDigests
from phalanx.train.training_run import Run

COMMON: dict[str, Any] = {
    "model.vocab_multiple": 64,
    "telemetry.digests_every": 1,
    "telemetry.at_corruption": "report",
    "checkpoint.mode": "blocking",
    "checkpoint.every_steps": 0,
    "evaluate.final_tokens": 64,
    "logging.every_steps": 50,
}

HEALTHY: tuple[dict[str, Any], ...] = (
    {"parallel.replicate": 2},
    {"parallel.replicate": 3},
    {"parallel.replicate": 4},
    {"parallel.replicate": 2, "parallel.shard": 2, "parallel.zero": 1},
    {"parallel.replicate": 2, "parallel.shard": 2, "parallel.zero": 2},
    {"parallel.replicate": 2, "parallel.shard": 2, "parallel.zero": 3},
    {"parallel.replicate": 2, "parallel.tensor": 2},
    {"parallel.replicate": 2, "parallel.context": 2},
    {"parallel.replicate": 2, "parallel.pipeline": 2},
    {"parallel.shard": 2, "parallel.tensor": 2},
)
VARIANTS: tuple[dict[str, Any], ...] = (
    {"train.precision": "fp32", "optim.name": "adamw"},
    {"train.precision": "bf16", "optim.name": "lamb", "model.dropout": 0.1}
    | {"model.attention_dropout": 0.1, "model.attention_backend": "math"},
    {"train.precision": "bf16", "optim.name": "adamw", "optim.state_bits": 8, "model.dropout": 0.2},
    {"train.precision": "fp32", "optim.name": "muon", "model.dropout": 0.1},
    {"train.precision": "bf16", "optim.name": "came"},
)

TEN_MILLION: dict[str, Any] = {
    "model.layers": 6,
    "model.hidden": 384,
    "model.heads": 6,
    "data.sequence_length": 128,
    "train.global_batch": 4,
    "train.micro_batch": 1,
}


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Flip one bit of one element in place; twice: nothing."""
    octets = tensor.detach().view(-1).view(torch.uint8)
    octets[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8


def started(folder: Path, settings: dict[str, Any], name: str, target: str, *arguments: Any) -> Path:
    """A run, each of whose ranks does `target` of this script; its folder."""
    run = folder / name
    config = load(RunConfig, None, tiny.overrides(folder, run, tiny.SETTINGS | COMMON | settings)).value
    preload = ("phalanx.train.session", "torch._dynamo", "torch._inductor.config")
    given = (config, *arguments)
    status = launch_local(config.parallel.layout.world_size, f"detect_corruption:{target}", given, preload=preload)
    if status:
        sys.exit(f"the run {name} failed ({status})")
    return run


def run_rank(worker: Worker, config: RunConfig) -> None:
    """Train, and say nothing."""
    session.run_rank(worker, config, Path("corruption.toml"), Console(quiet=True))


# flips


def drawn(seed: int, step: int, ranks: int, names: Sequence[str], sizes: dict[str, int]) -> tuple[int, str, int]:
    """Rank, tensor and element of the fault of a step; the same on all ranks."""
    draw = random.Random(seed * 1_000_003 + step)
    name = draw.choice(list(names))
    return draw.randrange(ranks), name, draw.randrange(sizes[name])


def flip_rank(worker: Worker, config: RunConfig, seed: int, prefixes: tuple[str, ...], out: Path) -> None:
    """A rank of the part `flips`: the fault comes with the check, as if it had been there since the update."""
    check, told = StateDigests.check, []

    def checked(digests: StateDigests, step: int, *, saves: bool) -> None:
        tensors = {n: t for n, t in digests._run.state_tensors().items() if n.startswith(prefixes) and t.numel()}
        sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        guilty, name, element = drawn(seed, step, worker.world_size, sorted(tensors), sizes)
        bit = random.Random(seed + step).randrange(8 * tensors[name].element_size())
        is_here = worker.rank == guilty
        if is_here:
            flip(tensors[name], element, bit)
        told.append([step, guilty, name, element, bit])
        check(digests, step, saves=saves)
        if is_here:
            flip(tensors[name], element, bit)

    StateDigests.check = checked  # type: ignore[method-assign]
    run_rank(worker, config)
    if worker.rank == 0:
        out.write_text(json.dumps(told))


def measure_flips(folder: Path, ranks: int, trials: int, prefixes: tuple[str, ...], seed: int) -> dict[str, Any]:
    """How many of so many flips were found at once, and named the right rank and tensor alone."""
    out = folder / f"flips-{seed}.json"
    settings = {"parallel.replicate": ranks, "train.steps": trials, "train.global_batch": ranks, "train.micro_batch": 1}
    run = started(folder, settings, f"flips-{seed}", "flip_rank", seed, prefixes, out)
    by_step: dict[int, list[UnlikeCopies]] = {}
    for record in read_records(run):
        if isinstance(record, UnlikeCopies):
            by_step.setdefault(record.step, []).append(record)
    found = right = tensor_right = 0
    for step, guilty, name, _, _ in json.loads(out.read_text()):
        records = by_step.get(step, [])
        verdict = judge_corruption(CorruptionEvidence(unlike=tuple(records)), CorruptionPolicy())
        found += bool(records)
        right += verdict.blamed_ranks == (guilty,)
        tensor_right += [one.tensor for one in records] == [name.partition(".")[2]]
    return {
        "ranks": ranks,
        "state": "weights" if prefixes == ("model.",) else "weights and optimizer state",
        "trials": trials,
        "found": found,
        "right_rank": right,
        "right_tensor": tensor_right,
    }


# healthy


def healthy_rank(worker: Worker, config: RunConfig) -> None:
    """A rank of the part `healthy`."""
    run_rank(worker, config)


def measure_healthy(folder: Path, runs: int, steps: int) -> dict[str, Any]:
    """What is found in so many healthy runs: nothing, it is hoped."""
    cases = [layout | variant for variant in VARIANTS for layout in HEALTHY if _fits(layout, variant)][:runs]
    blamed, detected, compared, checks = [], [], 0, 0
    for number, case in enumerate(cases):
        settings = {"train.steps": steps, "train.global_batch": 12, "train.micro_batch": 1, "train.seed": number} | case
        settings |= {"telemetry.replay_every": 2, "telemetry.recompute_sigma": 6.0}
        run = started(folder, settings, f"healthy-{number}", "healthy_rank")
        verdict = judge_run(run)
        digests = [record for record in read_records(run) if not isinstance(record, UnlikeCopies | UnlikeReplays)]
        checks += len(digests)
        compared += sum(getattr(record, "compared", 0) for record in digests)
        print(f"healthy run {number + 1} of {len(cases)}: {verdict.sentence}", flush=True)
        if verdict.detections:
            detected.append({"case": case, "sentence": verdict.sentence})
            blamed += [case] if verdict.blamed_ranks else []
    return {"runs": len(cases), "checks": checks, "compared": compared, "detected": detected, "blamed": len(blamed)}


def _fits(layout: dict[str, Any], variant: dict[str, Any]) -> bool:
    """Muon works on whole matrices."""
    split = ("parallel.shard", "parallel.tensor", "parallel.context")
    return variant["optim.name"] != "muon" or not any(layout.get(axis, 1) > 1 for axis in split)


# detectors


class _Noting(CorruptionResponse):
    """Keeps what is found of one step, and ends nothing."""

    seen: bool = False
    named: tuple[int, ...] = ()

    def act(self, unlike: Sequence[UnlikeCopies | UnlikeReplays]) -> None:
        verdict = judge_corruption(CorruptionEvidence(unlike=tuple(unlike)), CorruptionPolicy())
        self.seen, self.named = True, verdict.blamed_ranks


@contextmanager
def fault(run: Run, kind: str, guilty: int, bit: int, draw: random.Random) -> Iterator[None]:
    """On one rank one bit is wrong within it: of a weight, or of an element of what the first layer puts out."""
    engine = run.trainer
    assert isinstance(engine, Engine)
    place = draw.random()
    if run.ranks.rank != guilty:
        yield
    elif kind == "weight":
        weight = engine.parameters["layers.0.attention.q"]
        element = int(place * weight.numel())
        flip(weight, element, bit)
        yield
        flip(weight, element, bit)
    else:

        def spoil(_module: Any, _arguments: Any, output: torch.Tensor) -> torch.Tensor:
            spoilt = output.clone()
            flip(spoilt, int(place * spoilt.numel()), bit)
            return spoilt

        hook = engine.blocks[0].register_forward_hook(spoil)
        yield
        hook.remove()


def detector_rank(worker: Worker, config: RunConfig, kind: str, warm_up: int, out: Path) -> None:
    """A rank of the part `detectors`."""
    original, rows = Run.accumulate_gradients, []
    history = NormHistory(6.0)
    watchers: dict[str, Any] = {}

    def accumulate(run: Run, batch: Batch) -> torch.Tensor:
        step = run.progress.step + 1
        if not watchers:
            watchers["response"] = _Noting(run.ranks, run.folder.path, "report", run.note)
            watchers["digests"] = StateDigests(run, watchers["response"])
            watchers["replays"] = Replays(run, watchers["response"])
            watchers["replays"]._every = 1
        if step > warm_up:
            draw = random.Random(step)
            guilty, bit = draw.randrange(worker.world_size), draw.randrange(32)
            row: dict[str, Any] = {"bit": bit}
            with fault(run, kind, guilty, bit, draw):
                response = watchers["response"]
                for name, look in _looks(run, watchers, batch, step, original):
                    response.seen, response.named = False, ()
                    look()
                    row |= {name: response.seen, f"{name} names": response.named == (guilty,)}
                norm = float(run.optimizer.clip()[0])
                run.trainer.zero_grad()
            row["norm jumps"] = history.is_spike(norm)
            rows.append(row)
        loss = original(run, batch)
        healthy = float(run.optimizer.clip()[0])
        if step > warm_up:
            rows[-1] |= {"norm": norm, "healthy norm": healthy, "changes anything": norm != healthy}
        history.add(healthy)
        return loss

    Run.accumulate_gradients = accumulate  # type: ignore[method-assign]
    run_rank(worker, config)
    if worker.rank == 0:
        out.write_text(json.dumps(rows))


def _looks(
    run: Run, watchers: dict[str, Any], batch: Batch, step: int, original: Callable[..., Any]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What looks at the faulty step, by name, in the order of a real step."""
    yield "replay", lambda: watchers["replays"].check(step, batch, -1)

    def digests() -> None:
        original(run, batch)
        watchers["digests"].take_gradients(step)
        watchers["digests"].check(step, saves=True)

    yield "digests", digests


def measure_detectors(folder: Path, kind: str, trials: int) -> list[dict[str, Any]]:
    """What each detector sees of the same faults, by the kind of bit."""
    warm_up, out = 20, folder / f"detectors-{kind}.json"
    settings = {"parallel.replicate": 3, "train.steps": warm_up + trials, "train.global_batch": 6, "optim.lr": 1e-4}
    settings |= {"train.micro_batch": 2, "telemetry.digests_every": 1_000_000}
    started(
        folder,
        settings | {"telemetry.replay_every": 1_000_000},
        f"detectors-{kind}",
        "detector_rank",
        kind,
        warm_up,
        out,
    )
    rows = json.loads(out.read_text())
    found = []
    for title, bits in {"mantissa": range(23), "exponent": range(23, 31), "sign": range(31, 32)}.items():
        mine = [row for row in rows if row["bit"] in bits]
        counts = {key: sum(row[key] for row in mine) for key in ("changes anything", "norm jumps")}
        for name in ("digests", "replay"):
            counts |= {name: sum(row[name] for row in mine), f"{name} names": sum(row[f"{name} names"] for row in mine)}
        found.append({"fault": kind, "bits": title, "faults": len(mine)} | counts)
    return found


# cost


def cost_rank(worker: Worker, config: RunConfig, warm_up: int, out: Path) -> None:
    """A rank of the part `cost`."""
    steps: list[dict[str, float]] = []
    spent = {"digests": 0.0, "replay": 0.0}

    def timed(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            began_s = time.process_time()
            try:
                return method(*arguments, **named)
            finally:
                spent[name] += time.process_time() - began_s

        return call

    StateDigests.take_gradients = timed(StateDigests.take_gradients, "digests")  # type: ignore[method-assign]
    StateDigests.check = timed(StateDigests.check, "digests")  # type: ignore[method-assign]
    Replays.check = timed(Replays.check, "replay")  # type: ignore[method-assign]
    original = Run.batches

    @contextmanager
    def batches(run: Run) -> Iterator[Iterator[Batch]]:
        def over(stream: Iterator[Batch]) -> Iterator[Batch]:
            began_s = None
            for number, batch in enumerate(stream):
                now_s = time.process_time()
                if began_s is not None and number > warm_up:
                    steps.append({"step": now_s - began_s - sum(spent.values())} | spent)
                spent.update(dict.fromkeys(spent, 0.0))
                began_s = time.process_time()
                yield batch

        with original(run) as stream:
            yield over(stream)

    Run.batches = batches  # type: ignore[method-assign]
    run_rank(worker, config)
    if worker.rank == 0:
        out.write_text(json.dumps(steps))


def measure_cost(folder: Path, steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Medians over steps of CPU time beside that of the same step."""
    out, warm_up = folder / "cost.json", 3
    given = settings | {"parallel.replicate": 2, "train.steps": steps + warm_up + 1, "telemetry.replay_every": 1}
    run = started(folder, given, "cost", "cost_rank", warm_up, out)
    rows = json.loads(out.read_text())
    line = (run / "telemetry/digests.jsonl").read_text().splitlines()[-1]
    every = USUALLY_EVERY
    shares = {name: statistics.median(row[name] / row["step"] for row in rows) for name in ("digests", "replay")}
    return {
        "steps": len(rows),
        "step_cpu_s": statistics.median(row["step"] for row in rows),
        "check_cpu_s": statistics.median(row["digests"] for row in rows),
        "check_of_a_step": shares["digests"],
        "digests_every": every,
        "overhead": shares["digests"] / every,
        "replay_of_a_step": shares["replay"],
        "bytes_a_check_in_the_file": len(line),
        "tensors": json.loads(line)["compared"],
    }


def show(part: str, found: Any) -> None:
    """Rows of plain values."""
    for row in found if isinstance(found, list) else [found]:
        cells = ", ".join(f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print(f"{part}: {cells}", flush=True)


def main() -> None:
    """Measure, and print figures."""
    parser = benchmark_parser(__doc__, "few trials of a tiny model", as_json=True)
    parser.add_argument("--part", choices=("flips", "healthy", "detectors", "cost"), help="only this")
    parser.add_argument("--runs", type=int, default=44, help="healthy ones, at most 44 (default: all)")
    given = parser.parse_args()
    quick, found = given.quick, dict[str, Any]()
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts: dict[str, Callable[[], Any]] = {
            "flips": lambda: [
                measure_flips(folder, ranks, 4 if quick else 100, prefixes, seed)
                for ranks, prefixes, seed in ((3, ("model.",), 1), (4, ("model.", "optim."), 2))[: 1 if quick else 2]
            ],
            "healthy": lambda: measure_healthy(folder, 1 if quick else given.runs, 3 if quick else 6),
            "detectors": lambda: [
                row
                for kind in ("weight", "product")[: 1 if quick else 2]
                for row in measure_detectors(folder, kind, 4 if quick else 160)
            ],
            "cost": lambda: measure_cost(folder, 3 if quick else 40, {} if quick else TEN_MILLION),
        }
        for part, measure in parts.items():
            if given.part in (None, part):
                found[part] = measure()
                show(part, found[part])
    write_json(given.json, found)


if __name__ == "__main__":
    main()
