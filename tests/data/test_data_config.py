import subprocess
import sys
from typing import Any

import pytest

from phalanx.core.config import load, validate
from phalanx.core.errors import UserError
from phalanx.data.config import DataConfig

TEXT = {"kind": "text", "path": "a.txt"}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"sources": [{"kind": "text"}]}, r"path = \(\) does not fit kind = 'text'"),
        ({"sources": [{"kind": "python-stdlib", "path": "x"}]}, "remove path"),
        ({"sources": [TEXT | {"field": "body"}]}, "field = 'body' does not fit kind = 'text'; remove it"),
        ({"sources": [TEXT | {"bad_utf8": "skip", "document_separator": "x"}]}, "use 'replace' or 'error'"),
        ({"sources": [TEXT | {"weight": 1.0}, TEXT]}, "give every source a weight above 0, or none"),
        ({"tokenizer": {"kind": "file"}}, "give the path of a tokenizer.json"),
        ({"tokenizer": {"kind": "bytes", "path": "x"}}, "set kind = 'file'"),
        ({"tokenizer": {"kind": "bpe", "vocab_size": 256}}, "need at least 257"),
        ({"tokenizer": {"kind": "none"}}, "does not fit a source of kind 'python-stdlib'"),
        ({"sources": [{"kind": "nanogpt", "path": "x"}]}, "token files; give the tokenizer they were made with"),
        ({"validation_split": "tail"}, "use 'document'"),
        ({"validation_sources": [TEXT], "validation_fraction": 0.1}, "give one of the two"),
        ({"sequence_length": 1}, "sequence_length = 1"),
        ({"sources": [{"kind": "txt", "path": "x"}]}, "sources.0.kind = 'txt'"),
        ({"source": []}, "did you mean sources"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_cure(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(DataConfig, tree)


def test_a_full_dump_is_read_back_as_the_same_config() -> None:
    trees: list[dict[str, Any]] = [
        {},
        {"sources": [{"kind": "jsonl", "path": ["a", "b"], "field": "x", "prompt_field": "y"}]},
        {"validation_sources": [TEXT]},
        {"sources": [{"kind": "megatron", "path": "x"}], "tokenizer": {"kind": "none", "vocab_size": 5}},
    ]
    for tree in trees:
        config = validate(DataConfig, tree)
        assert validate(DataConfig, config.model_dump(mode="json")) == config


def test_overrides_reach_sources() -> None:
    config = load(DataConfig, None, ["sources.0.kind=text", "sources.0.path=a.txt", "tokenizer.kind=bytes"]).value
    assert config.sources[0].path == ("a.txt",)


def test_preparing_and_its_command_need_no_torch() -> None:
    modules = ["config", "prepare", "samples", "tokens.prepared_corpus", "tokens.shards", "encoding.encoding_processes"]
    modules += ["tokenizers.spec", "tokenizers.tokenizer"]
    code = f"import sys, {', '.join('phalanx.data.' + m for m in modules)}, phalanx.cli.data_command\n"
    code += "assert 'torch' not in sys.modules and 'pyarrow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
