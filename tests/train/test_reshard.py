"""A run that goes on in another layout has the saved state bit for bit, and the figures of one that never moved.

A few of the pairs of ``benchmarks/parity.py --reshard``, with threads of this process as ranks.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import rewrite
from support.open_checkpoint import open_checkpoint
from support.parity import reshard as resharding
from support.parity.reshard import Moved, moved, process_rank, reshard
from train_helpers import copies

from phalanx.launch.environment import Worker
from phalanx.train.config import RunConfig

PAIRS = [
    ("pp2 zbv", "fs2 zero 3"),
    ("pp2 zbv", "single"),
    ("single", "pp2 fs2 tp2"),
    ("fs2 zero 3", "tp2"),
    ("fs2 zero 3", "cp2 ring"),
]


@pytest.fixture(scope="module", autouse=True)
def _short_runs() -> Iterator[None]:
    """Of the benchmark's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resharding, "SAVED_STEP", 3)
        patch.setattr(resharding, "LAST_STEP", 6)
        patch.setitem(resharding.SETTINGS, "checkpoint.every_steps", 3)
        patch.setitem(resharding.SETTINGS, "train.steps", 6)
        patch.setitem(resharding.SETTINGS, "train.global_batch", 4)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[Moved]:
    """What came of all pairs, in `folder`."""
    return reshard(folder, PAIRS, by_threads)


def by_threads(config: RunConfig) -> None:
    """Without a loader process, which takes longer to start than these runs take."""
    parallel = config.parallel.model_copy(update={"host_loader": False})
    config = config.model_copy(update={"parallel": parallel})
    count = config.parallel.layout.world_size
    listener = socket.create_server(("127.0.0.1", 0))
    port, errors = listener.getsockname()[1], []

    def main(rank: int) -> None:
        fd = listener.detach() if rank == 0 and count > 1 else None
        worker = Worker(rank, rank, count, count, "127.0.0.1", port, hosts_store=rank == 0, listen_fd=fd)
        try:
            process_rank(worker, config)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    listener.close()
    if errors:
        raise errors[0]


@pytest.mark.slow
def test_runs_go_on_in_layouts_of_other_axes_and_sizes(found: list[Moved]) -> None:
    assert [(pair.saved, pair.loaded) for pair in found] == PAIRS
    assert all(pair.passes for pair in found), found


@pytest.mark.campaign(but=("8-fs2 zero 3-pp2 zbv",))
@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "saved", "loaded"),
    [(8, "fs2 zero 3", "pp2 zbv"), (8, "single", "pp2 fs2 tp2"), (16, "single", "pp2 fs2 tp2")],
)
def test_moments_of_fewer_bits_move_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int, saved: str, loaded: str
) -> None:
    """Codes and scales go with the rows: blocks never cross them, so no layout rounds differently."""
    monkeypatch.setitem(resharding.SETTINGS, "optim.state_bits", bits)
    monkeypatch.setitem(resharding.SETTINGS, "model.hidden", 64)
    (pair,) = reshard(tmp_path, [(saved, loaded)], by_threads)
    assert pair.passes, pair
    last = open_checkpoint(list(copies(tmp_path / f"{saved} to {loaded}"))[-1]).read()
    kinds = {last[f"optim.{name}.exp_avg"].dtype for name in ("layers.0.attention.q", "layers.0.mlp.up")}
    assert kinds == {torch.uint8 if bits == 8 else torch.bfloat16}


@pytest.mark.campaign(but=("fs2 zero 3-pp2 zbv-lamb",))
@pytest.mark.slow
@pytest.mark.parametrize("name", ["lamb", "came"])
@pytest.mark.parametrize(("saved", "loaded"), [("fs2 zero 3", "pp2 zbv"), ("single", "fs2 zero 3")])
def test_state_of_rows_and_columns_moves_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: str, loaded: str, name: str
) -> None:
    monkeypatch.setitem(resharding.SETTINGS, "optim.name", name)
    monkeypatch.setitem(resharding.SETTINGS, "optim.lr", 1e-4)
    (pair,) = reshard(tmp_path, [(saved, loaded)], by_threads)
    assert pair.passes, pair


def test_the_comparison_sees_other_state_and_other_figures(folder: Path, found: list[Moved]) -> None:
    """What the benchmark calls equal is what nothing was done to."""
    right = found[PAIRS.index(("pp2 zbv", "single"))]
    assert right.passes and right.losses < 1e-6
    copy = folder / "pp2 zbv to single"
    (resaved,) = (copy / "resaved").iterdir()
    manifest = json.loads((resaved / "manifest.json").read_text())
    assert manifest["state"]["samples"] == 12
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    where = max(index for index, line in enumerate(lines) if json.loads(line)["kind"] == "step") - 1
    one = json.loads(lines[where])
    assert one["kind"] == "step"
    lines[where] = json.dumps(one | {"loss": one["loss"] * (1 + 1e-4)})
    (copy / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert moved(folder, "pp2 zbv", "single").losses == pytest.approx(1e-4, rel=0.02)
    other = list(copies(copy))[-1]  # of the last step
    assert other.name != resaved.name
    for path in list(resaved.iterdir()):
        path.unlink()
    for path in other.iterdir():
        (resaved / path.name).write_bytes(path.read_bytes())
    rewrite(resaved, lambda tree: tree.update(step=int(resaved.name.removeprefix("step-"))))
    different = moved(folder, "pp2 zbv", "single").different
    assert "samples" in different and "model.embedding" in different
    assert any(name.startswith("optim.") for name in different)


def test_the_layouts_cover_every_axis() -> None:
    layouts = resharding.LAYOUTS.values()
    assert {axis for layout in layouts for axis in layout} >= {"pipeline", "shard", "context", "tensor"}
    assert len(layouts) == 6
