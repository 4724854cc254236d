"""What travels of an optimizer's state: tensors by their form, plain values by JSON, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradsync.engine.replicas import (
    Buffers,
    BufferSite,
    _assign,
    _bytes_of,
    _describe,
    _form,
    _hyper_parameters,
    _is_plain,
    _plain,
    _refuse_what_cannot_travel,
    _shape_state,
    _unpack,
)
from gradsync.errors import GradSyncError

PLAIN: list[tuple[object, Any]] = [
    (None, None),
    (True, True),
    (3, 3),
    (0.5, 0.5),
    ("amsgrad", "amsgrad"),
    (torch.tensor(2.5), 2.5),
    (torch.tensor([7]), 7),
    ((0.9, torch.tensor(0.5)), [0.9, 0.5]),
    ([1, (2, None)], [1, [2, None]]),
    ([], []),
]


@pytest.mark.parametrize(("value", "sent"), PLAIN, ids=[repr(value) for value, _ in PLAIN])
def test_plain_values_are_numbers_words_and_lists_of_them(value: object, sent: object) -> None:
    assert _is_plain(value)
    assert _plain(value) == sent


@pytest.mark.parametrize("value", [torch.ones(2), {}, [1, torch.ones(3)], object(), {1}, b"bytes"], ids=type)
def test_anything_else_is_not_plain(value: object) -> None:
    assert not _is_plain(value)


def test_hyper_parameters_are_what_is_plain_of_each_group() -> None:
    one, two = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [one], "lr": torch.tensor(0.5)}, {"params": [two], "scratch": {}}], lr=0.1)
    first, second = _hyper_parameters(optimizer)
    assert (first["lr"], second["lr"], second["momentum"]) == (0.5, 0.1, 0)
    assert "params" not in first
    assert "scratch" not in second


def test_a_value_takes_the_kind_of_what_was_there() -> None:
    rate = torch.tensor(0.5)
    group: dict[str, Any] = {"lr": rate, "betas": (0.9, 0.99), "names": ["a"], "eps": 1e-8}
    for key, value in (("lr", 0.25), ("betas", [0.8, 0.9]), ("names", ["b"]), ("eps", 1e-6), ("new", [1])):
        _assign(group, key, value)
    assert group["lr"] is rate
    assert group == {"lr": torch.tensor(0.25), "betas": (0.8, 0.9), "names": ["b"], "eps": 1e-6, "new": [1]}


STATE: dict[str, Any] = {"step": torch.tensor(3.0), "mean": torch.ones(2, 3), "count": 5, "rates": (1, 2), "odd": {}}
DESCRIBED = {
    "step": ("tensor", "float32", [], "cpu"),
    "mean": ("tensor", "float32", [2, 3], "cpu"),
    "count": ("value", 5),
    "rates": ("value", [1, 2]),
    "odd": ("other", "dict"),
}


def test_a_state_is_described_by_forms_and_values() -> None:
    assert _describe(STATE) == DESCRIBED
    assert _describe({}) == {}


def test_state_that_is_neither_is_refused_by_name() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    good = {key: form for key, form in DESCRIBED.items() if key != "odd"}
    _refuse_what_cannot_travel(optimizer, [good, {}])
    with pytest.raises(ValueError, match=r"^the state 'odd' of SGD is a dict, which cannot be sent to other ranks"):
        _refuse_what_cannot_travel(optimizer, [good, DESCRIBED])


def test_a_state_gets_the_form_that_was_described_and_keeps_what_fits() -> None:
    parameter = nn.Parameter(torch.ones(3, 2).t())
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    fitting, narrow = torch.full((2, 3), 7.0), torch.ones(2, 3, dtype=torch.float16)
    optimizer.state[parameter] = {"mean": fitting, "narrow": narrow, "shape": torch.ones(3), "gone": 1, "number": 2}
    described = {
        "mean": ("tensor", "float32", [2, 3], "cpu"),
        "narrow": ("tensor", "float32", [2, 3], "cpu"),
        "shape": ("tensor", "float32", [4], "cpu"),
        "number": ("value", 9),
        "new": ("tensor", "int64", [], "cpu"),
    }
    _shape_state(optimizer, parameter, described)
    state = optimizer.state[parameter]
    assert set(state) == set(described)
    assert state["mean"] is fitting
    assert state["number"] == 9
    for key, dtype, shape in (
        ("narrow", torch.float32, (2, 3)),
        ("shape", torch.float32, (4,)),
        ("new", torch.int64, ()),
    ):
        assert (state[key].dtype, tuple(state[key].shape), state[key].requires_grad) == (dtype, shape, False)
        assert not state[key].any()
    assert state["narrow"].stride() == parameter.stride(), "a fused optimizer needs them alike"
    _shape_state(optimizer, parameter, {})
    assert parameter not in optimizer.state


def test_tensors_of_all_types_come_out_of_one_run_of_bytes() -> None:
    sent = [torch.tensor([1, 2, 3], dtype=torch.uint8), torch.randn(2, 3).t(), torch.tensor(5), torch.ones(0)]
    flat = torch.cat([_bytes_of(tensor) for tensor in sent])
    assert flat.numel() == 3 + 24 + 8
    received = [torch.zeros_like(tensor) for tensor in sent]
    addresses = [tensor.data_ptr() for tensor in received]
    _unpack(flat, received)
    assert all(torch.equal(one, other) for one, other in zip(sent, received, strict=True))
    assert [tensor.data_ptr() for tensor in received] == addresses


def test_a_buffer_keeps_its_form_or_is_named() -> None:
    table: dict[str, torch.Tensor | None] = {"mean": torch.zeros(3), "count": torch.tensor(1)}
    buffers = Buffers([BufferSite(f"norm.{key}", table, key) for key in table])
    assert buffers.any
    table["count"] = torch.tensor(2)
    assert [id(tensor) for tensor in buffers.tensors()] == [id(tensor) for tensor in table.values()]
    assert _form(torch.zeros(2, 3, dtype=torch.int64)) == "int64[2, 3] on cpu"
    table["mean"] = torch.zeros(4)
    with pytest.raises(
        GradSyncError, match=r"^buffer norm\.mean was float32\[3\] on cpu at attach and is float32\[4\]"
    ):
        buffers.tensors()
    table["mean"] = None
    with pytest.raises(GradSyncError, match=r"^buffer norm\.mean was there at attach and is None now"):
        buffers.tensors()
    own = Buffers([BufferSite("norm.mean", {"mean": torch.zeros(3)}, "mean")], kept=False)
    assert (own.any, own.tensors()) == (False, [])
