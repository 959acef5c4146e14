"""Silent data corruption: copies that should be equal and are not, batches that give other bits, norms that jump."""
