"""What devices, hosts and clusters can do, from small TOML files: times of products, attention and collectives."""

from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.hardware.device_model import Device
from phalanx.plan.hardware.hardware_files import cluster_names, device_names, load_cluster, load_device

__all__ = ["Cluster", "Device", "cluster_names", "device_names", "load_cluster", "load_device"]
