"""Modules that torch.jit has compiled have tables like any other, as far as we ask them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradsync.engine.jit_modules import ScriptedTable, buffers_of, children_of, parameters_of, refuse_scripted_root


def test_the_tables_of_a_plain_module_are_its_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert parameters_of(model[0]) is model[0]._parameters
    assert buffers_of(model[1]) is model[1]._buffers
    assert children_of(model) is model._modules
    refuse_scripted_root(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_those_of_a_scripted_one_are_read_and_written_like_them() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    children = children_of(scripted)
    assert isinstance(children, ScriptedTable)
    assert (len(children), list(children)) == (2, ["0", "1"])
    parameters, buffers = parameters_of(children["0"]), buffers_of(children["1"])
    assert {key: tuple(value.shape) for key, value in parameters.items()} == {"weight": (3, 2), "bias": (3,)}
    assert set(buffers) == {"running_mean", "running_var", "num_batches_tracked"}
    assert len(buffers) == 3
    buffers["running_mean"] = torch.ones(3)
    assert buffers["running_mean"].tolist() == [1.0] * 3
    with pytest.raises(TypeError, match=r"^the model is compiled by torch\.jit"):
        refuse_scripted_root(scripted)


def test_a_table_forgets_what_is_deleted() -> None:
    table = ScriptedTable({"a": 1, "b": 2})
    del table["a"]
    assert dict(table) == {"b": 2}
