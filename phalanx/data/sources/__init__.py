"""Input: which files a source is made of, how they are cut into units, and the documents in them as pieces of text."""
