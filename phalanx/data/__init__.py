"""From text to batches: from the bottom up `sources`, `tokenizers`, `tokens`, `encoding`, then `prepare`, `loader`.

Preparing is `phalanx.data.prepare.prepare`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from phalanx.data.batch import Batch
    from phalanx.data.config import DataConfig, SourceConfig, TokenizerConfig
    from phalanx.data.host_loader import HostLoaderClient, start_host_loader, why_no_host_loader
    from phalanx.data.loader import Loader, LoaderState
    from phalanx.data.prepare import open_prepared
    from phalanx.data.tokenizers.tokenizer import ByteTokenizer, CharTokenizer, LibraryTokenizer, Tokenizer
    from phalanx.data.tokens.prepared_corpus import Prepared

__all__ = [
    "Batch",
    "ByteTokenizer",
    "CharTokenizer",
    "DataConfig",
    "HostLoaderClient",
    "LibraryTokenizer",
    "Loader",
    "LoaderState",
    "Prepared",
    "SourceConfig",
    "Tokenizer",
    "TokenizerConfig",
    "open_prepared",
    "start_host_loader",
    "why_no_host_loader",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "phalanx.data.batch": ["Batch"],
        "phalanx.data.config": ["DataConfig", "SourceConfig", "TokenizerConfig"],
        "phalanx.data.host_loader": ["HostLoaderClient", "start_host_loader", "why_no_host_loader"],
        "phalanx.data.loader": ["Loader", "LoaderState"],
        "phalanx.data.prepare": ["open_prepared"],
        "phalanx.data.tokenizers.tokenizer": ["ByteTokenizer", "CharTokenizer", "LibraryTokenizer", "Tokenizer"],
        "phalanx.data.tokens.prepared_corpus": ["Prepared"],
    },
)
