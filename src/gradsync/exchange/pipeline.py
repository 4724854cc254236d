"""The pipeline: runs the rounds of buckets, several at a time, in an order that depends on the buckets' order alone.

A bucket's rounds in a step are a generator: it encodes, launches a round, yields the pending, goes on when the round
is over. Whenever a bucket begins, every one that is under way goes one round further, oldest first; at the end of
the step the rest is done. So ranks launch the same rounds in the same order, however fast each is:

    bucket 0    encode P0 ┄┄┄┄┄┄┄ P0 in, Q0 ┄┄┄┄┄┄┄ Q0 in, decode
    bucket 1                encode P1 ┄┄┄┄┄┄┄┄┄┄┄┄┄┄ P1 in, Q1 ┄┄┄
    bucket 2                                encode P2 ┄┄┄┄┄┄┄┄┄┄
    launched    P0          P1      Q0      P2        Q1

On the host this happens on a thread of its own, beside the computation. On NCCL nothing ever waits on the host, so it
happens at once, on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from gradsync.errors import GradSyncError
from gradsync.transport.current_stream import current_stream
from gradsync.transport.lane_thread import LaneThread
from gradsync.transport.pending import LaneTask, Pending, Promise

_SLICE_S = 1.0

PendingRounds = Iterator[Pending | None]  # None: others have a round here, this rank does not


class _UnderWay(NamedTuple):
    rounds: PendingRounds
    pending: Pending | None  # the round it waits for
    delivery: Promise


class Pipeline:
    """A pipeline that takes buckets and runs them: on `lane_thread`, or in the caller itself if there is none."""

    def __init__(self, lane_thread: LaneThread | None, device: torch.device) -> None:
        self._lane_thread = lane_thread
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._under_way: list[_UnderWay] = []
        self._broken: Exception | None = None

    def take(self, rounds: PendingRounds, delivery: Promise) -> None:
        """Begin a bucket's rounds after those handed in before."""
        if self._stream is None:
            self._do(lambda: self._begin(rounds, delivery), delivery)
            return
        device, ready, done = self._stream.device, torch.cuda.Event(), torch.cuda.Event()
        ready.record(current_stream(device))
        delivery.then(lambda: current_stream(device).wait_event(done))
        self._do(lambda: self._begin(_between(rounds, ready, done), delivery), delivery)

    def flush(self) -> None:
        """Run all rounds to their ends: no more begin in this step."""
        self._do(self._finish_all)

    def _do(self, work: Callable[[], None], delivery: Promise | None = None) -> None:
        """Run `work` in its turn, on the pipeline's stream; if it fails, whoever waits for a delivery hears of it."""

        def run() -> None:
            try:
                with self.on_stream():
                    work()
            except Exception as error:
                self._give_up(error, delivery)

        if self._lane_thread is None:
            run()
        else:
            self._lane_thread.take(LaneTask(run, "the exchange", 0, -1))

    def _give_up(self, error: Exception, newest: Promise | None) -> None:
        """Give up what is under way and what is to come, none of which arrives: the stream itself has failed, say."""
        first, self._broken = self._broken, self._broken or error
        waiting = [each.delivery for each in self._under_way] + ([] if newest is None else [newest])
        self._under_way = []
        for delivery in waiting:
            delivery.finish(error if first is None else _again(first))

    def on_stream(self) -> AbstractContextManager[object]:
        """Let what an exchange launches inside go to the pipeline's stream; on a CPU there is none."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _begin(self, rounds: PendingRounds, delivery: Promise) -> None:
        # A thread that torch did not start heeds torch.set_num_threads() only once it has asked; until then a small
        # matrix product wakes a thread per core, and ranks that share cores wait 20 ms for each.
        torch.get_num_threads()
        newest = self._further(_UnderWay(rounds, None, delivery))
        self._all_further()
        if newest is not None:
            self._under_way.append(newest)

    def _finish_all(self) -> None:
        while self._under_way:
            self._all_further()

    def _all_further(self) -> None:
        self._under_way = [each for each in map(self._further, self._under_way) if each is not None]

    def _further(self, bucket: _UnderWay) -> _UnderWay | None:
        """Take a bucket one round further; None when it has arrived, or failed: then nothing later can be trusted."""
        if self._broken is not None:
            bucket.delivery.finish(_again(self._broken))
            return None
        try:
            if bucket.pending is not None:
                _await(bucket.pending)
            return bucket._replace(pending=next(bucket.rounds))
        except StopIteration:
            bucket.delivery.finish()
        except Exception as error:
            self._broken = error
            bucket.delivery.finish(error)
        return None


def _again(first: Exception) -> Exception:
    """The error of whatever comes after the first one, which may say itself whose it is."""
    return first if isinstance(first, GradSyncError) else RuntimeError(str(first))


def _await(pending: Pending) -> None:
    # It ends: the channel's own timeout bounds it, and whoever gives up cuts the connections.
    while pending.on_host and not pending.landed(_SLICE_S):
        pass
    pending.settle()


def _between(rounds: PendingRounds, ready: torch.cuda.Event, done: torch.cuda.Event) -> PendingRounds:
    """Do these rounds on the current stream, after one event and before another."""
    torch.cuda.current_stream().wait_event(ready)
    yield from rounds
    done.record()
