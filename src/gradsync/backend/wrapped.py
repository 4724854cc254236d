"""A work around another: all that is not said otherwise is the other's own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

NO_TIMEOUT = timedelta(0)


class WrappedWork(dist.Work):
    """What a collective hands back, with something added by those who inherit."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return self._work.wait(timeout)

    def synchronize(self) -> None:
        self._work.synchronize()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def _source_rank(self) -> int:
        return self._work._source_rank()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future()

    def get_future_result(self) -> torch.futures.Future[Any]:
        return self._work.get_future_result()  # type: ignore[attr-defined]  # missing in the stubs

    def block_current_stream(self) -> None:
        self._work.block_current_stream()
