"""Whether inputs are those of the batch that raised is told by where they lie in memory, and not by their shapes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsync.engine.retried_batches import Retries, Seen, handled, is_again, is_part, number_of
from gradsync.errors import GradSyncError

DATA = torch.arange(64.0).view(8, 8)
spans = st.tuples(st.integers(0, 7), st.integers(1, 8)).map(lambda pair: (pair[0], min(8, pair[0] + pair[1])))


def seen(*tensors: torch.Tensor) -> Seen:
    return tuple(map(weakref.ref, tensors))


@given(spans, spans)
def test_slices_are_of_one_batch_where_they_have_an_element_in_common(
    one: tuple[int, int], two: tuple[int, int]
) -> None:
    rows = range(*one), range(*two)
    first, second = (DATA[each.start : each.stop] for each in rows)
    assert is_again(seen(first), (), [second]) is bool(set(rows[0]) & set(rows[1]))
    assert is_part(seen(first), (), [second]) is bool(set(rows[0]) & set(rows[1]))


@given(st.integers(0, 7), st.integers(0, 7))
def test_columns_lie_from_their_first_element_to_their_last(one: int, two: int) -> None:
    """They overlap in memory, though they have no element in common: another column of one tensor may be a retry."""
    first, second = DATA[:, one], DATA[:, two]
    assert is_part(seen(first), (), [second])
    row_after = DATA.view(-1)[one + 57 : one + 58] if one < 7 else DATA.new_ones(1)
    assert not is_part(seen(first), (), [row_after])
    assert is_part(seen(first), (), [DATA.view(-1)[one + 56 : one + 57]])


def test_a_copy_is_another_batch_and_a_view_of_another_type_is_not() -> None:
    first = DATA[2:4]
    assert not is_part(seen(first), (), [first.clone()])
    assert is_part(seen(first), (), [first.view(torch.int32)])
    assert not is_part(seen(first), (), [DATA.view(torch.int32)[4:]])
    halves = DATA.view(torch.float16).view(-1)  # twice as many elements
    assert is_part(seen(first), (), [halves[32:33]])
    assert not is_part(seen(first), (), [halves[31:32]])
    assert not is_part(seen(first), (), [halves[64:65]])


def test_what_the_forward_before_had_tells_nothing_unless_there_is_nothing_else() -> None:
    mask, first, second = torch.ones(3), DATA[:2], DATA[2:4]
    assert not is_part(seen(mask, first), seen(mask), [mask, second])
    assert is_part(seen(mask, first), seen(mask), [mask, first])
    assert not is_part(seen(mask), seen(mask), [mask])
    assert is_again(seen(mask), seen(mask), [mask])
    assert not is_again(seen(mask, first), seen(mask), [mask, second])
    assert not is_part((), (), [first])
    assert not is_part(seen(first), (), [])


def test_a_tensor_without_memory_of_its_own_is_known_by_itself() -> None:
    graph, other = torch.eye(3).to_sparse(), torch.eye(3).to_sparse()
    for one, two in ((graph, other), (torch.ones(0), torch.ones(0)), (DATA[3:3], DATA[3:3])):
        assert is_part(seen(one), (), [one])
        assert not is_part(seen(one), (), [two])
        assert not is_part(seen(one), (), [DATA])


def test_one_that_is_gone_tells_nothing() -> None:
    last = seen(torch.ones(5))
    assert not is_part(last, (), [torch.ones(5)])


def test_the_same_memory_with_a_graph_is_another_batch() -> None:
    images = torch.ones(4, requires_grad=True) * 2
    assert is_part(seen(images), (), [images])
    assert not is_part(seen(images), (), [images.detach()])


def test_an_error_has_a_number_of_its_own_and_those_it_came_of_count_too() -> None:
    first, second = ValueError(), ValueError()
    assert number_of(first) == number_of(first) != number_of(second)
    assert handled() == frozenset()
    try:
        try:
            raise first
        except ValueError as error:
            assert handled() == {number_of(first)}
            raise second from error
    except ValueError:
        assert handled() == {number_of(first), number_of(second)}
        assert handled(lambda error: error is first) == {number_of(first)}
    try:
        try:
            raise first
        finally:
            first.__cause__ = first  # a ring has an end, too
    except ValueError:
        assert handled() == {number_of(first)}
    assert handled() == frozenset()


def _engine_run_backward(error: Exception) -> None:
    """As autograd's own function is called, by which a traceback tells that an error came of a backward."""
    raise error


def heard(retries: Retries, inputs: Sequence[torch.Tensor], error: Exception) -> None:
    """A forward with these inputs, and a backward that raises, of which we hear in the `except` block."""
    retries.forward_comes(inputs)
    assert not retries.backward_comes()
    try:
        _engine_run_backward(error)
    except ArithmeticError:
        retries.backward_raised()


def test_inside_of_the_except_block_it_is_that_batch_and_said_once() -> None:
    retries = Retries(lambda: "[here]")
    retries.forward_comes([DATA[:2]])
    try:
        _engine_run_backward(ArithmeticError())
    except ArithmeticError:
        retries.backward_raised()
        assert retries.inside
        with pytest.warns(UserWarning, match=r"^\[here\] a batch whose backward raised was tried again"):
            retries.forward_comes([DATA[4:5]])
        assert retries.under_way
        assert retries.backward_comes()
        retries.forward_comes([DATA[5:6]])
        retries.ended()
        assert not retries.under_way
        with pytest.raises(GradSyncError, match=r"^\[here\] another batch comes inside of the `except` block"):
            retries.forward_comes([DATA[6:]])
    assert not retries.inside
    retries.forward_comes([DATA[:2]])
    assert not retries.backward_comes()


def test_a_backward_alone_tries_it_again_too() -> None:
    retries = Retries(lambda: "[here]")
    retries.forward_comes([DATA[:2]])
    try:
        _engine_run_backward(ArithmeticError())
    except ArithmeticError:
        retries.backward_raised()
        with pytest.warns(UserWarning, match="was tried again"):
            assert retries.backward_comes()
        assert retries.backward_comes()
    retries.forward_comes([DATA[2:4]])
    assert not retries.under_way


def test_after_the_block_the_same_input_is_refused_and_another_one_is_another_batch() -> None:
    retries = Retries(lambda: "[here]")
    heard(retries, [DATA[:2]], ArithmeticError())
    with pytest.raises(GradSyncError, match=r"^\[here\] "):
        retries.forward_comes([DATA[1:3]])
    retries.forward_comes([DATA[2:4]])
    retries.forward_comes([DATA[:2]])
    assert not retries.under_way


@pytest.mark.parametrize("how", ["ended", "another_batch"])
def test_after_a_step_or_a_batch_of_the_loader_the_same_input_is_another_batch(how: str) -> None:
    retries = Retries(lambda: "[here]")
    heard(retries, [DATA[:2]], ArithmeticError())
    getattr(retries, how)()
    retries.forward_comes([DATA[:2]])
    assert not retries.under_way
    assert not retries.backward_comes()


def test_an_error_that_was_handled_already_says_nothing_of_a_backward_that_raises_later() -> None:
    retries = Retries(lambda: "[here]")
    try:
        _engine_run_backward(ArithmeticError())
    except ArithmeticError:
        retries.forward_comes([DATA[:2]])
        retries.backward_raised()
        assert not retries.inside
        retries.forward_comes([DATA[4:]])
        assert not retries.under_way


def test_an_error_that_came_of_no_backward_is_not_that_of_the_batch() -> None:
    retries = Retries(lambda: "[here]")
    retries.forward_comes([DATA[:2]])
    try:
        raise ArithmeticError
    except ArithmeticError:
        retries.backward_raised()
        assert not retries.inside
