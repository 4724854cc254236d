"""The links by which speakers of hosts beat to each other: small messages on the gloo channels of their subgroups.

    frame    │ magic │ checksum │ number │ last number heard │ tokens taken │ what the speaker says │

Nothing here waits. Receives are posted ahead, and whether one has been filled its buffer tells, by its checksum: gloo's
work would say so only to somebody who waits for it, and a wait that expires closes the connection for good. Who has not
acknowledged several messages is sent fewer.

Note [Tokens]
    A C function that holds the interpreter keeps a speaker from beating, but not gloo: its thread moves what was
    posted. So every speaker has a reserve of sends posted that nobody receives, its tokens. Whoever hears nothing of
    it any more asks for one, by receiving it; and if it comes then the process runs and the network passes: the rank is
    late, not dead. A stopped process gives none. Those that were taken are replaced when it speaks again.

          beats     ──┬──┬──┬──╴interpreter held╶────────┬──┬──
          tokens      ● ● ● ● ●    ↓       ↓       ↓    ● ● ●
          watcher   ──┴──┴──┴──····?·······?·······?·····┴──┴──       late
"""

from __future__ import annotations

import contextlib
import math
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from gradsync.transport.gloo_channel import GlooChannel
from gradsync.transport.notable_ranks import SUMMARY_NBYTES
from gradsync.transport.speaker import HELD_SHARE

_FRAME, _TOKEN = 0x6B656174, 0x6B6E6574  # what a buffer begins with once it is filled
_START = struct.Struct("<II")  # magic, checksum of the rest
_REST = struct.Struct("<QQI")  # number, last number heard, tokens taken
_FRAME_NBYTES = _START.size + _REST.size + SUMMARY_NBYTES
# Nobody else sends on these channels, except collectives. Words that may be the last have a receive of their own: who
# was held finds the others filled with older ones, and the sender's process may end before there is room.
_FRAMES_TAG, _TOKENS_TAG, _LAST_WORDS_TAG = (1 << 30) + 1, (1 << 30) + 2, (1 << 30) + 3
_AHEAD = 4  # receives posted
_UNHEARD = 8  # messages sent that were not acknowledged
_SLOWER = 4  # beyond that only every so many-th is sent
_TOKENS_AT_ONCE = 32


class Neighbour(NamedTuple):
    """Somebody to beat to."""

    rank: int
    channel: GlooChannel
    place: int  # in the channel
    vouches: bool  # tokens are given and asked for


class _Inbox:
    """A receive that was posted."""

    def __init__(self, neighbour: Neighbour, nbytes: int, tag: int) -> None:
        self._tensor = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        self._text = memoryview(self._tensor.numpy())  # type: ignore[arg-type]  # it has a buffer
        self._work = neighbour.channel.recv(self._tensor, neighbour.place, tag)

    def content(self) -> bytes | None:
        """Return the message that came, None until all of it is here."""
        magic, checksum = _START.unpack_from(self._text)
        if magic not in (_FRAME, _TOKEN):
            return None
        text = bytes(self._text)
        return text[_START.size :] if zlib.crc32(text[_START.size :]) == checksum else None


class _Link:
    """One neighbour's."""

    def __init__(self, neighbour: Neighbour, reserve: int) -> None:
        self.neighbour = neighbour
        self.closed = False
        self._inboxes: deque[_Inbox] = deque()
        self._sent: deque[tuple[int, Any, torch.Tensor]] = deque()  # gloo needs them until they are delivered
        self._tokens: deque[tuple[Any, torch.Tensor]] = deque()
        self._asked: _Inbox | None = None
        self._last_words: _Inbox | None = None
        self._urgent: list[tuple[Any, torch.Tensor]] = []  # words that may be the last: few
        self._latest = 0  # of all that was heard
        self._number = self._heard = self._acknowledged = self._skipped = 0
        self._reserve = reserve if neighbour.vouches else 0
        self._given = self._taken = 0  # tokens that the neighbour took of ours, and we of its
        with self._noticing_its_end():
            for _ in range(_AHEAD):
                self._post()
        self._await_last_words()

    def hear(self) -> bytes | None:
        """The newest message since the last call."""
        newest = None
        while self._inboxes and (text := self._inboxes[0].content()) is not None:
            self._inboxes.popleft()
            number, acknowledged, given = _REST.unpack_from(text)
            if number > self._heard:
                self._heard = number
                self._settle(acknowledged, given)
            newest = self._newer(text) or newest
            with self._noticing_its_end():
                self._post()
        if self._last_words is not None and (text := self._last_words.content()) is not None:
            newest, self._last_words = self._newer(text) or newest, None
            self._await_last_words()
        return newest

    def say(self, text: bytes, at_once: bool) -> None:
        if self.closed:
            return
        if self._number - self._acknowledged >= _UNHEARD and not at_once:
            self._skipped += 1
            if self._skipped % _SLOWER:
                return
        self._number += 1
        rest = _REST.pack(self._number, self._heard, self._taken) + text
        with self._noticing_its_end():
            self._sent.append((self._number, *self._send(_FRAME, rest, _FRAMES_TAG)))
            if at_once:
                self._urgent.append(self._send(_FRAME, rest, _LAST_WORDS_TAG))

    def _newer(self, text: bytes) -> bytes | None:
        """Return what a frame says, None if something said later was heard."""
        number, *_ = _REST.unpack_from(text)
        if number <= self._latest:
            return None
        self._latest = number
        return text[_REST.size :]

    def _await_last_words(self) -> None:
        with self._noticing_its_end():
            self._last_words = _Inbox(self.neighbour, _FRAME_NBYTES, _LAST_WORDS_TAG)

    def vouched(self) -> bool:
        """Return whether a token has come that we had asked for."""
        if self._asked is None or self._asked.content() is None:
            return False
        self._asked = None
        self._taken += 1
        return True

    def ask(self) -> None:
        """Ask for a token; one at a time."""
        if self._asked is None and self.neighbour.vouches and not self.closed:
            with self._noticing_its_end():
                self._asked = _Inbox(self.neighbour, _START.size + 1, _TOKENS_TAG)

    def restock(self) -> None:
        """Replace the tokens that were taken, some at a time."""
        with self._noticing_its_end():
            for _ in range(min(self._reserve - len(self._tokens), _TOKENS_AT_ONCE)):
                if self.closed:
                    break
                self._tokens.append(self._send(_TOKEN, b"\1", _TOKENS_TAG))

    def _settle(self, acknowledged: int, given: int) -> None:
        self._acknowledged = max(self._acknowledged, min(acknowledged, self._number))
        while self._sent and self._sent[0][0] <= self._acknowledged:
            self._sent.popleft()
        while self._given < given and self._tokens:
            self._given += 1
            self._tokens.popleft()

    def _post(self) -> None:
        if not self.closed:
            self._inboxes.append(_Inbox(self.neighbour, _FRAME_NBYTES, _FRAMES_TAG))

    def _send(self, magic: int, rest: bytes, tag: int) -> tuple[Any, torch.Tensor]:
        tensor = torch.frombuffer(bytearray(_START.pack(magic, zlib.crc32(rest)) + rest), dtype=torch.uint8).clone()
        return self.neighbour.channel.send(tensor, self.neighbour.place, tag), tensor

    @contextlib.contextmanager
    def _noticing_its_end(self) -> Iterator[None]:
        """Gloo refuses what is posted on a connection that has ended."""
        try:
            yield
        except RuntimeError:
            self.closed = True


class BeatLinks:
    """This speaker's links to its neighbours."""

    def __init__(self, neighbours: Iterable[Neighbour], num_tokens: int) -> None:
        self._links = {each.rank: _Link(each, num_tokens) for each in neighbours}
        for link in self._links.values():
            link.neighbour.channel.keep(link)

    def hear(self) -> Iterator[tuple[int, bytes]]:
        """The newest message of everybody who has sent one."""
        for rank, link in self._links.items():
            if (text := link.hear()) is not None:
                yield rank, text

    def vouched(self) -> list[int]:
        """The neighbours whose tokens have come."""
        return [rank for rank, link in self._links.items() if link.vouched()]

    def closed(self) -> list[int]:
        """The neighbours whose connection has ended; `hear` once more for what they sent before."""
        return [rank for rank, link in self._links.items() if link.closed]

    def send(self, messages: Sequence[tuple[int, bytes]], at_once: bool = False) -> None:
        """Say these, or some of them to who does not listen; `at_once`: each is worth it."""
        for rank, text in messages:
            self._links[rank].say(text, at_once)

    def ask(self, ranks: Iterable[int]) -> None:
        """Ask for a token of these."""
        for rank in ranks:
            self._links[rank].ask()

    def restock(self) -> None:
        """Keep the reserve of our own tokens."""
        for link in self._links.values():
            link.restock()


def tokens_for(timeout: float, dead_after: float) -> int:
    """Return how many tokens are asked for while a rank may be late: see `Speaker.doubtful`.

    >>> tokens_for(60, 10), tokens_for(600, 10), tokens_for(1e7, 1)
    (18, 52, 250)
    """
    often = 2 * HELD_SHARE  # at first one in each half of `dead_after`, then one in each such part of the time so far
    return often + 2 + math.ceil(math.log(max(timeout / (HELD_SHARE * dead_after), 1)) / math.log1p(1 / often))
