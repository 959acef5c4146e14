"""Which files a source is made of: each that a path stands for is read once, or refused by its name."""

import os
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from data_helpers import documents, make_config, write_jsonl, write_text

from phalanx.core.errors import UserError
from phalanx.data.config import SourceConfig
from phalanx.data.prepare import prepare
from phalanx.data.sources.input_files import list_files, plan_units


def names(*paths: Path, kind: str = "text") -> list[str]:
    return [file.name for file in list_files(SourceConfig.model_validate({"kind": kind, "path": [*map(str, paths)]}))]


def write(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, [f"text of {path.parent.name}/{path.name}, long enough for a sample"])


class TestOneName:
    def test_files_of_one_name_below_several_paths_are_all_read(self, tmp_path: Path) -> None:
        for folder in "abc":
            (tmp_path / folder).mkdir()
            records = [{"text": f"record {i} of {folder}, long enough for a sample"} for i in range(40)]
            write_jsonl(tmp_path / folder / "part-0.jsonl", records)
        paths = [tmp_path / "a", tmp_path / "b" / "part-0.jsonl", tmp_path / "[c]" / "*.jsonl"]
        assert names(*paths, kind="jsonl") == ["0:part-0.jsonl", "1:part-0.jsonl", "c/part-0.jsonl"]
        source = SourceConfig(kind="jsonl", path=[*map(str, paths)])
        prepared = prepare(make_config(tmp_path, source, validation_fraction=0.3), workers=1)
        held = documents(prepared, "validation")
        assert len({*documents(prepared), *held}) == 120
        chosen = [{text.split()[1] for text in held if f"of {folder}," in text} for folder in "ab"]
        assert chosen[0] != chosen[1], "documents at one place of two files are held out or not by themselves"

    def test_other_names_stay_as_they_are(self, tmp_path: Path) -> None:
        write(tmp_path / "a" / "x.txt", tmp_path / "a" / "y.txt", tmp_path / "b" / "y.txt", tmp_path / "b" / "0:y.txt")
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / "x.txt").symlink_to("../a/x.txt")
        found = names(tmp_path / "a", tmp_path / "b", tmp_path / "c", tmp_path / "a" / "x.txt")
        assert found == ["0:0:y.txt", "0:y.txt", "1:y.txt", "x.txt"], "a file under two paths is read once"

    def test_units_of_files_of_one_name_and_size_are_two(self, tmp_path: Path) -> None:
        write(tmp_path / "a" / "x.txt", tmp_path / "b" / "x.txt")
        source = SourceConfig(kind="text", path=[str(tmp_path / "a"), str(tmp_path / "b")], bad_utf8="skip")
        parts = [part.name for unit in plan_units(source, list_files(source), 0.0) for part in unit.parts]
        assert parts == ["0:x.txt", "1:x.txt"]


class TestLinks:
    @pytest.mark.parametrize("pattern", ["", "**/*.txt", "*/**/*.txt"])
    def test_linked_folders_are_read_once_and_loops_end(self, tmp_path: Path, pattern: str) -> None:
        root, other = tmp_path / "corpus", tmp_path / "other"
        write(root / "z" / "a.txt", other / "deep" / "b.txt")
        (root / "z" / "again").symlink_to(root)
        (root / "a-link").symlink_to(root / "z")
        (root / "z" / "outside").symlink_to(other)
        (other / "loop").symlink_to(other)
        assert [name for name in names(root / pattern) if not name.startswith("a-link")] == [
            "z/a.txt",
            "z/outside/deep/b.txt",
        ]

    @pytest.mark.parametrize("pattern", ["", "*.txt"])
    def test_a_link_to_nowhere_is_refused_by_name(self, tmp_path: Path, pattern: str) -> None:
        write(tmp_path / "corpus" / "a.txt")
        (tmp_path / "corpus" / "b.txt").symlink_to("gone")
        with pytest.raises(UserError, match=r"data.sources.path = .*b.txt'.*cannot be read \(No such file"):
            names(tmp_path / "corpus" / pattern)


class TestNoEntry:
    @pytest.fixture
    def closed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        """A folder whose list nobody may read, whoever runs this test."""
        write(tmp_path / "corpus" / "open" / "a.txt", tmp_path / "corpus" / "closed" / "b.txt")
        closed = str(tmp_path / "corpus" / "closed")

        def guard(real: Any) -> Any:
            def refuse(path: Any) -> Any:
                if os.fspath(path) == closed:
                    raise PermissionError(13, "Permission denied", closed)
                return real(path)

            return refuse

        monkeypatch.setattr(os, "scandir", guard(os.scandir))
        monkeypatch.setattr(os, "listdir", guard(os.listdir))
        return closed

    @pytest.mark.parametrize("pattern", ["", "*/*.txt", "**/*.txt", "closed", "c*/b*"])
    def test_a_folder_that_cannot_be_read_is_refused_by_name(self, tmp_path: Path, closed: str, pattern: str) -> None:
        with pytest.raises(UserError, match=rf"data.sources.path = '{closed}'.*cannot be read \(Permission denied"):
            names(tmp_path / "corpus" / pattern)

    def test_a_folder_of_pythons_own_sources(
        self, tmp_path: Path, closed: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / "corpus"))
        with pytest.raises(UserError, match=rf"'{closed}'.*cannot be read"):
            list_files(SourceConfig(kind="python-stdlib"))

    def test_a_path_whose_folder_cannot_be_entered(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_: Path) -> bool:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "is_dir", refuse)
        with pytest.raises(UserError, match=r"a.txt'.*cannot be read \(Permission denied"):
            names(tmp_path / "a.txt")


def test_a_pattern_means_what_it_means_to_path_glob(tmp_path: Path) -> None:
    write(tmp_path / "a" / "x.txt", tmp_path / "a" / "b" / ".y.txt", tmp_path / "a" / "b" / "c" / "z.TXT")
    for pattern in ("a/*.txt", "a/**/*.txt", "*/b/.*", "**/[xz].*", "a/?/../*.txt", "a/*", "**/c/*", "a/*/c/z.TXT"):
        wanted = [path.relative_to(tmp_path) for path in tmp_path.glob(pattern) if path.is_file()]
        plain = 2 if pattern.startswith("a/") else 0  # names begin below what is no pattern
        assert sorted(names(tmp_path / pattern)) == sorted(path.as_posix()[plain:] for path in wanted), pattern


def test_names_that_are_no_utf8_are_read_and_shown_escaped(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for name, content in ((b"a\xe9.txt", b"text that is long enough for a sample"), (b"bad\xff.txt", b"\xff")):
        (tmp_path / "corpus" / os.fsdecode(name)).write_bytes(content)
    source = SourceConfig(kind="text", path=str(tmp_path / "corpus"), bad_utf8="skip")
    config = make_config(tmp_path, source, validation_fraction=1e-9)
    prepared = prepare(config, workers=1)
    assert prepared.sources[0].skipped == (r"bad\xff.txt",)
    assert prepare(config, workers=1).fingerprint == prepared.fingerprint
    with pytest.raises(UserError) as caught:
        prepare(make_config(tmp_path, SourceConfig(kind="text", path=str(tmp_path / "corpus"))), workers=1)
    assert "bad\\udcff.txt" in str(caught.value).encode().decode(), "it can be printed"
