"""Tables for the README, from one run's results."""

from __future__ import annotations

from statistics import median
from typing import Any

from variants import RANKS

import bench_harness

OTHERS = ("eager", "compiled", "hook")
PASSES = ("project", "orthogonalize", "project_back", "restore")


def tables(results: dict[str, Any]) -> str:
    methods = results["methods"]
    texts = [
        "**Encoding**\n\n" + _phase(methods, "encode"),
        "**Decoding one payload**\n\n" + _phase(methods, "decode 1"),
        "**PowerSGD, pass by pass**\n\n" + _passes(methods["PowerSGD"]),
        "**When it pays**\n\n" + _break_even(methods, results["num_elements"]),
    ]
    return "\n\n".join(texts)


def _phase(methods: dict[str, Any], phase: str) -> str:
    """Milliseconds of everybody; how much of the copy's bandwidth ours reaches, counting the fewest bytes."""
    rows = []
    for name, method in methods.items():
        times = {who: _time(method, f"{who} {phase}") for who in ("ours", *OTHERS)}
        if times["ours"] is None:
            continue
        rest = [each for who in OTHERS if (each := times[who]) is not None]
        best = f"{min(rest) / times['ours']:.2f}×" if rest and name != "cast" else "–"
        rows.append([name, *_bandwidth(method, phase, times["ours"]), *(_ms(times[who]) for who in OTHERS), best])
    header = ["method", "fewest bytes", "ours ms", "GB/s", "of a copy", "eager ms", "compiled ms", "hook ms"]
    return bench_harness.table([*header, "ours against the best"], rows)


def _passes(method: dict[str, Any]) -> str:
    rows = []
    for phase in PASSES:
        own = _time(method, f"ours {phase}")
        assert own is not None
        rows.append([f"`{phase}`", *_bandwidth(method, phase, own)])
    return bench_harness.table(["pass", "fewest bytes", "ms", "GB/s", "of a copy"], rows)


def _bandwidth(method: dict[str, Any], phase: str, own: float) -> list[str]:
    nbytes, copied = method["fewest_nbytes"].get(phase), _time(method, "copy")
    if nbytes is None or copied is None:
        return ["–", _ms(own), "–", "–"]
    size = method["num_elements"]
    fraction = nbytes / own / (8 * size / copied)
    return [f"{nbytes / size:.2f}", _ms(own), f"{nbytes / own / 1e9:.0f}", f"{fraction:.0%}"]


def _break_even(methods: dict[str, Any], size: int) -> str:
    """Below this bandwidth a compressed all-reduce beats one in bf16: bytes a rank saves over the time it works."""
    rows = []
    for name, method in methods.items():
        row = [name, f"{2 * size / method['sent_nbytes']:.1f}×"]
        for n in RANKS:
            saved = 2 * (n - 1) / n * (2 * size - method["sent_nbytes"])
            work = _work(method, n)
            row += [f"{1e3 * work:.2f}", f"{8 * saved / work / 1e9:.0f}" if saved > 0 else "–"]
        rows.append(row)
    header = ["method", "smaller than bf16"]
    for n in RANKS:
        header += [f"work ms, n = {n}", f"break-even Gbit/s, n = {n}"]
    return bench_harness.table(header, rows)


def _work(method: dict[str, Any], n: int) -> float:
    """Encode all; decode n payloads of one part and encode their sum; decode all."""
    encode, decode, part = (_time(method, f"ours {phase}") for phase in ("encode", "decode 1", f"decode {n}"))
    assert encode is not None
    return encode + (decode or 0.0) + (part + encode / n if part is not None else 0.0)


def _time(method: dict[str, Any], arm: str) -> float | None:
    return median(method["samples"][arm]) if arm in method["samples"] else None


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{1e3 * value:.3f}" if value < 0.1 else f"{1e3 * value:.1f}"
