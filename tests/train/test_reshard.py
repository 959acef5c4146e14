"""A run that goes on in another layout has the saved state bit for bit, and the figures of one that never moved.

A few of the pairs of ``benchmarks/parity.py --reshard``, with threads of this process as ranks.
"""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import rewrite
from support.open_checkpoint import open_checkpoint
from support.parity import reshard as resharding
from support.parity.reshard import moved, process_rank, reshard
from train_helpers import copies

from phalanx.launch.environment import Worker
from phalanx.train.config import RunConfig

pytestmark = pytest.mark.usefixtures("no_peak")

PAIRS = [
    ("single", "pp2 fs2 tp2"),
    ("pp2 zbv", "single"),
    ("fs2 zero 3", "tp2"),
    ("fs2 zero 3", "cp2 ring"),
]
FEWER_BITS = [("fs2 zero 3", "pp2 zbv"), ("single", "pp2 fs2 tp2")]


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


def test_a_run_goes_on_in_another_layout(tmp_path: Path) -> None:
    (found,) = reshard(tmp_path, [("pp2 zbv", "fs2 zero 3")], by_threads)
    assert found.passes, found


@pytest.mark.slow
def test_runs_go_on_in_layouts_of_other_axes_and_sizes(tmp_path: Path) -> None:
    found = reshard(tmp_path, PAIRS, by_threads)
    assert [(pair.saved, pair.loaded) for pair in found] == PAIRS
    assert all(pair.passes for pair in found), found


@pytest.mark.campaign(but=("16-pairs1",))
@pytest.mark.slow
@pytest.mark.parametrize(("bits", "pairs"), [(8, FEWER_BITS), (16, FEWER_BITS[-1:])])
def test_moments_of_fewer_bits_move_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int, pairs: list[tuple[str, str]]
) -> None:
    """Codes and scales go with the rows: blocks never cross them, so no layout rounds differently."""
    monkeypatch.setitem(resharding.SETTINGS, "optim.state_bits", bits)
    monkeypatch.setitem(resharding.SETTINGS, "model.hidden", 64)
    found = reshard(tmp_path, pairs, by_threads)
    assert all(pair.passes for pair in found), found
    saved = open_checkpoint(list(copies(tmp_path / "single to pp2 fs2 tp2"))[-1]).read()
    kinds = {saved[f"optim.{name}.exp_avg"].dtype for name in ("layers.0.attention.q", "layers.0.mlp.up")}
    assert kinds == {torch.uint8 if bits == 8 else torch.bfloat16}


@pytest.mark.campaign(but=("lamb",))
@pytest.mark.slow
@pytest.mark.parametrize("name", ["lamb", "came"])
def test_state_of_rows_and_columns_moves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(resharding.SETTINGS, "optim.name", name)
    monkeypatch.setitem(resharding.SETTINGS, "optim.lr", 1e-4)
    pairs = [("fs2 zero 3", "pp2 zbv"), ("single", "fs2 zero 3")]
    found = reshard(tmp_path, pairs, by_threads)
    assert all(pair.passes for pair in found), found


def test_the_comparison_sees_other_state_and_other_figures(tmp_path: Path) -> None:
    """What the benchmark calls equal is what nothing was done to."""
    (right,) = reshard(tmp_path, [("single", "pp2 zbv")], by_threads)
    assert right.passes and right.losses < 1e-6
    copy = tmp_path / "single to pp2 zbv"
    (resaved,) = (copy / "resaved").iterdir()
    manifest = json.loads((resaved / "manifest.json").read_text())
    assert manifest["state"]["samples"] == 80
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    where = max(index for index, line in enumerate(lines) if json.loads(line)["kind"] == "step") - 1
    one = json.loads(lines[where])
    assert one["kind"] == "step"
    lines[where] = json.dumps(one | {"loss": one["loss"] * (1 + 1e-4)})
    (copy / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert moved(tmp_path, "single", "pp2 zbv").losses == pytest.approx(1e-4, rel=0.02)
    other = list(copies(copy))[-1]  # of the last step
    assert other.name != resaved.name
    for path in list(resaved.iterdir()):
        path.unlink()
    for path in other.iterdir():
        (resaved / path.name).write_bytes(path.read_bytes())
    rewrite(resaved, lambda tree: tree.update(step=int(resaved.name.removeprefix("step-"))))
    different = moved(tmp_path, "single", "pp2 zbv").different
    assert "samples" in different and "model.embedding" in different
    assert any(name.startswith("optim.") for name in different)


def test_the_layouts_cover_every_axis() -> None:
    layouts = resharding.LAYOUTS.values()
    assert {axis for layout in layouts for axis in layout} >= {"pipeline", "shard", "context", "tensor"}
    assert len(layouts) == 6
