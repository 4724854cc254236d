"""Checks of the network: which interface gloo and NCCL take on each host, whether it leads out, MTU and speed. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from gradsync.cli.doctor.finding import Finding, Grade, by_host, on_one_host, who
from gradsync.cli.doctor.rank_facts import Facts, Nic
from gradsync.launch.interface import is_loopback

_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_HOST_ONLY = ("docker", "virbr", "br-", "veth", "cni", "flannel", "cali", "lxc", "podman")
_TUNNELS = ("tun", "tap", "wg", "tailscale", "zt")
_FAST_MBIT = 10_000
_USUAL_MTU, _JUMBO_MTU = 1500, 9000


def check_interfaces(facts: Sequence[Facts]) -> list[Finding]:
    """Find where gloo and NCCL listen, and why others will not reach them there."""
    found = [finding for host in by_host(facts).values() for finding in _unknown(host)]
    if on_one_host(facts):
        inside = f"one host: its ranks meet on {facts[0].variables.get(_GLOO, 'loopback')}"
        return found or [Finding(Grade.OK, "interfaces", inside)]
    found += [finding for host in by_host(facts).values() for finding in (*_gloo(host), *_nccl(host))]
    found += _subnets(facts)
    return found or [Finding(Grade.OK, "interfaces", "; ".join(_told(host) for host in by_host(facts).values()))]


def check_mtu(facts: Sequence[Facts]) -> list[Finding]:
    """Packets as large as they can be, and equally large everywhere."""
    if len(by_host(facts)) == 1:
        return _small_packets(facts[0], [nic for nic in facts[0].nics if nic.up and nic.address])
    chosen = [(host, nic) for host in by_host(facts).values() if (nic := chosen_nic(host[0])) is not None]
    sizes = sorted({nic.mtu for _, nic in chosen if nic.mtu})
    if len(sizes) > 1:
        told = "; ".join(f"{nic.mtu} ({nic.name}) on {who(host)}" for host, nic in chosen)
        larger = next(nic for _, nic in chosen if nic.mtu == sizes[-1])
        on = " and ".join(who(host) for host, nic in chosen if nic.mtu > sizes[0])
        detail = f"{told}; what does not fit the smaller is dropped on the way, and large transfers stall or hang"
        fix = f"sudo ip link set dev {larger.name} mtu {sizes[0]}    # on {on}"
        return [Finding(Grade.WRONG, "MTUs differ between hosts", detail, fix)]
    return [finding for host, nic in chosen for finding in _small_packets(host[0], [nic])]


def check_speed(facts: Sequence[Facts]) -> list[Finding]:
    """Cards equally fast, as their drivers say."""
    chosen = [(host, nic) for host in by_host(facts).values() if (nic := chosen_nic(host[0])) is not None]
    known = [(host, nic) for host, nic in chosen if nic.mbit > 0]
    if len({nic.mbit for _, nic in known}) < 2:
        return []
    slowest = min(known, key=lambda each: each[1].mbit)[1]
    told = "; ".join(f"{nic.mbit / 1000:g} Gbit/s ({nic.name}) on {who(host)}" for host, nic in known)
    fix = f"sudo ethtool -s {slowest.name} autoneg on    # then look at the cable and the switch's port"
    return [Finding(Grade.WRONG, "network cards of different speed", told, fix)]


def chosen_nic(facts: Facts) -> Nic | None:
    """The interface that gloo takes: by its variable, else as gradsync.init() would, else by the host's name."""
    if names := facts.variables.get(_GLOO):
        return facts.nic(names.split(",")[0].strip())
    return facts.nic(facts.towards_master) or _by_name(facts)


def way_out(facts: Facts) -> str:
    """The interface to name instead: towards the master, else the fastest that leads out."""
    towards = facts.nic(facts.towards_master)
    if towards is not None and not _is_host_only(towards):
        return towards.name
    ways = [nic for nic in facts.nics if nic.up and nic.address and not _is_host_only(nic)]
    return max(ways, key=lambda nic: (not nic.virtual, nic.mbit), default=Nic("eth0")).name


def nccl_matches(pattern: str, name: str) -> bool:
    """NCCL's own notation: prefixes by commas, `=` for whole names, `^` for all others.

    >>> nccl_matches("eth,ib", "ib0"), nccl_matches("=eth", "eth0"), nccl_matches("^docker,lo", "eth0")
    (True, False, True)
    """
    excludes, whole = pattern.startswith("^"), pattern.lstrip("^").startswith("=")
    names = [each for each in pattern.lstrip("^=").split(",") if each]
    hit = any(name == each if whole else name.startswith(each) for each in names)
    return hit != excludes


def _unknown(host: Sequence[Facts]) -> list[Finding]:
    """Variables that name what does not exist."""
    first, found = host[0], []
    have = ", ".join(f"{nic.name} ({nic.address})" for nic in first.nics if nic.address)
    for name in first.variables.get(_GLOO, "").split(","):
        nic = first.nic(name.strip())
        if name and (nic is None or not nic.address):
            what = f"{_GLOO}={first.variables[_GLOO]} on {who(host)}"
            detail = f"there is no interface {name.strip()} with an address; there are {have}"
            found.append(Finding(Grade.WRONG, what, detail, f"export {_GLOO}={way_out(first)}"))
    pattern = first.variables.get(_NCCL, "")
    if pattern and not any(nccl_matches(pattern, nic.name) for nic in first.nics if nic.address):
        detail = f"it fits no interface with an address; there are {have}"
        found.append(
            Finding(Grade.WRONG, f"{_NCCL}={pattern} on {who(host)}", detail, f"export {_NCCL}={way_out(first)}")
        )
    return found


def _gloo(host: Sequence[Facts]) -> list[Finding]:
    first, here, named = host[0], who(host), host[0].variables.get(_GLOO, "")
    nic = first.nic(named.split(",")[0].strip()) if named else _by_name(first)
    how = f"{_GLOO}={named}" if named else f"the host's name resolves to {first.name_address or 'nothing'} (/etc/hosts)"
    if (nic is None and named) or (place := _leads_to_no_host(nic)) is None:
        return []  # said by _unknown, or well
    where, why = place
    fix = f"export {_GLOO}={way_out(first)}"
    if not named and (taken := first.nic(first.towards_master)) is not None and _leads_to_no_host(taken) is None:
        detail = (
            f"{how}, {why}. gradsync.init() takes {taken.name} ({taken.address}) instead, as this check-up did; "
            f"init_process_group alone would have gloo listen on {where}"
        )
        return [Finding(Grade.NOTE, f"the host's name leads to {where} on {here}", detail, fix)]
    return [Finding(Grade.WRONG, f"gloo listens on {where} on {here}", f"{how}, {why}", fix)]


def _leads_to_no_host(nic: Nic | None) -> tuple[str, str] | None:
    """Return what an interface is, and why no other host may reach it there; None if one can."""
    if nic is None or _is_loopback(nic):
        return "loopback", "which no other host can reach"
    if nic.name.startswith(_HOST_ONLY):
        return nic.name, "which is a bridge inside the host"
    return (nic.name, "which is a tunnel") if nic.name.startswith(_TUNNELS) else None


def _nccl(host: Sequence[Facts]) -> list[Finding]:
    """NCCL's interface, by its variable; NCCL itself passes over loopback and docker, but not over tunnels."""
    first, here, pattern = host[0], who(host), host[0].variables.get(_NCCL, "")
    if not first.gpus and not pattern:
        return []
    fitting = [
        nic for nic in first.nics if nic.address and nic.up and nccl_matches(pattern or "^docker,lo,virbr", nic.name)
    ]
    fix = f"export {_NCCL}={way_out(first)}"
    if pattern and fitting and all(_is_host_only(nic) for nic in fitting):
        detail = f"{_NCCL}={pattern} leads to {fitting[0].name} only, which no other host can reach"
        return [Finding(Grade.WRONG, f"NCCL listens on {fitting[0].name} on {here}", detail, fix)]
    if not pattern and any(nic.name.startswith(_TUNNELS) for nic in fitting):
        names = ", ".join(nic.name for nic in fitting)
        return [Finding(Grade.NOTE, f"NCCL may take a tunnel on {here}", f"it chooses among {names}", fix)]
    gloo = first.variables.get(_GLOO, "")
    if gloo and pattern and not any(nccl_matches(pattern, name.strip()) for name in gloo.split(",")):
        detail = f"{_GLOO}={gloo}, but {_NCCL}={pattern}"
        return [Finding(Grade.NOTE, f"gloo and NCCL use different networks on {here}", detail, fix)]
    return []


def _subnets(facts: Sequence[Facts]) -> list[Finding]:
    chosen = [(host, nic) for host in by_host(facts).values() if (nic := chosen_nic(host[0])) is not None]
    networks = {str(_network(nic)) for _, nic in chosen if nic.prefix and not _is_loopback(nic)}
    if len(networks) < 2:
        return []
    told = "; ".join(f"{nic.address}/{nic.prefix} ({nic.name}) on {who(host)}" for host, nic in chosen)
    other = next(nic for _, nic in chosen if nic.address != chosen[0][1].address)
    fix = f"ip route get {other.address}    # and if that is not the fast way: export {_GLOO}=INTERFACE"
    return [Finding(Grade.NOTE, "hosts are in different subnets", f"{told}; fine only if a router joins them", fix)]


def _small_packets(facts: Facts, nics: Sequence[Nic]) -> list[Finding]:
    return [
        Finding(
            Grade.NOTE,
            f"small packets on {nic.name} of host {facts.host}",
            f"MTU {nic.mtu} at {nic.mbit / 1000:g} Gbit/s; {_JUMBO_MTU} is cheaper, if all switches take it",
            f"sudo ip link set dev {nic.name} mtu {_JUMBO_MTU}    # on every host",
        )
        for nic in nics
        if nic.mbit >= _FAST_MBIT and 0 < nic.mtu <= _USUAL_MTU
    ]


def _told(host: Sequence[Facts]) -> str:
    nic = chosen_nic(host[0])
    shown = "not known" if nic is None else f"{nic.name} ({nic.address}, MTU {nic.mtu})"
    return f"{shown} on {who(host)}"


def _by_name(facts: Facts) -> Nic | None:
    exact = next((nic for nic in facts.nics if nic.address == facts.name_address and nic.address), None)
    if exact is None and facts.name_address and _loops(facts.name_address):
        return next((nic for nic in facts.nics if _is_loopback(nic)), None)
    return exact


def _network(nic: Nic) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(f"{nic.address}/{nic.prefix}", strict=False)
    except ValueError:
        return None


def _is_loopback(nic: Nic) -> bool:
    return _loops(nic.address)


def _loops(address: str) -> bool:
    try:
        return is_loopback(address)
    except ValueError:
        return False


def _is_host_only(nic: Nic) -> bool:
    return _is_loopback(nic) or nic.name.startswith(_HOST_ONLY)
