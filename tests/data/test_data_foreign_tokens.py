import struct
from pathlib import Path

import numpy as np
import pytest
from data_helpers import make_config, stored

from phalanx.core.errors import UserError
from phalanx.data.config import DataConfig, SourceConfig, TokenizerConfig
from phalanx.data.loader import Loader
from phalanx.data.prepare import prepare
from phalanx.data.tokens.prepared_corpus import Prepared

CODES = {"uint8": 1, "int32": 4, "int64": 5, "uint16": 8}


def flat(documents: list[list[int]]) -> list[int]:
    return [token for document in documents for token in document]


def write_megatron(prefix: Path, documents: list[list[int]], dtype: str = "int32") -> Path:
    """What Megatron's IndexedDatasetBuilder writes: one sequence a document."""
    sizes = np.array([len(d) for d in documents], np.int32)
    pointers = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)[:-1]]) * np.dtype(dtype).itemsize
    prefix.with_suffix(".bin").write_bytes(np.array(flat(documents), dtype).tobytes())
    head = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype])
    head += struct.pack("<Q", len(sizes)) + struct.pack("<Q", len(documents) + 1)
    index = np.arange(len(documents) + 1, dtype=np.int64)
    prefix.with_suffix(".idx").write_bytes(head + sizes.tobytes() + pointers.tobytes() + index.tobytes())
    return prefix


def run(folder: Path, source: SourceConfig, vocab_size: int = 1000, **settings: object) -> tuple[DataConfig, Prepared]:
    tokenizer = TokenizerConfig(kind="none", vocab_size=vocab_size)
    config = make_config(folder, source, **({"tokenizer": tokenizer, "sequence_length": 4} | settings))
    return config, prepare(config)


def some_documents(count: int = 50) -> list[list[int]]:
    return [[(i * 7 + j) % 900 for j in range(3 + i % 5)] for i in range(count)]


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_megatron_in_place(tmp_path: Path, dtype: str) -> None:
    documents = some_documents()
    prefix = write_megatron(tmp_path / "corpus", documents, dtype)
    config, prepared = run(tmp_path, SourceConfig(kind="megatron", path=str(prefix)))
    assert stored(prepared).tolist() == flat(documents)
    split = prepared.sources[0].splits["train"]
    assert (split.num_documents, split.shards[0].tokens) == (50, tmp_path / "corpus.bin")
    batch = Loader(prepared, config.model_copy(update={"random_offset": False})).batch(0, 60)
    assert batch.documents_BS is not None
    starts = set(np.cumsum([0, *map(len, documents)]).tolist())
    tokens_in_order = flat(documents)
    places = {tuple(tokens_in_order[i : i + 5]): i for i in range(len(tokens_in_order) - 4)}
    for tokens, targets, weights in zip(
        batch.tokens_BS.tolist(), batch.targets_BS.tolist(), batch.weights_BS.tolist(), strict=True
    ):
        begin = places[(*tokens, targets[-1])]
        assert weights == [0.0 if begin + 1 + k in starts else 1.0 for k in range(4)]


def test_megatron_holds_out_whole_documents_at_the_end(tmp_path: Path) -> None:
    documents = some_documents()
    prefix = write_megatron(tmp_path / "corpus", documents)
    source = SourceConfig(kind="megatron", path=str(prefix) + ".bin")
    config, prepared = run(tmp_path, source, validation_fraction=0.2)
    train, held = stored(prepared), stored(prepared, "validation")
    assert [*train, *held] == flat(documents)
    assert len(train) in np.cumsum([len(d) for d in documents])
    assert 0.15 < len(held) / len(train) < 0.3
    passed = next(Loader(prepared, config).validation_batches(100))
    assert passed.documents_BS is not None
    count = prepared.sources[0].splits["validation"].num_documents
    assert int((passed.weights_BS == 0).logical_and(passed.targets_BS > 0).sum()) >= count - 1


def test_megatron_with_an_end_of_document_token(tmp_path: Path) -> None:
    documents = [[*d, 999] for d in some_documents()]
    prefix = write_megatron(tmp_path / "corpus", documents)
    _, prepared = run(tmp_path, SourceConfig(kind="megatron", path=str(prefix), document_token=999))
    shard = prepared.sources[0].splits["train"].shards[0]
    assert prepared.sources[0].has_end_of_text
    assert shard.starts is not None
    tokens = stored(prepared)
    assert (tokens[np.load(shard.starts)[1:]] == 999).all()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda b, i: i.unlink(), "has no readable index.*put the .idx file beside"),
        (lambda b, i: i.write_bytes(b"x" * 40 + i.read_bytes()), "is no Megatron index"),
        (lambda b, i: i.write_bytes(i.read_bytes()[:100]), "missing or damaged"),
        (lambda b, i: b.write_bytes(b.read_bytes()[:-4]), "its index does not fit its"),
    ],
)
def test_bad_megatron_files(tmp_path: Path, break_it: object, message: str) -> None:
    prefix = write_megatron(tmp_path / "corpus", some_documents())
    break_it(prefix.with_suffix(".bin"), prefix.with_suffix(".idx"))  # type: ignore[operator]
    with pytest.raises(UserError, match=message):
        run(tmp_path, SourceConfig(kind="megatron", path=str(prefix) + ".bin"))


def nanogpt(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    train, held = np.arange(500, dtype=np.uint16), np.arange(500, 600, dtype=np.uint16)
    train.tofile(folder / "train.bin")
    held.tofile(folder / "val.bin")
    return train, held


def test_nanogpt_folder(tmp_path: Path) -> None:
    train, held = nanogpt(tmp_path)
    source = SourceConfig(kind="nanogpt", path=str(tmp_path))
    _, prepared = run(tmp_path, source, validation_fraction=0.05)
    assert stored(prepared).tolist() == train.tolist()
    assert stored(prepared, "validation").tolist() == held.tolist()
    assert prepared.sources[0].splits["train"].shards[0].tokens == tmp_path / "train.bin"


def test_nanogpt_documents_by_their_last_token(tmp_path: Path) -> None:
    tokens = np.array([1, 2, 3, 0, 4, 5, 0, 6, 7, 8, 9, 0], np.uint16)
    tokens.tofile(tmp_path / "train.bin")
    source = SourceConfig(kind="nanogpt", path=str(tmp_path / "train.bin"), document_token=0)
    config, prepared = run(tmp_path, source, sequence_length=11, random_offset=False)
    batch = Loader(prepared, config).batch(0, 1)
    assert batch.documents_BS is not None
    assert batch.documents_BS[0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2]
    assert (batch.weights_BS == 1).all()


def test_an_id_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    nanogpt(tmp_path)
    with pytest.raises(UserError, match=r"train.bin': token 100 has the id 100, the vocabulary has 100"):
        run(tmp_path, SourceConfig(kind="nanogpt", path=str(tmp_path)), vocab_size=100)


def test_the_wrong_type_of_ids_is_seen(tmp_path: Path) -> None:
    np.arange(500, dtype=np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match=r"has the id 65536, the vocabulary has 1000; .*token_dtype"):
        run(tmp_path, SourceConfig(kind="nanogpt", path=str(tmp_path), token_dtype="uint32"))
    (tmp_path / "train.bin").write_bytes(b"odd")
    with pytest.raises(UserError, match="has 3 bytes, no multiple of 2"):
        run(tmp_path, SourceConfig(kind="nanogpt", path=str(tmp_path)))


def test_a_document_token_that_never_comes(tmp_path: Path) -> None:
    nanogpt(tmp_path)
    with pytest.raises(UserError, match="no token has the id 999"):
        run(tmp_path, SourceConfig(kind="nanogpt", path=str(tmp_path), document_token=999))


def test_a_changed_file_is_checked_again(tmp_path: Path) -> None:
    nanogpt(tmp_path)
    source = SourceConfig(kind="nanogpt", path=str(tmp_path))
    _, first = run(tmp_path, source)
    np.arange(700, dtype=np.uint16).tofile(tmp_path / "train.bin")
    _, second = run(tmp_path, source)
    assert len(stored(second)) == 700
    assert first.fingerprint != second.fingerprint
