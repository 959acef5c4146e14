"""A net in stages over ranks gives the losses and gradients of the whole; late and lost peers."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import ranks as thread_ranks
import torch
from ranks import ThreadGroups, peak_live, run_ranks
from torch import Tensor, nn

from phalanx.core.layout import Layout
from phalanx.parallel.config import Schedule
from phalanx.parallel.deferred_gradients import WeightQueue
from phalanx.parallel.pipeline.pipeline_executor import AutogradStage, PipelineError, PipelineExecutor, _Mail
from phalanx.parallel.pipeline.schedules import Message, Step, Table, forward_table, make_table
from phalanx.parallel.process_groups import make_gloo

WIDTH, ROWS = 6, 4
SHAPE = (ROWS, WIDTH)


class DeferringProduct(torch.autograd.Function):
    """x @ w whose weight gradient goes to a queue where that asks for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, queue: WeightQueue) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.queue = queue
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        for_x = gradient @ weight.T if ctx.needs_input_grad[0] else None
        if not ctx.queue.deferring:
            return for_x, x.T @ gradient, None
        ctx.queue.put(weight, lambda: x.T @ gradient)
        return for_x, None, None


class Stage(nn.Module):
    """One stage of a tiny net: a deferrable product and a bias that is not; the last one makes a loss."""

    def __init__(self, index: int, stages: int, queue: WeightQueue) -> None:
        super().__init__()
        seed = torch.Generator().manual_seed(index)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=seed) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.randn(WIDTH, generator=seed))
        self.last, self.queue = index == stages - 1, queue

    def forward(self, x: Tensor | None, micro_batch: int) -> Tensor:
        rows, targets = batch(micro_batch)
        product: Tensor = DeferringProduct.apply(rows if x is None else x, self.weight, self.queue)
        y = torch.tanh(product + self.bias) + (rows if x is None else x)
        return (y - targets).square().sum() if self.last else y


def batch(micro_batch: int) -> tuple[Tensor, Tensor]:
    rows, targets = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(100 + micro_batch))
    return rows, targets


@dataclass
class Outcome:
    """What one rank has after a step."""

    losses: dict[int, float]
    gradients: dict[str, Tensor]


def whole(stages: int, micro_batches: int) -> Outcome:
    """The same net on one rank, without a pipeline."""
    net = [Stage(index, stages, WeightQueue()) for index in range(stages)]
    losses = {}
    for m in range(micro_batches):
        x: Tensor | None = None
        for stage in net:
            x = stage(x, m)
        assert x is not None
        x.backward()
        losses[m] = float(x.detach())
    return Outcome(losses, gradients(dict(enumerate(net))))


def gradients(stages: dict[int, Stage]) -> dict[str, Tensor]:
    return {f"{i}.{name}": p.grad for i, s in stages.items() for name, p in s.named_parameters() if p.grad is not None}


def step(groups: ThreadGroups, table: Table, steps: int = 1, **options: Any) -> Outcome:
    """Run `table` on one rank, `steps` times; losses and gradients are of the last."""
    rank = groups.layout.coordinates(groups.rank).pipeline
    stages = {i: Stage(i, table.placement.stages, WeightQueue()) for i in table.placement.stages_of(rank)}
    runners = {i: AutogradStage(stage, stage.queue) for i, stage in stages.items()}
    executor = PipelineExecutor(groups, table.placement, runners, **options)
    for _ in range(steps):
        for stage in stages.values():
            stage.zero_grad()
        losses = executor.run(table, [SHAPE] * table.micro_batches)
    assert all(not runner._live for runner in runners.values())
    assert all(stage.queue.waiting == 0 for stage in stages.values())
    return Outcome({m: float(loss) for m, loss in losses.items()}, gradients(stages))


CASES: list[tuple[Schedule, int, int, int]] = [
    ("1f1b", 1, 1, 3),
    ("interleaved_1f1b", 1, 2, 3),
    ("zbv", 1, 2, 3),
    ("1f1b", 2, 1, 5),
    ("interleaved_1f1b", 2, 3, 4),
    ("interleaved_zero_bubble", 2, 2, 6),
    ("zbv", 2, 2, 2),
    ("1f1b", 4, 1, 8),
    ("interleaved_1f1b", 4, 2, 8),
    ("interleaved_zero_bubble", 4, 2, 4),
    ("zbv", 4, 2, 9),
    ("1f1b", 3, 1, 4),
]


@pytest.mark.parametrize(("schedule", "ranks", "chunks", "count"), CASES)
def test_losses_and_gradients_are_those_of_the_whole(schedule: Schedule, ranks: int, chunks: int, count: int) -> None:
    table = make_table(schedule, ranks, chunks, count)
    expected = whole(ranks * chunks, count)
    outcomes = run_ranks(Layout(pipeline=ranks), lambda groups: step(groups, table, steps=2))
    found = {name: g for outcome in outcomes for name, g in outcome.gradients.items()}
    assert found.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found[name], gradient)
    holders = [outcome.losses for outcome in outcomes if outcome.losses]
    assert holders == [pytest.approx(expected.losses)]


@pytest.mark.parametrize("look_ahead", [0, 1, 50])
def test_any_look_ahead_gives_the_same(look_ahead: int) -> None:
    table = make_table("interleaved_zero_bubble", 2, 2, 6)
    outcomes = run_ranks(Layout(pipeline=2), lambda groups: step(groups, table, look_ahead=look_ahead))
    expected = whole(4, 6)
    assert outcomes[1].losses == pytest.approx(expected.losses)
    for outcome in outcomes:
        for name, gradient in outcome.gradients.items():
            torch.testing.assert_close(gradient, expected.gradients[name])


def test_pipelines_beside_one_another_keep_to_themselves() -> None:
    table = make_table("1f1b", 2, 1, 3)
    expected = whole(2, 3)
    outcomes = run_ranks(Layout(pipeline=2, replicate=2), lambda groups: step(groups, table))
    assert [bool(outcome.losses) for outcome in outcomes] == [False, False, True, True]
    for outcome in outcomes:
        for name, gradient in outcome.gradients.items():
            torch.testing.assert_close(gradient, expected.gradients[name])


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2)])
def test_a_pass_without_gradients_between_steps(schedule: Schedule, chunks: int) -> None:
    training, evaluation = make_table(schedule, 2, chunks, 2), forward_table(schedule, 2, chunks, 1)

    def body(groups: ThreadGroups) -> dict[int, float]:
        stages = {i: Stage(i, 2 * chunks, WeightQueue()) for i in training.placement.stages_of(groups.rank)}
        runners = {i: AutogradStage(stage, stage.queue) for i, stage in stages.items()}
        executor = PipelineExecutor(groups, training.placement, runners)
        executor.run(training, [SHAPE] * 2)
        before = {name: g.clone() for name, g in gradients(stages).items()}
        with torch.no_grad():
            losses = executor.run(evaluation, [SHAPE])
        assert all(torch.equal(g, before[name]) for name, g in gradients(stages).items())
        assert all(not runner._live for runner in runners.values())
        return {m: float(loss) for m, loss in losses.items()}

    found = [losses for losses in run_ranks(Layout(pipeline=2), body) if losses]
    assert found == [pytest.approx({0: whole(2 * chunks, 2).losses[0]})]


def test_messages_may_have_a_shape_per_micro_batch_and_any_type() -> None:
    table = forward_table("interleaved_1f1b", 2, 2, 3)
    shapes = [(2, 3), (5, 3), (0, 3)]

    def body(groups: ThreadGroups) -> dict[int, Tensor]:
        def stage(x: Tensor | None, micro_batch: int) -> Tensor:
            return torch.zeros(shapes[micro_batch], dtype=torch.bfloat16).T.contiguous().T if x is None else x + 1

        runners = {index: AutogradStage(stage) for index in table.placement.stages_of(groups.rank)}
        with torch.no_grad():
            executor = PipelineExecutor(groups, table.placement, runners, dtype=torch.bfloat16)
            return executor.run(table, shapes)

    results = run_ranks(Layout(pipeline=2), body)
    assert results[0] == {}
    for micro_batch, result in results[1].items():
        assert torch.equal(result, torch.full(shapes[micro_batch], 3.0, dtype=torch.bfloat16))


class Counting(AutogradStage):
    """Counts the stage inputs (or outputs, on the first stage) that are alive, through their storage."""

    def __init__(self, stage: Stage, seen: list[weakref.ref[Any]]) -> None:
        super().__init__(self._watched, stage.queue)
        self.stage, self.seen = stage, seen
        self.peak = 0

    def _watched(self, x: Tensor | None, micro_batch: int) -> Tensor:
        entered = torch.zeros(SHAPE) if x is None else x
        held = entered * 1.0  # what a layer keeps for its backward pass
        self.seen.append(weakref.ref(held.untyped_storage()))
        y = self.stage(held, micro_batch)
        del held, entered
        self.peak = max(self.peak, sum(ref() is not None for ref in self.seen))
        return y


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks", "count"),
    [("1f1b", 4, 1, 8), ("interleaved_1f1b", 2, 2, 6), ("interleaved_zero_bubble", 2, 2, 4), ("zbv", 2, 2, 6)],
)
def test_no_more_activations_live_than_the_schedule_promises(
    schedule: Schedule, ranks: int, chunks: int, count: int
) -> None:
    table = make_table(schedule, ranks, chunks, count)

    def body(groups: ThreadGroups) -> int:
        seen = list[weakref.ref[Any]]()
        stages = table.placement.stages_of(groups.rank)
        runners = {i: Counting(Stage(i, ranks * chunks, WeightQueue()), seen) for i in stages}
        PipelineExecutor(groups, table.placement, runners).run(table, [SHAPE] * count)
        gc.collect()
        assert not any(ref() is not None for ref in seen)
        return max(runner.peak for runner in runners.values())

    peaks = run_ranks(Layout(pipeline=ranks), body)
    assert peaks == [peak_live(table, rank) for rank in range(ranks)]
    if schedule == "1f1b":
        assert peaks == [4, 3, 2, 1]


def test_values_of_a_sent_output_are_not_kept() -> None:
    linear = nn.Linear(3, 3)
    runner = AutogradStage(lambda x, _: linear(x) + 1.0)
    y = runner.forward(0, torch.ones(2, 3))
    storage = weakref.ref(y.untyped_storage())
    del y
    assert storage() is None and len(runner._live) == 1
    gradient = runner.backward(0, torch.ones(2, 3))
    assert gradient is not None
    torch.testing.assert_close(gradient, linear.weight.sum(0).expand(2, 3))


class Batched(PipelineExecutor):
    """What is to be avoided: a send is batched with the receive that comes next, and both are waited for."""

    def _perform(self, step: Step, mail: _Mail) -> Tensor | None:
        made = super()._perform(step, mail)
        if step.give is not None:
            later = [work for _, work in mail._expected.values()]
            for work in [mail._sent[step.give][1], *later[:1]]:
                work.wait()
        return made


@pytest.mark.parametrize(("executor", "on_time"), [(PipelineExecutor, True), (Batched, False)])
def test_a_late_peer_does_not_hold_up_independent_compute(executor: type[PipelineExecutor], on_time: bool) -> None:
    """Rank 1 sends its first gradient only when rank 0 has run its second forward pass, which needs nothing of it."""
    table = make_table("1f1b", 2, 1, 2)
    second_forward = threading.Event()

    def first(x: Tensor | None, micro_batch: int) -> Tensor:
        y: Tensor = stages[0](x, micro_batch)
        if micro_batch == 1:
            second_forward.set()
        return y

    seen = list[bool]()

    class Late(AutogradStage):
        def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
            if micro_batch == 0:
                seen.append(second_forward.wait(30.0 if on_time else 0.3))
            return super().backward(micro_batch, gradient)

    stages = [Stage(index, 2, WeightQueue()) for index in range(2)]

    def body(groups: ThreadGroups) -> None:
        runner = AutogradStage(first) if groups.rank == 0 else Late(stages[1])
        executor(groups, table.placement, {groups.rank: runner}).run(table, [SHAPE] * 2)

    run_ranks(Layout(pipeline=2), body)
    assert seen == [on_time]


def test_a_slow_receiver_does_not_hold_up_the_sender() -> None:
    """Rank 0 runs all its warm-up while rank 1 is still in its first pass and has taken nothing else."""
    table = forward_table("1f1b", 2, 1, 6)
    all_sent = threading.Event()
    seen = list[bool]()

    class Slow(AutogradStage):
        def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
            if micro_batch == 0:
                seen.append(all_sent.wait(30.0))
            assert x is not None
            return x.sum()

    class Quick(AutogradStage):
        def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
            if micro_batch == table.micro_batches - 1:
                all_sent.set()
            return torch.full(SHAPE, float(micro_batch))

    def body(groups: ThreadGroups) -> dict[int, Tensor]:
        runner = (Slow if groups.rank else Quick)(lambda x, _: torch.zeros(()))
        executor = PipelineExecutor(groups, table.placement, {groups.rank: runner}, look_ahead=1)
        return executor.run(table, [SHAPE] * 6)

    sums = run_ranks(Layout(pipeline=2), body)[1]
    assert seen == [True]
    assert {m: float(x) for m, x in sums.items()} == {m: float(m * ROWS * WIDTH) for m in range(6)}


def test_neither_direction_uses_the_others_group() -> None:
    """Four messages each, and the first one, which opens the channel."""
    table = make_table("1f1b", 3, 1, 4)

    def body(groups: ThreadGroups) -> dict[str, dict[str, int]]:
        step(groups, table)
        return {name: dict(group.traffic.calls) for (name, _), group in groups._groups.items()}

    calls = run_ranks(Layout(pipeline=3), body)
    assert calls[1] == {
        "pipeline 0 to 1": {"receive": 5},
        "pipeline 1 to 0": {"send": 5},
        "pipeline 1 to 2": {"send": 5},
        "pipeline 2 to 1": {"receive": 5},
    }
    assert calls[0].keys() == {"pipeline 0 to 1", "pipeline 1 to 0"}


class LostError(Exception):
    """The fault that is injected."""


@pytest.mark.parametrize("vanishes", [True, False])
def test_a_lost_peer_is_named_and_nobody_hangs(vanishes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of 2 fails in micro-batch 1 and closes its connections, or just says nothing until the time is up."""
    monkeypatch.setattr(thread_ranks, "TIMEOUT_S", 30.0 if vanishes else 1.5)
    table = make_table("1f1b", 2, 1, 3)
    messages = list[str]()
    arrived, over = threading.Event(), threading.Event()

    class Going(AutogradStage):
        def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
            arrived.set()
            return super().backward(micro_batch, gradient)

    class Failing(AutogradStage):
        def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
            if micro_batch == 1:
                assert arrived.wait(30.0)
                raise LostError("a fault")
            return super().forward(micro_batch, x)

    def body(groups: ThreadGroups) -> None:
        kind = Failing if groups.rank else Going
        executor = PipelineExecutor(groups, table.placement, {groups.rank: kind(Stage(groups.rank, 2, WeightQueue()))})
        if groups.rank:
            with pytest.raises(LostError) as caught:
                executor.run(table, [SHAPE] * 3)
            assert caught.value.__notes__ == ["in the pipeline's action 1F1: stage 1, micro-batch 1"]
            del caught
            if vanishes:
                close(groups)
            assert over.wait(30.0)
            return
        with pytest.raises(PipelineError) as failed:
            executor.run(table, [SHAPE] * 3)
        messages.append(str(failed.value))
        over.set()

    run_ranks(Layout(pipeline=2), body, make_gloo)
    (message,) = messages
    assert message.startswith("stage 0, micro-batch 1: receiving gradients from rank 1 (stage 1) failed on rank 0: ")


def close(groups: ThreadGroups) -> None:
    """End this rank's connections, as the end of its process would."""
    for group in groups._groups.values():
        group.backend.abort()
        group._made = None
    gc.collect()


def test_messages_name_both_ends() -> None:
    message = Message(stage=2, gradient=False, micro_batch=5, sender=1, receiver=2, order=0)
    assert (message.source, message.content) == (1, "activations")
    assert message._replace(gradient=True).source == 3
