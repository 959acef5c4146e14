"""The process of every host that owns the memory of snapshots and outlives the ranks."""
