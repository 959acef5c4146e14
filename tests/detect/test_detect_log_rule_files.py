"""Rule files of users: adding, changing and switching off by name; mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.detect.logs.log_rules import Matcher, load_rules, may_explode, required_texts

NEW = """
[lustre-mine]
where = "output"
pattern = 'quota daemon says no'
fault = "storage"
severity = "alarm"
meaning = "our own quota"
action = "ask Ann"
matches = ["the quota daemon says no to job 5"]
"""


def written(folder: Path, text: str, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_new_rule_comes_before_ours(tmp_path: Path) -> None:
    new = NEW.replace("quota daemon says no", "CUDA error: mine")
    rules = load_rules([written(tmp_path, new)])
    assert rules[0].name == "lustre-mine"
    found = Matcher(rules).find("CUDA error: mine", "output")
    assert found is not None and found.name == "lustre-mine"


def test_a_field_is_changed_by_name(tmp_path: Path) -> None:
    changed = written(tmp_path, '[xid-user-code]\nseverity = "fatal"\n')
    rules = {rule.name: rule for rule in load_rules([changed])}
    before = {rule.name: rule for rule in load_rules()}
    assert rules["xid-user-code"].severity == "fatal"
    assert rules["xid-user-code"].pattern == before["xid-user-code"].pattern
    assert [rule.name for rule in load_rules([changed])] == list(before), "it keeps its place"


def test_a_new_pattern_brings_its_own_examples(tmp_path: Path) -> None:
    text = "[disk-full]\npattern = 'platte voll'\nmatches = ['die Platte voll']\n"
    matcher = Matcher(load_rules([written(tmp_path, text)]))
    assert matcher.by_name["disk-full"].spares == ()
    assert matcher.find("OSError: [Errno 28] No space left on device", "output") is None
    with pytest.raises(UserError, match=r"mine\.toml: \[disk-full\].*matches.*required"):
        load_rules([written(tmp_path, "[disk-full]\npattern = 'x'\n")])


def test_a_rule_is_switched_off_and_on_again(tmp_path: Path) -> None:
    off = written(tmp_path, "[loss-not-finite]\nenabled = false\n", "off.toml")
    on = written(tmp_path, "[loss-not-finite]\nenabled = true\n", "on.toml")
    assert Matcher(load_rules([off])).find("loss: nan", "output") is None
    assert Matcher(load_rules([off, on])).find("loss: nan", "output") is not None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a\n", r"mine\.toml.*not valid TOML"),
        ("a = 3\n", r"mine\.toml: a = 3: is not a table"),
        (NEW.replace('"alarm"', '"loud"'), r"mine\.toml: \[lustre-mine\].*severity = 'loud'.*note.*alarm"),
        (NEW.replace('"storage"', '"disk"'), r"\[lustre-mine\].*fault = 'disk'"),
        (NEW.replace("pattern", "patern"), r"\[lustre-mine\].*did you mean pattern"),
        (NEW.replace("'quota daemon says no'", "'quota ('"), r"\[lustre-mine\] pattern = 'quota \('.*no regular"),
        (NEW.replace("'quota daemon says no'", "'(a+)+b'"), r"\[lustre-mine\] pattern.*repetition within"),
        (NEW.replace("to job 5", "").replace("says no", "says yes", 1), r"\[lustre-mine\] matches.*does not match"),
        (NEW + "spares = ['the quota daemon says no']\n", r"\[lustre-mine\] spares.*matches this line"),
        (NEW.replace('where = "output"\n', ""), r"\[lustre-mine\].*where.*required"),
        ("[xid-ecc]\nseverity = 3\n", r"\[xid-ecc\].*severity = 3"),
    ],
)
def test_a_mistake_names_file_rule_and_field(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=r"(?s)" + said):
        load_rules([written(tmp_path, text)])


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.toml.*cannot be read"):
        load_rules([tmp_path / "gone.toml"])
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"UTF-8.*binary\.toml|binary\.toml.*UTF-8"):
        load_rules([tmp_path / "binary.toml"])


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("Disk quota exceeded", {"disk quota exceeded"}),
        ("ab|cdef", None),
        ("abc|cdef", {"abc", "cdef"}),
        (r"x{0,3}needle\d+", {"needle"}),
        (r"(?:needle)?hay", {"hay"}),
        (r"(?:needle){2}", {"needle"}),
        (r"[xy]+", None),
        (r"(?!never)ever", {"ever"}),
        (r"foo.{0,9}(?P<which>longest)", {"longest"}),
        (r"foo(?:bar|)end", {"foo"}),
    ],
)
def test_texts_that_a_match_contains(pattern: str, texts: set[str] | None) -> None:
    assert required_texts(pattern) == (None if texts is None else frozenset(texts))


@pytest.mark.parametrize(
    ("pattern", "explodes"),
    [
        ("(a+)+$", True),
        (r"(?:\w+\s*)*x", True),
        (r"((a|b){0,50}c){0,50}", True),
        (r"(?=(a*)*)", True),
        (r"(?:a+|b*)+", True),
        (r".*foo.*bar", False),
        (r".*.*.*x", True),
        (r"(?:.*a|.*b|.*c)", False),
        (r"(?:ab){2,3}\d+", False),
        (r"\S{1,80}(?: x)?", False),
    ],
)
def test_patterns_that_may_take_for_ever(pattern: str, explodes: bool) -> None:
    assert may_explode(pattern) is explodes


@given(st.dictionaries(st.text(max_size=8), st.one_of(st.text(max_size=8), st.integers(), st.none()), max_size=6))
def test_no_table_is_too_wild(tree: dict[str, object]) -> None:
    from phalanx.detect.logs.log_rules import _rule  # what a file holds, without writing one

    with pytest.raises(UserError, match=r"f\.toml: \[wild\]"):
        _rule("wild", tree, "f.toml")
