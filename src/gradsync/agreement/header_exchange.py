"""Headers on their way: merged through the control tree, and each by itself where somebody is to be named.

pack ─▶ merge_all ─▶ receive ─┬─ all as it should be: merged headers are enough
                              └─ somebody is to be named ─▶ exchange: every rank's row, on every rank
"""

from __future__ import annotations

import torch

from gradsync.agreement.header import ALL_FIELDS, Head, Headers, merged, pack_header
from gradsync.transport.lane import Lane


class HeaderExchange:
    """Headers under way."""

    def __init__(self, lane: Lane, head: Head, marks: bytes | bytearray, alike: int = 0) -> None:
        """Start it; `alike` are more fields in which ranks must not differ without their being named."""
        self._lane = lane
        self._row = pack_header(head, marks)
        self._alike = alike
        self.pending = lane.merge_all(self._row, merged, "the step header")

    def receive(self, timeout: float | None = None) -> Headers:
        """Wait until every rank's is here; where somebody is to be named, each by itself."""
        self._lane.wait(self.pending, timeout)
        headers = Headers(self.pending.rows)
        assert headers.size == self._lane.groups.size, "every rank's header is in it once"
        return self._fetch() if headers.needs_names(self._alike) and not headers.whole else headers

    def receive_all(self) -> Headers:
        """Wait for every rank's own, unless all said the same."""
        headers = self.receive()
        return headers if headers.whole or not headers.differ_in(ALL_FIELDS) else self._fetch()

    def _fetch(self) -> Headers:
        """Every rank's own; all ranks come to this at once."""
        rows = self._lane.exchange(bytes(self._row.numpy()), "the headers of all ranks")
        return Headers(torch.stack([torch.frombuffer(bytearray(row), dtype=torch.uint8) for row in rows]))
