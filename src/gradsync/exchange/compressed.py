"""One tensor at a time, compressed: what `all_reduce(compress=...)` keeps ready for tensors of a form."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from gradsync.compress.choice import Param
from gradsync.exchange.desk import Desk
from gradsync.exchange.exact import Exact
from gradsync.exchange.keeping import Kept
from gradsync.exchange.parcel import Item, Parcel
from gradsync.exchange.shipping import Shipping, open_desk, travelling_devices
from gradsync.plan import Plan
from gradsync.transport.lane import Lane


class Compressed:
    """Sums of tensors on one device by one plan. Nothing is kept: one tensor need not follow from the one before."""

    def __init__(
        self,
        lane: Lane,
        parent: dist.ProcessGroup,
        plan: Plan,
        device: torch.device,
        timeout: float,
        desks: dict[torch.device, Desk],
    ) -> None:
        """Every rank of the group makes it at once. All plans for a device share one of the `desks`."""
        self._lane = lane
        exact = Exact(lane, parent, plan.algorithm, travelling_devices(parent, [device], plan), timeout)
        if device not in desks:
            desks[device] = open_desk(lane, device)
        self._shipping = Shipping(lane, parent, exact, plan, device, timeout, desk=desks[device])
        self._parcel: Parcel | None = None
        self._start: dict[str, torch.Tensor] = {}  # the factors from which each call begins

    def reduce(self, tensor: torch.Tensor, scale: float) -> None:
        """Replace `tensor` by its sum over the ranks; each brings `scale` times its own."""
        parcel = self._parcel_for(tensor)
        flat = parcel.items[0].of(parcel.flat)
        if scale == 1.0:
            flat.copy_(tensor.detach())
        else:
            torch.mul(tensor.detach(), scale, out=flat)
        parcel.factors = dict(self._start)
        ticket = self._shipping.launch(parcel)
        self._shipping.flush()
        self._lane.wait(ticket)
        with torch.no_grad():
            tensor.copy_(flat)

    def _parcel_for(self, tensor: torch.Tensor) -> Parcel:
        """The last one, if it had this form: then its tables and buffers are there already."""
        last = self._parcel
        if last is None or last.items[0].shape != tuple(tensor.shape) or last.flat.dtype != tensor.dtype:
            flat = torch.zeros(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
            item = Item(
                "the tensor",
                0,
                tuple(tensor.shape),
                torch.empty(tensor.shape, device="meta", dtype=torch.float32).stride(),
            )
            choice = self._shipping.choose(Param(item.name, item.shape, tensor.dtype))
            last = Parcel(0, flat, [item], replace(choice, feedback=False, exact_steps=0))
            self._shipping.replace(Kept({}, {}))  # forgets what it had for another form
            self._shipping.add([last])
            self._parcel, self._start = last, dict(last.factors)
        return last
