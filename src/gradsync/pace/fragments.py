"""A fragment: some of the parameters, their global values, and the exchange of what the ranks changed.

    p  each rank's own      ──── w − p ───▶  Σ (w − p) / n  ───▶  w, b     all ranks' alike
                             launch (clock)      wait              merge ───▶  p

`w` and the momentum `b` are of the parameter's type, and fp32 where that has 16 bits; so is what travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from gradsync.pace.averages import PendingMean, finish_mean, launch_mean, wait_header
from gradsync.pace.contract import PaceContext, State
from gradsync.plan.paces import Nesterov

_HALF = (torch.float16, torch.bfloat16)


class Fragment:
    """Synchronizes its parameters; the pace says when. At most one exchange is under way."""

    def __init__(self, context: PaceContext, named: Sequence[tuple[str, torch.nn.Parameter]], outer: Nesterov) -> None:
        """Every rank makes it at once, with equal parameters."""
        self._context = context
        self._outer = outer
        self._params = [param for _, param in named]
        self._w = [_wide(param) for param in self._params]
        self._b = [torch.zeros_like(w) for w in self._w] if outer.momentum else []
        forms = [(name, w) for (name, _), w in zip(named, self._w, strict=True)]
        self.flat_set = context.flat_set(forms)
        self.launched_at: int | None = None  # the clock when the exchange under way began
        self.synchronized_at = 0  # the clock up to which w knows of our steps
        self.equal_at = 0  # the clock at which p was w
        self._pending_mean: PendingMean | None = None  # None though under way: it is back, and waits to be merged

    @torch.no_grad()
    def launch(self, clock: int) -> None:
        """Send what changed. Buffers do not wait for `merge`: rank 0's own would go back to where they were."""
        flat_part, lane = self.flat_set.flat_parts[0], self._context.lane
        for view, w, param in zip(flat_part.views, self._w, self._params, strict=True):
            torch.sub(w, param, out=view).div_(lane.groups.size)
        self.launched_at = clock
        self._pending_mean = launch_mean(self._context, self.flat_set, flat_part, with_buffers=True, clock=clock)
        if self._context.buffers.tensors():
            wait_header(self._context, self._pending_mean)
            self._context.buffers.finish(lane)

    def wait(self) -> None:
        """Wait until it is back."""
        if self._pending_mean is not None:
            finish_mean(self._context, self.flat_set, self._pending_mean)
            self._pending_mean = None

    def discard(self) -> None:
        """Let what is under way come to nothing: w has not changed, so p − w still holds all of it."""
        self.wait()
        self.launched_at = None

    @torch.no_grad()
    def merge(self, clock: int, mixing: float) -> None:
        """The outer step, and what it makes of p."""
        assert self.launched_at is not None
        launched_at, self.launched_at = self.launched_at, None
        if self._pending_mean is not None:
            pending_mean, self._pending_mean = self._pending_mean, None
            finish_mean(self._context, self.flat_set, pending_mean)
        self._step()
        self.synchronized_at = launched_at
        if mixing == 0:
            self.return_to_global(clock)
        elif mixing < 1:
            for param, w in zip(self._params, self._w, strict=True):
                param.copy_(mixing * param.to(w.dtype) + (1 - mixing) * w)

    def _step(self) -> None:
        lr, momentum = self._outer.lr, self._outer.momentum
        for i, (w, delta) in enumerate(zip(self._w, self.flat_set.flat_parts[0].views, strict=True)):
            if momentum:
                b = self._b[i].mul_(momentum).add_(delta)
                w.sub_(lr * (delta + momentum * b))
            else:
                w.sub_(lr * delta)

    @torch.no_grad()
    def return_to_global(self, clock: int) -> None:
        """p ← w."""
        for param, w in zip(self._params, self._w, strict=True):
            param.copy_(w)
        self.synchronized_at = self.equal_at = clock

    def reset(self, clock: int) -> None:
        """w ← p, which is equal on all ranks; and no momentum."""
        self.discard()
        for w, param in zip(self._w, self._params, strict=True):
            w.copy_(param.detach())
        for b in self._b:
            b.zero_()
        self.synchronized_at = self.equal_at = clock

    def state(self, in_flight: bool) -> State:
        """The fragment's tensors, by parameter; with `in_flight` also what is back, zeros if nothing is."""
        self.wait()
        state: State = {}
        for i, (name, view) in enumerate(zip(self.flat_set.names, self.flat_set.flat_parts[0].views, strict=True)):
            state[f"global.{name}"] = self._w[i].clone()
            if self._b:
                state[f"momentum.{name}"] = self._b[i].clone()
            if in_flight:
                state[f"landed.{name}"] = view.clone() if self.launched_at is not None else torch.zeros_like(view)
        return state

    def load(self, state: State, launched_at: int, synchronized_at: int, equal_at: int) -> None:
        """Continue from it; what is not in it is zero. What was under way goes on if it was back."""
        landed = launched_at >= 0 and f"landed.{self.flat_set.names[0]}" in state
        self.launched_at = launched_at if landed else None
        self.synchronized_at, self.equal_at = synchronized_at, equal_at
        views = self.flat_set.flat_parts[0].views
        for i, name in enumerate(self.flat_set.names):
            self._w[i].copy_(state[f"global.{name}"])
            if self._b:
                self._b[i].copy_(state.get(f"momentum.{name}", torch.zeros((), dtype=torch.float32, device="cpu")))
            views[i].copy_(state.get(f"landed.{name}", torch.zeros((), dtype=torch.float32, device="cpu")))


def cut(nbytes: Sequence[int], num_parts: int) -> list[range]:
    """Cut a row of tensors of these sizes into parts that follow each other and are about equally large.

    None is empty as long as there are tensors.

    >>> cut([4, 4, 4, 12], 2)
    [range(0, 3), range(3, 4)]
    >>> cut([8, 8], 3)
    [range(0, 1), range(1, 2), range(2, 2)]
    """
    ends = [0, *accumulate(nbytes)]
    full = min(num_parts, len(nbytes))
    cuts = [0]
    for part in range(1, full):
        candidates = range(cuts[-1] + 1, len(nbytes) - (full - part) + 1)
        cuts.append(min(candidates, key=lambda at: abs(ends[at] * full - part * ends[-1])))
    cuts += [len(nbytes)] * (num_parts + 1 - len(cuts))
    return [range(begin, end) for begin, end in pairwise(cuts)]


def _wide(param: torch.nn.Parameter) -> torch.Tensor:
    return param.detach().to(torch.float32 if param.dtype in _HALF else param.dtype, copy=True)
