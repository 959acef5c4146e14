"""The config contract: files, overrides, origins, and errors that name the key, the value and the cure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, model_validator

from phalanx.core.config import Config, key_lines, known_keys, load, parse_override, read_toml, walk
from phalanx.core.errors import UserError


class Item(Config):
    kind: str = Field("text", description="kind of source")
    weight: float = Field(1.0, gt=0, description="share, relative")


class Model(Config):
    hidden: int = Field(128, ge=1, description="width, elements")
    heads: int = Field(4, ge=1, description="attention heads")

    @model_validator(mode="after")
    def _heads_fit(self) -> Model:
        if self.hidden % self.heads:
            raise ValueError(f"heads = {self.heads} does not divide hidden = {self.hidden}: make hidden a multiple")
        return self


class Root(Config):
    model: Model = Field(default_factory=Model, description="the model")
    sources: tuple[Item, ...] = Field((), description="sources")
    steps: int = Field(description="steps")


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(
        '# a comment\nsteps = 10\n\n[model]\n\nheads = 8\n\n[[sources]]\nkind = "a"\n[[sources]]\nweight = 2\n'
    )
    return path


def test_values_come_from_file_override_and_default(config_file: Path) -> None:
    loaded = load(Root, config_file, ["model.hidden=256", "sources.1.kind=b"])
    assert loaded.value == Root(
        steps=10, model=Model(hidden=256, heads=8), sources=(Item(kind="a"), Item(kind="b", weight=2))
    )
    origins = {key: loaded.origin(key) for key, _, _ in walk(loaded.value)}
    assert origins == {
        "model.hidden": "override",
        "model.heads": f"{config_file}:6",
        "sources.0.kind": f"{config_file}:9",
        "sources.0.weight": "default",
        "sources.1.kind": "override",
        "sources.1.weight": f"{config_file}:11",
        "steps": f"{config_file}:2",
    }


def test_the_last_override_wins_and_a_whole_table_can_be_given() -> None:
    assert load(Root, None, ["steps=1", "steps=2"]).value.steps == 2
    loaded = load(Root, None, ["steps=1", "model={heads = 2}", 'sources=[{kind = "x"}]'])
    assert loaded.value.model.heads == 2
    assert loaded.origin("model.heads") == "override"
    assert loaded.value.sources[0].kind == "x"


def test_an_override_may_append_one_item_to_a_list() -> None:
    assert load(Root, None, ["steps=1", "sources.0.kind=x", "sources.1.kind=y"]).value.sources[1].kind == "y"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("model.headz=3", ["model.headz", "did you mean model.heads?"]),
        ("hedden=3", ["hedden", "did you mean model.hidden?"]),
        ("zzz.qqq=3", ["zzz", "no such setting", "phalanx explain"]),
        ("model.heads=0", ["model.heads = 0", "greater than or equal to 1", "attention heads"]),
        ("model.heads=3", ["model", "heads = 3", "hidden = 128", "make hidden a multiple"]),
        ("model.heads=many", ["model.heads = 'many'", "integer"]),
        ("model", ["'model'", "key=value"]),
        ("=3", ["'=3'", "key=value"]),
        ("sources.2.kind=x", ["sources.2.kind", "does not fit"]),
        ("sources.0.wieght=2", ["sources.0.wieght", "did you mean sources.0.weight?"]),
        ("steps.x=1", ["steps.x", "no"]),
    ],
)
def test_mistakes_name_the_key_the_value_and_the_cure(override: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load(Root, None, ["steps=1", override])
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_a_required_setting_that_is_missing_is_named() -> None:
    with pytest.raises(UserError, match="steps: is required and was not given; add steps"):
        load(Root, None)


def test_several_mistakes_are_listed_one_a_line() -> None:
    with pytest.raises(UserError) as caught:
        load(Root, None, ["steps=x", "model.heads=0"])
    assert "2 settings are wrong" in str(caught.value)
    assert "model.heads = 0" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"steps = ", "not valid TOML"), (b"\xff\xfe", "not UTF-8"), (None, "no such config file")],
)
def test_unreadable_files(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "bad.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load(Root, path)


def test_a_wrong_item_does_not_make_its_list_too_short_as_well() -> None:
    class Listing(Config):
        sources: tuple[Item, ...] = Field((Item(),), min_length=1, description="sources")

    with pytest.raises(UserError) as caught:
        load(Listing, None, ["sources.0.weight=-1"])
    assert str(caught.value).startswith("sources.0.weight = -1")
    with pytest.raises(UserError, match="sources = "):
        load(Listing, None, ["sources=[]"])


def test_a_byte_order_mark_is_passed_over(config_file: Path) -> None:
    plain = load(Root, config_file)
    config_file.write_bytes(b"\xef\xbb\xbf" + config_file.read_bytes())
    marked = load(Root, config_file)
    assert (marked.value, marked.origins) == (plain.value, plain.origins)
    assert read_toml(config_file)


def test_lines_are_right_around_multi_line_values() -> None:
    text = 'a = """\n[b]\nc = 1\n"""\n# x\nb = [\n 1,\n 2,\n]\n[t]\nd.e = 1\n'
    assert key_lines(text) == {"a": 1, "b": 6, "t.d.e": 11}


@given(st.dictionaries(st.from_regex(r"[a-z]{1,6}", fullmatch=True), st.integers(-9, 9), max_size=8), st.data())
def test_every_key_is_found_on_its_own_line(values: dict[str, int], data: st.DataObject) -> None:
    lines: list[str] = []
    expected: dict[str, int] = {}
    for key, value in values.items():
        lines += data.draw(st.lists(st.sampled_from(["", "# note", "  "]), max_size=2))
        lines.append(f"{key} = {value}")
        expected[key] = len(lines)
    assert key_lines("\n".join(lines)) == expected


def test_overrides_are_toml_or_plain_text() -> None:
    assert parse_override("a.b=1e-3") == ("a.b", 1e-3)
    assert parse_override("a=[1, 2]") == ("a", [1, 2])
    assert parse_override("a=x=y") == ("a", "x=y")
    assert parse_override("a=") == ("a", "")
    assert parse_override("a=true") == ("a", True)


def test_known_keys_reach_into_lists() -> None:
    assert {"model.heads", "sources.0.weight", "steps"} <= set(known_keys(Root))


def test_core_does_not_import_torch() -> None:
    rooms = ", ".join(f"phalanx.core.{name}" for name in ("config", "files", "hardware", "units"))
    code = f"import sys, {rooms}; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
