"""Common parts by name, for those who have not measured: links, networks, devices, and the clusters made of them.

`docs/links.md` shows it as a table, with sources.
"""

from gradsync.planner.catalogue.assembled_cluster import cluster
from gradsync.planner.catalogue.devices import DEVICES, Processor, device
from gradsync.planner.catalogue.networks import LINKS, NETWORKS, CatalogueLink, link, network

__all__ = ["DEVICES", "LINKS", "NETWORKS", "CatalogueLink", "Processor", "cluster", "device", "link", "network"]
