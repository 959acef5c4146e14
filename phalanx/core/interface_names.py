"""Network interfaces as settings of NCCL and gloo name them. Torch-free."""

from __future__ import annotations


def names_interface(pattern: str, name: str, *, exact: bool = False) -> bool:
    """Whether a pattern such as that of ``NCCL_SOCKET_IFNAME`` means this interface.

    ``eth,ib`` are prefixes, ``=eth0`` a whole name, ``^`` before either means all others; an empty one means none.

    Args:
        exact: the pattern is a list of whole names, as gloo's.
    """
    excluding = not exact and pattern.startswith("^")
    pattern = pattern.removeprefix("^") if excluding else pattern
    if not exact and pattern.startswith("="):
        exact, pattern = True, pattern[1:]
    parts = [part.strip() for part in pattern.split(",") if part.strip()]
    found = name in parts if exact else any(name.startswith(part) for part in parts)
    return bool(parts) and found is not excluding
