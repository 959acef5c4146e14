"""Congestion control as fluid: what it settles on, and what a hot link does to itself and to others."""
