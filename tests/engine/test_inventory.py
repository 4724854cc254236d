"""What a model consists of is read once, by name; what cannot be served is refused, and later changes are noticed."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

import gradsync as gs
from gradsync.engine.argument_hints import not_a_model, not_an_optimizer
from gradsync.engine.attach import _as_list, _check_arguments, check_terms, is_disabled, plain
from gradsync.engine.parameters import Inventory, ModelChanges, note_unhooked, take_inventory
from gradsync.errors import GradSyncError


class Tied(nn.Module):
    """A weight with two names, a sparse table, buffers with two names, none, and not to be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=True)
        self.bag = nn.EmbeddingBag(4, 3)
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("nothing", None)
        self.register_buffer("count", torch.tensor(0), persistent=False)
        self.first.register_buffer("again", self.mean)


def names(inventory: Inventory) -> list[str]:
    return [entry.name for entry in inventory.entries]


def test_every_parameter_and_buffer_is_there_once_in_order_by_its_first_name() -> None:
    model = Tied()
    inventory = take_inventory(model, [], ())
    assert names(inventory) == ["frozen", "table.weight", "bag.weight", "first.weight", "first.bias"]
    assert [entry.index for entry in inventory.entries] == list(range(5))
    assert [entry.name for entry in inventory.entries if entry.sparse] == ["table.weight"]
    assert [site.name for site in inventory.buffers] == ["mean", "count"]
    assert inventory.ignored == set()
    for entry in inventory.entries:
        assert entry.owner[entry.key] is entry.param
    assert [id(site.tensor) for site in inventory.buffers] == [id(model.mean), id(model.count)]
    values = inventory.tensors()
    assert [value.data_ptr() for value in values] == [
        tensor.data_ptr() for tensor in (*(entry.param for entry in inventory.entries), model.mean, model.count)
    ]
    assert not any(value.requires_grad for value in values)


def test_ranks_compare_a_row_for_each() -> None:
    model = Tied()
    optimizers = [SGD([model.first.weight, model.frozen]), Adam([{"params": []}, {"params": [model.first.weight]}])]
    table = take_inventory(model, optimizers, ()).table(optimizers)
    assert table[0] == {
        "kind": "parameter",
        "name": "frozen",
        "shape": [2],
        "dtype": "float64",
        "device": "cpu",
        "requires_grad": False,
        "sparse": False,
        "optimizer": "0 (SGD) group 0 place 1",
    }
    assert [row["optimizer"] for row in table[1:5]] == [
        "none",
        "none",
        "0 (SGD) group 0 place 0, 1 (Adam) group 1 place 0",
        "none",
    ]
    assert [row["sparse"] for row in table[:5]] == [False, True, False, False, False]
    assert table[5:] == [
        {"kind": "buffer", "name": "mean", "shape": [3], "dtype": "float32", "device": "cpu"},
        {"kind": "buffer", "name": "count", "shape": [], "dtype": "int64", "device": "cpu"},
    ]


@pytest.mark.parametrize("by_name", [True, False])
def test_what_is_ignored_is_left_alone_under_all_its_names(by_name: bool) -> None:
    model = Tied()
    ignore = ["second.weight", "mean"] if by_name else [model.first.weight, model.mean]
    inventory = take_inventory(model, [SGD(model.parameters())], ignore)
    assert names(inventory) == ["frozen", "table.weight", "bag.weight", "first.bias"]
    assert [site.name for site in inventory.buffers] == ["count"]
    assert inventory.ignored == {id(model.first.weight), id(model.mean)}


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("odd", buffer)
    return model


def under(make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(OrderedDict(head=nn.Linear(2, 2), body=make(nn.Linear(2, 2))))


def looks_like_ddp(module: nn.Module) -> nn.Module:
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)  # it needs a process group
    nn.Module.__init__(wrapper)
    wrapper.module = module
    return wrapper


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "frozen": (lambda: nn.Linear(2, 2).requires_grad_(False), "the model has no parameter that requires a gradient"),
    "empty": (nn.Module, "the model has no parameter that requires a gradient"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "parameter weight is on the meta device"),
    "lazy": (lambda: nn.LazyLinear(2), "parameter weight is lazy and has no shape yet"),
    "sparse buffer": (lambda: with_buffer(torch.eye(2).to_sparse()), "buffer odd is torch.sparse_coo, which cannot"),
    "expanded buffer": (lambda: with_buffer(torch.ones(1).expand(3)), "buffer odd is an expanded tensor"),
    "meta buffer": (lambda: with_buffer(torch.ones(1, device="meta")), "buffer odd is on the meta device"),
    "under DDP": (lambda: looks_like_ddp(nn.Linear(2, 2)), "the model is under DistributedDataParallel"),
    "a part under DDP": (lambda: under(looks_like_ddp), "its module 'body' is under DistributedDataParallel"),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_cannot_be_served_is_refused(case: str) -> None:
    make, said = MODELS[case]
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        take_inventory(make(), [], ())


@pytest.mark.parametrize("buffer", [torch.ones(1).expand(1), torch.ones(3, 1).expand(3, 1), torch.ones(0)])
def test_a_buffer_whose_elements_have_room_of_their_own_is_served(buffer: torch.Tensor) -> None:
    assert [site.name for site in take_inventory(with_buffer(buffer), [], ()).buffers] == ["odd"]


IGNORED: dict[str, tuple[Any, type[Exception], str]] = {
    "a string": ("weight", TypeError, "ignore takes a list of names or tensors, got the string 'weight'"),
    "a tensor": (
        torch.ones(2, 3),
        TypeError,
        "ignore takes a list of names or tensors, got a tensor of shape [2, 3]: put it into a list",
    ),
    "a number": (3, TypeError, "ignore takes a list of names or tensors, got 3: put it into a list"),
    "numbers": ([3], TypeError, "ignore takes names or tensors, got 3"),
    "a foreign tensor": ([torch.ones(2, 3)], ValueError, "ignore holds a tensor of shape (2, 3), which is none of"),
    "a foreign name": (["wieght"], ValueError, "ignore names 'wieght', which the model does not have"),
}


@pytest.mark.parametrize("case", IGNORED)
def test_what_cannot_be_ignored_is_refused(case: str) -> None:
    ignore, kind, said = IGNORED[case]
    with pytest.raises(kind, match=f"^{re.escape(said)}"):
        take_inventory(nn.Linear(2, 2), [], ignore)


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(5, 2)
    optimizer = SGD(model.parameters())
    optimizer.add_param_group({"params": [other.weight]})
    with pytest.raises(ValueError, match=r"^SGD holds a parameter of shape \(2, 5\) that the model does not have"):
        take_inventory(model, [optimizer], ())
    with pytest.raises(TypeError, match=r"^attach takes torch optimizers, got Plan"):
        take_inventory(model, [gs.Plan()], ())  # type: ignore[list-item]


def test_a_parameter_attached_without_a_hook_is_recognized_until_it_is_let_go() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    entries = take_inventory(model, [], ()).entries
    note_unhooked(entries, True)
    with pytest.raises(ValueError, match=r"^parameter weight is attached already; call detach\(\) on that GradSync"):
        take_inventory(model, [], ())
    note_unhooked(entries, False)
    take_inventory(model, [], ())


# After attach


def watched(model: nn.Module, **options: Any) -> ModelChanges:
    inventory = take_inventory(model, [], ())
    return ModelChanges(model, inventory.entries, inventory.ignored, place=lambda: "[here]", **options)


def three() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))


def replace_weight(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.zeros(2, 2))


def add_parameter(model: nn.Sequential) -> None:
    model.register_parameter("late", nn.Parameter(torch.zeros(1)))


def add_layer(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2))


def take_layer(model: nn.Sequential) -> None:
    del model[2]


def swap_layer(model: nn.Sequential) -> None:
    model[1] = nn.Linear(2, 2)


def set_to_none(model: nn.Sequential) -> None:
    model[1].bias = None


def rename(model: nn.Sequential) -> None:
    model[1].kernel = model[1].weight
    del model[1].weight


def exchange_layers(model: nn.Sequential) -> None:
    model[0], model[1] = model[1], model[0]


def convert(model: nn.Sequential) -> None:
    model.double()


CHANGES: dict[Callable[[nn.Sequential], None], str] = {
    replace_weight: "parameter 0.weight was replaced after attach by 0.weight, which nobody averages",
    add_parameter: "parameter late was added after attach, and nobody averages what came later",
    add_layer: "parameters 3.weight, 3.bias were added after attach, and nobody averages what came later",
    take_layer: "parameters 2.weight, 2.bias were taken out of the model after attach",
    swap_layer: "parameters 1.weight, 1.bias were replaced after attach by 1.weight, 1.bias, which nobody averages",
    set_to_none: "parameter 1.bias was taken out of the model after attach",
    rename: "parameter 1.weight is called 1.kernel since attach",
    exchange_layers: "parameter 0.weight is called 1.weight since attach",
    convert: "parameter 0.weight was torch.float32 on cpu at attach and is torch.float64 on cpu now",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_that_changes_after_attach_is_noticed(change: Callable[[nn.Sequential], None]) -> None:
    model = three()
    changes = watched(model)
    changes.check_model()
    change(model)
    with pytest.raises(GradSyncError, match=rf"^\[here\] {re.escape(CHANGES[change])}"):
        changes.check_model()


def test_modules_without_parameters_may_come_and_go_and_tensors_may_stand_in() -> None:
    model = three()
    changes = watched(model)
    model.append(nn.Tanh())
    changes.check_model()
    model[3] = nn.ReLU()
    changes.check_model()
    del model[3]
    changes.check_model()
    seen: list[bool] = []
    model.register_forward_pre_hook(lambda *_: seen.append(changes.check_model() is None))
    torch.func.functional_call(model, {"0.weight": torch.zeros(2, 2)}, torch.zeros(1, 2))
    assert seen == [True]


@pytest.mark.parametrize("how", ["registered", "filled", "in a new module"])
def test_a_buffer_that_comes_later_is_told_of_once(how: str) -> None:
    model = three()
    model.register_buffer("empty", None)
    changes = watched(model)
    if how == "registered":
        model.register_buffer("late", torch.ones(2))
    elif how == "filled":
        model.empty = torch.ones(2)
    else:
        model.append(nn.BatchNorm1d(2, affine=False))
    name = {"registered": "buffer late was", "filled": "buffer empty was"}.get(how, "buffers 3.num_batches_tracked, ")
    with pytest.warns(UserWarning, match=rf"^\[here\] {name}"):
        changes.check_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changes.check_model()


def test_buffers_of_which_each_rank_keeps_its_own_may_come_later() -> None:
    model = three()
    changes = watched(model, buffers=False)
    model.register_buffer("late", torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changes.check_model()


def test_an_optimizer_may_get_foreign_parameters_but_not_their_gradients() -> None:
    model, late = three(), nn.Parameter(torch.zeros(4))
    changes, optimizer = watched(model), SGD(model.parameters())
    model[0].weight.grad = torch.zeros(2, 2)
    changes.check_optimizer(optimizer)
    optimizer.add_param_group({"params": [late]})
    changes.check_optimizer(optimizer)
    late.grad = torch.zeros(4)
    with pytest.raises(GradSyncError, match=r"^\[here\] SGD got a parameter of shape \(4,\) after attach"):
        changes.check_optimizer(optimizer)


def test_a_gradient_that_was_assigned_with_its_graph_is_noticed() -> None:
    model = three()
    changes = watched(model)
    model[1].bias.grad = torch.zeros(2)
    changes.check_assigned()
    model[1].bias.grad = torch.zeros(2, requires_grad=True) * 2
    with pytest.raises(GradSyncError, match=r"^\[here\] the \.grad of parameter 1\.bias was assigned"):
        changes.check_assigned()


def test_what_is_thawed_must_be_heard_of_before_it_has_a_gradient() -> None:
    model = three()
    model[0].requires_grad_(False)
    changes = watched(model)
    assert not changes.trainable_changed()
    model[0].weight.requires_grad_(True)
    assert changes.trainable_changed()
    changes.check_thawed(lambda entry: False)
    model[0].weight.grad = model[1].weight.grad = torch.zeros(2, 2)
    changes.check_thawed(lambda entry: True)
    with pytest.raises(GradSyncError, match=r"^\[here\] parameter 0\.weight was thawed and used before"):
        changes.check_thawed(lambda entry: False)
    changes.note_trainable()
    assert not changes.trainable_changed()
    changes.check_thawed(lambda entry: False)


# Arguments


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (SGD(nn.Linear(1, 1).parameters()), "SGD (the model comes first: gs.attach(model, optimizer))"),
        (nn.Linear, "the class Linear (make one first: model = Linear(...))"),
        (nn.Linear(1, 1).parameters(), "generator (pass the model itself, not its parameters)"),
        ([nn.Linear(1, 1)], "list (put several modules into one torch.nn.ModuleList)"),
        (3, "int"),
    ],
)
def test_what_is_no_model_is_told_what_was_meant(given: object, hint: str) -> None:
    assert not_a_model(given) == f"attach takes a torch.nn.Module, got {hint}"
    with pytest.raises(TypeError, match=f"got {re.escape(hint)}$"):
        take_inventory(given, [], ())  # type: ignore[arg-type]


class Holder:
    """A framework's object with an optimizer inside."""

    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer


def an_optimizer() -> SGD:
    return SGD(nn.Linear(1, 1).parameters())


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (gs.Plan(), "Plan (the plan comes third: gs.attach(model, optimizer, plan), or plan=...)"),
        (gs.auto(), "Auto (the plan comes third: gs.attach(model, optimizer, plan), or plan=...)"),
        (SGD, "the class SGD (make one first: optimizer = SGD(model.parameters(), lr=...))"),
        (nn.Linear, "the class"),
        (torch.optim.lr_scheduler.StepLR(an_optimizer(), 1), "StepLR (pass what it schedules: scheduler.optimizer)"),
        (torch.ones(1), "Tensor (pass the optimizer that was made from the model's parameters, not parameters)"),
        (iter([1]), "list_iterator (pass the optimizer that was made from the model's parameters, not parameters)"),
        ({"all": an_optimizer()}, "dict (pass a list: list(optimizers.values()))"),
        (torch.amp.GradScaler("cpu"), "GradScaler (did you mean scaler=...?)"),
        (gs.Guard(), "Guard (did you mean guard=...?)"),
        (Holder(an_optimizer()), "Holder (pass the optimizer inside of it)"),
        (Holder(None), "Holder"),
        (3, "int"),
    ],
)
def test_what_is_no_optimizer_is_told_what_was_meant(given: object, hint: str) -> None:
    assert not_an_optimizer(given) == f"attach takes torch optimizers, got {hint}"


def test_optimizers_are_none_one_or_several() -> None:
    first, second = an_optimizer(), an_optimizer()
    assert _as_list(None) == []
    assert _as_list(first) == [first]
    assert _as_list((first, second)) == _as_list([first, second]) == [first, second]


@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        ({"plan": "ring"}, TypeError, "plan"),
        ({"guard": 3}, TypeError, "guard must be a gs.Guard, got 3"),
        ({"buffers": "keep"}, ValueError, 'buffers must be "broadcast" or "none", got \'keep\''),
        ({"scaler": 3}, TypeError, "scaler must be a torch.amp.GradScaler, got 3"),
    ],
)
def test_an_argument_of_another_kind_is_refused(changed: dict[str, Any], kind: type[Exception], said: str) -> None:
    right: dict[str, Any] = {"plan": gs.Plan(), "guard": gs.Guard(), "buffers": "broadcast", "scaler": None, "size": 2}
    for good in ({}, {"buffers": "none"}, {"scaler": torch.amp.GradScaler("cpu")}, {"plan": gs.auto()}):
        _check_arguments(**(right | good))
    with pytest.raises(kind, match=re.escape(said)):
        _check_arguments(**(right | changed))


def test_a_plan_and_a_guard_may_be_left_out_and_nothing_else_may_stand_there() -> None:
    check_terms(None, None)
    check_terms(gs.auto(), gs.Guard())
    with pytest.raises(TypeError):
        check_terms("ring", None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        check_terms(None, "guard")  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "is_so"), [(None, False), ("", False), ("0", False), ("1", True), ("no", True)])
def test_a_variable_disables_what_is_clever(value: str | None, is_so: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADSYNC_DISABLE", raising=False)
    if value is not None:
        monkeypatch.setenv("GRADSYNC_DISABLE", value)
    assert is_disabled() is is_so


def test_a_disabled_plan_keeps_its_windows_and_its_buckets_and_nothing_else() -> None:
    clever = gs.Plan(gs.ring(), gs.int8(), gs.accumulate(3), bucket_bytes=4096, audit_every=5)
    assert plain(clever) == gs.Plan(gs.native(), None, gs.accumulate(3), bucket_bytes=4096)
    assert plain(gs.Plan(pace=gs.local_sgd(4))) == gs.Plan(gs.native(), None, gs.every_step())
    assert plain(gs.auto()) == gs.Plan(gs.native())
