"""PowerSGD: two sums of thin matrices, P and then Q, which the pipeline pipelines over buckets."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import torch

from gradsync.compress.powersgd import PowerSGD, matrix, start_q
from gradsync.exchange.flat import FlatBucket, Form, Item
from gradsync.exchange.participants import Participants
from gradsync.exchange.pinned import Staged
from gradsync.exchange.pipeline import Journey
from gradsync.kernels.powersgd_kernels import orthogonalize, project, project_back, restore
from gradsync.trace.tally import CodecTally


class Batch(NamedTuple):
    """Matrices of like shape that lie one after the other."""

    items: list[Item]
    grad: torch.Tensor  # [count, rows, cols], as views
    residual: torch.Tensor
    p: torch.Tensor  # [count, rows, rank], where it is added up
    q: torch.Tensor  # [count, cols, rank], likewise
    start: torch.Tensor  # the first q


class LowRank:
    """Matrices as products of thin ones."""

    def __init__(
        self,
        flat_bucket: FlatBucket,
        codec: PowerSGD,
        participants: Participants,
        wire: torch.device,
        account: CodecTally,
    ) -> None:
        """Every rank of the group makes it at once."""
        self._flat_bucket, self._codec, self._participants, self._account = flat_bucket, codec, participants, account
        device = flat_bucket.flat.device
        shapes = [matrix(item.param.shape) for item in flat_bucket.items]
        forms = [Form(codec.rank * sum(side), torch.float32, wire) for side in zip(*shapes, strict=True)]
        self._p, self._q = (Staged.beside(participants.for_sums(form), device) for form in forms)
        self.way = participants.sum_way(forms[0])
        self.sent_nbytes = sum(form.numel * form.dtype.itemsize * participants.sum_share(form) for form in forms)
        # Without feedback the sum of gradient and nothing is made in the same place.
        self._scratch = (
            torch.zeros_like(flat_bucket.flat, dtype=torch.float32) if flat_bucket.residual is None else None
        )
        self._batches = self._make_batches()
        for batch in self._batches:
            for item, q in zip(batch.items, batch.start, strict=True):
                flat_bucket.factors.setdefault(item.name, q)

    def _make_batches(self) -> list[Batch]:
        batches, p_at, q_at, rank = [], 0, 0, self._codec.rank
        residual = self._flat_bucket.residual if self._scratch is None else self._scratch
        assert residual is not None
        for (rows, cols), group in groupby(self._flat_bucket.items, lambda item: matrix(item.param.shape)):
            for items in _side_by_side(list(group), rows * cols):
                count = len(items)
                p = self._p.near[p_at : p_at + count * rows * rank].view(count, rows, rank)
                q = self._q.near[q_at : q_at + count * cols * rank].view(count, cols, rank)
                grad, left = (_as_batch(flat, items, rows, cols) for flat in (self._flat_bucket.flat, residual))
                start = torch.stack([start_q(item.param, rank, self._codec.seed) for item in items]).to(grad.device)
                batches.append(Batch(items, grad, left, p, q, start))
                p_at, q_at = p_at + p.numel(), q_at + q.numel()
        return batches

    def go(self, step: int) -> Journey:
        flat, index = self._flat_bucket.flat, self._flat_bucket.index
        with self._account.timing("encode_s", flat.device, self._flat_bucket.spans):
            if self._scratch is not None:
                self._scratch.zero_()
            before = [
                torch.stack([self._flat_bucket.factors[item.name] for item in batch.items]) for batch in self._batches
            ]
            for batch, q in zip(self._batches, before, strict=True):
                batch.p.copy_(project(batch.grad, batch.residual, q))
            self._p.down()
        yield self._participants.sum(self._p.wire, index)
        with self._account.timing("encode_s", flat.device, self._flat_bucket.spans):
            self._p.up()
            own = []
            for batch in self._batches:
                orthogonalize(batch.p)
                own.append(project_back(batch.residual, batch.p))
                batch.q.copy_(own[-1])
            self._q.down()
        yield self._participants.sum(self._q.wire, index)
        with self._account.timing("decode_s", flat.device, self._flat_bucket.spans):
            self._q.up()
            for batch, q_own, q_before in zip(self._batches, own, before, strict=True):
                restore(batch.grad, batch.residual, batch.p, q_own, batch.q)
                self._keep(batch, q_before)

    def _keep(self, batch: Batch, before: torch.Tensor) -> None:
        """Where the next step begins; after a NaN: where this one did.

        A matrix of a lower rank leaves columns of zeros, from which no step would ever find anything again: anew.
        """
        sound = batch.q.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
        found = torch.where((batch.q == 0).all(-2, keepdim=True), batch.start, batch.q)
        for item, q in zip(batch.items, torch.where(sound, found, before), strict=True):
            self._flat_bucket.factors[item.name] = q


def _side_by_side(items: list[Item], numel: int) -> list[list[Item]]:
    """Cut where there is a gap between neighbours: a batch is one contiguous view."""
    batches: list[list[Item]] = []
    for item in items:
        if batches and item.start == batches[-1][-1].start + numel:
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches


def _as_batch(flat: torch.Tensor, items: list[Item], rows: int, cols: int) -> torch.Tensor:
    start = items[0].start
    return flat[start : start + len(items) * rows * cols].view(len(items), rows, cols)
