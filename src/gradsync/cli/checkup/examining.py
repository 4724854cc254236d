"""All checks, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.cli.checkup.cards import check_gpus, check_topology
from gradsync.cli.checkup.facts import Facts
from gradsync.cli.checkup.finding import Finding
from gradsync.cli.checkup.links import Measured, check_clocks, check_links
from gradsync.cli.checkup.machine import check_files, check_memory, check_processors
from gradsync.cli.checkup.network import check_interfaces, check_mtu, check_speed
from gradsync.cli.checkup.variables import check_variables
from gradsync.cli.checkup.versions import check_backends, check_library, check_versions

CHECKS = (
    check_versions,
    check_backends,
    check_library,
    check_interfaces,
    check_mtu,
    check_speed,
    check_memory,
    check_files,
    check_processors,
    check_gpus,
    check_topology,
    check_variables,
)


def examine(facts: Sequence[Facts], measured: Measured | None, *known: Finding) -> list[Finding]:
    """What all checks find, and what is known already, the worst first."""
    found = [*(finding for check in CHECKS for finding in check(facts)), *known]
    if measured is not None:
        found += [*check_links(measured, facts), *check_clocks(measured)]
    return sorted(found, key=lambda finding: finding.grade)
