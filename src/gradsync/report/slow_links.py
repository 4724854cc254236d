"""Links that give less than the others, from what each connection carried while it was busy.

A kernel counts the time in which a connection had something to send, in ticks of up to 10 ms; so carried bytes and busy
time are summed over the run, and a link is judged only when it was busy for many ticks. One that carried as much and
was hardly busy is what a link should be: others are compared with it, at the least rate that it must have had.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from gradsync.report.lateness import own_s
from gradsync.report.rank_stats import RankStats
from gradsync.report.table import Table
from gradsync.report.wording import host_of, printable, who
from gradsync.trace.reader import RunTrace
from gradsync.units import show_rate

_PART = 1 / 3  # of what the others give: less is slow
_FEWEST_S = 0.25  # busy, to judge a link by
_FEWEST_NBYTES = 1 << 20
_TICK_S = 0.004
_MATTERS = 0.05  # of the run's time that a link is busy, for anybody to care


class LinkUse(NamedTuple):
    """The use of all connections from one rank to another, or to an address whose rank is not known."""

    rank: int
    peer: int | None
    address: str
    nbytes: int
    busy_s: float
    retransmits: int

    @property
    def rate(self) -> float:
        """Bytes per second while it was busy; at least that, where this was too short to be known."""
        return self.nbytes / max(self.busy_s, _FEWEST_S)


class SlowLink(NamedTuple):
    """A link that gives less than the others, or than the probe says."""

    rank: int
    host: str
    peer: int | None
    peer_host: str | None
    address: str
    rate: float  # bytes per second while it was busy
    usual: float  # what it was compared with
    text: str
    advice: str


def sum_links(run: RunTrace, table: Table) -> list[LinkUse]:
    """Every link's sums over the steps of a table."""
    since = table.steps[0] if table.steps else 0
    sums: dict[tuple[int, int | None, str], list[float]] = {}
    for rank, trace in run.ranks.items():
        for line in trace.socket_lines:
            for wire in line.wires if line.step >= since else ():
                key = (rank, wire.peer, printable(wire.address) if wire.peer is None else "")
                entry = sums.setdefault(key, [0, 0.0, 0])
                entry[0] += max(0, wire.nbytes)
                entry[1] += max(0.0, wire.busy_s)
                entry[2] += max(0, wire.retransmits)
    return [
        LinkUse(rank, peer, address, int(nbytes), busy_s, int(resent))
        for (rank, peer, address), (nbytes, busy_s, resent) in sums.items()
    ]


def find_slow_links(
    run: RunTrace, table: Table, links: Sequence[LinkUse], late: Sequence[int], said: RankStats
) -> list[SlowLink]:
    """Every link that gives far less than the others, the slowest first.

    What a rank does not take yet from its socket waits on the sender's side, and looks as if the link were slow. So the
    time by which the receiver was later than the sender does not count, and links to ranks that are always late are
    not judged.
    """
    elapsed_s = sum(median(cell.step_s for cell in table.rows[step].values()) for step in table.steps)
    told = [link for link in links if link.nbytes >= _FEWEST_NBYTES]
    found = []
    for link in told:
        if link.busy_s < _FEWEST_S:
            continue
        others = [other.rate for other in told if other is not link and _comparable(run, other, link)]
        usual = max(median(others) if others else 0.0, (said.link_bandwidth or 0.0) if len(others) < 2 else 0.0)
        if link.peer in late or link.rate >= _PART * usual:
            continue
        alone = _without_lateness(link, table)
        if alone.rate < _PART * usual and alone.busy_s >= max(_FEWEST_S, _MATTERS * elapsed_s):
            found.append(_slow(run, alone, usual, 0 if usual == said.link_bandwidth else len(others)))
    return sorted(found, key=lambda slow: slow.rate)


def _comparable(run: RunTrace, other: LinkUse, link: LinkUse) -> bool:
    """Return whether the other was busy long, or carried no less in a short time, and is no faster inside of a host."""
    fair = _inside(run, link) or not _inside(run, other)
    return fair and (other.busy_s >= _FEWEST_S or other.nbytes >= link.nbytes / 2)


def _inside(run: RunTrace, link: LinkUse) -> bool:
    return link.peer is not None and host_of(run, link.peer) == host_of(run, link.rank)


def _without_lateness(link: LinkUse, table: Table) -> LinkUse:
    """A link's busy time without that in which the receiver cannot have been there."""
    if link.peer is None:
        return link
    pairs = [(table.cell(step, link.peer), table.cell(step, link.rank)) for step in table.steps]
    late_s = sum(max(0.0, own_s(theirs) - own_s(mine)) for theirs, mine in pairs if theirs and mine)
    return link._replace(busy_s=max(link.busy_s - late_s, _TICK_S))


def _slow(run: RunTrace, link: LinkUse, usual: float, num_others: int) -> SlowLink:
    """`num_others`: with how many it was compared; with none, it was with the probe's bandwidth."""
    to = link.address if link.peer is None else who(run, link.peer)
    than = ("the probe found", "the other gives", "the others give")[min(num_others, 2)]
    rates = f"{show_rate(link.rate)} where {than} {show_rate(usual)}{' (median)' if num_others > 1 else ''}"
    return SlowLink(
        link.rank,
        host_of(run, link.rank),
        link.peer,
        None if link.peer is None else host_of(run, link.peer),
        link.address,
        link.rate,
        usual,
        f"the link from {who(run, link.rank)} to {to} gives {rates}",
        "Look for other traffic, a slower port, a bad cable or the wrong interface on that way (gradsync doctor).",
    )
