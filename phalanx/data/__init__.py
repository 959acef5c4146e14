"""From text to batches: from the bottom up `sources`, `tokenizers`, `tokens`, `encoding`, then `prepare`, `loader`."""
