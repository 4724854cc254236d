"""Checks of what is installed: versions alike on all ranks and supported, backends, the C module. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gradsync.cli.doctor.finding import Finding, Grade, who
from gradsync.cli.doctor.rank_facts import Facts

OLDEST, TOO_NEW = (2, 11), (3, 0)  # of torch, as pyproject.toml has it
_REBUILD = "pip install --force-reinstall --no-deps --no-cache-dir gradsync"


def check_versions(facts: Sequence[Facts]) -> list[Finding]:
    """Python, torch, gradsync and NCCL are the same everywhere."""
    found = [finding for name in ("python", "torch", "gradsync", "nccl") for finding in _alike(facts, name)]
    first = facts[0]
    if not found:
        names = [("Python", first.python), ("torch", first.torch), ("gradsync", first.gradsync), ("NCCL", first.nccl)]
        told = ", ".join(f"{name} {version}" for name, version in names if version)
        found = [Finding(Grade.OK, "versions", told if len(facts) == 1 else f"{told} on all {len(facts)} ranks")]
    return found + _supported(facts)


def check_backends(facts: Sequence[Facts]) -> list[Finding]:
    """Gloo for all, NCCL where there are GPUs."""
    found = []
    if lacking := [each for each in facts if "gloo" not in each.backends]:
        found.append(
            Finding(
                Grade.WRONG,
                f"torch has no gloo on {who(lacking)}",
                f"it has {_listed(lacking[0].backends)}; gradsync's control messages go by gloo",
                "pip install --force-reinstall torch",
            )
        )
    if lacking := [each for each in facts if each.gpus and "nccl" not in each.backends]:
        found.append(
            Finding(
                Grade.WRONG,
                f"torch has no NCCL on {who(lacking)}",
                "there are GPUs, and without NCCL their gradients go through the host, by gloo",
                "pip install --force-reinstall torch",
            )
        )
    return found or [Finding(Grade.OK, "backends", _listed(facts[0].backends))]


def check_library(facts: Sequence[Facts]) -> list[Finding]:
    """The C module: sums in shared memory, fast compressors."""
    lacking = [each for each in facts if not each.library]
    if not lacking:
        levels = {level: [each for each in facts if each.level == level] for level in sorted({f.level for f in facts})}
        if len(levels) == 1:
            return [Finding(Grade.OK, "C module", f"present, uses {facts[0].level}")]
        told = "; ".join(f"{level} on {who(some)}" for level, some in levels.items())
        return [Finding(Grade.OK, "C module", f"present; {told} (the same bits, at different speeds)")]
    without = [each for each in lacking if not each.compiler]
    fix = f"sudo apt-get install -y gcc && {_REBUILD}" if without else _REBUILD
    why = "there is no C compiler" if without else f"though there is a compiler ({lacking[0].compiler})"
    if len(lacking) < len(facts):
        detail = f"{why}; the other ranks have it, and it is used only if all ranks of a host do"
        return [Finding(Grade.WRONG, f"the C module is missing on {who(lacking)}", detail, fix)]
    detail = f"{why}; without it there are no sums in shared memory, and compressors take many times as long"
    return [Finding(Grade.NOTE, "the C module was not built", detail, fix)]


def _alike(facts: Sequence[Facts], name: str) -> list[Finding]:
    versions = {str(getattr(each, name)) for each in facts}
    if len(versions) == 1:
        return []
    groups = {version: [each for each in facts if getattr(each, name) == version] for version in sorted(versions)}
    usual = max(groups, key=lambda version: len(groups[version]))
    told = "; ".join(f"{version or 'none'} on {who(some)}" for version, some in groups.items())
    odd = " and ".join(who(some) for version, some in groups.items() if version != usual)
    return [Finding(Grade.WRONG, f"ranks have different versions of {name}", told, _install(name, usual, odd))]


def _install(name: str, usual: str, odd: str) -> str:
    if name == "python":
        return f"python{'.'.join(usual.split('.')[:2])} -m venv .venv    # on {odd}"
    package, version = ("torch", "") if name == "nccl" else (name, f"=={usual.partition('+')[0]}")
    return f"pip install {'--force-reinstall ' if name == 'nccl' else ''}{package}{version}    # on {odd}"


def _supported(facts: Sequence[Facts]) -> list[Finding]:
    low, high = (".".join(map(str, each)) for each in (OLDEST, TOO_NEW))
    odd = [each for each in facts if not OLDEST <= _numbers(each.torch) < TOO_NEW]
    if not odd:
        return []
    detail = f"gradsync works with {low} and later, below {high}"
    return [
        Finding(Grade.WRONG, f"torch {odd[0].torch} on {who(odd)}", detail, f"pip install 'torch>={low},<{high}'"),
    ]


def _numbers(version: str) -> tuple[int, int]:
    """
    >>> _numbers("2.13.0+cpu"), _numbers("odd")
    ((2, 13), (0, 0))
    """
    found = re.match(r"([0-9]{1,6})\.([0-9]{1,6})", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
