"""From text to batches: `sources`, `tokenizers`, `tokens` and `encoding` from the bottom up, then `prepare`, `loader`."""
