"""The operations for which ranks meet: what all do together after attach begins with a header that says what it is.

Gloo aborts the process when sizes differ, and a rank may call `detach()` while another is in backward: so ranks that
are in different calls find out, and raise the same sentence.
"""

from __future__ import annotations

import enum

from gradsync.agreement.header import CALL, Flag, Head, HeaderExchange, Headers
from gradsync.errors import JOIN, Disagreement
from gradsync.transport.lane import Lane


class Call(enum.IntEnum):
    """An operation for which ranks can meet."""

    SYNCHRONIZE = 0
    VOTE = 1
    BROADCAST = 2
    LOAD = 3
    DETACH = 4
    GATHER = 5
    AVERAGE = 6
    NEIGHBOURS = 7
    DRAIN = 8
    PLAN = 9


_NAMES = {
    Call.SYNCHRONIZE: "a synchronization",
    Call.VOTE: "the vote of join()",
    Call.BROADCAST: "broadcast() or the end of join()",
    Call.LOAD: "load_state_dict()",
    Call.DETACH: "detach()",
    Call.GATHER: "state_dict(all_ranks=True)",
    Call.AVERAGE: "an average of its pace",
    Call.NEIGHBOURS: "an exchange with its neighbours",
    Call.DRAIN: "drain()",
    Call.PLAN: "the choice of a plan by gs.auto()",
}
_STEPS = {Call.SYNCHRONIZE, Call.VOTE}
_ENDS = {Call.DETACH, Call.DRAIN}  # what comes after the last batch


def meet(lane: Lane, call: Call, num_parameters: int, word: bytes = bytes(8), flags: int = Flag.NONE) -> list[Head]:
    """Wait until every rank is in this call; return what each brought: 8 bytes, and flags."""
    head = Head(lane.step, 0, 0.0, 0, -1, 0, flags, word, call)
    headers = HeaderExchange(lane, head, bytes(num_parameters), each=True).receive()
    check_same_call(headers, lane.groups.ranks)
    return headers.heads if headers.whole else [head] * headers.size


def check_same_call(headers: Headers, ranks: tuple[int, ...]) -> None:
    """Raise the same sentence everywhere if ranks are in different calls."""
    if not headers.differ_in(CALL):
        return
    first = headers.heads[0].call
    for rank, head in enumerate(headers.heads):
        if head.call != first:
            raise Disagreement(
                f"rank {ranks[0]} is in {_NAMES[Call(first)]} but rank {ranks[rank]} is in {_NAMES[Call(head.call)]}; "
                f"{_way_out({Call(first), Call(head.call)})}"
            )


def _way_out(calls: set[Call]) -> str:
    if Call.VOTE in calls and Call.SYNCHRONIZE in calls:
        return "enter `with sync.join():` on every rank"
    if calls & _ENDS and calls & _STEPS:
        return JOIN
    if Call.DETACH in calls and calls & {Call.AVERAGE, Call.NEIGHBOURS}:  # paces that know no join()
        return "every rank must take equally many steps"
    return "every rank must call the same, in the same step"
