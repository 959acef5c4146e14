"""Numbers as people read them."""

from __future__ import annotations

import re
from typing import Any

_SIZE = re.compile(r"([0-9.]+)\s*([kMGTP]?)(i?)B?", re.IGNORECASE)


def count(value: float) -> str:
    """``1234567`` as ``1.23M``; below a thousand as it is."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}" if value != int(value) else str(int(value))


def size(num_bytes: float) -> str:
    """Bytes in binary units: ``1.50 GiB``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def read_size(value: Any) -> Any:
    """Of a setting: text as `parse_size` reads it, all else as it is."""
    return parse_size(value) if isinstance(value, str) else value


def duration(seconds: float) -> str:
    """``75`` as ``1m15s``, ``4000`` as ``1h06m``, ``0.012`` as ``12ms``."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02d}h"
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def parse_size(text: str) -> int:
    """Bytes of ``"500 GB"`` (10⁹), ``"1.5 TiB"`` (2⁴⁰), ``"1000"``.

    Raises:
        ValueError: it is no such text; the message holds the cure after a colon.
    """
    found = _SIZE.fullmatch(text.strip())
    try:
        number, prefix, binary = found.groups() if found else ("", "", "")
        value = float(number)
    except ValueError:
        raise ValueError(f'{text!r} is no size: write bytes, or such as "500 GB" or "1.5 TiB"') from None
    return round(value * (1024.0 if binary else 1000.0) ** " kmgtp".index(prefix.lower() or " "))
