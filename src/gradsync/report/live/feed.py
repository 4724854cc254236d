"""The state that a live page shows now, and what of it is new: one reader of the folder for all who watch."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import NamedTuple

from gradsync.report.exporters.prometheus import exposition
from gradsync.report.live.run_state import RunState, look_of, silence_s, state_of
from gradsync.report.page import laid_out, sections
from gradsync.report.pictures.escape import shown
from gradsync.report.summary import Summary, summarize
from gradsync.trace.reader import Follower, RunTrace

RECENT = 1000  # steps that a live view judges: how it goes now, not how it once went
_KEPT = 4000  # steps of each rank in memory, however long the run
_EVERY_S = 1.0  # at most this often
_REST = 4  # and after a look at least so many times its own length: training needs the processor more


class FeedUpdate(NamedTuple):
    """A look into the folder."""

    run: RunTrace
    summary: Summary
    state: RunState


class FeedReader:
    """Reads on; cheap when nothing was written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._follower = Follower(folder)
        self._seen: object = None
        self._update: FeedUpdate | None = None

    def look(self) -> FeedUpdate:
        """Return how the run stands; raise ValueError with a sentence while the folder holds no trace."""
        mark = look_of(self._folder)
        if self._update is None or (mark and mark != self._seen):
            try:
                run = self._follower.read()
            except ValueError:
                if self._update is None:
                    raise
                return self._update._replace(state=RunState("failed", "the trace is gone from its folder"))
            for trace in run.ranks.values():
                del trace.steps[:-_KEPT]
            self._update = FeedUpdate(run, summarize(run, RECENT), state_of(run, 0.0))
            self._seen = mark
        run = self._update.run
        self._update = self._update._replace(state=state_of(run, silence_s(self._folder)))
        return self._update


class Feed:
    """The parts of the page, each with the version in which it last changed."""

    def __init__(self, folder: Path) -> None:
        self._reader = FeedReader(folder)
        self._update: FeedUpdate | None = None
        self._run: RunTrace | None = None
        self._parts: dict[str, tuple[int, str]] = {}
        self._next = 0.0  # by the monotonic clock
        self._one_at_a_time = asyncio.Lock()
        self.version = 0

    async def refresh(self) -> None:
        """Look again, unless somebody just did; beside the event loop, which others need meanwhile."""
        async with self._one_at_a_time:
            begin = time.monotonic()
            if begin >= self._next:
                await asyncio.to_thread(self.look)
                self._next = max(begin + _EVERY_S, (1 + _REST) * time.monotonic() - _REST * begin)

    def look(self) -> None:
        """Draw anew what is new."""
        update = self._update = self._reader.look()
        parts = {"status": _status(update.state)}
        if update.run is not self._run:
            parts |= sections(update.run, update.summary, live=True)
            self._run = update.run
        changed = {key: html for key, html in parts.items() if key not in self._parts or self._parts[key][1] != html}
        if changed:
            self.version += 1
            self._parts |= {key: (self.version, html) for key, html in changed.items()}

    def metrics(self) -> bytes:
        """Return what Prometheus reads, of the last look."""
        assert self._update is not None
        return exposition(self._update.run, self._update.summary)

    async def page(self) -> str:
        """The whole page as it is now; it tells its version, so that only what is newer need follow."""
        await self.refresh()
        assert self._run is not None
        parts = {key: html for key, (_, html) in self._parts.items()}
        status = f'<span data-version="{self.version}">{parts.pop("status")}</span>'
        return laid_out(self._run, parts, status)

    def since(self, version: int) -> dict[str, str]:
        """Parts that changed after that version."""
        return {key: html for key, (changed, html) in self._parts.items() if changed > version}


def _status(state: RunState) -> str:
    kind = {"failed": "lost"}.get(state.kind, state.kind)
    return f'<span class="state {kind}">{shown(state.text, 120)}</span>'
