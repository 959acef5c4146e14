from __future__ import annotations

from pathlib import Path

import pytest
from data_helpers import documents, lines, make_config, write_jsonl, write_text

from phalanx.core.errors import UserError
from phalanx.data.batch_text import batch_text, open_near
from phalanx.data.config import DataConfig, SourceConfig
from phalanx.data.loader import Loader
from phalanx.data.prepare import prepare


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    one = write_text(tmp_path / "one.txt", lines(200))
    two = write_text(tmp_path / "two.txt", [line.upper() for line in lines(300)])
    sources = [SourceConfig(kind="text", path=(str(path),), document_separator="\n") for path in (one, two)]
    return make_config(tmp_path, *sources, sequence_length=32)


def test_the_text_is_that_of_the_batch_that_training_reads(config: DataConfig) -> None:
    prepared = prepare(config)
    loader = Loader(prepared, config)
    for start, count in ((0, 5), (loader.samples_per_epoch - 2, 6), (1030, 3)):
        batch = loader.batch(start, count)
        found = batch_text(prepared, config, start, count)
        assert [one.number for one in found] == batch.sample_index_B.tolist()
        for sample, tokens, numbers in zip(found, batch.tokens_BS.tolist(), batch.documents_BS, strict=True):
            assert "".join(piece.text for piece in sample.pieces) == prepared.tokenizer.decode(tokens)
            assert sum(piece.num_tokens for piece in sample.pieces) == 32
            assert len(sample.pieces) == len(set(numbers.tolist()))


def test_documents_have_their_numbers(config: DataConfig) -> None:
    prepared = prepare(config)
    longer = config.model_copy(update={"sequence_length": 256})
    name = prepared.sources[0].name
    known = documents(prepared)
    whole = [
        piece
        for sample in batch_text(prepared, longer, 0, Loader(prepared, longer).samples_per_epoch)
        for piece in sample.pieces[1:-1]
        if sample.source == name
    ]
    assert len(whole) > 50
    assert all(piece.is_begun_here and piece.text == known[piece.document] for piece in whole)


def test_what_is_not_trained_on_is_a_piece_of_its_own(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": f"What is {n}?", "text": f" It is {n}."} for n in range(90)])
    config = make_config(
        tmp_path, SourceConfig(kind="jsonl", path=(str(path),), prompt_field="question"), sequence_length=64
    )
    pieces = [piece for sample in batch_text(prepare(config), config, 0, 10) for piece in sample.pieces]
    assert any(piece.text.startswith("What is") and not piece.is_trained_on for piece in pieces)
    assert any(piece.text.startswith(" It is") and piece.is_trained_on for piece in pieces)


def test_what_was_prepared_is_found_from_elsewhere(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = prepare(config)
    near = config.model_copy(update={"folder": str(Path(config.folder).relative_to(tmp_path))})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert open_near(near, [Path.cwd(), tmp_path]).fingerprint == expected.fingerprint
    with pytest.raises(UserError, match="not been prepared"):
        open_near(near, [Path.cwd()])
