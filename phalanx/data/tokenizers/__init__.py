"""Text to token ids and back; which tokenizer a config means, and how it is made of the sources."""
