from pathlib import Path

import numpy as np
import torch

from phalanx.data.config import DataConfig, SourceConfig, TokenizerConfig
from phalanx.data.loader import Loader, LoaderState
from phalanx.data.prepare import prepare


def make(folder: Path, **settings: object) -> tuple[DataConfig, Loader]:
    text = "".join(f"line {i} of the text\n" for i in range(400))
    (folder / "text.txt").write_text(text)
    defaults = {
        "sequence_length": 16,
        "sources": (SourceConfig(kind="text", path=str(folder / "text.txt"), document_separator="\n"),),
        "tokenizer": TokenizerConfig(kind="bytes"),
        "folder": str(folder / "prepared"),
        "validation_fraction": 0.1,
    }
    config = DataConfig(**(defaults | settings))
    return config, Loader(prepare(config, workers=1), config)


def test_a_resumed_stream_equals_an_uninterrupted_one_and_batch(tmp_path: Path) -> None:
    _, loader = make(tmp_path)
    with loader.stream(counts=6) as stream:
        straight = [next(stream) for _ in range(8)]
    for number, (batch, state) in enumerate(straight):
        assert state == LoaderState(6 * (number + 1))
        assert torch.equal(batch.tokens_BS, loader.batch(6 * number, 6).tokens_BS)
        with loader.stream(state, counts=6) as resumed:
            again, _ = next(resumed)
        assert torch.equal(again.tokens_BS, loader.batch(6 * (number + 1), 6).tokens_BS)


def test_ranks_share_a_step_in_order(tmp_path: Path) -> None:
    _, loader = make(tmp_path)
    shares = []
    for rank in range(3):
        with loader.stream(counts=6, rank=rank, ranks=3) as stream:
            shares.append(next(stream)[0].tokens_BS)
    assert torch.equal(torch.cat(shares), loader.batch(0, 6).tokens_BS)


def test_one_epoch_reads_every_token_once(tmp_path: Path) -> None:
    _, loader = make(tmp_path, random_offset=False)
    every = loader.batch(0, loader.samples_per_epoch)
    stream = np.concatenate([np.load(s.tokens) for s in loader.prepared.sources[0].splits["train"].shards])
    rows = {tuple(row) for row in every.tokens_BS.tolist()}
    pieces = stream[: loader.samples_per_epoch * 16].reshape(-1, 16)
    assert {tuple(row) for row in pieces.tolist()} == rows
