"""The control code of a step among simulated ranks: what it costs one does not grow with how many there are."""

from __future__ import annotations

import pytest

from scale import attach_at_scale, header_at_scale, heartbeat_at_scale


@pytest.mark.parametrize("per_host", [1, 8])
def test_a_rank_does_as_much_in_a_step_of_two_thousand_as_in_one_of_sixteen(per_host: int) -> None:
    few, many = header_at_scale.count(16, per_host), header_at_scale.count(2048, per_host)
    assert many["calls"]["median"] == few["calls"]["median"]
    assert few["messages"]["mean"] * 16 == 2 * 15
    assert 2 * 2047 <= many["messages"]["mean"] * 2048 <= 2.01 * 2047  # who listens further up says that too


def test_the_busiest_rank_of_two_thousand_does_as_much_as_that_of_a_thousand() -> None:
    few, many = header_at_scale.count(1024, 1), header_at_scale.count(2048, 1)
    assert many["calls"]["most"] == few["calls"]["most"]
    assert many["messages"]["most"] <= few["messages"]["most"] + 2


def test_who_is_out_of_step_is_named_in_the_same_words_among_a_thousand() -> None:
    found = header_at_scale.disagree(1024, 8)
    assert found["whole"] == 1024
    assert found["sentence"].startswith("rank 1021 is in synchronization 5 and rank 0 in 4")


def test_a_death_is_heard_by_all_within_a_second_of_its_bound() -> None:
    found = heartbeat_at_scale.measure(512, 2)
    assert len(found["named_after_s"]) == 4
    assert found["named_by"] == 511
    assert all(seconds <= heartbeat_at_scale.DEAD_AFTER_S + 1 for seconds in found["named_after_s"].values())
    few = heartbeat_at_scale.measure(64, 2)
    assert found["messages_per_s"]["most"] <= 2 * few["messages_per_s"]["most"]


def test_a_thousand_ranks_attach_in_twelve_rounds_and_compare_what_they_bring_in_two_messages() -> None:
    met = attach_at_scale.meet(1024, 8)
    assert met["rounds"]["to meet"] < met["rounds"]["with channels"] <= 12
    assert met["requests"]["most"] <= 200
    assert attach_at_scale.agree(1024, 8, parameters=10)["messages"] <= 2.01
