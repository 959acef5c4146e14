"""Learn the numbers of `phalanx detect machines` from the develop split, after `benchmarks/train_minder.py`.

    python benchmarks/calibrate_minder.py               # writes phalanx/detect/minder/weights/numbers.json
    python benchmarks/calibrate_minder.py --only order  # one part of it alone

In this order, each from scenarios that no other part uses: thresholds per number of machines from healthy jobs, the
order of metrics by a decision tree, what classes of faults look like, from jobs with faults, and how sure to be.
Thresholds of the paper's method and its variants are learnt by `benchmarks/minder_compare.py calibrate`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.harness import benchmark_parser
from support.minder_candidates import complete

from phalanx.core.files import atomic_writer
from phalanx.detect.minder.fault_guess import changes_of, class_features, confidence_features
from phalanx.detect.minder.machine_history import MetricHistory, MetricNumbers
from phalanx.detect.minder.machine_judge import IncidentTeller
from phalanx.detect.minder.minder_policy import MinderPolicy
from phalanx.detect.minder.minder_weights import MinderNumbers, encoders_of, numbers_of
from phalanx.detect.minder.online_minder import OnlineMinder
from phalanx.detect.minder.similarity import largest_score
from phalanx.detect.monitoring.job_scenarios import Scenario, draw_scenario, fault_scenarios, split_ranges
from phalanx.detect.monitoring.metric_catalogue import CATALOGUE, DETECTED, normalise
from phalanx.detect.monitoring.metric_generator import generate

WEIGHTS = Path("phalanx/detect/minder/weights")

FIRST_HEALTHY, FIRST_TREE, FIRST_FAULT, FIRST_SURE = 400_000, 450_000, 500_000, 550_000
"""Numbers of scenarios of the develop split."""

SIZES: Mapping[int, int] = {4: 12, 8: 10, 16: 8, 32: 6, 64: 5, 128: 3, 256: 2, 512: 1, 1000: 1}
"""Healthy jobs by number of machines: together about as many machines of each size."""

STEADY_SHARE = 0.75
"""Of the time of continuity, in which a healthy machine must stay below: bursts are shorter."""

MARGIN = 4.0
"""Of thresholds over what was seen of healthy jobs: a week of a thousand machines shows more than the jobs here."""

PARTS = ("order", "thresholds", "faults", "sure")

LOWERED = 3.0
"""Sensitivity at which is learnt how sure to be."""

UNUSED = (1, 5)
"""Features that are not fitted: the share hardly differs, and thresholds follow the number of machines already."""

LEAST = (5.0, 7.0, 4.5)
"""Thresholds are at least these."""


def healthy_jobs(quick: bool) -> list[Scenario]:
    sizes = {4: 1, 16: 1} if quick else SIZES
    counts = [size for size, jobs in sizes.items() for _ in range(jobs)]
    return [draw_scenario("develop", FIRST_HEALTHY + at, machines=count) for at, count in enumerate(counts)]


class _Recorded(MetricHistory):
    """Keeps all ratios."""

    def __init__(self, numbers: MetricNumbers, machines: int, policy: MinderPolicy) -> None:
        super().__init__(numbers, machines, policy)
        self.all: list[NDArray[np.float32]] = []

    def _judge(self, found: NDArray[np.float32], has_changed: NDArray[np.bool_]) -> None:
        super()._judge(found, has_changed)
        self.all.append(np.concatenate([self.ratios, np.broadcast_to(self._spread, (2, self.ratios.shape[1]))]))


def healthy_thresholds(numbers: MinderNumbers, jobs: Sequence[Scenario]) -> dict[str, dict[str, Any]]:
    """Floors and thresholds by metric: no healthy machine exceeded them for most of the time of continuity."""
    policy = MinderPolicy()
    seen: dict[str, dict[int, list[NDArray[np.float64]]]] = {name: {} for name in DETECTED}
    spreads: dict[str, list[NDArray[np.float64]]] = {name: [] for name in DETECTED}
    for scenario in jobs:
        minder = OnlineMinder(scenario.machines, DETECTED, policy, numbers)
        recorded = {name: _Recorded(numbers.metrics[name], scenario.machines, policy) for name in DETECTED}
        minder.histories = dict(recorded)
        minder.add(normalise(generate(scenario).table).values)
        for name, history in recorded.items():
            ratios = np.stack(history.all)
            seen[name].setdefault(scenario.machines, []).append(steady_ratio(ratios[:, :3]))
            spreads[name].append(np.median(ratios[:, 3:, 0], axis=0))
    found = {}
    for name in DETECTED:
        by_size = sorted(seen[name].items())
        largest = np.stack([np.max(values, axis=0) for _, values in by_size])
        smooth = np.maximum.accumulate(largest, axis=0)  # more machines never have a lower one
        limits = np.maximum(MARGIN * smooth, LEAST)
        # When a job hangs noise is gone, and the largest of so many constant offsets shows: healthy data have no hangs.
        offsets = 1.15 * np.sqrt(2 * np.log([size for size, _ in by_size])) / 0.6745
        limits[:, 2] = np.maximum(limits[:, 2], offsets)
        found[name] = {
            "floors": [round(float(value), 6) for value in np.min(spreads[name], axis=0) * 0.7],
            "thresholds": [
                [size, *(round(float(one), 3) for one in limit)]
                for (size, _), limit in zip(by_size, limits, strict=True)
            ],
        }
        print(name, "healthy", largest.round(1).tolist(), flush=True)
    return found


def steady_ratio(ratios: NDArray[np.float32], continuity: int = 240) -> NDArray[np.float64]:
    """Of [windows, 3, machines]: the largest ratio that some machine keeps up for most of the time of continuity."""
    spans = np.lib.stride_tricks.sliding_window_view(ratios, continuity, axis=0)[::8]
    at = int((1 - STEADY_SHARE) * continuity)
    return np.partition(spans, at, axis=-1)[..., at].max(axis=(0, 2)).astype(np.float64)


def learn_order(quick: bool) -> tuple[list[str], list[str]]:
    """The order of metrics, and the tree as text."""
    rows, labels = [], []
    for number, scenario in enumerate(fault_scenarios("develop", 8 if quick else 150, first=FIRST_TREE)):
        machines = int(np.random.default_rng(number).choice([4, 8, 16, 32, 64]))
        smaller = draw_scenario("develop", FIRST_TREE + number, fault=fault_of(scenario), machines=machines)
        table = complete(generate(smaller).table)
        fault = smaller.fault
        assert fault is not None
        for at in range(60, table.samples - 8, 20):
            if abs(at - fault.start_s) < 40 or at > fault.end_s - 10:
                continue
            means = np.nanmean(table.values[:, :, at : at + 8], axis=2) if at else None
            assert means is not None
            away = np.abs(means - np.nanmean(means, axis=1, keepdims=True)) / (
                np.nanstd(means, axis=1, keepdims=True) + 1e-6
            )
            rows.append(np.nan_to_num(np.nanmax(away, axis=1)) / largest_score(machines))
            labels.append(at > fault.start_s)
    importance = np.zeros(len(DETECTED))
    depth = np.full(len(DETECTED), 99)
    text: list[str] = []
    _grow(np.array(rows), np.array(labels), 0, importance, depth, text)
    order = sorted(range(len(DETECTED)), key=lambda one: (depth[one], -importance[one]))
    return [DETECTED[one] for one in order], text


def fault_of(scenario: Scenario) -> str:
    assert scenario.fault is not None
    return scenario.fault.signature.fault


def _grow(
    rows: NDArray[np.float64],
    labels: NDArray[np.bool_],
    level: int,
    importance: NDArray[np.float64],
    depth: NDArray[np.int64],
    text: list[str],
    most: int = 6,
) -> None:
    """A tree by Gini's impurity, of at least 1 % of the windows in a leaf."""
    best = (1e-4, -1, 0.0)
    for column in range(rows.shape[1]):
        order = np.argsort(rows[:, column])
        sorted_labels = labels[order]
        left = np.arange(1, len(order))
        ones = np.cumsum(sorted_labels)[:-1]
        total = sorted_labels.sum()
        share_left, share_right = ones / left, (total - ones) / (len(order) - left)
        impurity = (left * share_left * (1 - share_left) + (len(order) - left) * share_right * (1 - share_right)) / len(
            order
        )
        gain = labels.mean() * (1 - labels.mean()) - impurity
        gain[(left < 60) | (len(order) - left < 60)] = 0
        at = int(gain.argmax())
        if gain[at] > best[0]:
            best = (float(gain[at]), column, float(rows[order[at], column]))
    gain, column, limit = best
    if column < 0 or level == most:
        text.append(f"{'  ' * level}fault {labels.mean():.0%} of {len(labels)}")
        return
    importance[column] += gain * len(labels)
    depth[column] = min(depth[column], level)
    high = rows[:, column] > limit
    text.append(f"{'  ' * level}{DETECTED[column]} z above {limit:.2f} of the largest possible:")
    _grow(rows[high], labels[high], level + 1, importance, depth, text, most)
    text.append(f"{'  ' * level}else:")
    _grow(rows[~high], labels[~high], level + 1, importance, depth, text, most)


def learn_classes(cases: int) -> dict[str, Any]:
    """What classes look like from their onset on: with all 21 metrics, and with the seven that sources often have."""
    looks, names = [], []
    for scenario in fault_scenarios("develop", cases, first=FIRST_FAULT):
        number = scenario.seed - split_ranges("develop").first_seed
        small = draw_scenario("develop", number, fault=fault_of(scenario), machines=12)
        fault = small.fault
        assert fault is not None
        table = generate(small, tuple(CATALOGUE)).table
        at = min(int(fault.start_s) + 240, int(fault.end_s) - 1, table.samples - 1)
        changes = changes_of(table, fault.machines[0], int(fault.start_s), at)
        vanished = [one.metric for one in fault.signature.effects if one.how == "vanish"]
        for known in (CATALOGUE, DETECTED):
            kept = [change for change in changes if change.metric in known]
            looks.append(class_features(tuple(CATALOGUE), kept, [name for name in vanished if name in known]))
            names.append(fault_of(scenario))
    classes = tuple(sorted(set(names)))
    weights = fit_classes(np.stack(looks), np.array([classes.index(name) for name in names]), len(classes))
    odds = np.stack(looks) @ weights[:, :-1].T + weights[:, -1]
    right = np.mean(odds.argmax(axis=1) == [classes.index(name) for name in names])
    print(f"{len(looks)} looks, guessed right among themselves {right:.0%}", flush=True)
    return {
        "names": list(classes),
        "metrics": list(CATALOGUE),
        "weights": weights[:, :-1].round(5).tolist(),
        "constants": weights[:, -1].round(5).tolist(),
    }


def fit_classes(
    rows: NDArray[np.float64], labels: NDArray[np.int64], classes: int, decay: float = 3e-3, steps: int = 800
) -> NDArray[np.float64]:
    """Multinomial regression with weight decay, by gradient descent with momentum: [classes, features + 1]."""
    middle, size = rows.mean(axis=0), rows.std(axis=0) + 1e-6
    scaled = np.hstack([(rows - middle) / size, np.ones((len(rows), 1))])
    wanted = np.eye(classes)[labels]
    weights, speed = np.zeros((classes, scaled.shape[1])), np.zeros((classes, scaled.shape[1]))
    for _ in range(steps):
        odds = scaled @ weights.T
        shares = np.exp(odds - odds.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        slope = (shares - wanted).T @ scaled / len(rows)
        slope[:, :-1] += decay * weights[:, :-1]
        speed = 0.9 * speed - 0.1 * slope
        weights = weights + speed
    found = weights.copy()
    found[:, :-1] /= size
    found[:, -1] -= found[:, :-1] @ middle
    return found


def judged_incidents(
    numbers: MinderNumbers, faults: int, hours: int, most_machines: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Of incidents that blame machines, at lowered thresholds: what they are trusted by, and whether they are right.

    Above the thresholds hardly any is wrong, so that how sure to be is learnt from weaker ones too.
    """
    policy = MinderPolicy(sensitivity=LOWERED)
    rows, right = [], []
    scenarios = (
        *fault_scenarios("develop", faults, first=FIRST_SURE),
        *(draw_scenario("develop", FIRST_SURE + 10_000 + one, duration_s=3600) for one in range(hours)),
    )
    for drawn in scenarios:
        scenario = draw_scenario(
            "develop",
            drawn.seed - split_ranges("develop").first_seed,
            fault=fault_of(drawn) if drawn.fault else None,
            machines=min(drawn.machines, most_machines),
            duration_s=drawn.duration_s,
        )
        case = generate(scenario)
        faulty = {host for fault in case.labels.faults for host in fault.machines}
        minder = OnlineMinder(scenario.machines, DETECTED, policy, numbers)
        teller = IncidentTeller(policy, numbers)
        for one in minder.add(normalise(case.table).values):
            told = teller.tell(one, case.table)
            if told is not None and told.blamed_hosts:
                as_usual = dataclasses.replace(one, score=one.score / LOWERED)
                rows.append(confidence_features(as_usual, scenario.machines))
                right.append(bool(faulty & set(told.blamed_hosts)))
    found = np.array(rows)
    found[:, UNUSED] = 0
    return found, np.array(right)


def learn_confidence(numbers: MinderNumbers, faults: int, hours: int, most_machines: int) -> dict[str, Any]:
    """A logistic regression with few numbers; prints its table of reliability, each half judged by the other's fit."""
    rows, right = judged_incidents(dataclasses.replace(numbers, confidence=None), faults, hours, most_machines)
    halves = np.arange(len(rows)) % 2 == 0
    said = np.empty(len(rows))
    for half in (halves, ~halves):
        constant, weights = fit_odds(rows[half], right[half])
        said[~half] = 1 / (1 + np.exp(-(constant + rows[~half] @ weights)))
    print(f"{len(rows)} incidents at {1 / LOWERED:.0%} of the thresholds, {int((~right).sum())} of them wrong")
    for low, high in itertools.pairwise((0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0001)):
        of_bin = (said >= low) & (said < high)
        if of_bin.any():
            shares = f"{said[of_bin].mean():.3f} | {right[of_bin].sum()} of {of_bin.sum()}"
            print(f"| {low:g} to {min(high, 1):g} | {shares} |")
    constant, weights = fit_odds(rows, right)
    print("constant", round(constant, 3), "weights", weights.round(3).tolist(), flush=True)
    return {"constant": round(constant, 4), "weights": weights.round(4).tolist()}


def fit_odds(
    rows: NDArray[np.float64], right: NDArray[np.bool_], decay: float = 1.0, steps: int = 30
) -> tuple[float, NDArray[np.float64]]:
    """Logistic regression with a penalty on squared weights, by Newton's method: constant and weights."""
    middle, size = rows.mean(axis=0), rows.std(axis=0)
    scaled = np.hstack(
        [np.divide(rows - middle, size, out=np.zeros_like(rows), where=size > 1e-9), np.ones((len(rows), 1))]
    )
    penalty = np.diag([decay] * rows.shape[1] + [1e-3])
    weights = np.zeros(scaled.shape[1])
    for _ in range(steps):
        said = 1 / (1 + np.exp(-scaled @ weights))
        slope = scaled.T @ (right - said) - penalty @ weights
        curve = (scaled * (said * (1 - said))[:, None]).T @ scaled + penalty
        weights = weights + np.linalg.solve(curve, slope)
    of_rows = np.divide(weights[:-1], size, out=np.zeros_like(size), where=size > 1e-9)
    return float(weights[-1] - of_rows @ middle), of_rows


def main() -> None:
    parser = benchmark_parser(__doc__, "a few small jobs")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="folder of encoders.npz, where numbers.json goes")
    parser.add_argument("--only", choices=PARTS, help="learn one part again")
    parser.add_argument("--faults", type=int, default=240, help="jobs with a fault")
    parser.add_argument("--hours", type=int, default=24, help="healthy hours, beside them, of how sure to be")
    parser.add_argument("--machines", type=int, default=64, help="of a job at most, for how sure to be")
    options = parser.parse_args()
    target = options.weights / "numbers.json"
    with np.load(options.weights / "encoders.npz") as arrays:
        encoders = encoders_of(arrays)
    unlimited = {"floors": [0.0, 0.0], "thresholds": [[4, 1e9, 1e9, 1e9], [1500, 1e9, 1e9, 1e9]]}
    written: dict[str, Any] = {"order": list(DETECTED), "metrics": dict.fromkeys(DETECTED, unlimited)}
    if target.exists():
        written = json.loads(target.read_text())
    jobs = healthy_jobs(options.quick)
    for part in [options.only] if options.only else PARTS:
        started_s = time.process_time()
        if part == "order":
            written["order"], written["tree"] = learn_order(options.quick)
            print("\n".join(written["tree"]), written["order"], sep="\n", flush=True)
        elif part == "thresholds":
            blind = numbers_of({"order": DETECTED, "metrics": dict.fromkeys(DETECTED, unlimited)}, encoders)
            written["metrics"] = healthy_thresholds(blind, jobs)
        elif part == "faults":
            written["classes"] = learn_classes(24 if options.quick else options.faults)
        else:
            faults, hours, most = (3, 0, 40) if options.quick else (options.faults, options.hours, options.machines)
            written["confidence"] = learn_confidence(numbers_of(written, encoders), faults, hours, most)
        print(f"{part}: {time.process_time() - started_s:.0f} s of processors", flush=True)
        with atomic_writer(target) as file:
            file.write(json.dumps(written, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
