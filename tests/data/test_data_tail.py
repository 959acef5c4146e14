"""Held-out text of corpora that have too few documents to hold some of them out: the end of their text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import lines, make_config, stored, write_jsonl, write_text

from phalanx.core.errors import UserError
from phalanx.data.config import SourceConfig, TokenizerConfig
from phalanx.data.loader import Loader
from phalanx.data.prepare import Progress, open_prepared, prepare
from phalanx.data.sources import input_files
from phalanx.data.tokens.prepared_corpus import Prepared, PreparedSplit, hold_out_tail
from phalanx.data.tokens.shards import TokenStream


def both(prepared: Prepared) -> list[int]:
    return [*stored(prepared, "train").tolist(), *stored(prepared, "validation").tolist()]


@pytest.mark.parametrize("name", ["a.txt", "held-2.txt"], ids=["chosen for training", "chosen to be held out"])
@pytest.mark.parametrize("kind", ["bytes", "bpe", "chars"])
def test_one_text_file_just_trains(tmp_path: Path, name: str, kind: str) -> None:
    path = write_text(tmp_path / name, lines(60))
    settings: dict[str, Any] = {"tokenizer": TokenizerConfig(kind=kind, vocab_size=300), "validation_fraction": None}
    config = make_config(tmp_path, SourceConfig(kind="text", path=str(path)), **settings)
    said: list[Progress] = []
    prepared = prepare(config, workers=1, progress=said.append)
    assert "the end of the text" in said[-1].stage
    assert prepared.tokenizer.decode(both(prepared)) == path.read_text()
    assert prepared.num_tokens("validation") == round(0.05 * len(both(prepared)))
    assert both(open_prepared(config)) == both(prepared)
    loader = Loader(prepared, config)
    assert loader.samples_per_epoch and list(loader.validation_batches(4))


def test_a_source_that_is_held_out_as_a_whole_beside_others(tmp_path: Path) -> None:
    """Its end is held out; of the others, whole documents are, as ever."""
    many = write_jsonl(tmp_path / "a.jsonl", [{"text": line} for line in lines(200)])
    one = write_text(tmp_path / "held-2.txt", lines(20))
    sources = SourceConfig(kind="jsonl", path=str(many)), SourceConfig(kind="text", path=str(one))
    alone = prepare(make_config(tmp_path, sources[0], validation_fraction=0.05), workers=1)
    prepared = prepare(make_config(tmp_path, *sources, validation_fraction=0.05), workers=1)
    assert prepared.sources[0].splits == alone.sources[0].splits
    held = prepared.sources[1].splits["validation"].num_tokens
    assert held == round(0.05 * (held + prepared.sources[1].splits["train"].num_tokens))


@pytest.mark.parametrize("share", [1e-9, 0.05, 0.4, 0.9])
def test_masks_and_borders_move_with_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    monkeypatch.setattr(input_files, "MIN_UNIT_BYTES", 512)
    records = [{"q": f"question {i}? ", "a": f"answer {i} of them"} for i in range(40)]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    source = SourceConfig(kind="jsonl", path=str(path), field="a", prompt_field="q")
    before = prepare(make_config(tmp_path, source), workers=1).sources[0]
    assert len(before.splits["train"].shards) > 3
    after = hold_out_tail(before, share, least=17)
    whole, *parts = (_values(split) for split in (before.splits["train"], *after.splits.values()))
    assert whole == [[*first, *second] for first, second in zip(*parts, strict=True)]
    assert len(parts[1][0]) == max(2, round(share * len(whole[0])))
    assert [sum(part[2]) for part in parts] == [split.num_documents for split in after.splits.values()]
    assert sum(split.num_trained for split in after.splits.values()) == before.splits["train"].num_trained
    twice = hold_out_tail(after, share, least=17)
    assert [_values(split) for split in twice.splits.values()] == parts


def _values(split: PreparedSplit) -> list[list[int]]:
    """Tokens, mask, and 1 where a document begins."""
    stream, begin = TokenStream(split.shards), np.array([0])
    tokens, mask = np.zeros((1, len(stream)), np.int64), np.zeros((1, len(stream)), np.int64)
    stream.read_tokens(begin, tokens)
    stream.read_mask(begin, mask)
    starts = set(stream.document_starts(begin, len(stream))[1])
    return [*tokens.tolist(), *mask.tolist(), [int(place in starts) for place in range(len(stream))]]


@pytest.mark.parametrize(("length", "held"), [(17, None), (18, 2), (20, 4), (40, 20)])
def test_a_sample_to_train_on_comes_before_the_share(tmp_path: Path, length: int, held: int | None) -> None:
    """A text of 17 letters has 18 tokens with its end: one too few for a sample and a target that is held out."""
    source = SourceConfig(kind="text", path=str(write_text(tmp_path / "held-2.txt", ["x" * length])))
    config = make_config(tmp_path, source, validation_fraction=0.5)
    if held is None:
        with pytest.raises(UserError, match=r"has 16 tokens to train on, a sample needs 17"):
            prepare(config, workers=1)
    else:
        assert prepare(config, workers=1).num_tokens("validation") == held
