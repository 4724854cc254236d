"""The check that all ranks are in the same synchronization, and the sentence if they are not."""

from __future__ import annotations

from gradsync.agreement.header import Flag, Headers, Mark
from gradsync.errors import Disagreement, listed


def check_headers(headers: Headers, names: list[str], ranks: tuple[int, ...]) -> None:
    """Raise the same `Disagreement` on every rank if the ranks are not in the same synchronization."""
    if headers.same_place:
        return
    heads = headers.heads
    active = [rank for rank, head in enumerate(heads) if not head.flags & (Flag.SHADOW | Flag.ABORTED)]
    for rank in active:
        head, first = heads[rank], heads[active[0]]
        if head.step != first.step:
            raise Disagreement(
                f"rank {ranks[rank]} is in synchronization {head.step} and rank {ranks[active[0]]} in {first.step}: "
                "they did not call backward equally often; every rank must synchronize in every step "
                "(for uneven inputs use `with sync.join():`)"
            )
        if head.layout_hash != first.layout_hash:
            raise Disagreement(
                f"rank {ranks[rank]} and rank {ranks[active[0]]} packed their gradients differently in synchronization "
                f"{head.step}; detach and attach again on every rank, or resume all from the same checkpoint"
            )
        uneven = head.backwards != first.backwards and not (head.flags | first.flags) & Flag.WEIGHTED
        if uneven and head.micro_batches == first.micro_batches:
            raise Disagreement(
                f"rank {ranks[rank]} ran {head.backwards} backward calls since the last synchronization but rank "
                f"{ranks[active[0]]} ran {first.backwards}: enter no_sync() on the same micro-batches of every rank, "
                "or say how much each counts with set_batch_weight()"
            )
    _check_num_steps({ranks[rank]: heads[rank].num_steps for rank in active if heads[rank].num_steps >= 0})
    _check_trainable(headers, names, ranks)


def _check_num_steps(counts: dict[int, int]) -> None:
    """Raise where one rank ran two backwards in a step, or left out a step that others took."""
    if len(set(counts.values())) < 2:
        return
    most = max(counts.values())
    often = [rank for rank, count in counts.items() if count == most]
    rarely = [rank for rank, count in counts.items() if count < most]
    least = min(counts.values())
    raise Disagreement(
        f"optimizer.step() ran {_times(most)} since the last synchronization on {listed(often)}, but "
        f"{'not' if not least else f'only {_times(least)}'} on {listed(rarely)}: call backward() and step() equally "
        "often on every rank (all backwards of a step but the last under sync.no_sync()), and leave no step() out "
        "after an average that the others apply; for uneven inputs use `with sync.join():`"
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _check_trainable(headers: Headers, names: list[str], ranks: tuple[int, ...]) -> None:
    for index, name in enumerate(names):
        trainable = [bool(marks & Mark.TRAINABLE) for marks in headers.marks_of(index)]
        if len(set(trainable)) > 1:
            on = listed([ranks[r] for r, flag in enumerate(trainable) if flag])
            off = listed([ranks[r] for r, flag in enumerate(trainable) if not flag])
            raise Disagreement(
                f'parameter {index} ("{name}") requires a gradient on {on} but not on {off}; '
                "freeze and unfreeze parameters in the same step on every rank"
            )
