"""Copies of snapshots on other hosts: where, over which network, sending and fetching."""
