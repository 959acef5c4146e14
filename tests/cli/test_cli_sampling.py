"""`phalanx generate` and `phalanx evaluate` as a person uses them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from support.tiny import write_corpus
from train_helpers import Commands, entries

from phalanx.core.errors import UserError
from phalanx.data.tokenizers.tokenizer import ByteTokenizer
from phalanx.train.weights.sampling import read_prompts, stream_text

ROOT = Path(__file__).parents[2]


def _text(commands: Commands, folder: Path, *arguments: str) -> str:
    result = commands.run(folder, "generate", "run", *arguments)
    assert result.status == 0, result
    return result.out


def test_the_same_seed_gives_the_same_text(commands: Commands, trained: Path) -> None:
    first = _text(commands, trained, "the ", "--seed", "3", "--tokens", "8")
    assert first.startswith("the ")
    assert first == _text(commands, trained, "the ", "--seed", "3", "--tokens", "8")
    assert first != _text(commands, trained, "the ", "--seed", "4", "--tokens", "8")


def test_temperature_nought_takes_the_likeliest(commands: Commands, trained: Path) -> None:
    texts = {_text(commands, trained, "the ", "--temperature", "0", "--seed", str(seed)) for seed in (0, 1)}
    assert len(texts) == 1
    assert texts == {_text(commands, trained, "the ", "--top-k", "1", "--seed", "7")}


def test_text_alone_goes_to_stdout_and_the_rest_is_said(commands: Commands, trained: Path) -> None:
    result = commands.run(trained, "generate", "run", "the ", "--tokens", "100", "--temperature", "0")
    assert re.search(r"\[\d+ tokens, \d+ per second, step 20", result.err)
    assert len(result.out.encode()) <= 16 + 1
    assert "[11 tokens" in result.err
    assert "the model's longest sequence of 16 is full" in result.err
    few = commands.run(trained, "generate", "run", "the ", "--tokens", "2", "--temperature", "0")
    assert "[2 tokens" in few.err
    assert "is full" not in few.err
    assert result.out.startswith(few.out.rstrip("\n"))


def test_a_prompt_may_be_left_out(commands: Commands, trained: Path) -> None:
    assert _text(commands, trained, "--tokens", "5") != "\n"


def test_several_prompts_are_continued_as_each_alone(commands: Commands, trained: Path, tmp_path: Path) -> None:
    how = ("--seed", "3", "--tokens", "6")
    alone = [_text(commands, trained, prompt, *how) for prompt in ("the ", "a\nb")]
    several = commands.run(trained, "generate", "run", "the ", "a\nb", *how)
    assert several.out == "---\n".join(alone)
    assert re.search(r"\[2 texts, \d+ tokens, \d+ per second, step 20\]", several.err)
    file = tmp_path / "prompts.jsonl"
    file.write_text('\ufeff{"prompt": "a\\nb", "more": 1}\r\n\n"the "\n', encoding="utf-8")
    lines = _text(commands, trained, "--prompts", str(file), "--json", "--samples", "2", "--batch", "3", *how)
    texts = [json.loads(line) for line in lines.splitlines()]
    assert [text["prompt"] for text in texts] == ["a\nb", "a\nb", "the ", "the "]
    assert [text["prompt"] + text["text"] + "\n" for text in texts[::2]] == alone[::-1]
    assert texts[1]["text"] != texts[0]["text"]
    for text in texts:
        assert text["ended"] == ("tokens" if text["tokens"] == 6 else "end_of_text")


def test_a_text_says_that_the_model_is_full(commands: Commands, trained: Path) -> None:
    result = commands.run(trained, "generate", "run", "the ", "--json", "--tokens", "100", "--temperature", "0")
    (text,) = [json.loads(line) for line in result.out.splitlines()]
    assert (text["tokens"], text["ended"]) == (11, "max_sequence")
    assert "the model's longest sequence of 16 is full" in result.err


def test_prompts_are_lines_or_json_values() -> None:
    assert read_prompts("one \r\n\n  two\u2028\nthree", json_lines=False) == ["one ", "  two\u2028", "three"]
    assert read_prompts('"a"\n{"prompt": ""}\n', json_lines=True) == ["a", ""]
    for text, named in (('"a"\nb\n', "line 2 is no JSON"), ('{"text": "a"}', "line 1 has no prompt"), ("3", "line 1")):
        with pytest.raises(UserError, match=named):
            read_prompts(text, json_lines=True)


def test_bytes_of_one_character_come_together() -> None:
    pieces = list(stream_text(ByteTokenizer(), [*"aå漢".encode(), 0xE6, 0xBC]))
    assert "".join(pieces) == "aå漢\ufffd"
    assert pieces == ["a", "", "å", "", "", "漢", "", "", "\ufffd"]


def test_evaluate_repeats_the_figures_of_the_run(commands: Commands, trained: Path) -> None:
    result = commands.run(trained, "evaluate", "run", "--json", "--batch", "3")
    assert result.status == 0, result
    found = json.loads(result.out)
    (last,) = entries(trained / "run", "evaluation")
    assert found["loss"] == pytest.approx(last["validation_loss"], rel=1e-6)
    assert found["tokens"] == last["validation_tokens"]
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * found["tokens"] / math.log(2) / found["bytes"])
    words = commands.run(trained, "evaluate", "run").out
    assert words.startswith("step 20: held-out loss ")
    assert f"{found['bits_per_byte']:.4f} bits per byte" in words
    some = json.loads(commands.run(trained, "evaluate", "run", "--json", "--tokens", "200").out)
    assert 0 < some["tokens"] <= 200 < found["tokens"]


def test_other_text_is_read_with_the_tokenizer_of_the_run(commands: Commands, trained: Path, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, documents=40, seed=5)
    config = tmp_path / "other.toml"
    config.write_text(
        f"""
train.steps = 1
[data]
folder = "{tmp_path}/prepared"
sequence_length = 8
validation_sources = [{{ kind = "jsonl", path = "{corpus}" }}]
"""
    )
    result = commands.run(tmp_path, "evaluate", str(trained / "run"), "--data", str(config), "--json")
    assert result.status == 0, result
    found = json.loads(result.out)
    texts = [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines()]
    assert found["bytes"] == sum(len(text.encode()) for text in texts)
    assert found["tokens"] == found["bytes"] + len(texts) - 1  # the first end-of-text is predicted by nothing
