"""Where a store listens that took a free port."""

from __future__ import annotations

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore


def port_of(store: Store) -> int:
    inner = store.underlying_store if isinstance(store, PrefixStore) else store
    assert isinstance(inner, TCPStore)
    return inner.port
