"""States between ranks: all of them to rank 0 to be saved, and back to whoever continues.

When a run resumes, every rank brings what it has read: its own state, that of all, or nothing. Each says which old
ranks' parts it brings; all then assign the parts alike, and only what is not yet where it belongs travels.

    old rank    0   1   2   3   4
    new rank    0   1   2   0   1        old % new: each part to one rank, so that nothing is added up twice
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradsync.agreement.documents import share
from gradsync.checkpoint.format import SavedRunState, Shapes, State, flatten_part, flatten_shared, read, read_parts
from gradsync.errors import Disagreement, listed
from gradsync.transport.lane import Lane

_WHAT, _TAG = "the state of another rank", 0
_EXACT_RECIPE_END = '"compress": {"kind": "exact"}}'  # how the recipe of a plan without residuals ends


class StateSummary(NamedTuple):
    """A summary of the state that a rank brings; plain data."""

    refusal: str | None  # why it cannot take it
    digest: str | None  # of what must be equal on all ranks; None: it brings nothing
    step: int
    world_size: int  # of the run that saved it
    parts: dict[str, int]  # the old ranks of which it brings the part, and how many residuals each has
    torn: bool  # whether gradients of an open window were left out
    keeps: int  # how many residuals this rank keeps in this run

    @classmethod
    def of(cls, saved: SavedRunState | None, refusal: Exception | None, keeps: int) -> StateSummary:
        if saved is None:
            return cls(None if refusal is None else str(refusal), None, 0, 0, {}, False, keeps)
        parts = {str(rank): len(part.residuals) for rank, part in saved.parts.items()}
        torn = any(part.torn for part in saved.parts.values())
        return cls(None, saved.shared.digest, saved.shared.step, saved.shared.world_size, parts, torn, keeps)


class StateMove(NamedTuple):
    """An old rank's part, who brings it, and who takes it on."""

    old: int
    source: int
    owner: int


class Redistribution(NamedTuple):
    """Says who takes on which part."""

    moves: list[StateMove]
    lost: list[int]  # old ranks whose part nobody brings
    whole: bool  # every rank has exactly what it had: an open window can go on
    any_kept: bool  # whether there are residuals at all


def receive(
    lane: Lane,
    state: Mapping[str, torch.Tensor],
    shapes: Shapes,
    keeps: int,
    failing: Callable[[], AbstractContextManager[None]],
) -> tuple[SavedRunState, Redistribution]:
    """Return what this rank continues from, of all that the ranks bring; every rank calls this at once.

    `keeps` is how many residuals this rank keeps in this run; `failing` stands around what no rank can go on from.
    """
    saved, refusal = None, None
    try:
        saved = read(state, shapes)
    except (TypeError, ValueError) as error:
        refusal = error
    with failing():
        summaries = [StateSummary(**words) for words in share(lane, StateSummary.of(saved, refusal, keeps)._asdict())]
    check_summaries(summaries, lane, refusal)
    redistribution = assign(summaries)
    with failing():
        return collect_states(lane, saved, redistribution.moves, summaries, shapes), redistribution


def changes(taken: SavedRunState, redistribution: Redistribution, recipe: str) -> Iterator[str]:
    """Yield what is not as it was when the state was saved, for people; `recipe` is the one of this run."""
    shared = taken.shared
    if redistribution.lost and (redistribution.any_kept or not shared.recipe.endswith(_EXACT_RECIPE_END)):
        yield (
            f"nobody brings the state of {listed(redistribution.lost)} of {shared.world_size}: its residual is zero, "
            "and what it had not sent yet is lost. Load every rank's state to keep it"
        )
    if shared.recipe != recipe and redistribution.any_kept:
        yield (
            f"this state was saved with {shared.recipe}, and this plan says {recipe}; what was not sent yet "
            "is taken over, PowerSGD's Q only where it fits"
        )


def check_summaries(summaries: Sequence[StateSummary], lane: Lane, refusal: Exception | None) -> None:
    """All ranks go on, or all raise."""
    if refusal is not None and len(summaries) == 1:
        raise refusal
    for rank, summary in enumerate(summaries):
        if summary.refusal is not None:
            text = f"{listed(lane.global_ranks([rank]))} cannot load its state: {summary.refusal}"
            raise Disagreement(text) if refusal is None else ValueError(text)
    digests = {summary.digest for summary in summaries if summary.digest is not None}
    if not digests:
        raise ValueError("load_state_dict() got an empty state on every rank; load one on at least one of them")
    if len(digests) > 1:
        found = "; ".join(_distinct_states(summaries, lane))
        raise Disagreement(
            f"load_state_dict() got different states: {found}. Load states that were saved in the same step of "
            "the same run; files of more ranks may be left of an older one"
        )


def _distinct_states(summaries: Sequence[StateSummary], lane: Lane) -> Iterator[str]:
    """Each state once, and who brings it."""
    kinds: dict[str, list[int]] = {}
    for rank, summary in enumerate(summaries):
        if summary.digest is not None:
            kinds.setdefault(summary.digest, []).append(rank)
    for ranks in kinds.values():
        first = summaries[ranks[0]]
        yield f"that of step {first.step}, saved by {first.world_size} ranks, on {listed(lane.global_ranks(ranks))}"


def assign(summaries: Sequence[StateSummary]) -> Redistribution:
    """Says who takes on which old rank's part: the rank old % new, or if that one compresses nothing, one that does.

    >>> first = StateSummary(None, "a", 9, 3, {"0": 1, "2": 1}, False, 1)
    >>> assign([first, StateSummary(None, "a", 9, 3, {"0": 1}, False, 1)])[:2]
    ([StateMove(old=0, source=0, owner=0), StateMove(old=2, source=0, owner=0)], [1])
    """
    size, before = len(summaries), max(summary.world_size for summary in summaries)
    # With across_hosts one rank of each host keeps residuals, and it may be another one than before.
    most = max(summary.keeps for summary in summaries)
    owners = [rank for rank, summary in enumerate(summaries) if summary.keeps == most]
    moves, lost = [], []
    for old in range(before):
        holders = [rank for rank, summary in enumerate(summaries) if str(old) in summary.parts]
        if not holders:
            lost.append(old)
            continue
        owner = old % size
        if summaries[holders[0]].parts[str(old)] and owner not in owners:
            owner = owners[old % len(owners)]
        moves.append(StateMove(old, owner if owner in holders else holders[0], owner))
    moved = any(each.owner != each.old for each in moves)
    whole = not (lost or moved or size != before or any(summary.torn for summary in summaries))
    return Redistribution(moves, lost, whole, any(any(summary.parts.values()) for summary in summaries))


def collect_states(
    lane: Lane,
    saved: SavedRunState | None,
    moves: Sequence[StateMove],
    summaries: Sequence[StateSummary],
    shapes: Shapes,
) -> SavedRunState:
    """Return what this rank goes on with, and no other; every rank calls this at once."""
    rank, parts = lane.groups.rank, {}
    for old, source, owner in moves:
        if rank == source:
            assert saved is not None
            if rank == owner:
                parts[old] = saved.parts[old]
            else:
                _send(lane, flatten_part(old, saved.parts[old], saved.shared.step), owner)
        elif rank == owner:
            parts |= read_parts(_receive(lane, source), shapes)
    with_state = [index for index, summary in enumerate(summaries) if summary.digest is not None]
    for without_state in sorted(set(range(len(summaries))) - set(with_state)):
        if rank == with_state[0]:
            assert saved is not None
            _send(lane, flatten_shared(saved), without_state)
        elif rank == without_state:
            saved = read(_receive(lane, with_state[0]), shapes)
    assert saved is not None
    return saved._replace(parts=parts)


def gather(lane: Lane, shared: State, own: State) -> State:
    """Bring to rank 0 what is shared and every rank's own, in host memory; the others get nothing."""
    if lane.groups.rank:
        _send(lane, own, 0)
        return {}
    state = {key: tensor.cpu() for key, tensor in (shared | own).items()}
    for source in range(1, lane.groups.size):
        state |= _receive(lane, source)
    return state


def _send(lane: Lane, state: State, to: int) -> None:
    """Send a state: its table as JSON, then each tensor's bytes."""
    table = [(key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for key, tensor in state.items()]
    text = torch.frombuffer(bytearray(json.dumps(table).encode()), dtype=torch.uint8)
    control = lane.groups.control
    for message in (torch.tensor([text.numel()], device="cpu"), text, *state.values()):
        _run(lane, control.send, _bytes_of(message.cpu()), to)


def _receive(lane: Lane, source: int) -> State:
    control = lane.groups.control
    length = torch.zeros(1, dtype=torch.int64, device="cpu")
    _run(lane, control.recv, _bytes_of(length), source)
    text = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    _run(lane, control.recv, text, source)
    state: State = {}
    for key, dtype, shape in json.loads(bytes(text.numpy())):
        state[key] = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        _run(lane, control.recv, _bytes_of(state[key]), source)
    return state


def _run(lane: Lane, issue: Callable[[torch.Tensor, int, int], dist.Work], message: torch.Tensor, peer: int) -> None:
    """A message on the lane's thread: gloo's messages, unlike its collectives, do not tell when they have ended."""
    if message.numel():

        def run() -> None:
            issue(message, peer, _TAG).wait()

        lane.wait(lane.send(run, _WHAT, message.numel()))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory, as bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8)
