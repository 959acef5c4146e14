"""Stragglers: which machine is slow, which stage is too heavy, and what that costs, from spans (`judge_run`)."""
