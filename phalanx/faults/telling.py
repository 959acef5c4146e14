"""Words that would give an injected fault away to a detector, and finding them in what a worker shows. Torch-free."""

from __future__ import annotations

import re

TELLING = re.compile(
    r"fault|inject|incident|manifest|campaign|chaos|sabotage|deliberate|on purpose"
    r"|disguis|pretend|simulat|ground.?truth|referee",
    re.IGNORECASE,
)

_REAL = re.compile(r"segmentation fault|segfault|page ?faults?|faulthandler|default", re.IGNORECASE)


def telling_words(text: str) -> list[str]:
    """Those in `text`, each once; what systems say of real faults (``Segmentation fault``, page faults) is none."""
    return sorted({match.group().lower() for match in TELLING.finditer(_REAL.sub("", text))})
