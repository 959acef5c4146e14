"""Reading files of TOML that people write."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError


def read_tree(path: Path) -> dict[str, Any]:
    """What tomllib makes of the file at `path`.

    Raises:
        UserError: it cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError("cannot be read", cure=f"look at the file: {error.strerror}", field=str(path)) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, no TOML, endless digits or brackets
        raise UserError(f"is no TOML: {error}", cure="correct it there", field=str(path)) from error
