"""Taking state back: from memory, from another host, from durable storage, by all ranks together."""
