"""Digests in rotation: every bit that a replica holds is in exactly one share, and nothing is changed by looking."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from drift_cases import BITS, Mixed, bits, random_flip
from torch import nn

from gradsync.agreement.header import Head, Headers, pack_header
from gradsync.drift.digests import NUM_SHARES, DigestMismatch, DigestReading, ReplicaDigests, cut, replica_tensors_of
from gradsync.engine.bucket import GradEntry


def replica(model: nn.Module | None = None, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, list[GradEntry]]:
    """A model that has taken two steps."""
    torch.manual_seed(seed)
    model = Mixed() if model is None else model
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        model(torch.randn(3)).backward()
        opt.step()
    entries = [GradEntry(i, name, param, {}, name, False) for i, (name, param) in enumerate(model.named_parameters())]
    return model, opt, entries


def words(replica_digest: ReplicaDigests, steps: range = range(NUM_SHARES)) -> list[bytes]:
    """What a rank would announce in so many steps; digests are a step late."""
    said = []
    for step in steps:
        replica_digest.take(step)
        said.append(replica_digest.announce()[0])
    return said


@pytest.mark.parametrize("seed", range(60))
def test_a_flipped_bit_changes_the_digest_of_exactly_one_share(seed: int) -> None:
    model, opt, entries = replica()
    replica_digest = ReplicaDigests(entries, [opt], None)
    before = words(replica_digest)
    flip = random_flip(seed)
    flip(model, opt)
    assert sum(a != b for a, b in zip(before, words(replica_digest), strict=True)) == 1, flip
    flip(model, opt)
    assert words(replica_digest) == before


def test_looking_changes_nothing() -> None:
    model, opt, entries = replica()
    held = [bits(p).clone() for p in model.parameters()]
    states = {id(p): sorted(state) for p, state in opt.state.items()}
    versions = [p._version for p in model.parameters()]
    words(ReplicaDigests(entries, [opt], None))
    assert all(torch.equal(a, bits(p)) for a, p in zip(held, model.parameters(), strict=True))
    assert {id(p): sorted(state) for p, state in opt.state.items()} == states, "no state was made"
    assert [p._version for p in model.parameters()] == versions


@pytest.mark.parametrize("seed", range(10))
def test_shares_hold_everything_once_and_are_about_equal(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([1, 3, 7, 100, 5000, 60001]) for _ in range(rng.randrange(1, 30))]
    entries = []
    for i, size in enumerate(sizes):
        param = nn.Parameter(torch.empty(size, dtype=rng.choice([torch.float32, torch.float16, torch.float64])))
        entries.append(GradEntry(i, f"p{i}", param, {}, "", False))
    shares = cut(replica_tensors_of(entries, []), NUM_SHARES)
    seen = {entry.name: 0 for entry in entries}
    weights = []
    for pieces in shares:
        weights.append(0)
        for piece in pieces:
            name = piece.replica_tensor.parameter
            assert name is not None
            assert piece.start == seen[name] < piece.stop, "in order, without gaps"
            assert piece.start * piece.replica_tensor.value.element_size() % 8 == 0, "on borders of words"
            seen[name] = piece.stop
            weights[-1] += (piece.stop - piece.start) * piece.replica_tensor.value.element_size()
    assert seen == {entry.name: entry.param.numel() for entry in entries}
    assert max(weights) <= sum(weights) / NUM_SHARES + 64


def test_state_that_appears_or_is_loaded_is_seen_at_once() -> None:
    _, opt, entries = replica()
    replica_digest = ReplicaDigests(entries, [opt], None)
    before = words(replica_digest, range(7, 7 + NUM_SHARES))
    opt.load_state_dict(opt.state_dict())
    again = words(replica_digest, range(7, 7 + NUM_SHARES))
    assert again == before
    next(iter(opt.state.values()))["exp_avg"].view(-1)[0] += 1
    assert sum(a != b for a, b in zip(before, words(replica_digest, range(7, 7 + NUM_SHARES)), strict=True)) == 1


def test_what_only_a_rank_knows_is_left_out() -> None:
    model = nn.Linear(3, 2)
    opt = torch.optim.LBFGS(model.parameters())

    def closure() -> Any:
        loss = model(torch.randn(4, 3)).square().mean()
        loss.backward()
        return loss

    opt.step(closure)
    entries = [GradEntry(i, name, p, {}, name, False) for i, (name, p) in enumerate(model.named_parameters())]
    names = [each.name for each in replica_tensors_of(entries[:1], [opt])]
    assert not any("prev_loss" in name for name in names), "its own loss"
    assert any("n_iter" in name for name in names)
    assert not any('"bias"' in name for name in names), "ignored by the user"
    assert names[0] == "history_size of group 0 of LBFGS", "hyper-parameters first: they may be the cause"


def test_every_dtype_of_the_cases_has_its_bits() -> None:
    assert {param.element_size() for param in Mixed().parameters()} <= set(BITS)


class SlowDevice:
    """Ranks of one process whose digests come after a delay, each rank's after another one; no rank waits."""

    def __init__(self, seed: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rng = random.Random(seed)
        self.ranks = []
        for _ in range(ranks):
            _, opt, entries = replica()
            self.ranks.append(ReplicaDigests(entries, [opt], None))
        self._now = 0
        self._delays: dict[int, int] = {}  # in steps, by reading
        read: Callable[..., DigestReading] = ReplicaDigests._read
        under_way: list[Any] = [None]  # in the place of an event
        monkeypatch.setattr(ReplicaDigests, "_read", lambda *args: replace(read(*args), events=under_way))
        monkeypatch.setattr(DigestReading, "is_there", lambda reading: self._is_there(reading))

    def _is_there(self, reading: DigestReading) -> bool:
        delay = self._delays.setdefault(id(reading), self._rng.choice([0, 1, 1, 2, 6]))
        return self._now > reading.step + delay

    def step(self, step: int) -> list[DigestMismatch | None]:
        """All announce, exchange their headers, hear, and digest a share."""
        rows, self._now = [], step
        for rank in self.ranks:
            word, scale = rank.announce()
            head = Head(step, 0, 1.0, 1, -1, 1, 0, bytes(8), replica_digest=word, loss_scale=scale)
            rows.append(pack_header(head, b""))
        headers = Headers(torch.stack(rows))
        heard = [rank.hear(headers) for rank in self.ranks]
        for rank in self.ranks:
            rank.take(step)
        return heard


@pytest.mark.parametrize("seed", range(10))
def test_digests_that_come_late_are_compared_once_and_by_all(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowDevice(seed, 3, monkeypatch)
    keep = [rank._read for rank in slow.ranks]  # digests of all steps are unlike each other, on one rank
    readings: list[DigestReading] = []

    def read(step: int, pieces: Any) -> DigestReading:
        readings.append(keep[1](step, pieces))
        readings[-1].joined += 1 + step
        return readings[-1]

    monkeypatch.setattr(slow.ranks[1], "_read", read)
    found = [slow.step(step) for step in range(400)]
    compared = [[mismatch.step for mismatch in each if mismatch is not None] for each in found]
    assert all(len(steps) in (0, 3) and len(set(steps)) <= 1 for steps in compared), "on all ranks, of one step"
    steps = [steps[0] for steps in compared if steps]
    assert len(steps) == len(set(steps)), "each once"
    assert set(range(max(steps) - 20)) <= set(steps), "none is left out"


def test_a_digest_of_a_replica_that_is_rightly_unlike_the_others_is_never_announced() -> None:
    _, opt, entries = replica()
    replica_digest = ReplicaDigests(entries, [opt], None)
    said = []
    for step in range(6):
        said.append(replica_digest.announce()[0] != bytes(8))
        replica_digest.take(step, silent=step in (2, 3))
    assert said == [False, True, True, False, False, True]
