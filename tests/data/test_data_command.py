from pathlib import Path

import pytest
from click.testing import CliRunner
from data_helpers import lines, write_jsonl

from phalanx.cli.data import command
from phalanx.core.errors import UserError


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", [{"q": f"[{i}] why?", "text": line} for i, line in enumerate(lines(200))])
    text = f"""
        [train]
        steps = 1
        [data]
        folder = "{tmp_path / "prepared"}"
        sequence_length = 16
        validation_fraction = 0.2
        [data.tokenizer]
        kind = "bytes"
        [[data.sources]]
        kind = "jsonl"
        path = "{tmp_path / "a.jsonl"}"
        prompt_field = "q"
    """
    path = tmp_path / "c.toml"
    path.write_text(text)
    return path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(command, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_prepare_info_and_inspect(config: Path) -> None:
    said = run("prepare", config, "--workers", 1)
    assert "jsonl-0: tokenising" in said
    assert "ready in" in said
    shown = run("info", config)
    assert "257 token ids (bytes)" in shown
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("jsonl-0")] == ["train", "validation"]
    assert [line for line in said.splitlines() if line.startswith("jsonl-0  ")] == [
        line for line in shown.splitlines() if line.startswith("jsonl-0  ")
    ]
    text = run("inspect", config, "--tokens", 100)
    assert "document [1] why?line 1 of the text, å and 漢 in it" in text


def test_preparing_again_does_nothing(config: Path) -> None:
    run("prepare", config, "--workers", 1)
    assert "tokenising" not in run("prepare", config, "--workers", 1)


def test_info_before_preparing(config: Path) -> None:
    with pytest.raises(UserError, match=r"has not been prepared.*run `phalanx data prepare`"):
        run("info", config)


def test_inspect_beyond_the_end(config: Path) -> None:
    run("prepare", config, "--workers", 1)
    with pytest.raises(UserError, match="there is no token 1000000000 of source 0 in the validation split"):
        run("inspect", config, "--split", "validation", "--at", 10**9)
