import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import documents, lines, make_config, stored, write_jsonl, write_text

from phalanx.core.errors import UserError
from phalanx.core.files import folder_lock
from phalanx.data.config import DataConfig, SourceConfig, TokenizerConfig
from phalanx.data.encoding import encode, encoding_processes
from phalanx.data.prepare import Progress, open_prepared, prepare
from phalanx.data.sources import input_files
from phalanx.data.tokens import prepared_corpus
from phalanx.data.tokens.prepared_corpus import Prepared, read_manifest

RUN = """
import sys
from phalanx.data.sources import input_files
from phalanx.data.config import DataConfig
from phalanx.data.prepare import prepare
input_files.MIN_UNIT_BYTES = 4096
config = DataConfig.model_validate_json(sys.argv[1])
prepared = prepare(config, workers=int(sys.argv[2]), progress=lambda p: print(p.num_tokens, flush=True))
assert "torch" not in sys.modules, "preparing must not import torch"
print(prepared.fingerprint)
"""


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "MIN_UNIT_BYTES", 4096)


def corpus(folder: Path, count: int = 2000, **settings: Any) -> DataConfig:
    path = write_jsonl(folder / "a.jsonl", [{"text": line} for line in lines(count)])
    return make_config(folder, SourceConfig(kind="jsonl", path=str(path)), **({"validation_fraction": 0.2} | settings))


def start(config: DataConfig, workers: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RUN, config.model_dump_json(exclude_unset=True), str(workers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def tree(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "manifest.json"}


def only_folder(result: Prepared) -> Path:
    return result.sources[0].folder


class TestSplit:
    def test_every_document_is_in_one_split(self, tmp_path: Path) -> None:
        result = prepare(corpus(tmp_path), workers=1)
        train, held = documents(result), documents(result, "validation")
        assert sorted(train + held) == sorted(lines(2000))
        assert 300 < len(held) < 500
        sizes = {s: p.num_bytes for s, p in result.sources[0].splits.items()}
        assert sizes == {"train": sum(len(d.encode()) for d in train), "validation": sum(len(d.encode()) for d in held)}

    def test_the_choice_moves_with_its_own_seed_only(self, tmp_path: Path) -> None:
        held = [
            documents(prepare(corpus(tmp_path, **s), workers=1), "validation")
            for s in ({}, {"seed": 5}, {"sequence_length": 32}, {"validation_seed": 5})
        ]
        assert held[0] == held[1] == held[2] != held[3]

    def test_a_larger_share_keeps_what_was_held_out(self, tmp_path: Path) -> None:
        few = documents(prepare(corpus(tmp_path, validation_fraction=0.1), workers=1), "validation")
        more = documents(prepare(corpus(tmp_path, validation_fraction=0.3), workers=1), "validation")
        assert set(few) < set(more)


class TestAgain:
    def test_nothing_is_read_when_nothing_changed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = corpus(tmp_path)
        first = prepare(config, workers=1)

        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("no content may be read")

        monkeypatch.setattr(encode, "_content_hash", refuse)
        monkeypatch.setattr("phalanx.data.prepare.encode_all", refuse)
        monkeypatch.setattr("phalanx.data.prepare.plan_units", refuse)
        assert prepare(config, workers=1).fingerprint == first.fingerprint

    def test_a_touched_file_is_hashed_but_not_encoded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = corpus(tmp_path)
        first = prepare(config, workers=1)
        os.utime(tmp_path / "a.jsonl", ns=(1, 1))
        asked: list[int] = []
        monkeypatch.setattr("phalanx.data.prepare.encode_all", lambda units, *_: iter(asked.extend([len(units)]) or ()))
        assert prepare(config, workers=1).fingerprint == first.fingerprint
        assert asked == [0]

    def test_a_change_of_equal_size_is_seen(self, tmp_path: Path) -> None:
        config = corpus(tmp_path)
        prepare(config, workers=1)
        path = tmp_path / "a.jsonl"
        path.write_text(path.read_text().replace("line 1999 ", "LINE 1999 "))
        os.utime(path, ns=(2, 2))
        result = prepare(config, workers=1)
        assert any("LINE 1999" in d for d in documents(result) + documents(result, "validation"))

    def test_of_changed_files_only_their_units_are_done_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for i in range(6):
            write_text(tmp_path / f"{i}.txt", [f"file {i} " * 500])
        config = make_config(tmp_path, SourceConfig(kind="text", path=str(tmp_path / "*.txt")))
        prepare(config, workers=1)
        write_text(tmp_path / "3.txt", ["other " * 600])
        real, asked = encoding_processes.encode_all, []
        monkeypatch.setattr(
            "phalanx.data.prepare.encode_all", lambda units, *rest: asked.extend(units) or real(units, *rest)
        )
        result = prepare(config, workers=1)
        assert [part.name for unit in asked for part in unit.parts] == ["3.txt"]
        assert [d[:6] for d in documents(result)] == ["file 0", "file 1", "file 2", "other ", "file 4", "file 5"]
        names = {p.name.split(".")[0] for p in only_folder(result).iterdir()} - {"lock", "manifest"}
        assert len(names) == 6, "what belongs to the old file is deleted"

    def test_prepared_tokens_can_be_opened_without_the_text(self, tmp_path: Path) -> None:
        config = corpus(tmp_path)
        first = prepare(config, workers=1)
        (tmp_path / "a.jsonl").unlink()
        assert open_prepared(config).fingerprint == first.fingerprint
        assert (stored(open_prepared(config)) == stored(first)).all()


class TestManyProcesses:
    def test_workers_write_the_same_bytes_as_one_process(self, tmp_path: Path) -> None:
        config = corpus(tmp_path, tokenizer=TokenizerConfig(kind="bpe", vocab_size=300))
        alone = tree(only_folder(prepare(config, workers=1)))
        shutil.rmtree(tmp_path / "prepared")
        seen: list[Progress] = []
        together = prepare(config, workers=3, progress=seen.append)
        assert tree(only_folder(together)) == alone
        assert seen[-1].done_bytes == pytest.approx(seen[-1].total_bytes, rel=0.3)
        assert seen[-1].num_tokens > 0

    def test_a_workers_error_arrives_whole(self, tmp_path: Path) -> None:
        config = corpus(tmp_path)
        with (tmp_path / "a.jsonl").open("a") as file:
            file.write('{"other": 1}\n')
        with pytest.raises(UserError, match=r"a.jsonl': line 2001: field 'text' is absent.*missing_field"):
            prepare(config, workers=2)
        assert read_manifest(next((tmp_path / "prepared").glob("jsonl-*"))) is None

    def test_a_worker_that_dies_is_reported(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(encoding_processes, "_send", lambda process, value: process.kill())
        with pytest.raises(UserError, match="a preparing process ended with code -9"):
            prepare(corpus(tmp_path), workers=2)

    def test_two_at_once_give_one_whole_result(self, tmp_path: Path) -> None:
        config = corpus(tmp_path)
        both = [start(config, 1), start(config, 2)]
        ends = [process.communicate(timeout=60)[0].split()[-1] for process in both]
        assert [process.returncode for process in both] == [0, 0]
        assert ends == [open_prepared(config).fingerprint] * 2

    def test_who_waits_says_so(self, tmp_path: Path) -> None:
        said: list[str] = []
        holder = "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX)\n"
        holder += "print('held', flush=True); sys.stdin.read()"
        process = subprocess.Popen(
            [sys.executable, "-c", holder, str(tmp_path / "lock")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"

        def waiting() -> None:
            said.append("waiting")
            assert process.stdin is not None
            process.stdin.close()

        with folder_lock(tmp_path, waiting):
            assert said == ["waiting"]
        process.wait(timeout=240)


class TestKilled:
    @pytest.mark.campaign(but=("1",))
    @pytest.mark.parametrize("workers", [1, 2])
    def test_a_killed_preparation_goes_on_to_the_same_result(self, tmp_path: Path, workers: int) -> None:
        config = corpus(tmp_path, count=20_000)
        whole = prepare(config.model_copy(update={"folder": str(tmp_path / "whole")}), workers=1)
        for beats in (2, 40, 90):
            process = start(config, workers)
            assert process.stdout is not None
            for _ in range(beats):
                if not process.stdout.readline():
                    break
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
        left = list((tmp_path / "prepared").glob("jsonl-*/*.json"))
        result = prepare(config, workers=1)
        assert left, "some units were finished before the kill"
        assert result.fingerprint == whole.fingerprint
        assert tree(only_folder(result)).keys() == tree(only_folder(whole)).keys()
        assert (stored(result) == stored(whole)).all()

    def test_workers_do_not_outlive_their_parent(self, tmp_path: Path) -> None:
        process = start(corpus(tmp_path, count=50_000), 2)
        assert process.stdout is not None
        process.stdout.readline()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        if not children.exists():
            process.kill()
            pytest.skip("this system does not list the children of a process")
        while len(workers := children.read_text().split()) < 2:
            assert process.stdout.readline(), "the workers start before the work ends"
        process.kill()
        process.wait()
        deadline = time.monotonic() + 240
        while any(Path(f"/proc/{pid}").exists() and not _is_zombie(pid) for pid in workers):
            assert time.monotonic() < deadline, "a worker still runs"
            os.sched_yield()

    def test_a_record_without_its_files_is_not_believed(self, tmp_path: Path) -> None:
        config = corpus(tmp_path)
        first = prepare(config, workers=1)
        folder = only_folder(first)
        (folder / "manifest.json").unlink()
        next(folder.glob("*.tokens.npy")).unlink()
        broken = next(folder.glob("*.json"))
        broken.write_text(broken.read_text()[:50])
        assert prepare(config, workers=1).fingerprint == first.fingerprint


def _is_zombie(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


class TestDisk:
    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    def test_a_full_disk_leaves_nothing_half_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        config = corpus(tmp_path)
        real, calls = os.fsync, []

        def full(descriptor: int) -> None:
            calls.append(descriptor)
            if len(calls) == 20:
                raise OSError(code, os.strerror(code))
            real(descriptor)

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"the disk is full.*free some space"):
            prepare(config, workers=1)
        monkeypatch.undo()
        folder = next((tmp_path / "prepared").glob("jsonl-*"))
        assert not [p for p in folder.iterdir() if p.name.startswith(".")]
        monkeypatch.setattr(input_files, "MIN_UNIT_BYTES", 4096)
        assert len(documents(prepare(config, workers=1))) > 1000

    def test_a_real_limit_on_file_size(self, tmp_path: Path) -> None:
        limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        limited += "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n" + RUN
        config = corpus(tmp_path).model_dump_json(exclude_unset=True)
        done = subprocess.run([sys.executable, "-c", limited, config, "1"], capture_output=True, text=True)
        assert done.returncode != 0
        assert "the disk is full (File too large)" in done.stderr

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match=r"data.folder = .*cannot be written to.*set data.folder"):
            prepare(corpus(tmp_path).model_copy(update={"folder": str(tmp_path / "file" / "x")}), workers=1)

    def test_a_read_only_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(Path, "mkdir", refuse)
        with pytest.raises(UserError, match="Read-only file system"):
            prepare(corpus(tmp_path), workers=1)


def test_the_manifest_says_what_is_there(tmp_path: Path) -> None:
    result = prepare(corpus(tmp_path), workers=1)
    manifest = json.loads((only_folder(result) / "manifest.json").read_text())
    assert manifest["splits"]["train"]["num_tokens"] == len(stored(result))
    assert manifest["splits"]["train"]["num_documents"] == len(documents(result))
    for shard in manifest["splits"]["train"]["shards"]:
        tokens = np.load(only_folder(result) / shard["tokens"], mmap_mode="r")
        assert tokens.dtype == np.uint16
        assert len(tokens) == shard["num_tokens"]


def test_a_manifest_of_another_format_is_no_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = corpus(tmp_path)
    folder = only_folder(prepare(config, workers=1))
    manifest = json.loads((folder / "manifest.json").read_text()) | {"format": 0}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="has not been prepared"):
        open_prepared(config)
    assert prepared_corpus.read_manifest(folder) is None


def test_a_large_vocabulary_takes_four_bytes_a_token() -> None:
    assert encode.token_dtype(1 << 16) == np.uint16
    assert encode.token_dtype((1 << 16) + 1) == np.uint32


def test_the_default_config_prepares_the_standard_library(tmp_path: Path) -> None:
    config = DataConfig.model_validate({"sources": [{"kind": "python-stdlib"}], "folder": str(tmp_path)})
    quick = config.model_copy(update={"tokenizer": TokenizerConfig(kind="bytes")})
    result = prepare(quick, workers=1)
    train, held = documents(result), documents(result, "validation")
    assert 0.02 < len(held) / (len(train) + len(held)) < 0.1
    assert any(d.startswith('r"""OS routines') for d in train + held)
    assert result.num_bytes("train") == sum(len(d.encode()) for d in train)


class TestTargets:
    def answers(self, folder: Path, answers: list[str], **settings: Any) -> DataConfig:
        path = write_jsonl(folder / "a.jsonl", [{"q": "why? " * 9, "text": answer} for answer in answers])
        source = SourceConfig(kind="jsonl", path=str(path), prompt_field="q")
        return make_config(folder, source, validation_fraction=0.0, **settings)

    def test_documents_without_any_are_counted(self, tmp_path: Path) -> None:
        config = self.answers(tmp_path, ["", "yes", "", "because " * 30_000, "no"])
        for result in (prepare(config, workers=1), open_prepared(config)):
            split = result.sources[0].splits["train"]
            assert (split.num_trained, split.num_untrained, split.num_documents) == (3 + 8 * 30_000 + 2, 2, 5)

    def test_a_corpus_without_any_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"no token of the text .* is a target.*prompt_field"):
            prepare(self.answers(tmp_path, [""] * 20), workers=1)

    def test_all_is_trained_on_where_there_are_no_prompts(self, tmp_path: Path) -> None:
        split = prepare(corpus(tmp_path), workers=1).sources[0].splits["train"]
        assert (split.num_trained, split.num_untrained) == (split.num_tokens - split.num_documents, 0)
