"""Compression between hosts: replicas stay equal, nothing is lost, and the wire carries what was claimed."""

from __future__ import annotations

import pytest
import torch

import gradsync as gs
from gradsync.compress.recipe import Compressor
from gradsync.compress.toml import canonical
from netlab.compress_plays import conserve, count
from netlab.fixture import MakeLab

EVERY: dict[str, Compressor] = {
    "int8": gs.int8(),
    "int4": gs.int4(block=64),
    "sign": gs.sign(block=64),
    "topk": gs.topk(0.1, block=128),
    "randomk": gs.randomk(0.1),
    "powersgd": gs.powersgd(2),
    "across_hosts(int8)": gs.across_hosts(gs.int8()),
    "across_hosts(powersgd)": gs.across_hosts(gs.powersgd(2)),
}


@pytest.mark.parametrize("per_host", [[2, 2], [1, 2]], ids=["2+2", "1+2"])
def test_what_was_not_applied_is_in_the_residuals(per_host: list[int], lab: MakeLab) -> None:
    seen = lab().spawn(conserve, per_host, [canonical(each) for each in EVERY.values()], 5)
    for index, name in enumerate(EVERY):
        ranks = [rank[index] for rank in seen]
        assert all(rank["weights"] == ranks[0]["weights"] for rank in ranks), f"{name}: replicas differ"
        given, left = (torch.tensor([rank[key] for rank in ranks]) for key in ("given", "left"))
        mean, applied = given.mean(0), torch.tensor(ranks[0]["taken"])
        torch.testing.assert_close(applied + left.sum(0), mean, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("hosts", "way"), [(2, "gather"), (3, "two_phase")])
def test_a_host_sends_what_stats_says(hosts: int, way: str, lab: MakeLab) -> None:
    compressors = [gs.int8(), gs.topk(0.1)]
    for rank in lab(hosts=hosts).spawn(count, [1] * hosts, [canonical(each) for each in compressors]):
        for compressor, found in zip(compressors, rank, strict=True):
            assert found["way"] == way
            assert found["claimed"] == found["of_compressor"]
            assert found["counted"] == pytest.approx(found["claimed"], rel=0.05), compressor
