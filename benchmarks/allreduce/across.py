"""How fast is each algorithm between two hosts of two ranks at 1 Gbit/s, what does it send, and is `price` right?

python benchmarks/allreduce/across.py --rounds 15 --launches 3

    ┌─ host A ──────────┐      1 Gbit/s each way      ┌─ host B ──────────┐
    │  rank 0   rank 1  ├─ eth0 ═══════════════ eth0 ─┤  rank 2   rank 3  │     a lab of `netlab`: needs root
    └───────────────────┘                             └───────────────────┘

Arms take turns in the same processes. Bytes are those that the kernel counts on each host's link, less headers. Prices
are made of links measured in those processes, through what the algorithms themselves use:

    across, loopback   rounds of a schedule between two ranks, both ways at once; loopback in both hosts at once
    memory             an all-reduce of the ranks of each host, in both hosts at once, in shared memory
    call               what `gs.all_reduce` does beside: ranks compare what they brought, and a thread is woken
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path[:0] = [entry for entry in (str(HERE.parent), str(HERE)) if entry not in sys.path]

import bench_harness  # noqa: E402
import gradsync as gs  # noqa: E402
from gradsync.algorithms.price import price  # noqa: E402
from gradsync.algorithms.schedule import Schedule, Transfer  # noqa: E402
from gradsync.cluster import Cluster, Link  # noqa: E402
from gradsync.exchange.group_cache import CARD_NBYTES, group_cache  # noqa: E402
from gradsync.exchange.schedule_runner import Program, run  # noqa: E402
from gradsync.transport.groups import MESSAGES  # noqa: E402
from netlab.lab import Lab  # noqa: E402
from netlab.traffic import payload, sent  # noqa: E402

RATE = "1gbit"
HOSTS = ((0, 1), (2, 3))
SIZES = {"25 MB": 25_000_000, "4 MB": 4_000_000, "1 MB": 1_000_000, "100 KB": 100_000}
ALGORITHMS: dict[str, Any] = {
    "native()": gs.native(),
    "ring()": gs.ring(),
    "tree()": gs.tree(),
    "halving_doubling()": gs.halving_doubling(),
    "hierarchical()": gs.hierarchical(),
    "None": None,
}
IN_PLACE = "hierarchical(), in shared_empty"
# Whose rounds and which link inside a host an arm is priced with; gloo's own is a ring.
PRICED = {
    "gloo": (gs.ring(), "loopback"),
    "native()": (gs.ring(), "loopback"),
    "ring()": (gs.ring(), "loopback"),
    "tree()": (gs.tree(), "loopback"),
    "halving_doubling()": (gs.halving_doubling(), "loopback"),
    "hierarchical()": (gs.hierarchical(), "memory"),
    IN_PLACE: (gs.hierarchical(), "memory in place"),
}
_ACROSS = ((0, 2), (2, 0))
_LOOPBACK = ((0, 1), (1, 0), (2, 3), (3, 2))
_LARGE = 8_000_000
_PINGS, _PROBES, _COUNTED = 50, 5, 2

Samples = bench_harness.Samples


def measure(rounds: int, launches: int) -> dict[str, Any]:
    """Every arm at every size; `rounds` samples of each in each of `launches` sets of processes."""
    with Lab(hosts=len(HOSTS), rate=RATE) as lab:
        ranks = [len(host) for host in HOSTS]
        each = [joined(lab.spawn(run_rank, ranks, rounds, timeout=120 + 12 * rounds)) for _ in range(launches)]
    return {
        "machine": bench_harness.machine(),
        "commit": bench_harness.commit(HERE),
        "setting": {"hosts": HOSTS, "rate": RATE, "rounds": rounds},
        "launches": each,
    }


def joined(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' figures as one: an all-reduce ends with its last rank, and the ranks' processor time adds up."""
    first = by_rank[0]
    probes = {name: _over(max, [rank["probes"][name] for rank in by_rank]) for name in first["probes"]}
    sizes = {size: _joined_cell([rank["sizes"][size] for rank in by_rank]) for size in first["sizes"]}
    return {"probes": probes, "sizes": sizes}


def _joined_cell(cells: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "samples": {arm: _over(max, [cell["samples"][arm] for cell in cells]) for arm in cells[0]["samples"]},
        "cpu": {arm: _over(sum, [cell["cpu"][arm] for cell in cells]) for arm in cells[0]["cpu"]},
        "sent": {arm: [cells[host[0]]["sent"][arm] for host in HOSTS] for arm in cells[0]["sent"]},
    }


def _over(fold: Callable[[list[float]], float], columns: list[list[float]]) -> list[float]:
    return [round(fold(list(row)), 7) for row in zip(*columns, strict=True)]


# One rank


def run_rank(rounds: int) -> dict[str, Any]:
    """A rank's seconds, processor seconds and its host's bytes per call, for every arm and size; and of the probes."""
    gs.init(timeout=60)
    groups = [dist.new_group(list(host)) for host in HOSTS]
    mine = next(group for group, host in zip(groups, HOSTS, strict=True) if dist.get_rank() in host)
    sizes: dict[str, Any] = {}
    probes: Samples = {}
    for name, nbytes in SIZES.items():
        sizes[name] = _arms_taking_turns(nbytes, rounds)
        for probe, seconds in _probes(mine).items():  # after every size: the machine is not always equally busy
            probes.setdefault(probe, []).extend(seconds)
    dist.destroy_process_group()
    return {"sizes": sizes, "probes": probes}


def _arms_taking_turns(nbytes: int, rounds: int) -> dict[str, Any]:
    calls = _calls(nbytes)
    cpu: Samples = {name: [] for name in calls}
    arms = {name: _variant(call, cpu[name]) for name, call in calls.items()}
    for arm in arms.values():
        arm()  # connections and programs are made
    sent_by = {name: _bytes_sent(call) for name, call in calls.items()}
    for spent in cpu.values():
        spent.clear()
    return {"samples": bench_harness.interleave(arms, rounds), "cpu": cpu, "sent": sent_by}


def _calls(nbytes: int) -> dict[str, Callable[[], object]]:
    plain, shared = torch.ones(nbytes // 4).zero_(), gs.shared_empty(nbytes // 4)

    def reduce(tensor: torch.Tensor, algorithm: Any) -> Callable[[], object]:
        return lambda: gs.all_reduce(tensor, algorithm=algorithm, op="sum")

    ours = {name: reduce(plain, algorithm) for name, algorithm in ALGORITHMS.items()}
    return {"gloo": lambda: dist.all_reduce(plain), **ours, IN_PLACE: reduce(shared, gs.hierarchical())}


def _variant(call: Callable[[], object], cpu: list[float]) -> Callable[[], float]:
    def turn() -> float:
        dist.barrier()
        start, spent = time.perf_counter(), _cpu_s()
        call()
        cpu.append(_cpu_s() - spent)
        return time.perf_counter() - start

    return turn


def _cpu_s() -> float:
    """The processor time of all threads of this process, in and out of the kernel."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _bytes_sent(call: Callable[[], object]) -> float:
    """What this host sends per call, without headers; a barrier's few hundred bytes included."""
    dist.barrier()
    before = sent(Path("/proc/net/dev").read_text())
    for _ in range(_COUNTED):
        call()
    dist.barrier()  # the other ranks of this host have sent theirs too
    after = sent(Path("/proc/net/dev").read_text())
    return payload(after.nbytes - before.nbytes, after.packets - before.packets) / _COUNTED


# What links can do, by the means of the algorithms


def _probes(mine: dist.ProcessGroup) -> Samples:
    """Seconds of one round, or of one all-reduce inside a host, of next to nothing and of much."""
    rounds = {
        f"{name}, {kind}": _rounds(pairs, numel, repeats)
        for name, pairs in (("across", _ACROSS), ("loopback", _LOOPBACK))
        for kind, numel, repeats in (("1 element", 1, _PINGS), ("8 MB", _LARGE // 4, 2))
    }
    teams: Samples = {}
    for kind, numel in (("1 element", 1), ("8 MB", _LARGE // 4)):
        teams[f"memory, {kind}"] = _inside(torch.zeros(numel), mine)
        teams[f"memory in place, {kind}"] = _inside(gs.shared_empty(numel, group=mine), mine)
    return rounds | teams | {"call": _comparisons()}


def _rounds(pairs: tuple[tuple[int, int], ...], numel: int, repeats: int) -> list[float]:
    """Seconds per round in which all `pairs` send at once, through the executor that every schedule runs on.

    Every pair has two chunks of its own, which take turns: so, as in the algorithms, copies land in place and receives
    are posted a round ahead.
    """
    lane, k = group_cache(dist.group.WORLD).lane, len(pairs)
    turns = [tuple(Transfer(*pair, half * k + i, add=False) for i, pair in enumerate(pairs)) for half in range(2)]
    schedule = Schedule(4, 2 * k, tuple(turns) * (repeats // 2))
    program, flat = Program.compile(schedule, dist.get_rank(), 2 * k * numel, 4), torch.zeros(2 * k * numel)
    channel = lane.groups.data[MESSAGES]

    def go() -> None:
        lane.wait(lane.send(lambda: run(program, flat, channel, 0), "a probe", 0))

    turn = _variant(go, [])
    return [turn() / repeats for _ in range(1 + _PROBES)][1:]


def _comparisons() -> list[float]:
    """Seconds of what a call does beside its rounds."""
    lane = group_cache(dist.group.WORLD).lane

    def go() -> None:
        lane.exchange(bytes(CARD_NBYTES))
        lane.wait(lane.send(lambda: None, "a probe", 0))

    turn = _variant(go, [])
    return [turn() for _ in range(1 + 2 * _PROBES)][1:]


def _inside(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[float]:
    turn = _variant(lambda: gs.all_reduce(tensor, op="sum", group=group), [])
    return [turn() for _ in range(1 + 2 * _PROBES)][1:]


def links(probes: Samples) -> dict[str, Link]:
    """The links that these probes mean.

    A round of b bytes takes `latency_s + b / bandwidth`. In shared memory an all-reduce of S bytes by two ranks stands
    for hierarchical's two rounds inside, of S / 2 each.
    """

    def link(name: str, rounds: int) -> Link:
        small, large = (median(probes[f"{name}, {kind}"]) for kind in ("1 element", "8 MB"))
        return Link(small / rounds, _LARGE / (large - small))

    by_rounds = {name: link(name, 1) for name in ("across", "loopback")}
    return by_rounds | {name: link(name, 2) for name in ("memory", "memory in place")}


# Tables


def predicted_s(arm: str, nbytes: int, found: dict[str, Link]) -> float:
    """What `price` says; additions are free, since a piece is added while the next one travels."""
    recipe, inside = PRICED[arm]
    return price(recipe.schedule(HOSTS), nbytes, Cluster(HOSTS, inside=found[inside], across=found["across"]))


def border_nbytes(arm: str, nbytes: int) -> float:
    """What the schedule sends over the first host's border."""
    schedule = PRICED[arm][0].schedule(HOSTS)
    crossing = sum(t.src in HOSTS[0] and t.dst not in HOSTS[0] for transfers in schedule.rounds for t in transfers)
    return nbytes * crossing / schedule.num_chunks


def tables(results: dict[str, Any]) -> str:
    """Links, then a table per size."""
    launches = results["launches"]
    probes = {name: [x for each in launches for x in each["probes"][name]] for name in launches[0]["probes"]}
    found = links(probes)
    rows = [[name, f"{1e6 * link.latency_s:.0f}", f"{link.bandwidth / 1e6:.1f}"] for name, link in found.items()]
    rows.append(["call", f"{1e6 * median(probes['call']):.0f}", "–"])
    parts = [bench_harness.table(["link", "latency µs", "bandwidth MB/s"], rows)]
    header = ["all-reduce", "ms", "ring() / it", "MB over the border", "by formula", "price ms", "ms / price"]
    header += ["ms / (price + call)", "CPU"]
    for size in launches[0]["sizes"]:
        rows = _rows([each["sizes"][size] for each in launches], SIZES[size], found, median(probes["call"]))
        parts.append(f"{size}\n\n" + bench_harness.table(header, rows))
    return "\n\n".join(parts)


def _rows(cells: list[dict[str, Any]], nbytes: int, found: dict[str, Link], call_s: float) -> list[list[str]]:
    arms = cells[0]["samples"]
    samples, cpu = ({arm: [x for c in cells for x in c[key][arm]] for arm in arms} for key in ("samples", "cpu"))
    return [
        [
            arm if arm == "gloo" else f"`{arm}`",
            bench_harness.milliseconds(samples[arm]),
            _speedup(samples, arm),
            f"{median(n for cell in cells for n in cell['sent'][arm]) / 1e6:.3f}",
            *_expected(arm, nbytes, median(samples[arm]), found, call_s),
            f"{sum(cpu[arm]) / sum(samples[arm]) / (os.cpu_count() or 1):.0%}",
        ]
        for arm in arms
    ]


def _speedup(samples: Samples, arm: str) -> str:
    ratio, low, high = bench_harness.paired_ratio(samples, "ring()", arm)
    return f"**{ratio:.2f}** ({low:.2f}–{high:.2f})"


def _expected(arm: str, nbytes: int, seconds: float, found: dict[str, Link], call_s: float) -> list[str]:
    if arm not in PRICED:
        return ["–"] * 4
    expected = predicted_s(arm, nbytes, found)
    with_call = expected + (0.0 if arm == "gloo" else call_s)
    border = f"{border_nbytes(arm, nbytes) / 1e6:.3f}"
    return [border, f"{1e3 * expected:.1f}", f"**{seconds / expected:.2f}**", f"{seconds / with_call:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="per launch")
    parser.add_argument("--launches", type=int, default=3, help="sets of fresh processes")
    parser.add_argument("--out", type=Path, help="a JSON file that takes the samples under the key 'across'")
    options = parser.parse_args()
    results = measure(options.rounds, options.launches)
    print(tables(results))
    if options.out is not None:
        bench_harness.save(options.out, {"across": results})


if __name__ == "__main__":
    # Ranks import their function by the module's name, which is not __main__.
    from across import main as run_main

    run_main()
