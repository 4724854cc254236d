"""The loads of all buckets that DDP has now; DDP lays them out anew after the first step, and we follow.

A bucket that was not there before is made ready when it comes, on every rank at once, since DDP's buckets are the same
everywhere: ranks compare it, memory is taken together. What compressors keep goes by parameter, from the bucket
that had it to the one that has it now.
"""

from __future__ import annotations

from itertools import count, islice

import torch
from torch._C._distributed_c10d import GradBucket

from gradsync.engine.bucket import Entry
from gradsync.engine.opening import Opened
from gradsync.errors import GradSyncError
from gradsync.exchange.memory import Form
from gradsync.exchange.parcel import Parcel
from gradsync.integrations.accord import compare
from gradsync.integrations.load import Load, lay_out, make_load

Key = tuple[int, ...]  # the ids of a bucket's parameters, in order: the entries keep these alive


class Loads:
    """Finds the load of a bucket, or makes it."""

    def __init__(self, entries: list[Entry], opened: Opened) -> None:
        self._lane, self._exact, self._shipping = opened
        self._entries = {id(entry.param): entry for entry in entries}
        self._loads: dict[Key, Load] = {}
        # A state saved before the first step has the form of one saved later.
        self._shipping.expect([self._stand_in(entry) for entry in entries if entry.param.requires_grad])
        self._lane.describe = self._describe

    def find(self, bucket: GradBucket) -> Load | None:
        """Its load, if this bucket was there before."""
        return self._loads.get(tuple(map(id, bucket.parameters())))

    def make(self, bucket: GradBucket) -> Load:
        """The load of a new bucket. Nothing may be under way: other threads look through the memory that grows."""
        buffer, params = bucket.buffer(), bucket.parameters()
        items = lay_out([(self._name(param), param) for param in params])
        names, doing = [item.name for item in items], f"bucket {bucket.index()} of DDP"
        compare(self._lane, doing, step=self._lane.step, dtype=str(buffer.dtype), parameters=names)
        key = tuple(map(id, params))
        self._drop(set(key))
        form = Form(buffer.numel(), buffer.dtype, buffer.device)
        load = make_load(items, form, self._shipping.choose, self._free_indices(len(items)), self._exact.allocate)
        self._shipping.add(load.parcels)
        self._loads[key] = load
        return load

    def forget(self) -> None:
        """All are made anew when they come."""
        self._loads = {}

    def _drop(self, params: set[int]) -> None:
        """What held a gradient of one of these parameters: DDP has laid its buckets out anew."""
        for key in [key for key in self._loads if not params.isdisjoint(key)]:
            self._shipping.remove(self._loads.pop(key).parcels)

    def _free_indices(self, num: int) -> list[int]:
        taken = {parcel.index for parcel in self._shipping.parcels}
        return list(islice((index for index in count() if index not in taken), num))

    def _name(self, param: torch.Tensor) -> str:
        entry = self._entries.get(id(param))
        if entry is None:
            raise GradSyncError(
                f"{self._lane.place()} DDP brings a parameter of shape {tuple(param.shape)} that this hook does not "
                "know: it was made for another model, or the parameter was replaced; give gs.ddp_hook the model on "
                "which you register the hook"
            )
        return entry.name

    def _stand_in(self, entry: Entry) -> Parcel:
        """For a parameter whose bucket is not known yet."""
        [item] = lay_out([(entry.name, entry.param)])
        choice = self._shipping.choose(item.param._replace(dtype=entry.param.dtype))
        return Parcel(-1, torch.empty(0, dtype=entry.param.dtype, device=entry.param.device), [item], choice)

    def _describe(self, index: int) -> str:
        names = [item.name for parcel in self._shipping.parcels if parcel.index == index for item in parcel.items]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"bucket {index} ({shown})"
