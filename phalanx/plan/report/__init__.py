"""A prediction, or what a search found, for people and programs: text, JSON, a page."""
