"""Starting from weights that exist, of a run or of a Hugging Face folder: equal weights, all else fresh."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.open_checkpoint import newest
from support.tiny import WORDS, write_corpus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from train_helpers import begin, configured, entries, finish, run_all

from phalanx.core.config import load
from phalanx.core.errors import UserError
from phalanx.train.config import RunConfig
from phalanx.train.training_run import Run
from phalanx.train.weights.hf_folders import export_run, import_config
from phalanx.train.weights.trained import open_trained


def _started(folder: Path, changes: dict[str, Any], notes: list[str] | None = None) -> Run:
    run = begin(configured(folder, changes, "second"), notes)
    run.folder.release()
    return run


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run called ``run``."""
    folder = tmp_path_factory.mktemp("first")
    run_all(folder, {"model.vocab_multiple": 64})
    return folder


def test_weights_of_a_run_with_a_fresh_optimizer(first: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    write_corpus(tmp_path)
    changes = {"train.init_from": str(first / "run"), "model.vocab_multiple": 64, "optim.name": "lamb"}
    run = _started(tmp_path, changes, notes)
    checkpoint = newest(first / "run" / "checkpoints", print)
    assert checkpoint is not None
    assert f"starting from the weights of {checkpoint.path}" in notes
    saved = checkpoint.read(f"model.{name}" for name in run.trainer.parameters)
    for name, parameter in run.trainer.parameters.items():
        rows = 257 if name in ("embedding", "head") else len(parameter)
        assert torch.equal(parameter[:rows], saved[f"model.{name}"][:rows])
        assert not parameter[rows:].any()
    assert run.progress.step == 0
    assert all(not tensor.any() for tensor in run.optimizer.state_tensors().values())
    run_all(tmp_path, changes, "second")
    assert entries(tmp_path / "second")[0]["loss"] < 4.5 < math.log(257)


def test_resume_takes_precedence_over_initial_weights(first: Path, tmp_path: Path) -> None:
    changes = {"train.init_from": str(first / "run"), "model.vocab_multiple": 64}
    run_all(tmp_path, changes, "second")
    notes: list[str] = []
    assert _started(tmp_path, changes, notes).progress.step == 20
    assert not any("starting from the weights" in note for note in notes)


MISMATCHES = [
    ({"model.layers": 3}, r"model.layers = 3: the weights of .* were made with 2; set model.layers=2"),
    ({"model.activation": "gelu"}, "model.activation = 'gelu'.*set model.activation=\"swiglu\""),
    ({"model.heads": 4}, "model.heads = 4.*set model.heads=2"),
    ({"model.rope_theta": 500.0}, "model.rope_theta = 500.0.*set model.rope_theta=10000.0"),
    ({"model.mlp_hidden": 99}, "model.mlp_hidden = 99.*set model.mlp_hidden=128"),
    ({"model.vocab_size": 320}, "model.vocab_size = 320.*know 257 words.*set model.vocab_size=257"),
]


@pytest.mark.parametrize(("changes", "says"), MISMATCHES, ids=lambda value: str(value)[:40])
def test_weights_of_another_model_are_refused(first: Path, tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    settings = {"train.init_from": str(first / "run"), "model.vocab_multiple": 64} | changes
    with pytest.raises(UserError, match=says):
        _started(tmp_path, settings)
    assert not (tmp_path / "second" / "config.json").exists()


@pytest.mark.parametrize("multiple", [1, 100])
def test_the_padding_of_the_vocabulary_is_free(first: Path, tmp_path: Path, multiple: int) -> None:
    changes = {"train.init_from": str(first / "run")}
    for folder in ("64", str(multiple)):
        (tmp_path / folder).mkdir()
    same, other = (_started(tmp_path / str(m), changes | {"model.vocab_multiple": m}) for m in (64, multiple))
    assert same.trainer.model_config.vocab_rows != other.trainer.model_config.vocab_rows
    batch = same.loader.batch(0, 2)
    losses = [
        sum(run.trainer.model.loss(run.trainer.model(batch.tokens_BS), batch.targets_BS)) for run in (same, other)
    ]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0.0)


def test_another_tokenizer_is_warned_of(first: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    settings = {"train.init_from": str(first / "run"), "model.vocab_multiple": 64, "data.tokenizer.kind": "bpe"}
    _started(tmp_path, settings | {"data.tokenizer.vocab_size": 257}, notes)
    assert any("another tokenizer" in note for note in notes)


def _tokenizer_json(path: Path, size: int = 300) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    tokenizer.save(str(path))
    return tokenizer


def _folder(path: Path, family: str) -> Path:
    """A small random model saved by transformers, with a tokenizer."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    path.mkdir()
    size = _tokenizer_json(path / "tokenizer.json").get_vocab_size()
    if family == "llama":
        config = transformers.LlamaConfig(
            vocab_size=size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
        )  # fmt: skip
    else:
        config = transformers.GPT2Config(
            vocab_size=size, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.2
        )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def _config_of(folder: Path, config: Path) -> RunConfig:
    """The written config, on the tests' own text and device."""
    small = ["train.steps=3", "train.global_batch=4", "train.micro_batch=2", "train.device=cpu", "train.precision=fp32"]
    places = [f"run.folder={folder / 'run'}", f"data.folder={folder / 'prepared'}"]
    text = ["data.sources.0.kind=jsonl", f"data.sources.0.path={write_corpus(folder)}", "data.sequence_length=16"]
    quick = ["train.threads=1", "checkpoint.mode=blocking", "data.document_mask=false"]
    return load(RunConfig, config, [*small, *places, *text, *quick]).value


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_from_a_hugging_face_folder_and_back(tmp_path: Path, family: str) -> None:
    """The first loss is transformers' own on that batch; what training made of it is a folder transformers loads."""
    transformers = pytest.importorskip("transformers")
    source, said = _folder(tmp_path / "theirs", family), []
    import_config(source, tmp_path / "tune.toml", said.append)
    assert "differ by at most" in said[0]
    assert float(said[0].split("at most ")[1].split()[0]) < 1e-5
    config = _config_of(tmp_path, tmp_path / "tune.toml")
    run = begin(config)
    batch = run.loader.batch(0, 4)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        logits = theirs(batch.tokens_BS).logits.flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(logits, batch.targets_BS.flatten(), reduction="none")
    expected = float((losses * batch.weights_BS.flatten()).sum() / batch.weights_BS.sum())
    run.updated()
    assert float(run.accumulate_gradients(batch)) == pytest.approx(expected, rel=1e-5)
    run.updated()
    finish(run)
    export_run(tmp_path / "run", tmp_path / "ours", said.append)
    assert "differ by at most" in said[-1]
    trained = open_trained(tmp_path / "run", print, device="cpu")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    with torch.no_grad():
        ours = trained.model.logits(trained.model(batch.tokens_BS))[..., : trained.tokenizer.vocab_size]
        torch.testing.assert_close(back(batch.tokens_BS).logits, ours, rtol=1e-5, atol=1e-5)
    words = " ".join(WORDS[:7])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert tokenizer(words, add_special_tokens=False)["input_ids"] == trained.tokenizer.encode(words)


def test_settings_that_do_not_fit_a_folder(tmp_path: Path) -> None:
    source = _folder(tmp_path / "theirs", "gpt2")
    import_config(source, tmp_path / "tune.toml", lambda _: None, check=False)
    with pytest.raises(UserError, match="exists already"):
        import_config(source, tmp_path / "tune.toml", lambda _: None)
    config = _config_of(tmp_path, tmp_path / "tune.toml")
    shorter = config.model_copy(update={"model": config.model.model_copy(update={"max_sequence": 32})})
    with pytest.raises(UserError, match=r"model.max_sequence = 32.*set model.max_sequence=64"):
        begin(shorter)
    wider = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": 320})})
    with pytest.raises(UserError, match=r"model.vocab_size = 320.*set model.vocab_size=300"):
        begin(wider)


def test_an_architecture_without_a_counterpart_is_not_exported(first: Path, tmp_path: Path) -> None:
    run_all(tmp_path, {"model.block": "parallel", "train.steps": 2})
    with pytest.raises(UserError, match=r"model\.block|block"):
        export_run(tmp_path / "run", tmp_path / "out", print)
    assert not (tmp_path / "out").exists()
    said: list[str] = []
    export_run(first / "run", tmp_path / "bytes", said.append, dtype="bfloat16", check=False)
    assert any("without tokenizer.json" in line for line in said)
    with pytest.raises(UserError, match="exists already"):
        export_run(first / "run", tmp_path / "bytes", print)
