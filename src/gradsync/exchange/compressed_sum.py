"""One tensor at a time, compressed: what `all_reduce(compress=...)` keeps ready for tensors of a form."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from gradsync.exchange.choose_route import ExactSum
from gradsync.exchange.flat import FlatBucket, Item, lay_out
from gradsync.exchange.pipeline import Pipeline
from gradsync.exchange.residuals import KeptState
from gradsync.exchange.sender import Sender, open_pipeline, travelling_devices
from gradsync.plan.sync_plan import Plan
from gradsync.transport.current_stream import current_stream
from gradsync.transport.lane import Lane


class CompressedSum:
    """Sums of tensors on one device by one plan. Nothing is kept: one tensor need not follow from the one before."""

    def __init__(
        self,
        lane: Lane,
        parent: dist.ProcessGroup,
        plan: Plan,
        device: torch.device,
        pipelines: dict[torch.device, Pipeline],
    ) -> None:
        """Every rank of the group makes it at once. All plans for a device share one of the `pipelines`."""
        self._lane = lane
        exact = ExactSum(lane, parent, plan.algorithm, travelling_devices(parent, [device], plan))
        if device not in pipelines:
            pipelines[device] = open_pipeline(lane, device)
        self._sender = Sender(lane, parent, exact, plan, device, pipeline=pipelines[device])
        self._flat_bucket: FlatBucket | None = None
        self._read: torch.cuda.Event | None = None  # on a GPU: the last sum has been copied out
        self._start: dict[str, torch.Tensor] = {}  # the factors from which each call begins

    def reduce(self, tensor: torch.Tensor, scale: float) -> None:
        """Replace `tensor` by its sum over the ranks; each brings `scale` times its own."""
        flat_bucket = self._flat_bucket_for(tensor)
        flat = flat_bucket.items[0].of(flat_bucket.flat)
        if self._read is not None:  # the caller may be on another stream than the last time
            current_stream(flat.device).wait_event(self._read)
        if scale == 1.0:
            flat.copy_(tensor.detach())
        else:
            torch.mul(tensor.detach(), scale, out=flat)
        flat_bucket.factors.update(self._start)
        pending = self._sender.launch(flat_bucket)
        self._sender.flush()
        self._lane.wait(pending)
        with torch.no_grad():
            tensor.copy_(flat)
        if flat.is_cuda:
            self._read = torch.cuda.Event()
            self._read.record(current_stream(flat.device))

    def _flat_bucket_for(self, tensor: torch.Tensor) -> FlatBucket:
        """The last flat bucket, if it had this form: then its tables and buffers are there already."""
        last = self._flat_bucket
        if last is None or last.items[0].shape != tuple(tensor.shape) or last.flat.dtype != tensor.dtype:
            items, form = lay_out([Item.by_rows("the tensor", tensor)], align_nbytes=1)
            choice = self._sender.choose(items[0].param)
            last = FlatBucket(0, form.zeros(), items, replace(choice, feedback=False, exact_steps=0))
            self._sender.replace(KeptState({}, {}))  # forgets what it had for another form
            self._sender.add([last])
            self._flat_bucket, self._start = last, dict(last.factors)
        return last
