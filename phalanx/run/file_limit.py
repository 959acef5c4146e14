"""How many files and sockets a process of a job may have open."""

from __future__ import annotations

import resource

from phalanx.core.errors import UserError

_MANY = 65_536
_LEAST, _OF_A_HOST = 256, 2
"""A process of PyTorch has some hundred open; with fewer, sockets fail here and there, and healthy hosts look bad."""


def allow_files(hosts: int) -> None:
    """Raise this process's limit: a descriptor for each executor, and for as many strangers.

    Raises:
        UserError: it may not have enough for a driver of so many hosts, or for a rank.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = _LEAST + _OF_A_HOST * hosts
    if hard != resource.RLIM_INFINITY and hard < least:
        cure = f"raise the limit before (`ulimit -n {max(least, 4096)}`; who may: see `ulimit -Hn` and limits.conf)"
        raise UserError(f"a process may have only {hard} files open here, and this job needs {least}", cure=cure)
    wanted = _MANY if hard == resource.RLIM_INFINITY else min(hard, max(soft, _MANY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
