"""Rates of failures from the recorded year, and the year played in many ways."""
