"""A closer look at replicas whose digests differ: what differs, first where, on which ranks; and the repair.

Every rank comes here at once, having read the same headers, and comes to the same result:

    the share that was digested   ─ nothing but what is known already ─▶ done
    everything, by digests        ─▶ what differs, and who is right: the largest group of ranks, if it is the only one
    the first tensor that differs ─▶ halved until few elements are left, and these exchanged
    warn │ repair │ raise

What ranks hold differently: found by digests, put into a sentence with the first element and its values.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch

from gradsync.agreement.documents import share
from gradsync.agreement.outcome import HealthLog
from gradsync.drift.digests import NUM_SHARES, DigestMismatch, ReplicaDigests, ReplicaTensor, replica_tensors_of
from gradsync.engine.replicas import broadcast_optimizer, broadcast_tensors
from gradsync.errors import Disagreement, listed
from gradsync.kernels.digest import digest
from gradsync.plan.guard import DriftPolicy
from gradsync.transport.lane import Lane

_FEW = 16  # elements that are exchanged as they are
_WHAT = "the comparison of the replicas"


class ReplicaValue(NamedTuple):
    """The value that a rank holds under a name."""

    name: str
    number: int  # of the optimizer; -1: of none
    parameter: str | None
    form: str
    digest: str


class Difference(NamedTuple):
    """Something that not all ranks hold alike."""

    name: str
    number: int
    parameter: str | None
    groups: tuple[tuple[int, ...], ...]  # ranks (by index in the group) that hold the same, the largest group first
    forms: tuple[str, ...]  # by rank

    @property
    def pattern(self) -> tuple[str, tuple[tuple[int, ...], ...]]:
        """The part of a difference that makes it the same one again."""
        return self.name, self.groups

    @property
    def has_majority(self) -> bool:
        """True if anybody can say who is right: one group is larger than any other."""
        return len(self.groups[0]) > len(self.groups[1])

    @property
    def outliers(self) -> list[int]:
        """The ranks that are wrong; all of them, where nobody knows."""
        return sorted(rank for group in self.groups[int(self.has_majority) :] for rank in group)

    @property
    def is_structural(self) -> bool:
        """True if more than the elements of a tensor differ: a value, a shape, or it is missing."""
        return len(set(self.forms)) > 1


def compare(lane: Lane, mine: Sequence[ReplicaValue]) -> list[Difference]:
    """Return what differs, in the order in which ranks hold it; every rank calls this at once."""
    documents = [
        {name: ReplicaValue(name, *rest) for name, *rest in document["held"]}
        for document in share(lane, {"held": list(mine)})
    ]
    names = dict.fromkeys(name for document in documents for name in document)
    found = (difference_of([document.get(name) for document in documents]) for name in names)
    return [each for each in found if each is not None]


def difference_of(rows: Sequence[ReplicaValue | None]) -> Difference | None:
    """Return how the ranks' rows of one name differ; None if they do not.

    >>> a, b = ReplicaValue("w", -1, "w", "float32[2]", "1f"), ReplicaValue("w", -1, "w", "float32[2]", "2e")
    >>> difference_of([a, b, a]).groups, difference_of([a, b]).has_majority, difference_of([a, a])
    (((0, 2), (1,)), False, None)
    """
    groups: dict[ReplicaValue | None, list[int]] = {}
    for rank, row in enumerate(rows):
        groups.setdefault(row, []).append(rank)
    if len(groups) == 1:
        return None
    there = next(row for row in rows if row is not None)
    ordered = sorted((tuple(ranks) for ranks in groups.values()), key=lambda ranks: (-len(ranks), ranks))
    forms = tuple("missing" if row is None else row.form for row in rows)
    return Difference(there.name, there.number, there.parameter, tuple(ordered), forms)


def describe_difference(lane: Lane, difference: Difference, replica_tensor: ReplicaTensor | None) -> str:
    """The sentence; every rank calls this at once."""
    value = None if replica_tensor is None else replica_tensor.value
    if difference.is_structural or not isinstance(value, torch.Tensor):
        return describe_values(difference.name, lane, difference, list(difference.forms))
    at, values = _first_element(lane, value)
    if not value.dim():
        return describe_values(difference.name, lane, difference, values)
    index = [int(i) for i in torch.unravel_index(torch.tensor(at, device="cpu"), value.shape)]
    return describe_values(f"element {index} of {difference.name}", lane, difference, values)


def describe_values(what: str, lane: Lane, difference: Difference, values: list[str]) -> str:
    """The values of the two largest groups."""
    usual, outliers = difference.groups[:2]
    those, these = listed(lane.global_ranks(list(usual))), listed(lane.global_ranks(list(outliers)))
    return f"{what} is {values[usual[0]]} on {those} but {values[outliers[0]]} on {these}"


def _first_element(lane: Lane, tensor: torch.Tensor) -> tuple[int, list[str]]:
    """The first element in which ranks differ, and each one's value there."""
    flat = tensor.detach().reshape(-1)
    low, high = 0, flat.numel()
    while high - low > _FEW:
        middle = (low + high) // 2
        rows = lane.exchange(digest(flat[low:middle]).to_bytes(8, "little"), _WHAT)
        low, high = (middle, high) if all(row == rows[0] for row in rows) else (low, middle)
    raw = flat[low:high].resolve_conj().resolve_neg().contiguous().cpu().view(torch.uint8)
    rows = lane.exchange(bytes(raw.numpy()), _WHAT)
    item = flat.element_size()
    cells = [[row[i : i + item] for i in range(0, len(row), item)] for row in rows]
    first = next((i for i in range(high - low) if len({each[i] for each in cells}) > 1), 0)
    return low + first, [_shown(each[first], flat.dtype) for each in cells]


def _shown(raw: bytes, dtype: torch.dtype) -> str:
    """An element as a number, with as many digits as tell it from its neighbours; NaN with its bits."""
    element = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype)[0]
    if not dtype.is_floating_point:
        return str(element.item())
    value = element.double().item()
    return (
        f"{value:.17g}"
        if dtype == torch.float64
        else f"{value:.9g}" + (f" ({raw[::-1].hex()})" if value != value else "")
    )


_UNDECIDED = ", and no group of ranks is larger than the others, so nobody can tell who is right"
_RESTART = "Restart all ranks from the last checkpoint"


class Diagnosis:
    """The closer look, and what the guard says is to follow; it remembers what it has told."""

    def __init__(self, replica_digest: ReplicaDigests, policy: DriftPolicy, health_log: HealthLog) -> None:
        self._replica_digests = replica_digest
        self._policy = policy
        self._health_log = health_log
        self._known: set[tuple[str, tuple[tuple[int, ...], ...]]] = set()  # differences that were told
        self._scales: tuple[float, ...] = ()  # likewise
        self._again_at = 0  # where ranks hold other things: the step from which they look at everything again

    def investigate(self, lane: Lane, mismatch: DigestMismatch) -> None:
        """Find out what is behind it, and do what the guard says; every rank calls this at once."""
        if mismatch.generation != self._replica_digests.generation or not self._is_new(lane, mismatch):
            return
        held = {
            each.name: each
            for each in replica_tensors_of(self._replica_digests.entries, self._replica_digests.optimizers)
        }
        rows = [
            ReplicaValue(name, each.number, each.parameter, each.form, f"{each.digest():x}")
            for name, each in held.items()
        ]
        differences = compare(lane, rows)
        self._again_at = mismatch.step + NUM_SHARES
        known, self._known = self._known, {each.pattern for each in differences}
        if not differences:
            self._health_log.drifted()
            self._report_passed(lane, mismatch)
        elif not self._known <= known:
            self._health_log.drifted()
            first = next(each for each in differences if each.pattern not in known)
            text = describe_difference(lane, first, held.get(first.name)) + _more(len(differences) - 1)
            self._report(lane, "drift", text, differences, first.parameter)
            self._act(lane, differences, held, text, first.parameter)

    def compare_scales(self, lane: Lane, scales: Sequence[float]) -> None:
        """Find out whether loss scales differ, which the headers tell; 0 where a rank does not know its own."""
        difference = difference_of([ReplicaValue("the loss scale", -1, None, f"{scale:g}", "") for scale in scales])
        if difference is None or 0.0 in scales or self._scales == tuple(scales):
            return
        self._scales = tuple(scales)
        self._health_log.drifted()
        text = describe_values("the loss scale", lane, difference, list(difference.forms))
        self._report(lane, "loss_scale", text, [difference], None)
        if self._policy == "raise" or (self._policy == "repair" and not difference.has_majority):
            unclear = "" if difference.has_majority else _UNDECIDED
            raise Disagreement(f"{text}{unclear}; give every rank a GradScaler with the same state")
        if self._policy == "repair" and self._replica_digests.scaler is not None:
            if lane.groups.rank in difference.outliers:
                self._replica_digests.scaler.update(scales[difference.groups[0][0]])
            self._replica_digests.forget()
            self._scales = ()
            self._report(lane, "repair", f"{text}: it is now what most had", [difference], None)
        warnings.warn(f"{lane.place()} {text}: gradients of different scales were averaged", stacklevel=4)

    def _is_new(self, lane: Lane, mismatch: DigestMismatch) -> bool:
        """Return whether the share holds anything that was not told yet."""
        rows = [
            ReplicaValue(piece.replica_tensor.name, 0, None, f"{piece.start} {mismatch.layout}", f"{piece.digest():x}")
            for piece in mismatch.pieces
        ]
        differences = compare(lane, rows)
        if any(len(set(each.forms)) > 1 for each in differences):  # ranks cut their shares differently
            return mismatch.step >= self._again_at
        return not differences or any(each.pattern not in self._known for each in differences)

    # What is done

    def _act(
        self,
        lane: Lane,
        differences: list[Difference],
        held: dict[str, ReplicaTensor],
        text: str,
        parameter: str | None,
    ) -> None:
        has_majority = all(each.has_majority for each in differences)
        if self._policy == "warn":
            remedy = 'have such things repaired with gs.Guard(drift="repair")'
            if not has_majority:  # then a repair raises
                remedy = "make all equal to rank 0 with sync.broadcast(), on every rank"
            warnings.warn(
                f"{lane.place()} the replicas differ: {text}. Restart from the last checkpoint, or {remedy}",
                stacklevel=5,
            )
            return
        if self._policy == "raise":
            raise Disagreement(f"the replicas differ: {text}. {_RESTART}")
        if not has_majority:
            raise Disagreement(f"the replicas differ: {text}{_UNDECIDED}. {_RESTART}")
        self._repair(lane, differences, held, text)
        self._known = set()
        self._replica_digests.forget()  # digests under way were taken before
        self._report(lane, "repair", f"{text}: repaired from the other ranks", differences, parameter)
        warnings.warn(f"{lane.place()} the replicas differed: {text}. Repaired from the other ranks", stacklevel=5)

    def _repair(self, lane: Lane, differences: list[Difference], held: dict[str, ReplicaTensor], text: str) -> None:
        """Overwrite what differs with what the first rank of its largest group has."""
        whole: dict[int, int] = {}  # optimizers that travel as a whole, since more than values of tensors differ
        for number in sorted({each.number for each in differences if each.is_structural}):
            sources = set.intersection(*(set(each.groups[0]) for each in differences if each.number == number))
            if not sources:
                raise Disagreement(f"the replicas differ: {text}, and no rank is right in everything. {_RESTART}")
            whole[number] = min(sources)
        for number, source in whole.items():
            broadcast_optimizer(lane, self._replica_digests.optimizers[number], self._replica_digests.entries, source)
        for each in differences:
            if each.number not in whole:
                broadcast_tensors(lane, [held[each.name].value], each.groups[0][0], "the repair of a replica")

    def _report(self, lane: Lane, what: str, text: str, differences: list[Difference], parameter: str | None) -> None:
        ranks = lane.global_ranks(sorted({rank for each in differences for rank in each.outliers}))
        self._health_log.tell(lane.step, what, text, ranks, parameter, len(differences))

    def _report_passed(self, lane: Lane, mismatch: DigestMismatch) -> None:
        difference = difference_of([ReplicaValue("", -1, None, "", word.hex()) for word in mismatch.words])
        assert difference is not None
        who = listed(lane.global_ranks(difference.outliers))
        text = f"the digest of step {mismatch.step} differed on {who}, but all replicas are equal now: it has passed"
        self._report(lane, "drift", text, [difference], None)
        warnings.warn(f"{lane.place()} {text}", stacklevel=5)


def _more(count: int) -> str:
    return "" if not count else f" ({count} more {'differs' if count == 1 else 'differ'})"
