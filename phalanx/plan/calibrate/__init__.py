"""This machine as a device and a cluster: what measuring processes found, as files that `--cluster` takes."""
