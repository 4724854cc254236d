"""The numbers on the page of questions are those of the benchmarks' results."""

from __future__ import annotations

import json
import re
from statistics import mean, median
from typing import Any

from doc_pages import ROOT, read

PAGE = read("docs/faq.md")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
TEXT = " ".join(PAGE.split())


def results(name: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((ROOT / "benchmarks" / name / "results.json").read_text(encoding="utf-8"))
    return told


def table(width: int, *names: str) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in ROWS if len(row) == width and row[0] in names}


def test_step_times_are_medians_of_the_samples() -> None:
    steps = results("slow_link")["steps"]
    shown = table(3, "no sync", "DDP", "gradsync", *(f"gradsync, {kind}" for kind in ("bf16", "int8", "int4")))
    assert len(shown) == 6
    step_s = {rate: {arm: median(steps[rate]["arms"][arm]["samples_s"]) for arm in shown} for rate in steps}
    for arm, cells in shown.items():
        assert cells == [f"{step_s[rate][arm] * 1000:.0f}" for rate in ("100mbit", "1gbit")]
    gains = [f"{step_s[rate]['DDP'] / step_s[rate]['gradsync, int4']:.1f}" for rate in ("100mbit", "1gbit")]
    assert f"int4 is {gains[0]} times as fast as DDP's; at 1 Gbit/s {gains[1]} times" in TEXT


def test_losses_are_means_over_seeds() -> None:
    cells = results("slow_link")["loss"]
    shown = table(2, *(f"gradsync, {kind}" for kind in ("int8", "int4", "sign", "powersgd 4", "topk 1 %")))
    assert len(shown) == 5

    def final(arm: str, seed: int) -> float:
        return float(cells[f"2 replicas, large, batch 32, 1000 steps | {arm} | seed {seed}"]["final_held_out"])

    for arm, (cell,) in shown.items():
        worse = mean(final(arm, seed) / final("gradsync", seed) - 1 for seed in range(3))
        assert cell == f"{worse:+.2%}".replace("%", " %")


def test_paces_against_slow_ranks_are_the_stragglers_results() -> None:
    cells = results("pace")["stragglers"]
    shown = table(3, "every_step", "async_sgd(4)", "local_sgd(8)")
    assert len(shown) == 3

    def of(pace: str, key: str) -> list[float]:
        return [float(cells[f"at random | {pace} | seed {seed}"][key]) for seed in range(3)]

    for pace, (speed, loss) in shown.items():
        ratios = [sync / own for sync, own in zip(of("every_step", "took_s"), of(pace, "took_s"), strict=True)]
        assert speed == f"{mean(ratios):.2f}"
        assert loss == f"{mean(of(pace, 'final_held_out')):.3f}"


def test_a_gpu_step_is_the_median_of_its_samples() -> None:
    samples = results("gpu_step")["launches"][0]["samples"]
    ddp, exact, int4 = (f"{median(samples[arm]) * 1000:.0f}" for arm in ("DDP", "gradsync, exact", "gradsync, int4"))
    assert f"DDP's step took {ddp} ms, exact gradsync's {exact}, with int4 {int4}" in TEXT


def test_other_numbers_stand_in_the_table_they_are_linked_to() -> None:
    told = {
        "planner": ["104 cells", "6.6 %", "18.1 %", "5.1 %"],
        "signals": ["0.76 %", "0.30 %"],
        "allreduce": ["5.7", "59.7"],
        "pace": ["0.55"],
    }
    for name, numbers in told.items():
        source = read(f"benchmarks/{name}/README.md")
        assert [number for number in numbers if number not in TEXT or number not in source] == []
    ratios = [float(cell) for cell in re.findall(r"\*\*(\d\.\d+)\*\*", read("benchmarks/engine/README.md"))]
    assert f"between {min(ratios):.2f} and {max(ratios):.2f} of DDP's step" in TEXT
