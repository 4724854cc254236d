"""All checks, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.cli.doctor.check_gpus import check_gpus, check_topology
from gradsync.cli.doctor.check_host import check_files, check_memory, check_processors
from gradsync.cli.doctor.check_network import check_interfaces, check_mtu, check_speed
from gradsync.cli.doctor.check_variables import check_variables
from gradsync.cli.doctor.check_versions import check_backends, check_library, check_versions
from gradsync.cli.doctor.finding import Finding
from gradsync.cli.doctor.measured_links import MeasuredLinks, check_clocks, check_links
from gradsync.cli.doctor.rank_facts import Facts

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


def examine(facts: Sequence[Facts], measured: MeasuredLinks | None, *known: Finding) -> list[Finding]:
    """Return what all checks find, and what is known already, the worst first."""
    found = [*(finding for check in CHECKS for finding in check(facts)), *known]
    if measured is not None:
        found += [*check_links(measured, facts), *check_clocks(measured)]
    return sorted(found, key=lambda finding: finding.grade)
