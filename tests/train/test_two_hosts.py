"""The loss of a host, of its keeper, of a rack: runs go on from the memory of other hosts, with nothing durable."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_hosts import lost_and_found
from support.chunk_sums import chunk_sums
from support.hosts import Cluster, a_cluster, share_text
from support.kills.run import TinyRun
from support.open_checkpoint import open_checkpoint

from phalanx.checkpoint.storage.folder import candidates

STEPS = 40
REPLICATE = {"parallel.replicate": 2}
SHARD = {"parallel.shard": 2, "model.vocab_multiple": 2}
ENDLESS = 100_000
STEADY = {"optim.schedule.kind": "constant", "optim.schedule.warmup_steps": 0}
"""What a step does is not a matter of how many there will be: a run may be told its end when it has been looked at."""

Start = Callable[..., Cluster]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def straight(folder: Path) -> Callable[[dict[str, Any]], TinyRun]:
    """The run that nobody disturbs, with these settings; it has no keeper."""
    known: dict[str, TinyRun] = {}
    blocking = {"checkpoint.mode": "blocking", "checkpoint.memory_every_steps": 0}

    def made(changes: dict[str, Any]) -> TinyRun:
        changes = {key: value for key, value in changes.items() if not key.startswith("checkpoint.")}
        name = "".join(f"-{key.partition('.')[2]}-{value}" for key, value in changes.items())
        if name not in known:
            ranks = [1] * _ranks(changes)
            run = TinyRun(folder, f"straight{name}", {"train.steps": STEPS} | changes | blocking)
            with a_cluster(run, ranks) as cluster:
                cluster.start()
                assert set(cluster.wait()) == {0}, cluster.logs()
            known[name] = run
        return known[name]

    return made


@pytest.fixture
def start(tmp_path: Path, straight: Callable[..., TinyRun]) -> Iterator[Start]:
    """Start a run on hosts with so many ranks each, and wait until each of them could be lost."""
    with ExitStack() as running:

        def started(
            ranks: list[int], changes: dict[str, Any], racks: tuple[str, ...] = (), steps: int = STEPS
        ) -> Cluster:
            run = TinyRun(tmp_path, "run", {"train.steps": STEPS} | changes)
            share_text(straight(changes), tmp_path)
            cluster = running.enter_context(a_cluster(run, ranks, racks))
            cluster.start({"train.steps": steps})
            cluster.until_replicated()
            return cluster

        yield started


def _ranks(changes: dict[str, Any]) -> int:
    product = 1
    for key, value in changes.items():
        product *= value if key.startswith("parallel.") else 1
    return product


def go_on(cluster: Cluster, **changes: Any) -> None:
    cluster.start(changes)
    assert set(cluster.wait()) == {0}, cluster.logs()


def require_same(run: TinyRun, straight: TinyRun) -> None:
    assert run.steps() == straight.steps()
    last = [open_checkpoint(candidates(one.path / "checkpoints")[0].path).read() for one in (run, straight)]
    assert last[0].keys() == last[1].keys()
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])


@pytest.mark.campaign(but=("shard",))
@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        ([1, 1], SHARD),
        ([1, 1], REPLICATE),  # rank 0 alone has something to save, and is gone
        pytest.param([2, 2], SHARD | {"parallel.tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=["shard", "replicate", "shard and tensor"],
)
def test_a_host_is_lost(
    start: Start, straight: Callable[..., TinyRun], ranks: list[int], changes: dict[str, Any]
) -> None:
    cluster = start(ranks, changes)
    whole = cluster.lose(0).whole
    go_on(cluster)
    taken_up = cluster.taken_up()
    assert taken_up is not None and taken_up.step == whole[0] > 0
    assert taken_up.source.startswith("the memory of")
    require_same(cluster.run, straight(changes))


def test_what_is_left_goes_on_in_another_layout(start: Start, straight: Callable[..., TinyRun]) -> None:
    """The shards that a lost host had are read from its peer by whoever needs parts of them now."""
    cluster = start([1, 1], SHARD)
    whole = cluster.lose(0).whole
    go_on(cluster, **{"parallel.shard": 1, "parallel.tensor": 2})
    taken_up = cluster.taken_up()
    assert taken_up is not None and taken_up.step == whole[0]
    assert taken_up.source.startswith("the memory of ") and "lo of host " in taken_up.source
    assert [event["step"] for event in cluster.events("checkpoint")] == [STEPS]
    assert not cluster.last_keepers()
    mine, theirs = cluster.run.steps(), straight(SHARD).steps()
    assert [one[0] for one in mine] == list(range(1, STEPS + 1))
    assert mine[: whole[0]] == theirs[: whole[0]]
    assert [one[1] for one in mine] == pytest.approx([one[1] for one in theirs], rel=1e-4)


@pytest.mark.campaign(but=("all",))
@pytest.mark.parametrize("damaged", ["newest", pytest.param("all", marks=pytest.mark.slow)])
def test_a_replica_that_was_damaged_is_refused(start: Start, straight: Callable[..., TinyRun], damaged: str) -> None:
    cluster = start([1, 1], SHARD | {"checkpoint.every_steps": 10})
    cluster.until(
        "a checkpoint and later snapshots", lambda: _durable(cluster) < cluster.run.last_step() - 3, slowly=True
    )
    whole = cluster.lose(1).whole
    durable = _durable(cluster)
    hit = damage_replicas(cluster, 0, whole[:1] if damaged == "newest" else whole)
    assert hit == (1 if damaged == "newest" else len(whole))
    go_on(cluster)
    taken_up, said = cluster.taken_up(), cluster.log()
    assert taken_up is not None, said
    assert re.search(rf"step {whole[0]}: the copy of rank 1 in memory of host \S+ is refused \(.* sum .*\)", said), said
    if damaged == "newest":
        assert taken_up.step >= (whole[1] if len(whole) > 1 else durable)
    else:
        assert "trying durable storage or an older state" in said
        assert re.search(r"checkpoints/step-\d+\S*$", taken_up.source), taken_up
        assert taken_up.step >= durable
    require_same(cluster.run, straight(SHARD))


def _durable(cluster: Cluster) -> float:
    """Step of the newest checkpoint."""
    return max((one.step for one in candidates(cluster.run.path / "checkpoints")), default=math.inf)


def damage_replicas(cluster: Cluster, host: int, steps: list[int]) -> int:
    """Turn over a bit in the memory of the keeper of `host`, in every replica of these steps; how many there are."""
    records = [record for record, is_replica in cluster.held(host) if is_replica and record.step in steps]
    (keeper,) = [one for one in cluster.keepers(host) if one.name().startswith("phalanx keeper")]
    hit = set()
    for link in Path(f"/proc/{keeper.pid}/fd").iterdir():
        try:
            what = str(link.readlink())
        except FileNotFoundError:  # of a connection that was hung up just now
            continue
        if "of replica of rank" not in what:
            continue
        with link.open("r+b") as memory:
            content = memory.read()
            for record in records:
                if chunk_sums(content, record.data_bytes) == record.sums:
                    memory.seek(len(content) // 2)
                    memory.write(bytes([content[len(content) // 2] ^ 1]))
                    hit.add(record.step)
    return len(hit)


@pytest.mark.campaign
def test_a_keeper_dies_and_replicas_go_to_the_new_one(start: Start, straight: Callable[..., TinyRun]) -> None:
    cluster = start([1, 1], SHARD | STEADY, steps=ENDLESS)
    cluster.kill_keeper(0)
    killed = cluster.run.last_step()
    cluster.until(
        "replicas on both hosts", lambda: all(_newest_replica(cluster, host) > killed for host in (0, 1)), slowly=True
    )
    assert "there is a keeper on this host again" in cluster.log(0)
    whole = cluster.lose(1).whole
    end = {"train.steps": cluster.run.last_step() + 5}
    go_on(cluster, **end, **{"run.resume": "changed"})
    taken_up = cluster.taken_up()
    assert taken_up is not None and taken_up.step == whole[0] > killed
    # a shard came from another host: how, how much, how fast
    assert re.search(r"the memory of .*lo of host \S+: [\d.]+ \w+ at [\d.]+ GB/s", taken_up.source)
    require_same(cluster.run, straight(SHARD | STEADY | end))


def _newest_replica(cluster: Cluster, host: int) -> int:
    return max((record.step for record, is_replica in cluster.held(host) if is_replica), default=0)


@pytest.mark.campaign
@pytest.mark.slow
def test_a_rack_is_lost(start: Start, straight: Callable[..., TinyRun]) -> None:
    """Two of three hosts share a rack, so both keep their replicas on the third."""
    changes = {"parallel.shard": 3, "train.global_batch": 6}
    cluster = start([1, 1, 1], changes, ("left", "left", "right"))
    whole = cluster.lose(0, 1).whole
    assert {record.rank for record, is_replica in cluster.held(2) if is_replica} == {0, 1}
    assert "a host of the same rack" not in cluster.logs()
    go_on(cluster)
    taken_up = cluster.taken_up()
    assert taken_up is not None and taken_up.step == whole[0] > 0
    assert taken_up.source.startswith("the memory of ") and "lo of host " in taken_up.source
    require_same(cluster.run, straight(changes))


@pytest.mark.campaign
def test_hosts_are_lost_at_any_moment(tmp_path: Path) -> None:
    losses, bad = lost_and_found(tmp_path, 3, seed=1, steps_per_kill=30)
    assert not bad
    assert len(losses) == 3
    assert all(loss.taken_up == loss.whole > 0 for loss in losses)
