"""The config contract: a TOML file plus dotted ``key=value`` overrides, checked by pydantic models.

Each room owns a `Config` subclass beside its code. `load` builds one from a file and overrides, remembers where
every value came from, and turns each mistake into a `UserError` that names the key, the value and the cure.
"""

from __future__ import annotations

import difflib
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from phalanx.core.errors import UserError

MOST = (1 << 63) - 1
"""The largest whole number of a setting, either way: what 64 bits hold."""


if TYPE_CHECKING:  # it has no public name
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class _ToldByField(ModelMetaclass):
    """Of a config that is made in Python, what is refused is told as it is of a file."""

    def __call__(self, *args: Any, **fields: Any) -> Any:
        try:
            return super().__call__(*args, **fields)
        except ValidationError as error:
            raise _told(cast("type[Config]", self), error) from None


class Config(BaseModel, metaclass=_ToldByField):
    """Base of every component's config: frozen, unknown keys and numbers that are not finite refused, defaults checked.

    Declare fields with ``Field(default, ..., description="what it is, with its unit")``. Cross-field checks go in a
    ``@model_validator(mode="after")`` that raises ``ValueError("heads = 6 does not divide hidden = 100: make hidden a
    multiple of heads")``: both fields with their values, then the cure.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_number(cls, value: Any, info: ValidationInfo) -> Any:
        # To Python true is a number, and whole numbers have no end; to a config neither holds.
        kinds = set(_kinds(cls.model_fields[str(info.field_name)].annotation))
        items = value if isinstance(value, list | tuple) else [value]
        if bool not in kinds and kinds & {int, float} and any(isinstance(item, bool) for item in items):
            raise PydanticCustomError("number", "Must be a number, not true or false")
        if int in kinds and any(isinstance(item, int) and abs(item) > MOST for item in items):
            raise PydanticCustomError("number", "Must fit into 64 bits")
        return value


C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Loaded(Generic[C]):
    """A checked config and, for each dotted key that was given, where it came from."""

    value: C
    origins: Mapping[str, str]

    def origin(self, key: str) -> str:
        """Where the value of `key` came from: ``file.toml:12``, ``override`` or ``default``."""
        given = [k for k in self.origins if k == key or key.startswith(k + ".")]
        return self.origins[max(given, key=len)] if given else "default"


def load(kind: type[C], path: Path | None, overrides: Sequence[str] = ()) -> Loaded[C]:
    """Read `path`, apply ``key=value`` overrides in order, and check the result against `kind`.

    Raises:
        UserError: the file is missing or not TOML, an override has no ``=``, a key is unknown, a value is refused.
    """
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if path is not None:
        where = str(path)
        try:
            text = path.read_text(encoding="utf-8-sig")
            tree = tomllib.loads(text)
        except FileNotFoundError:
            raise UserError("there is no such config file", cure="check the path", value=where) from None
        except UnicodeDecodeError:
            raise UserError("is not UTF-8 text", cure="save the config file as UTF-8", value=where) from None
        except OSError as error:
            raise UserError(f"cannot be read ({error.strerror})", cure="check the path", value=where) from None
        # tomllib also raises plain ValueErrors, for example for numbers of more than 4,300 digits.
        except ValueError as error:
            raise UserError(f"is not valid TOML: {error}", cure="correct that line", value=where) from None
        except RecursionError:
            raise UserError("has brackets within brackets without end", cure="close them", value=where) from None
        origins = {key: f"{path}:{line}" for key, line in key_lines(text).items()}
    for override in overrides:
        key, value = parse_override(override)
        _put(tree, key, value, kind)
        # An override of a table replaces all that the file says below it.
        origins = {k: o for k, o in origins.items() if not k.startswith(key + ".")}
        origins[key] = "override"
    return Loaded(validate(kind, tree), origins)


def validate(kind: type[C], tree: Mapping[str, Any]) -> C:
    """Build `kind` from a tree of plain values; every problem becomes one line of one `UserError`."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise _told(kind, error) from None


def _told(kind: type[Config], error: ValidationError) -> UserError:
    """All that is wrong, a line for each setting."""
    items = error.errors()

    def follows(item: Any) -> bool:
        # A list may be too short only because pydantic left out an item that is wrong: that one is the cause.
        here = item["loc"]
        inner = (other["loc"] for other in items if len(other["loc"]) > len(here))
        return item["type"] == "too_short" and any(place[: len(here)] == here for place in inner)

    problems = [_explain(kind, item) for item in items if not follows(item)]
    if len(problems) == 1:
        return problems[0]
    lines = "".join(f"\n  {problem}" for problem in problems)
    return UserError(f"{len(problems)} settings are wrong:{lines}\n ", cure="correct each of them")


def parse_override(text: str) -> tuple[str, Any]:
    """Split ``a.b=value``; the value is read as TOML and, where it is none, taken as a plain string."""
    key, equals, raw = text.partition("=")
    key = key.strip()
    # Python hands over bytes of the command line that are not UTF-8 as lone surrogates, which cannot be printed.
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UserError("is not UTF-8 text", cure="write it in UTF-8", value=text)
    if not equals or not key:
        raise UserError("is not of the form key=value", cure="write for example train.steps=100", value=text)
    try:
        # As TOML first, so that numbers and lists have their types; then as text, so that a path needs no quotes on a
        # command line.
        return key, tomllib.loads(f"value = {raw}")["value"]
    except (ValueError, RecursionError):  # Python reads no number of thousands of digits
        return key, raw


def read_toml(path: Path) -> dict[str, Any]:
    """The TOML file at `path`, where no schema is at hand."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError("cannot be read", cure=f"look at the file: {error.strerror}", field=str(path)) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, no TOML, endless digits or brackets
        raise UserError(f"is no TOML: {error}", cure="correct it there", field=str(path)) from error


def key_lines(text: str) -> dict[str, int]:
    """Map every dotted key of a valid TOML text to the line (from 1) on which its entry starts.

    tomllib keeps no positions, so the text is parsed once per growing prefix: the lines that make a key appear are
    the lines it was written on. Config files are small, so the square cost does not matter.
    """
    lines = text.splitlines()
    seen: dict[str, int] = {}
    start = 0
    for end in range(1, len(lines) + 1):
        try:
            leaves = list(_leaves(tomllib.loads("\n".join(lines[:end]))))
        except tomllib.TOMLDecodeError:
            continue
        # An entry of several lines, such as a list, begins at its first line that is neither blank nor a comment.
        first = next(
            (i for i in range(start, end) if lines[i].strip() and not lines[i].lstrip().startswith("#")), start
        )
        for key in leaves:
            seen.setdefault(key, first + 1)
        start = end
    return seen


def walk(config: Config, prefix: str = "") -> Iterator[tuple[str, Any, FieldInfo]]:
    """``(dotted key, value, field)`` of every leaf of a config, in order of declaration."""
    for name, field in type(config).model_fields.items():
        key, value = f"{prefix}{name}", getattr(config, name)
        if isinstance(value, Config):
            yield from walk(value, key + ".")
        elif isinstance(value, list | tuple) and value and all(isinstance(v, Config) for v in value):
            for index, item in enumerate(value):
                yield from walk(item, f"{key}.{index}.")
        else:
            yield key, value, field


def known_keys(kind: type[Config], prefix: str = "") -> Iterator[str]:
    """Every dotted key that `kind` accepts; items of lists carry the index 0."""
    for name, field in kind.model_fields.items():
        key = f"{prefix}{name}"
        yield key
        inner, is_list = _config_inside(field.annotation)
        if inner is not None:
            yield from known_keys(inner, f"{key}.0." if is_list else key + ".")


def _put(tree: dict[str, Any], dotted: str, value: Any, kind: type[Config]) -> None:
    """Set `dotted` in `tree`, making tables on the way; digits index into lists (one past the end appends)."""
    *parents, last = dotted.split(".")
    place: Any = tree
    for part, following in zip(parents, dotted.split(".")[1:], strict=True):
        fresh: Any = [] if following.isdigit() else {}
        place = _child(place, part, fresh, dotted)
    if isinstance(place, list):
        _child(place, last, value, dotted)
        place[int(last)] = value
    elif isinstance(place, dict):
        place[last] = value
    else:
        raise _unknown(kind, dotted)


def _child(place: Any, part: str, fresh: Any, dotted: str) -> Any:
    if isinstance(place, dict):
        return place.setdefault(part, fresh)
    if isinstance(place, list) and part.isdigit() and int(part) <= len(place):
        if int(part) == len(place):
            place.append(fresh)
        return place[int(part)]
    raise UserError(f"{part!r} does not fit here", cure="see `phalanx explain` for the keys", field=dotted)


def _leaves(tree: Any, prefix: str = "") -> Iterator[str]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for name, value in items:
        key = f"{prefix}{name}"
        nested = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict) for v in value))
        if nested:
            yield from _leaves(value, key + ".")
        else:
            yield key


def _explain(kind: type[Config], item: Any) -> UserError:
    dotted = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return _unknown(kind, dotted)
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        # Validators of ours write "problem: cure", see `Config`.
        problem, _, cure = message.partition(": ")
        where = {"field": dotted} if dotted else {}
        return UserError(problem, cure=cure or "change one of them", **where)
    if item["type"] == "missing":
        return UserError("is required and was not given", cure=f"add {dotted} to the config", field=dotted)
    field: FieldInfo | None = None
    inner: type[Config] | None = kind
    for part in dotted.split("."):
        if not part.isdigit() and inner is not None and part in inner.model_fields:
            field = inner.model_fields[part]
            inner, _ = _config_inside(field.annotation)
    described = field is not None and field.description
    cure = f"it is: {described}" if described else "see `phalanx explain` for what it takes"
    return UserError(message[:1].lower() + message[1:], cure=cure, field=dotted, value=item["input"])


def _unknown(kind: type[Config], dotted: str) -> UserError:
    normal = ".".join("0" if part.isdigit() else part for part in dotted.split("."))
    known = list(known_keys(kind))
    # The section itself would be the nearest match of many misspelt keys in it, and no cure.
    sections = {key for key in known if any(other.startswith(f"{key}.") for other in known)}
    keys = [key for key in known if key not in sections or not normal.startswith(f"{key}.")]
    close = difflib.get_close_matches(normal, keys, n=1, cutoff=0.6)
    if not close:
        # Perhaps the right name in the wrong section.
        by_name = {key.rsplit(".", 1)[-1]: key for key in keys}
        near = difflib.get_close_matches(normal.rsplit(".", 1)[-1], by_name, n=1, cutoff=0.7)
        close = [by_name[near[0]]] if near else []
    cure = f"did you mean {close[0]}?" if close else "see `phalanx explain` for the keys"
    return UserError("there is no such setting", cure=cure, field=dotted)


def _kinds(annotation: Any) -> Iterator[type]:
    """The plain types that an annotation names, at any depth."""
    if isinstance(annotation, type):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _kinds(argument)


def _config_inside(annotation: Any) -> tuple[type[Config] | None, bool]:
    """The `Config` class within an annotation (``X``, ``X | None``, ``list[X]``, ``tuple[X, ...]``); is it listed?"""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation, False
    origin = typing.get_origin(annotation)
    listed = origin in (list, tuple)
    if listed or origin in (typing.Union, types.UnionType):
        for argument in typing.get_args(annotation):
            inner, deeper = _config_inside(argument)
            if inner is not None:
                return inner, listed or deeper
    return None, False
