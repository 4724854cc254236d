"""Common parts by name, for those who have not measured: links, networks, devices, and the clusters made of them.

`docs/links.md` shows it as a table, with sources.
"""

from gradsync.planner.catalogue.assembly import cluster
from gradsync.planner.catalogue.processors import DEVICES, Processor, device
from gradsync.planner.catalogue.wires import LINKS, NETWORKS, Wire, link, network

__all__ = ["DEVICES", "LINKS", "NETWORKS", "Processor", "Wire", "cluster", "device", "link", "network"]
