"""Incidents: what went wrong, what was done, what it cost; a page each, for people and for programs."""
