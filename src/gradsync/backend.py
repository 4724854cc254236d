"""gradsync as a backend of torch.distributed: `import gradsync.backend`, then name it.

    import gradsync.backend
    dist.init_process_group("cpu:gradsync")          # or "gradsync", or "cpu:gradsync,cuda:nccl"

All-reduce, reduce-scatter and all-gather of CPU tensors go through memory that the ranks of a host share; everything
else, and everything across hosts, is gloo's. A rank that dies is named by `gs.PeerLost` in either.

    dist.all_reduce, DDP, FSDP …
      └ group     every collective of torch.distributed; which go where
          ├ calls     what torch asks for, as operations of the team
          ├ queue     does them in shared memory, in order, by the caller or by a thread of C
          ├ works     what is handed back: wait, is_completed, get_future
          └ gloo      all the rest, with the dead named (`works`)
"""

from __future__ import annotations

import torch.distributed as dist

from gradsync.torch_backend.group import GradsyncGroup, monitored_barrier
from gradsync.torch_backend.open_group import open_group

__all__ = ["GradsyncGroup"]

# The one collective that torch gives to nobody but a backend called gloo.
dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = monitored_barrier

# As gloo says of itself; whoever names devices ("cpu:gradsync,cuda:nccl") is heeded.
dist.Backend.register_backend("gradsync", open_group, extended_api=True, devices=["cpu", "cuda"])
