"""Local SGD: every rank steps by itself, and now and then the parameters are averaged.

    rank 0    step step step step ┐        step step step step ┐
    rank 1    step step step step ┴ mean   step step step step ┴ mean
              └──── k ──────────┘

Without a compressor parameters travel as they are. With one, what changed since the last mean does: a code of few
bits would spoil parameters, but not their changes, and what it loses comes with the next change.

    exact         p ← Σ (p / n)
    compressed    p ← w − Σ ((w − p) / n), and the same becomes w
    one rank      p stays as it is

Only what required a gradient at attach travels (see `trained_parameters`), and rank 0's buffers with it. The first
average comes after step 1 if there is a warmup, after step k otherwise.

With `optimizer_state` the optimizers' state is averaged too: momentum and the like, tensors of floating point. Counts
stay, and what not every rank has: a rank whose GradScaler has skipped every step so far has no state yet, and one whose
batches never touched a parameter has none for it.
"""

from __future__ import annotations

import torch

from gradsync.agreement.documents import share
from gradsync.exchange.means import average
from gradsync.pace.after_step import AfterStep
from gradsync.pace.averages import finish_mean, launch_mean
from gradsync.pace.contract import PaceContext, SavedPace, Stats, numbers_in_state
from gradsync.plan.paces import LocalSGD


def average_optimizers(context: PaceContext) -> None:
    """Average the optimizers' state; every rank calls this at once."""
    tensors = _tensors(context)
    mine = [[*key, list(tensor.shape), str(tensor.dtype)] for key, tensor in tensors.items()]
    everyones = [{str(form) for form in document["state"]} for document in share(context.lane, {"state": mine})]
    common = set.intersection(*everyones)
    alike = [tensors[key] for key, form in zip(tensors, mine, strict=True) if str(form) in common]
    average(context.lane, context.exact, alike)


def _tensors(context: PaceContext) -> dict[tuple[int, str, str], torch.Tensor]:
    """The state by optimizer, parameter and key, in one order on every rank; parameters left alone have no name."""
    names = {id(param): name for name, param in context.parameters}
    found = {}
    for number, optimizer in enumerate(context.optimizers):
        for param in (param for group in optimizer.param_groups for param in group["params"] if id(param) in names):
            for key, value in sorted(optimizer.state.get(param, {}).items()):
                # By name, for a count of steps has the shape of a parameter that is one number.
                if key != "step" and isinstance(value, torch.Tensor) and _fits(value, param):
                    found[number, names[id(param)], key] = value
    return found


def _fits(value: torch.Tensor, param: torch.Tensor) -> bool:
    return value.is_floating_point() and value.shape == param.shape


class LocalSGDPace(AfterStep):
    """`local_sgd(k)` at work."""

    def __init__(self, pace: LocalSGD, context: PaceContext) -> None:
        """Every rank makes it at once, with equal parameters."""
        self._pace = pace
        super().__init__(context)
        self._size = context.lane.groups.size
        self._params = self._trained.params
        self._flat_set = context.flat_set(self._trained.named)
        compressed = context.plan.compress is not None
        self._anchor = [param.detach().clone() for param in self._params] if compressed else None
        self._last = 0  # its value at the last average
        self._num_averages = 0

    @property
    def replicas_equal(self) -> bool:
        return self._size == 1 or self._clock == self._last

    def _is_time(self) -> bool:
        return self._clock <= self._pace.warmup or (self._clock - self._pace.warmup) % self._pace.k == 0

    def drain(self) -> bool:
        if self._clock != self._last:
            self._act()
        return False

    def _act(self) -> None:
        self._due.clear()
        if self._size > 1:
            self._exchange()
            if self._pace.optimizer_state:
                average_optimizers(self._context)
        else:
            self._reset_anchor()
        self._last = self._clock
        self._num_averages += 1

    @torch.no_grad()
    def _exchange(self) -> None:
        flat_part = self._flat_set.flat_parts[0]
        for i, (view, param) in enumerate(zip(flat_part.views, self._params, strict=True)):
            if self._anchor is None:
                torch.div(param, self._size, out=view)
            else:
                torch.sub(self._anchor[i], param, out=view).div_(self._size)
        pending_mean = launch_mean(self._context, self._flat_set, flat_part, with_buffers=True, clock=self._clock)
        finish_mean(self._context, self._flat_set, pending_mean, with_buffers=True)
        for i, (view, param) in enumerate(zip(flat_part.views, self._params, strict=True)):
            if self._anchor is None:
                param.copy_(view)
            else:
                param.copy_(self._anchor[i].sub_(view))

    def describe(self, bucket: int) -> str:
        return self._flat_set.describe(bucket) or super().describe(bucket)

    def stats(self) -> Stats:
        return {"local_steps": self._clock - self._last, "num_averages": self._num_averages}

    def state(self) -> SavedPace:
        shared = numbers_in_state("local_sgd", clock=self._clock, last=self._last, due=int(bool(self._due)))
        if self._anchor is not None:
            names = self._flat_set.names
            shared |= {f"local_sgd.anchor.{name}": w.clone() for name, w in zip(names, self._anchor, strict=True)}
        return SavedPace(shared, {})

    def load(self, saved: SavedPace) -> None:
        self._flat_set.register()
        self._due.clear()
        shared = saved.shared
        if "local_sgd.clock" not in shared:
            self._trained.warn_of_another("local_sgd", shared)
            self._restart_from_mean()
            return
        self._clock, self._last = (int(shared[f"local_sgd.{key}"]) for key in ("clock", "last"))
        anchors = [f"local_sgd.anchor.{name}" for name in self._flat_set.names]
        if self._anchor is not None and not all(key in shared for key in anchors):
            self._restart_from_mean()  # nothing was compressed when it was saved
            return
        for w, key in zip(self._anchor or [], anchors, strict=False):
            w.copy_(shared[key])
        if int(shared["local_sgd.due"]):
            self._due.set()

    def _restart_from_mean(self) -> None:
        """Begin anew from the mean of what the ranks have loaded."""
        self._trained.level()
        self.reset()

    def reset(self) -> None:
        self._last = self._clock
        self._due.clear()
        self._reset_anchor()

    def _reset_anchor(self) -> None:
        for w, param in zip(self._anchor or [], self._params, strict=False):
            w.copy_(param.detach())
