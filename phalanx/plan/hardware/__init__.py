"""What devices, hosts and clusters can do, from small TOML files: times of products, attention and collectives."""

from phalanx.plan.hardware.cluster import Cluster, cluster_names, device_names, load_cluster, load_device
from phalanx.plan.hardware.device_model import Device

__all__ = ["Cluster", "Device", "cluster_names", "device_names", "load_cluster", "load_device"]
