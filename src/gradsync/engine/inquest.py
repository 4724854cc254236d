"""A closer look at replicas whose digests differ: what differs, first where, on which ranks; and the repair.

Every rank comes here at once, having read the same headers, and comes to the same result:

    the share that was digested   ─ nothing but what is known already ─▶ done
    everything, by digests        ─▶ what differs, and who is right: the largest group of ranks, if it is the only one
    the first tensor that differs ─▶ halved until few elements are left, and these exchanged
    warn │ repair │ raise
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from gradsync.engine.differences import Difference, Row, account, compare, difference_of, told
from gradsync.engine.holdings import Holding, holdings_of
from gradsync.engine.replicas import broadcast_optimizer, broadcast_tensors
from gradsync.engine.vitals import NUM_SHARES, Suspicion, Vitals
from gradsync.errors import Disagreement, listed
from gradsync.guard.findings import Findings
from gradsync.policy import DriftPolicy
from gradsync.transport.lane import Lane

_UNDECIDED = ", and no group of ranks is larger than the others, so nobody can tell who is right"
_RESTART = "Restart all ranks from the last checkpoint"


class Inquest:
    """Remembers what it said."""

    def __init__(self, vitals: Vitals, policy: DriftPolicy, findings: Findings) -> None:
        self._vitals = vitals
        self._policy = policy
        self._findings = findings
        self._known: set[tuple[str, tuple[tuple[int, ...], ...]]] = set()  # differences that were told
        self._scales: tuple[float, ...] = ()  # likewise
        self._again_at = 0  # where ranks hold other things: the step from which they look at everything again

    def hold(self, lane: Lane, suspicion: Suspicion) -> None:
        """Find out what is behind it, and do what the guard says; every rank calls this at once."""
        if suspicion.generation != self._vitals.generation or not self._is_news(lane, suspicion):
            return
        held = {each.name: each for each in holdings_of(self._vitals.entries, self._vitals.optimizers)}
        rows = [Row(name, each.number, each.parameter, each.form, f"{each.digest():x}") for name, each in held.items()]
        differences = compare(lane, rows)
        self._again_at = suspicion.step + NUM_SHARES
        known, self._known = self._known, {each.pattern for each in differences}
        if not differences:
            self._findings.drift_findings += 1
            self._say_it_passed(lane, suspicion)
        elif not self._known <= known:
            self._findings.drift_findings += 1
            first = next(each for each in differences if each.pattern not in known)
            text = account(lane, first, held.get(first.name)) + _more(len(differences) - 1)
            self._tell(lane, "drift", text, differences, first.parameter)
            self._act(lane, differences, held, text, first.parameter)

    def compare_scales(self, lane: Lane, scales: Sequence[float]) -> None:
        """The same for loss scales, which the headers tell; 0 where a rank does not know its own."""
        difference = difference_of([Row("the loss scale", -1, None, f"{scale:g}", "") for scale in scales])
        if difference is None or 0.0 in scales or self._scales == tuple(scales):
            return
        self._scales = tuple(scales)
        self._findings.drift_findings += 1
        text = told("the loss scale", lane, difference, list(difference.forms))
        self._tell(lane, "loss_scale", text, [difference], None)
        if self._policy == "raise" or (self._policy == "repair" and not difference.decided):
            unclear = "" if difference.decided else _UNDECIDED
            raise Disagreement(f"{text}{unclear}; give every rank a GradScaler with the same state")
        if self._policy == "repair" and self._vitals.scaler is not None:
            if lane.groups.rank in difference.odd:
                self._vitals.scaler.update(scales[difference.groups[0][0]])
            self._vitals.forget()
            self._scales = ()
            self._tell(lane, "repair", f"{text}: it is now what most had", [difference], None)
        warnings.warn(f"{lane.place()} {text}: gradients of different scales were averaged", stacklevel=4)

    def _is_news(self, lane: Lane, suspicion: Suspicion) -> bool:
        """Whether the share holds anything that was not told yet."""
        rows = [
            Row(piece.holding.name, 0, None, f"{piece.start} {suspicion.layout}", f"{piece.digest():x}")
            for piece in suspicion.pieces
        ]
        differences = compare(lane, rows)
        if any(len(set(each.forms)) > 1 for each in differences):  # ranks cut their shares differently
            return suspicion.step >= self._again_at
        return not differences or any(each.pattern not in self._known for each in differences)

    # What is done

    def _act(
        self, lane: Lane, differences: list[Difference], held: dict[str, Holding], text: str, parameter: str | None
    ) -> None:
        decided = all(each.decided for each in differences)
        if self._policy == "warn":
            mends = 'have such things repaired with gs.Guard(drift="repair")'
            if not decided:  # then a repair raises
                mends = "make all equal to rank 0 with sync.broadcast(), on every rank"
            warnings.warn(
                f"{lane.place()} the replicas differ: {text}. Restart from the last checkpoint, or {mends}",
                stacklevel=5,
            )
            return
        if self._policy == "raise":
            raise Disagreement(f"the replicas differ: {text}. {_RESTART}")
        if not decided:
            raise Disagreement(f"the replicas differ: {text}{_UNDECIDED}. {_RESTART}")
        self._repair(lane, differences, held, text)
        self._known = set()
        self._vitals.forget()  # digests under way were taken before
        self._tell(lane, "repair", f"{text}: repaired from the other ranks", differences, parameter)
        warnings.warn(f"{lane.place()} the replicas differed: {text}. Repaired from the other ranks", stacklevel=5)

    def _repair(self, lane: Lane, differences: list[Difference], held: dict[str, Holding], text: str) -> None:
        """Overwrite what differs with what the first rank of its largest group has."""
        whole: dict[int, int] = {}  # optimizers that travel as a whole, since more than values of tensors differ
        for number in sorted({each.number for each in differences if each.is_loose}):
            sources = set.intersection(*(set(each.groups[0]) for each in differences if each.number == number))
            if not sources:
                raise Disagreement(f"the replicas differ: {text}, and no rank is right in everything. {_RESTART}")
            whole[number] = min(sources)
        for number, source in whole.items():
            broadcast_optimizer(lane, self._vitals.optimizers[number], self._vitals.entries, source)
        for each in differences:
            if each.number not in whole:
                broadcast_tensors(lane, [held[each.name].value], each.groups[0][0], "the repair of a replica")

    def _tell(self, lane: Lane, what: str, text: str, differences: list[Difference], parameter: str | None) -> None:
        ranks = lane.global_ranks(sorted({rank for each in differences for rank in each.odd}))
        self._findings.tell(lane.step, what, text, ranks, parameter, len(differences))

    def _say_it_passed(self, lane: Lane, suspicion: Suspicion) -> None:
        difference = difference_of([Row("", -1, None, "", word.hex()) for word in suspicion.words])
        assert difference is not None
        who = listed(lane.global_ranks(difference.odd))
        text = f"the digest of step {suspicion.step} differed on {who}, but all replicas are equal now: it has passed"
        self._tell(lane, "drift", text, [difference], None)
        warnings.warn(f"{lane.place()} {text}", stacklevel=5)


def _more(count: int) -> str:
    return "" if not count else f" ({count} more {'differs' if count == 1 else 'differ'})"
