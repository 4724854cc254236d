"""The verdict on a step, from the headers alone: counted, dropped, or raised everywhere, and in which words."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gradsync as gs
from gradsync.agreement.header import Flag, Head, Headers, pack_header
from gradsync.agreement.outcome import TOO_MANY, HealthLog, Outcome, interrupted, nonfinite, step_outcome
from gradsync.trace.lines import Health

NAMES = ["0.weight", "0.bias"]
PLACE = "[rank 4/8 step 7]"
USUAL = Head(step=7, layout_hash=1, weight=1.0, backwards=1, nonfinite=-1, micro_batches=1, flags=0, digest=bytes(8))
SKIP = gs.Guard(nonfinite="skip", max_skips=3)


def headers(*heads: Head) -> Headers:
    return Headers(torch.stack([pack_header(head, bytearray(2)) for head in heads]))


def bad(index: int, count: int = 0) -> Head:
    return USUAL._replace(nonfinite=index, num_nonfinite=count)


def raised(kind: Flag = Flag.NONE) -> Head:
    return USUAL._replace(flags=Flag.ABORTED | kind)


class Judge:
    """Ranks 4, 5 and so on of eight, in step 7: what comes of their headers, and what is heard."""

    def __init__(self, guard: gs.Guard = SKIP) -> None:
        self.log = HealthLog(guard.max_skips)
        self.lines: list[Health] = []
        self.log.listen(self.lines.append)
        self.guard = guard

    def __call__(self, *heads: Head) -> tuple[Outcome, str]:
        groups = SimpleNamespace(ranks=tuple(range(4, 4 + len(heads))), size=len(heads))
        lane: Any = SimpleNamespace(groups=groups, step=7, place=lambda: PLACE)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outcome = step_outcome(lane, self.guard, headers(*heads), NAMES, self.log)
        self.warned = [str(one.message) for one in caught]
        return outcome


def test_a_usual_step_counts_and_nothing_is_said() -> None:
    judge = Judge()
    assert judge(USUAL, USUAL) == (Outcome.COUNTS, "")
    assert judge.warned == judge.lines == []
    assert judge.log.stats() == {"skipped_steps": 0, "drift_findings": 0}


def test_ranks_in_other_steps_disagree() -> None:
    with pytest.raises(gs.Disagreement, match="rank 5 is in synchronization 8 and rank 4 in 7"):
        Judge()(USUAL, USUAL._replace(step=8))


def test_a_batch_that_raised_is_dropped_whatever_else_the_ranks_say() -> None:
    judge = Judge()
    assert judge(raised(), USUAL._replace(step=8), bad(0)) == (Outcome.DROPPED, "")
    assert judge.warned == [f"{PLACE} backward did not finish on rank 4: the batch is skipped on every rank"]
    assert judge.log.skipped_steps == 0


def test_the_rank_that_raised_says_what_once() -> None:
    judge = Judge()
    judge.log.raised("ValueError: a bad batch")
    judge(raised(Flag.LOADER), raised(Flag.LOADER))
    assert judge.warned == [
        f"{PLACE} the loader raised on ranks 4 and 5 (ValueError: a bad batch): the batch is skipped on every rank"
    ]
    judge(raised(Flag.FORWARD), USUAL)
    assert judge.warned == [f"{PLACE} forward raised on rank 4: the batch is skipped on every rank"]


def test_a_rank_may_raise_in_two_ways() -> None:
    both = Flag.ABORTED | Flag.FORWARD | Flag.LOADER
    assert interrupted({1: both, 3: Flag.ABORTED | Flag.LOADER}) == (
        "forward raised on rank 1, and the loader raised on ranks 1 and 3"
    )


def test_too_many_batches_in_a_row_that_raise_end_the_run() -> None:
    judge = Judge()
    for _ in range(TOO_MANY - 1):
        judge(raised(), USUAL)
    judge.log.raised("ValueError: no")
    with pytest.raises(gs.GradSyncError) as error:
        judge(raised(), USUAL)
    assert str(error.value) == (
        f"{PLACE} {TOO_MANY} batches in a row came to nothing on every rank, since backward did not finish on rank 4 "
        "in the last of them (ValueError: no): look at what raises there"
    )


@pytest.mark.parametrize("between", ["counts", "skipped"])
def test_batches_are_in_a_row_only_if_nothing_is_between_them(between: str) -> None:
    judge = Judge()
    for number in range(2 * TOO_MANY - 2):
        judge(raised(), USUAL)
        if number == TOO_MANY - 2:
            judge.log.counted() if between == "counts" else judge(bad(0), USUAL)
    assert "the batch is skipped on every rank" in judge.warned[0]


def test_where_nan_is_allowed_the_step_counts() -> None:
    judge = Judge(gs.Guard(nonfinite="allow"))
    assert judge(bad(0, 3), USUAL) == (Outcome.COUNTS, "")
    assert judge.lines == judge.warned == []


def test_where_nan_raises_everybody_is_told_in_which_parameter() -> None:
    judge = Judge(gs.Guard(nonfinite="raise"))
    text = "rank 5 has NaN or Inf in the gradient of 0.bias (3 elements)"
    assert judge(USUAL, bad(1, 3)) == (Outcome.RAISES, text)
    assert judge.lines == [Health(7, "nonfinite", [5], "0.bias", 3, text)]
    assert judge.warned == []
    assert judge.log.skipped_steps == 0


def test_a_skipped_step_is_dropped_noted_and_warned_of() -> None:
    judge = Judge()
    text = "rank 4 has NaN or Inf in the gradient of 0.weight (1 element)"
    assert judge(bad(0, 1), USUAL) == (Outcome.DROPPED, "")
    assert judge.warned == [f"{PLACE} {text}: the step is skipped on every rank"]
    assert judge.lines == [Health(7, "nonfinite", [4], "0.weight", 1, text)]
    assert judge.log.stats()["skipped_steps"] == 1


def test_too_many_skips_in_a_row_are_reported() -> None:
    judge = Judge(gs.Guard(nonfinite="skip", max_skips=4))
    outcomes = [judge(bad(0), USUAL) for _ in range(4)]
    assert [outcome for outcome, _ in outcomes] == [Outcome.DROPPED] * 3 + [Outcome.RAISES]
    in_step = "in step 7 rank 4 has NaN or Inf in the gradient of 0.weight"
    assert outcomes[3][1] == (
        f"4 steps in a row were skipped because of NaN or Inf: {', '.join([in_step] * 3)}. Lower the learning rate or "
        "the loss scale, look at the data of these ranks, or allow more skips with gs.Guard(max_skips=...)"
    )
    assert judge.lines[-1] == Health(7, "skips", [4], "0.weight", 4, outcomes[3][1])
    assert judge.warned == []


def test_one_skip_may_be_too_many() -> None:
    outcome, report = Judge(gs.Guard(nonfinite="skip", max_skips=1))(bad(0), USUAL)
    assert outcome == Outcome.RAISES
    assert report.startswith("1 step was skipped because of NaN or Inf: in step 7 rank 4 has")


def test_a_step_that_counts_begins_a_new_row_of_skips() -> None:
    judge = Judge()
    for _ in range(4):
        assert judge(bad(0), USUAL)[0] == Outcome.DROPPED
        assert judge(bad(1), USUAL)[0] == Outcome.DROPPED
        judge.log.counted()
    assert judge.log.skipped_steps == 8
    judge(bad(1), USUAL)
    assert judge.log.report().count("in step") == 1, "only the last row is reported"


def test_a_drifted_replica_is_counted() -> None:
    log = HealthLog(3)
    log.drifted()
    assert log.stats() == {"skipped_steps": 0, "drift_findings": 1}


def test_of_many_ranks_with_nan_three_are_shown_and_the_others_named() -> None:
    found = nonfinite(headers(bad(0), USUAL, bad(1, 2), bad(0), bad(1), bad(0)), NAMES, (1, 2, 3, 5, 7, 9))
    assert found is not None
    assert found.text == (
        "rank 1 has NaN or Inf in the gradient of 0.weight, rank 3 has NaN or Inf in the gradient of 0.bias "
        "(2 elements), rank 5 has NaN or Inf in the gradient of 0.weight, and so have ranks 7 and 9"
    )
    assert (found.ranks, found.parameter, found.num_elements) == ([1, 3, 5, 7, 9], "0.weight", None)


def test_where_nothing_is_nonfinite_nothing_is_found() -> None:
    assert nonfinite(headers(USUAL, USUAL), NAMES, (0, 1)) is None
