"""Checks of environment variables: those that fight each other, were left over, or differ between ranks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gradsync.cli.doctor.finding import Finding, Grade, by_host, on_one_host, who
from gradsync.cli.doctor.rank_facts import Facts
from gradsync.units import show_nbytes

_LITTLE_NBYTES = 256 << 20  # what a rank's trace may take, twice
_OF_EACH_HOST = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "NCCL_NET_GDR_LEVEL", "NCCL_GRAPH_FILE")
_LOOPBACK = ("localhost", "127.", "::1")


class VariableRule(NamedTuple):
    """A variable, what is wrong with it, and for whom."""

    name: str
    is_odd: Callable[[str, Facts], bool]
    grade: Grade
    why: str
    fix: str


def _on(value: str, facts: Facts) -> bool:
    return value.lower() not in ("", "0", "false", "no", "off")


def _on_gpus(value: str, facts: Facts) -> bool:
    return _on(value, facts) and bool(facts.gpus)


def _hides_infiniband(value: str, facts: Facts) -> bool:
    return _on(value, facts) and bool(facts.infiniband)


def _between_gpus(value: str, facts: Facts) -> bool:
    return _on(value, facts) and facts.world_size > 1 and bool(facts.gpus)


def _chatty(value: str, facts: Facts) -> bool:
    return value.upper() in ("INFO", "TRACE")


def _detail(value: str, facts: Facts) -> bool:
    return value.upper() == "DETAIL"


def _fights_async(value: str, facts: Facts) -> bool:
    other = facts.variables.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    return _on(value, facts) and _on(other, facts)


def _outdated(value: str, facts: Facts) -> bool:
    return True


RULES = (
    VariableRule(
        "TORCH_DISTRIBUTED_DEBUG",
        _detail,
        Grade.WRONG,
        "with gloo, DistributedDataParallel crashes (segmentation fault) when it is made, and every collective "
        "is preceded by two more",
        "export TORCH_DISTRIBUTED_DEBUG=INFO",
    ),
    VariableRule(
        "CUDA_LAUNCH_BLOCKING", _on_gpus, Grade.WRONG, "nothing overlaps on a GPU", "unset CUDA_LAUNCH_BLOCKING"
    ),
    VariableRule(
        "NCCL_IB_DISABLE",
        _hides_infiniband,
        Grade.WRONG,
        "there is InfiniBand, and NCCL is told not to use it",
        "unset NCCL_IB_DISABLE",
    ),
    VariableRule(
        "TORCH_NCCL_BLOCKING_WAIT",
        _fights_async,
        Grade.WRONG,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING is on too, and only one of them can be",
        "unset TORCH_NCCL_BLOCKING_WAIT",
    ),
    VariableRule("NCCL_BLOCKING_WAIT", _outdated, Grade.NOTE, "an old name", "unset NCCL_BLOCKING_WAIT"),
    VariableRule("NCCL_ASYNC_ERROR_HANDLING", _outdated, Grade.NOTE, "an old name", "unset NCCL_ASYNC_ERROR_HANDLING"),
    VariableRule(
        "NCCL_P2P_DISABLE",
        _between_gpus,
        Grade.NOTE,
        "GPUs of a host exchange through its memory, not by NVLink or PCIe",
        "unset NCCL_P2P_DISABLE",
    ),
    VariableRule(
        "NCCL_SHM_DISABLE",
        _between_gpus,
        Grade.NOTE,
        "ranks of a host whose GPUs do not reach each other exchange by sockets",
        "unset NCCL_SHM_DISABLE",
    ),
    VariableRule(
        "NCCL_DEBUG", _chatty, Grade.NOTE, "left over? every rank prints pages of it", "export NCCL_DEBUG=WARN"
    ),
    VariableRule(
        "GRADSYNC_DISABLE",
        _on,
        Grade.NOTE,
        "left over? it is there to find out whether gradsync is at fault, not to train with",
        "unset GRADSYNC_DISABLE",
    ),
)


def check_variables(facts: Sequence[Facts]) -> list[Finding]:
    """Every rule, and what differs between ranks."""
    found = [finding for rule in RULES for finding in _apply(rule, facts)]
    found += [*_master(facts), *_trace(facts), *_differing(facts)]
    return found or [Finding(Grade.OK, "environment", "no variables that fight each other")]


def _apply(rule: VariableRule, facts: Sequence[Facts]) -> list[Finding]:
    odd = [each for each in facts if rule.name in each.variables and rule.is_odd(each.variables[rule.name], each)]
    if not odd:
        return []
    return [Finding(rule.grade, f"{rule.name}={odd[0].variables[rule.name]} on {who(odd)}", rule.why, rule.fix)]


def _master(facts: Sequence[Facts]) -> list[Finding]:
    odd = [each for each in facts if each.master.startswith(_LOOPBACK)]
    if not odd or on_one_host(facts):
        return []
    detail = f"{max(odd[0].num_nodes, len(by_host(facts)))} hosts take part, and each would look for rank 0 on itself"
    fix = "export MASTER_ADDR=HOST_OF_RANK_0    # torchrun: --rdzv-endpoint=HOST_OF_RANK_0:29500"
    return [Finding(Grade.WRONG, f"MASTER_ADDR={odd[0].master} on {who(odd)}", detail, fix)]


def _trace(facts: Sequence[Facts]) -> list[Finding]:
    if odd := [each for each in facts if each.trace_problem]:
        what = f"GRADSYNC_TRACE={odd[0].trace} cannot be written on {who(odd)}"
        return [
            Finding(Grade.WRONG, what, odd[0].trace_problem, "export GRADSYNC_TRACE=$HOME/run    # a folder of yours")
        ]
    if odd := [each for each in facts if each.trace and 0 <= each.trace_free_nbytes < _LITTLE_NBYTES]:
        what = f"little room for GRADSYNC_TRACE={odd[0].trace} on {who(odd)}"
        detail = f"{show_nbytes(odd[0].trace_free_nbytes)} free"
        return [Finding(Grade.NOTE, what, detail, f"df -h {odd[0].trace}    # then free some, or name another folder")]
    return []


def _differing(facts: Sequence[Facts]) -> list[Finding]:
    """Variables that all ranks must see alike, and do not."""
    names = sorted(
        {name for each in facts for name in each.variables if name.startswith(("NCCL_", "TORCH_", "GRADSYNC_"))}
    )
    found = []
    for name in names:
        values = {each.variables.get(name, "(not set)") for each in facts}
        if len(values) == 1 or name in _OF_EACH_HOST:
            continue
        groups = {value: [each for each in facts if each.variables.get(name, "(not set)") == value] for value in values}
        usual = max(sorted(groups), key=lambda value: len(groups[value]))
        told = "; ".join(f"{value} on {who(groups[value])}" for value in sorted(groups))
        fix = f"unset {name}" if usual == "(not set)" else f"export {name}={usual}"
        found.append(Finding(Grade.NOTE, f"{name} differs between ranks", told, f"{fix}    # on every host"))
    return found
