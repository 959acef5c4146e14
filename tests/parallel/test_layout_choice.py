"""Layouts that are chosen, and impossible ones that are refused before anything starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from phalanx.core.config import validate
from phalanx.core.errors import UserError
from phalanx.model.config import ModelConfig
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.feasible import Task, needed_bytes
from phalanx.parallel.layout_choice import Judge, LayoutChoice, Machines, Need, Verdict, choose_layout

MODEL: dict[str, Any] = {"layers": 8, "hidden": 64, "heads": 8, "vocab_size": 256, "max_sequence": 64}


def task(batch: int = 16, micro_batch: int = 0, weight_bytes: int = 4_000, **model: Any) -> Task:
    config = ModelConfig(**(MODEL | model))
    return Task(config, 64, (batch,), micro_batch, weight_bytes, weight_bytes, 2 * weight_bytes)


def choose(settings: dict[str, Any], what: Task | None = None, **machines: Any) -> LayoutChoice:
    config = validate(ParallelConfig, settings)
    return choose_layout(config, what or task(), Machines(**({"ranks_per_host": 8} | machines)))


def test_without_devices_the_axes_are_taken_as_they_are() -> None:
    choice = choose({"tensor": 2, "shard": 2})
    assert str(choice.layout) == "fs2·tp2" and choice.reasons == ()


def test_devices_alone_become_data_parallel_and_it_says_why() -> None:
    choice = choose({"devices": 8})
    assert str(choice.layout) == "fs8" and choice.config.zero == 1
    assert any("shard = 8" in reason for reason in choice.reasons)


def test_more_state_is_split_where_memory_is_short() -> None:
    # Whole: 4 kB weights, 4 kB gradients, 8 kB state; split over 8: masters 0.5 kB and state 1 kB beside them.
    assert choose({"devices": 8}, available_bytes=10_000).config.zero == 1
    assert choose({"devices": 8}, available_bytes=6_500).config.zero == 2
    assert choose({"devices": 8}, available_bytes=2_500).config.zero == 3


def test_a_small_batch_is_shared_by_splitting_matrices() -> None:
    assert str(choose({"devices": 8}, task(batch=4)).layout) == "fs4·tp2"


def test_between_hosts_a_pipeline_comes_before_split_weights() -> None:
    # On 2 ranks a host, tensor = 2 leaves 2 kB of weights and as much of gradients on each rank, which is too much.
    choice = choose({"devices": 8}, task(batch=64), ranks_per_host=2, available_bytes=2_600)
    assert choice.config.pipeline > 1 and choice.config.zero < 3
    assert choose({"devices": 8}, task(batch=64), available_bytes=2_600).config.zero == 3


def test_given_axes_stay() -> None:
    choice = choose({"devices": 8, "tensor": 2})
    assert choice.config.tensor == 2 and choice.layout.world_size == 8


def test_memory_counts_what_each_zero_stage_splits() -> None:
    sizes = [needed_bytes(ParallelConfig(shard=4, zero=zero), task()) for zero in (1, 2, 3)]
    assert sizes == [4_000 + 4_000 + 1_000 + 2_000, 4_000 + 1_000 + 1_000 + 2_000, 1_000 + 1_000 + 2_000]
    assert needed_bytes(ParallelConfig(), task()) == 16_000
    assert needed_bytes(ParallelConfig(tensor=2), task()) == 8_000
    assert 8_000 <= needed_bytes(ParallelConfig(pipeline=2), task()) < 10_000


def test_micro_batches_are_chosen_so_that_the_bubble_is_small() -> None:
    choice = choose({"pipeline": 2}, task(batch=64))
    assert choice.micro_batches >= 8 and choice.micro_batches * choice.micro_batch == 64


@pytest.mark.parametrize(
    ("settings", "what", "message"),
    [
        ({"tensor": 3}, {}, r"parallel\.tensor = 3.*model\.heads = 8"),
        ({"replicate": 3}, {}, r"train\.global_batch = 16.*multiple of 3"),
        ({"shard": 2}, {"micro_batch": 3}, r"train\.micro_batch = 3.*8 sequences"),
        ({"pipeline": 16}, {}, r"16 pipeline stages.*8 layers"),
        ({"pipeline": 4}, {"batch": 2}, r"parallel\.pipeline = 4.*2 micro-batches"),
        ({"context": 3}, {}, r"parallel\.context = 3.*64.*multiple of 6"),
        ({"devices": 6, "tensor": 4}, {}, r"parallel\.devices = 6.*tensor 4"),
        ({"devices": 7}, {"layers": 1, "heads": 1}, r"parallel\.devices = 7.*no layout"),
    ],
)
def test_impossible_layouts_are_refused_with_the_numbers_and_the_cure(
    settings: dict[str, Any], what: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        choose(settings, task(**what))


def test_memory_that_cannot_do_is_refused() -> None:
    with pytest.raises(UserError, match=r"parallel: .*each rank.*raise parallel\.zero"):
        choose({"shard": 2}, available_bytes=1_000)


def test_schedules_and_chunks_must_fit() -> None:
    with pytest.raises(UserError, match="chunks = 2 does not fit schedule = '1f1b'"):
        validate(ParallelConfig, {"pipeline": 2, "chunks": 2})
    assert ParallelConfig(pipeline=2, schedule="zbv").stages == 4


def test_an_optimizer_of_whole_matrices_gets_replicas_and_stages() -> None:
    what = replace(task(), whole_matrices_for="muon")
    choice = choose({"devices": 4}, what)
    assert str(choice.layout) == "dp4" and "muon works on whole matrices" in choice.reasons[0]
    assert str(choose({"devices": 3}, what).layout) == "pp3"
    with pytest.raises(
        UserError, match=r"optim\.name = 'muon'.*parallel\.shard = 2 and parallel\.tensor = 2 split them"
    ):
        choose({"shard": 2, "tensor": 2}, what)


def test_what_was_refused_first_is_told_as_the_reason_for_more_than_data_parallel() -> None:
    reasons = choose({"devices": 3}).reasons
    assert any(
        "not data parallel alone: train.global_batch = 16: cannot be shared by 3" in reason for reason in reasons
    )
    assert not any("not data parallel alone" in reason for reason in choose({"devices": 4}).reasons)


def test_a_batch_on_the_way_to_the_whole_one_is_named_as_such() -> None:
    what = replace(task(), global_batches=(4, 16))
    with pytest.raises(UserError, match=r"optim\.batch_warmup: has a batch of 4, which cannot be shared by 8"):
        choose({"shard": 8}, what)


def test_heads_that_cannot_be_exchanged_are_refused_early() -> None:
    assert choose({"context": 2, "context_method": "all_to_all", "tensor": 4}).layout.world_size == 8
    with pytest.raises(UserError, match=r"parallel\.context = 4: .*model\.heads 8 / parallel\.tensor 4 = 2"):
        choose({"context": 4, "context_method": "all_to_all", "tensor": 4})


def test_sequences_are_cut_into_two_pieces_a_rank_only_where_the_ring_balances() -> None:
    what = replace(task(), sequence_length=60)
    with pytest.raises(UserError, match=r"parallel\.context = 4: .* into 8 equal pieces, two a rank"):
        choose({"context": 4}, what)
    assert choose({"context": 4, "context_method": "all_to_all"}, what).layout.context == 4
    windows = replace(task(attention=("window",), window=8), sequence_length=60)
    assert choose({"context": 4}, windows).layout.context == 4


def test_numbers_of_devices_that_would_do_are_named() -> None:
    with pytest.raises(
        UserError, match=r"parallel\.devices = 11: no layout .*; take 10 or 12 devices, or give the axes"
    ):
        choose({"devices": 11}, task(layers=5))
    with pytest.raises(UserError, match=r"parallel\.devices = 22: .*; take 20 or 24 devices, or give"):
        choose({"devices": 22, "tensor": 2}, task(layers=5))


def judged(verdicts: dict[str, Verdict]) -> Judge:
    """By the layout and its ZeRO stage, such as ``fs8 2``; what is not named does not fit."""

    def judge(config: ParallelConfig, _: int) -> Need:
        verdict = verdicts.get(f"{config.layout} {config.zero}", "no")
        return Need(verdict, 100.0 / config.tensor / config.pipeline, 10.0, "things")

    return judge


def by_judge(judge: Judge, batch: int = 64) -> LayoutChoice:
    return choose_layout(ParallelConfig(devices=8), task(batch), Machines(8), judge)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ({"fs8 2": "well", "fs8 3": "well"}, "fs8 2"),
        ({"fs8 1": "slowly", "fs8 3": "barely", "fs4·tp2 2": "well"}, "fs4·tp2 2"),
        ({"fs8 1": "barely", "fs8 2": "slowly", "fs4·tp2 1": "slowly"}, "fs8 2"),
        ({"fs8 1": "barely", "fs4·tp2 1": "barely"}, "fs8 1"),
    ],
)
def test_the_first_that_fits_well_is_taken_else_slowly_else_barely(verdicts: dict[str, Verdict], expected: str) -> None:
    choice = by_judge(judged(verdicts))
    assert f"{choice.layout} {choice.config.zero}" == expected
    said = "\n".join(choice.reasons)
    verdict = verdicts[expected]
    assert ("whole layers are computed again" in said) == (verdict == "slowly")
    assert ("none leaves a tenth free" in said) == (verdict == "barely")
    assert ("not data parallel alone: things are" in said) == ("tp" in expected)


def test_sequences_are_split_only_where_no_layout_of_whole_ones_fits() -> None:
    def judge(config: ParallelConfig, _: int) -> Need:
        splits = (config.context, config.tensor) == (4, 2)
        return Need("well" if splits else others.get(str(config.layout), "no"), 100.0, 10.0, "things")

    others: dict[str, Verdict] = {}
    choice = by_judge(judge)
    assert (choice.config.context, choice.config.tensor, choice.layout.world_size) == (4, 2, 8)
    assert any(reason.startswith("context = 4: parts of every sequence") for reason in choice.reasons)
    others["tp8"] = "slowly"
    assert by_judge(judge).config.context == 1
    for refused in (replace(task(64), whole_matrices_for="muon"), replace(task(64), sequence_length=63)):
        others.clear()
        with pytest.raises(UserError, match="no layout of so many devices fits"):
            choose_layout(ParallelConfig(devices=8), refused, Machines(8), judge)


def test_where_nothing_fits_the_nearest_is_told_and_how_many_devices_would_do() -> None:
    enough = judged({"fs32 1": "well"})
    with pytest.raises(UserError, match=r"The nearest: things are .* of tp8 with .*; take 32 devices, a smaller model"):
        by_judge(enough)
    with pytest.raises(UserError, match=r"; take a smaller model or data.sequence_length, or give the axes yourself"):
        by_judge(judged({}))


def test_a_pipeline_takes_a_smaller_micro_batch_where_its_own_does_not_fit() -> None:
    sizes: list[tuple[str, int]] = []

    def judge(config: ParallelConfig, micro_batch: int) -> Need:
        sizes.append((str(config.layout), micro_batch))
        return Need("well" if config.pipeline == 2 and micro_batch == 1 else "no", 1.0, 1.0, "things")

    what = replace(task(64), whole_matrices_for="muon")
    choice = choose_layout(ParallelConfig(devices=2, replicate=1, pipeline=2), what, Machines(8), judge)
    assert (choice.micro_batch, choice.micro_batches) == (1, 64)
    assert [size for _, size in sizes] == sorted((size for _, size in sizes), reverse=True)
