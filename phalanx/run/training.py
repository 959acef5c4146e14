"""A job that is `phalanx train`: where the training goes, by the words of its command line. Torch-free.

The job is looked for by its folder whenever its driver is started again, so that must not depend on anything that may
be edited meanwhile, such as the config file.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from phalanx.core.config import parse_override
from phalanx.core.errors import UserError

_MODULES = ("phalanx", "phalanx.__main__", "phalanx.cli.main")
_FOLDER = "run.folder"


class Training(NamedTuple):
    """What the words say.

    Attributes:
        config: its file, from the folder that ranks run in.
        folder: where it goes, from there; empty: they do not say.
    """

    config: str
    folder: str

    @property
    def name(self) -> str:
        """Of its run."""
        return Path(self.folder).name if self.folder else Path(self.config).stem

    def names_folder(self, working_folder: str) -> bool:
        """Whether the words, or the config file, say where it goes; a file that cannot be read here says nothing."""
        if self.folder:
            return True
        with suppress(OSError, ValueError, AttributeError):
            found = tomllib.loads((Path(working_folder or ".") / self.config).read_text())
            return bool(found.get("run", {}).get("folder"))
        return False


def training_of(script: str, is_module: bool, arguments: Sequence[str]) -> Training | None:
    """The training that a module and its arguments stand for; None: it is something else."""
    if not is_module or script not in _MODULES or arguments[:1] not in (["train"], ("train",)):
        return None
    words = list(_positional(arguments[1:]))
    return Training(words[0], _folder_of(words[1:])) if words else None


def with_folder(folder: Path) -> str:
    """The word that has a training go there."""
    return f"{_FOLDER}={json.dumps(str(folder), ensure_ascii=False)}"


def _positional(words: Sequence[str]) -> Iterator[str]:
    rest = iter(words)
    for word in rest:
        if word == "--cluster":
            next(rest, "")
        elif not word.startswith("-"):
            yield word


def _folder_of(overrides: Sequence[str]) -> str:
    found = ""
    for word in overrides:
        with suppress(UserError):  # which the training will say
            key, value = parse_override(word)
            found = str(value) if key == _FOLDER else found
    return found
