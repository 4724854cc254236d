"""What a probe found, as data."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from gradsync.links import Cluster
from gradsync.probe.fitting import Fit


@dataclass(frozen=True)
class Findings:
    """The cluster, what it was fitted to, and what looked wrong.

    Args:
        cluster: To plan by; calibrated.
        tiers: What was measured of each link, by its name in the cluster: "across", "inside", "memory".
        warnings: Slow ranks and links by name, and whatever else makes the numbers doubtful.
    """

    cluster: Cluster
    tiers: dict[str, Fit]
    warnings: tuple[str, ...] = ()

    @property
    def median_error(self) -> float:
        """How far the fitted links are from what was measured at sizes kept back: relative, in the middle."""
        return median(error for fit in self.tiers.values() for error in fit.errors)

    @property
    def worst_error(self) -> float:
        return max(error for fit in self.tiers.values() for error in fit.errors)
