"""The worked example of docs/planning.md: what the page says is what the planner computes, and what the field reports.

1 B parameters, fp16: a few percent inside a node with NVLink, 30 to 50 % across nodes on one 100G Ethernet NIC.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

import gradsync as gs
from gradsync.cli.main import main
from gradsync.planner.catalogue import cluster
from gradsync.planner.from_size import describe
from gradsync.planner.predict import predict
from gradsync.planner.prediction import Prediction

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
ROW = re.compile(r"\| (a100|h100) \| ([\d,]+) \| (\d+) \| (.*) \|")
NO_OVERLAP, OVERLAP = gs.Plan(overlap="none"), gs.Plan()
MACHINES = {"a100": ("nvlink3", 312e12, 0.45), "h100": ("nvlink4-sharp", 989e12, 0.40)}


@cache
def ask(device: str, tokens: int, nodes: int, plan: gs.Plan, network: str = "100g", nics: int = 1) -> Prediction:
    link, flops, mfu = MACHINES[device]
    profile = describe(params=1e9, dtype="fp16", tokens=tokens, flops=flops, mfu=mfu)
    machines = cluster(gpus=8 * nodes, per_host=8, link=link, network=network, nics=nics, device=device)
    return predict(profile, machines, plan)


def percent(device: str, tokens: int, nodes: int, plan: gs.Plan, network: str = "100g", nics: int = 1) -> float:
    return 100 * ask(device, tokens, nodes, plan, network, nics).overhead


def test_inside_a_node_it_is_a_few_percent() -> None:
    assert 3 < percent("a100", 8192, 1, NO_OVERLAP) < 6
    assert percent("a100", 8192, 1, OVERLAP) < 2


@pytest.mark.parametrize(("nodes", "by_hand"), [(2, 36.0), (4, 45.1), (8, 48.8)])
def test_across_nodes_without_overlap_it_is_a_third_to_a_half(nodes: int, by_hand: float) -> None:
    """By hand: all-reduce inside and across, 2(g−1)/g · S / 230 GB/s + 2(m−1)/m · S / 11 GB/s, over 6PT / (F · MFU)."""
    step_s = 6 * 1e9 * 8192 / (312e12 * 0.45)
    wire_s = 2 * 7 / 8 * 2e9 / 230e9 + 2 * (nodes - 1) / nodes * 2e9 / 11e9
    assert 100 * wire_s / (wire_s + step_s) == pytest.approx(by_hand, abs=0.1)
    assert percent("a100", 8192, nodes, NO_OVERLAP) == pytest.approx(by_hand, abs=2)


@pytest.mark.parametrize(("nodes", "by_hand"), [(4, 31.5), (8, 39.1)])
def test_with_overlap_faster_gpus_are_as_exposed_at_twice_the_batch(nodes: int, by_hand: float) -> None:
    assert percent("h100", 16384, nodes, OVERLAP) == pytest.approx(by_hand, abs=3)


def test_overlap_hides_most_of_it_where_backward_is_long_enough() -> None:
    assert percent("a100", 8192, 2, OVERLAP) < percent("a100", 8192, 2, NO_OVERLAP) / 4


def test_tcp_instead_of_rdma_is_the_same_story_at_twice_the_batch() -> None:
    for nodes in (2, 4, 8):
        assert 35 < percent("a100", 16384, nodes, NO_OVERLAP, network="100g-tcp") < 54


def test_where_it_stops_holding() -> None:
    assert percent("a100", 32768, 8, OVERLAP) < 5  # a large batch
    assert percent("a100", 8192, 8, NO_OVERLAP, nics=8) == pytest.approx(13.6, abs=2)  # a NIC for each GPU
    assert percent("h100", 8192, 4, OVERLAP) > 55  # a small batch on fast GPUs


def rows() -> list[tuple[str, int, int, list[str]]]:
    found = [ROW.fullmatch(line) for line in PAGE.splitlines()]
    return [(r[1], int(r[2].replace(",", "")), int(r[3]), r[4].split(" | ")) for r in found if r is not None]


def test_the_page_and_the_planner_agree() -> None:
    assert len(rows()) == 6
    for device, tokens, compute_ms, cells in rows():
        told = [tuple(map(float, re.findall(r"[\d.]+", cell))) for cell in cells]
        for nodes, (without, with_overlap) in zip((1, 2, 4, 8), told, strict=True):
            assert round(1e3 * ask(device, tokens, nodes, OVERLAP).compute_s) == compute_ms
            assert percent(device, tokens, nodes, NO_OVERLAP) == pytest.approx(without, abs=0.6), (
                device,
                tokens,
                nodes,
            )
            assert percent(device, tokens, nodes, OVERLAP) == pytest.approx(with_overlap, abs=0.6), (
                device,
                tokens,
                nodes,
            )


EXAMPLES = re.findall(r"\$ gradsync plan (.*)\n(.*)\n", PAGE)


@pytest.mark.parametrize(("arguments", "answer"), EXAMPLES, ids=[arguments for arguments, _ in EXAMPLES])
def test_the_page_shows_what_the_command_answers(
    arguments: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments.split()]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert told.startswith(answer)


def test_the_page_shows_three_answers() -> None:
    assert len(EXAMPLES) == 3
