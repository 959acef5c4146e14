"""Hosts that are pods of a Kubernetes cluster; see docs/run_kubernetes.md."""
