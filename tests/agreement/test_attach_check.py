"""Attach agrees before the first byte: all ranks go on, or all raise the same sentence; then all can try again."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

import gradsync as gs
from gradsync.agreement import attach_check
from gradsync.agreement.attach_check import explain

Arguments = dict[str, Any]


def net(**changes: nn.Module) -> nn.Sequential:
    """Two layers, of which some may be others."""
    model = nn.Sequential()
    for name, layer in ({"first": nn.Linear(3, 4), "last": nn.Linear(4, 2)} | changes).items():
        model.add_module(name, layer)
    return model


def on_model(model: nn.Module, **arguments: Any) -> Arguments:
    return {"model": model, **arguments}


def with_buffer(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = net()
    model.register_buffer("table", torch.zeros(shape, dtype=dtype))
    return model


def with_optimizer(make: Callable[[nn.Sequential], torch.optim.Optimizer]) -> Arguments:
    model = net()
    return on_model(model, optimizer=make(model))


def frozen_first_bias() -> nn.Module:
    model = net()
    model.first.bias.requires_grad_(False)
    return model


def reversed_net() -> nn.Module:
    model = nn.Sequential()
    model.add_module("last", nn.Linear(4, 2))
    model.add_module("first", nn.Linear(3, 4))
    return model


def by_weight_and_bias(model: nn.Sequential, order: int = 1) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    groups = [[p for n, p in named if n.endswith(kind)] for kind in ("weight", "bias")][::order]
    return SGD([{"params": group} for group in groups], lr=0.1)


# name: (what most ranks attach, what the odd one attaches, what all say)
DISAGREEMENTS: dict[str, tuple[Callable[[], Arguments], Callable[[], Arguments], str]] = {
    "number": (
        lambda: on_model(net()),
        lambda: on_model(net(extra=nn.Linear(2, 2))),
        "the model has 4 parameters on {usual} but 6 on {odd} "
        '(the first that is not everywhere is "extra.weight"); build the same model on every rank',
    ),
    "name": (
        lambda: on_model(nn.Sequential(nn.Linear(3, 4))),
        lambda: on_model(nn.ModuleDict({"zero": nn.Linear(3, 4)})),
        'parameter 0 is "0.weight" on {usual} but "zero.weight" on {odd}; '
        "build the same model on every rank, in the same order",
    ),
    "order": (
        lambda: on_model(net()),
        lambda: on_model(reversed_net()),
        'parameter 0 is "first.weight" on {usual} but "last.weight" on {odd}; '
        "build the same model on every rank, in the same order",
    ),
    "shape": (
        lambda: on_model(net()),
        lambda: on_model(net(last=nn.Linear(4, 7))),
        'parameter 2 ("last.weight") has shape [2, 4] on {usual} but [7, 4] on {odd}; '
        "build the same model on every rank",
    ),
    "dtype": (
        lambda: on_model(net()),
        lambda: on_model(net(last=nn.Linear(4, 2, dtype=torch.float64))),
        'parameter 2 ("last.weight") has dtype float32 on {usual} but float64 on {odd}; '
        "build the same model on every rank",
    ),
    "requires_grad": (
        lambda: on_model(net()),
        lambda: on_model(frozen_first_bias()),
        'parameter 1 ("first.bias") has requires_grad true on {usual} but false on {odd}; '
        "build the same model on every rank",
    ),
    "sparsity": (
        lambda: on_model(nn.Embedding(4, 2)),
        lambda: on_model(nn.Embedding(4, 2, sparse=True)),
        'parameter 0 ("weight") has sparse false on {usual} but true on {odd}; build the same model on every rank',
    ),
    "buffer shape": (
        lambda: on_model(with_buffer(3)),
        lambda: on_model(with_buffer(4)),
        'buffer 0 ("table") has shape [3] on {usual} but [4] on {odd}; build the same model on every rank',
    ),
    "buffer dtype": (
        lambda: on_model(with_buffer(2, dtype=torch.int64)),
        lambda: on_model(with_buffer(2, dtype=torch.float64)),
        'buffer 0 ("table") has dtype int64 on {usual} but float64 on {odd}; build the same model on every rank',
    ),
    "buffer number": (
        lambda: on_model(with_buffer(3)),
        lambda: on_model(net()),
        "the model has 1 buffers on {usual} but 0 on {odd} "
        '(the first that is not everywhere is "table"); build the same model on every rank',
    ),
    "plan": (
        lambda: on_model(net()),
        lambda: on_model(net(), plan=gs.Plan(bucket_bytes=4096)),
        "the plans differ: bucket_bytes is null on {usual} but 4096 on {odd}; pass the same plan on every rank",
    ),
    "pace": (
        lambda: on_model(net(), plan=gs.Plan(pace=gs.accumulate(2))),
        lambda: on_model(net(), plan=gs.Plan(pace=gs.accumulate(3))),
        'the plans differ: pace is {{"backwards": 1, "k": 2, "kind": "accumulate"}} on {usual} '
        'but {{"backwards": 1, "k": 3, "kind": "accumulate"}} on {odd}; pass the same plan on every rank',
    ),
    "optimizer missing": (
        lambda: with_optimizer(lambda model: SGD(model.parameters())),
        lambda: on_model(net()),
        'parameter 0 ("first.weight") has optimizer 0 (SGD) group 0 place 0 on {usual} but none on {odd}; '
        "make the same optimizers with the same groups on every rank",
    ),
    "optimizer kind": (
        lambda: with_optimizer(lambda model: SGD(model.parameters())),
        lambda: with_optimizer(lambda model: AdamW(model.parameters())),
        'parameter 0 ("first.weight") has optimizer 0 (SGD) group 0 place 0 on {usual} '
        "but 0 (AdamW) group 0 place 0 on {odd}; make the same optimizers with the same groups on every rank",
    ),
    "optimizer groups": (
        lambda: with_optimizer(by_weight_and_bias),
        lambda: with_optimizer(lambda model: by_weight_and_bias(model, -1)),
        'parameter 0 ("first.weight") has optimizer 0 (SGD) group 0 place 0 on {usual} '
        "but 0 (SGD) group 1 place 0 on {odd}; make the same optimizers with the same groups on every rank",
    ),
    "order inside a group": (
        lambda: with_optimizer(lambda model: SGD(list(model.parameters()))),
        lambda: with_optimizer(lambda model: SGD(list(model.parameters())[::-1])),
        'parameter 0 ("first.weight") has optimizer 0 (SGD) group 0 place 0 on {usual} '
        "but 0 (SGD) group 0 place 3 on {odd}; make the same optimizers with the same groups on every rank",
    ),
}


def heard(arguments: Arguments) -> str:
    """What attach says; "attached" if it has nothing to say."""
    try:
        gs.attach(**arguments).detach()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "attached"


def heard_and_left(arguments: Arguments) -> tuple[str, list[str]]:
    """What attach says, and the threads that it leaves; what other tests left in this process does not count."""
    before = set(threading.enumerate())
    said = heard(arguments)
    return said, [t.name for t in set(threading.enumerate()) - before if t.name.startswith("gradsync")]


def averages() -> bool:
    """Whether a right attach works in this process."""
    model = nn.Linear(3, 1, bias=False)
    sync = gs.attach(model)
    model(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
    sync.detach()
    assert model.weight.grad is not None
    return bool((model.weight.grad == (dist.get_world_size() - 1) / 2).all())


def disagree(case: str, odd: int) -> tuple[str, list[str], bool]:
    usual, other, _ = DISAGREEMENTS[case]
    return *heard_and_left((other if dist.get_rank() == odd else usual)()), averages()


def every_disagreement(odd: int) -> dict[str, tuple[str, list[str], bool]]:
    return {case: disagree(case, odd) for case in DISAGREEMENTS}


@pytest.fixture(scope="module")
def said(pool: Any) -> list[dict[str, tuple[str, list[str], bool]]]:
    """What each of two ranks heard in every case, one after the other in the same processes."""
    return pool.run(every_disagreement, 1, ranks=2)


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_ranks_that_differ_all_raise_the_same_sentence(case: str, said: list[dict[str, Any]]) -> None:
    sentence = "Disagreement: " + DISAGREEMENTS[case][2].format(usual="rank 0", odd="rank 1")
    assert [ranks[case][0] for ranks in said] == [sentence] * 2


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_after_a_disagreement_no_thread_is_left_and_a_right_attach_works(case: str, said: list[dict[str, Any]]) -> None:
    assert [ranks[case][1:] for ranks in said] == [([], True)] * 2


@pytest.mark.parametrize("odd", [0, 1])
def test_of_three_ranks_the_odd_one_is_named_as_such(odd: int, run: Any) -> None:
    usual = {0: "ranks 1 and 2", 1: "ranks 0 and 2"}[odd]
    for case in ("shape", "number", "plan"):
        sentence = "Disagreement: " + DISAGREEMENTS[case][2].format(usual=usual, odd=f"rank {odd}")
        assert [text for text, *_ in run(disagree, case, odd, ranks=3)] == [sentence] * 3


def speak(protocol: int) -> str:
    ours = attach_check.PROTOCOL
    attach_check.PROTOCOL = protocol if dist.get_rank() == 1 else ours
    try:
        return heard(on_model(net()))
    finally:
        attach_check.PROTOCOL = ours


def test_another_protocol_is_said_before_anything_else(run: Any) -> None:
    sentence = (
        "Disagreement: the gradsync protocol is 3 on ranks 0 and 2 but 99 on rank 1; "
        "install the same gradsync on every host"
    )
    assert run(speak, 99, ranks=3) == [sentence] * 3


def test_a_refusal_is_said_before_what_it_made_different() -> None:
    rows = [{"kind": "parameter", "name": "w", "dtype": "float32"}]
    right = {"protocol": 1, "refusal": None, "plan": {}, "parameters": rows}
    wrong = {"protocol": 1, "refusal": "it is lazy", "plan": {}, "parameters": []}
    assert explain([right, wrong], [4, 7]) == "rank 7 refused to attach: it is lazy"


def differ_in_optimizer_groups_without_parameters() -> str:
    model = net()
    optimizer = SGD(model.parameters())
    if dist.get_rank() == 1:
        optimizer.add_param_group({"params": []})
    return heard(on_model(model, optimizer=optimizer))


def test_groups_without_parameters_count_too(run: Any) -> None:
    sentence = (
        "Disagreement: an optimizer has groups of [4] parameters on rank 0 but of [4, 0] on rank 1; "
        "make the same optimizers with the same groups on every rank"
    )
    assert run(differ_in_optimizer_groups_without_parameters) == [sentence] * 2


# What one rank refuses, alone


def all_frozen() -> nn.Module:
    return net().requires_grad_(False)


def with_expanded_buffer() -> nn.Module:
    model = net()
    model.register_buffer("mask", torch.ones(1).expand(5))
    return model


def with_sparse_buffer() -> nn.Module:
    model = net()
    model.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)
    return model


def sharded() -> nn.Module:
    return fully_shard(net(), mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))  # type: ignore[no-any-return]


REFUSALS: dict[str, tuple[Callable[[], Arguments], str]] = {
    "not a module": (
        lambda: on_model([nn.Linear(2, 2)]),  # type: ignore[arg-type]
        "TypeError: attach takes a torch.nn.Module, got list (put several modules into one torch.nn.ModuleList)",
    ),
    "the optimizer first": (
        lambda: on_model(SGD(net().parameters())),  # type: ignore[arg-type]
        "TypeError: attach takes a torch.nn.Module, got SGD (the model comes first: gs.attach(model, optimizer))",
    ),
    "a class for a model": (
        lambda: on_model(nn.Linear),  # type: ignore[arg-type]
        "TypeError: attach takes a torch.nn.Module, got the class Linear (make one first: model = Linear(...))",
    ),
    "parameters for a model": (
        lambda: on_model(net().parameters()),  # type: ignore[arg-type]
        "TypeError: attach takes a torch.nn.Module, got generator (pass the model itself, not its parameters)",
    ),
    "the plan second": (
        lambda: on_model(net(), optimizer=gs.Plan()),
        "TypeError: attach takes torch optimizers, got Plan (the plan comes third: gs.attach(model, optimizer, plan), "
        "or plan=...)",
    ),
    "a class for an optimizer": (
        lambda: on_model(net(), optimizer=SGD),
        "TypeError: attach takes torch optimizers, got the class SGD (make one first: optimizer = "
        "SGD(model.parameters(), lr=...))",
    ),
    "parameters for an optimizer": (
        lambda: on_model(net(), optimizer=list(net().parameters())),
        "TypeError: attach takes torch optimizers, got Parameter (pass the optimizer that was made from the model's "
        "parameters, not parameters)",
    ),
    "a scheduler": (
        lambda: on_model(net(), optimizer=LambdaLR(SGD(net().parameters()), lambda _: 1.0)),
        "TypeError: attach takes torch optimizers, got LambdaLR (pass what it schedules: scheduler.optimizer)",
    ),
    "optimizers by name": (
        lambda: on_model(net(), optimizer={"all": SGD(net().parameters())}),
        "TypeError: attach takes torch optimizers, got dict (pass a list: list(optimizers.values()))",
    ),
    "a scaler for an optimizer": (
        lambda: on_model(net(), optimizer=torch.amp.GradScaler("cpu")),
        "TypeError: attach takes torch optimizers, got GradScaler (did you mean scaler=...?)",
    ),
    "a file for a plan": (
        lambda: on_model(net(), plan="plan.toml"),
        "TypeError: plan must be a gs.Plan, got 'plan.toml' (did you mean gs.Plan.load('plan.toml')?)",
    ),
    "a pace for a plan": (
        lambda: on_model(net(), plan=gs.accumulate(4)),
        "TypeError: plan must be a gs.Plan, got Accumulate(k=4, backwards=1) (did you mean gs.Plan(pace=...)?)",
    ),
    "a plan that is none": (
        lambda: on_model(net(), plan={"pace": 4}),
        "TypeError: plan must be a gs.Plan, got {'pace': 4} (did you mean gs.Plan(**...)?)",
    ),
    "a guard that is none": (lambda: on_model(net(), guard=30), "TypeError: guard must be a gs.Guard, got 30"),
    "unknown buffers": (
        lambda: on_model(net(), buffers="average"),
        'ValueError: buffers must be "broadcast" or "none", got \'average\'',
    ),
    "ddp": (
        lambda: on_model(DistributedDataParallel(net())),
        "ValueError: the model is under DistributedDataParallel, which averages gradients itself; "
        "pass the model that you gave to it (ddp.module) and drop the wrapper",
    ),
    "ddp inside": (
        lambda: on_model(nn.Sequential(DistributedDataParallel(net()))),
        "ValueError: its module '0' is under DistributedDataParallel, which averages gradients itself; "
        "pass the model that you gave to it (ddp.module) and drop the wrapper",
    ),
    "fsdp": (
        lambda: on_model(FullyShardedDataParallel(net(), device_id=torch.device("cpu"))),
        "ValueError: the model is under FSDP, which shards parameters; "
        "gradsync serves replicas that hold the whole model",
    ),
    "fully_shard": (
        lambda: on_model(sharded()),
        "ValueError: parameter first.weight is a DTensor (FSDP2 or tensor parallelism); gradsync serves replicas that "
        "hold the whole model: attach before fully_shard is not possible, use its own replication instead",
    ),
    "meta": (
        lambda: on_model(net(last=nn.Linear(4, 2, device="meta"))),
        "ValueError: parameter last.weight is on the meta device; call model.to_empty(device=...) and load it first",
    ),
    "lazy": (
        lambda: on_model(net(last=nn.LazyLinear(2))),
        "ValueError: parameter last.weight is lazy and has no shape yet; run one forward before attach",
    ),
    "compiled by torch.jit": (
        lambda: on_model(torch.jit.script(net())),
        "TypeError: the model is compiled by torch.jit, which allows no hooks on its forward; attach a module that "
        "calls it: wrapped = torch.nn.Sequential(model), then gs.attach(wrapped, optimizer), and train wrapped",
    ),
    "nothing to train": (
        lambda: on_model(all_frozen()),
        "ValueError: the model has no parameter that requires a gradient, so there is nothing to synchronize; "
        "attach after parameters are made and unfrozen",
    ),
    "everything ignored": (
        lambda: on_model(nn.Linear(2, 2), ignore=["weight", "bias"]),
        "ValueError: the model has no parameter that requires a gradient, so there is nothing to synchronize; "
        "attach after parameters are made and unfrozen",
    ),
    "another model's optimizer": (
        lambda: on_model(net(), optimizer=SGD(nn.Linear(5, 6).parameters())),
        "ValueError: SGD holds a parameter of shape (6, 5) that the model does not have; "
        "make the optimizer from this model's parameters, after any change to them, or, if it trains several models, "
        "attach each of them without it: gs.attach(model)",
    ),
    "no optimizer": (
        lambda: on_model(net(), optimizer="SGD"),
        "TypeError: attach takes torch optimizers, got str",
    ),
    "unknown name to ignore": (
        lambda: on_model(net(), ignore=["middle.weight"]),
        "ValueError: ignore names 'middle.weight', which the model does not have; "
        "names are those of model.named_parameters() and model.named_buffers()",
    ),
    "one name to ignore, not a list": (
        lambda: on_model(net(), ignore="last.weight"),
        "TypeError: ignore takes a list of names or tensors, got the string 'last.weight'",
    ),
    "one tensor to ignore, not a list": (
        lambda: on_model(net(), ignore=torch.ones(2)),
        "TypeError: ignore takes a list of names or tensors, got a tensor of shape [2]: put it into a list",
    ),
    "a tensor of no model to ignore": (
        lambda: on_model(net(), ignore=[torch.zeros(2, 3, dtype=torch.float32, device="cpu")]),
        "ValueError: ignore holds a tensor of shape (2, 3), which is none of the model's; "
        "pass the parameter or buffer itself, no copy of it, or its name",
    ),
    "a number to ignore": (lambda: on_model(net(), ignore=[3]), "TypeError: ignore takes names or tensors, got 3"),
    "an expanded buffer": (
        lambda: on_model(with_expanded_buffer()),
        "ValueError: buffer mask is an expanded tensor whose elements share memory, so it cannot be written; "
        "register its clone(), or name it in ignore=[...]",
    ),
    "a sparse buffer": (
        lambda: on_model(with_sparse_buffer()),
        "ValueError: buffer graph is torch.sparse_coo, which cannot be broadcast; name it in ignore=[...]",
    ),
}
NEEDS_ALL_RANKS = {"ddp", "ddp inside", "fsdp", "fully_shard"}


def every_refusal() -> dict[str, str]:
    return {case: heard(make()) for case, (make, _) in REFUSALS.items()}


@pytest.fixture(scope="module")
def refused_alone(pool: Any) -> dict[str, str]:
    return pool.run(every_refusal, ranks=1)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_work_is_refused_with_one_sentence(case: str, refused_alone: dict[str, str]) -> None:
    assert refused_alone[case] == REFUSALS[case][1]


def refuse_everywhere(case: str) -> tuple[str, list[str], bool]:
    return *heard_and_left(REFUSALS[case][0]()), averages()


@pytest.mark.parametrize("case", ["ddp", "fsdp", "fully_shard", "meta"])
def test_what_every_rank_refuses_they_refuse_in_the_same_words(case: str, run: Any) -> None:
    assert run(refuse_everywhere, case) == [(REFUSALS[case][1], [], True)] * 2


def refuse_on(odd: int, case: str) -> tuple[str, list[str], bool]:
    arguments = REFUSALS[case][0]() if dist.get_rank() == odd else on_model(net())
    return *heard_and_left(arguments), averages()


@pytest.mark.parametrize("case", sorted(set(REFUSALS) - NEEDS_ALL_RANKS))
def test_what_one_rank_refuses_stops_all_and_names_it(case: str, run: Any) -> None:
    reason = REFUSALS[case][1].split(": ", 1)[1]
    sentence = f"Disagreement: rank 1 refused to attach: {reason}"
    assert run(refuse_on, 1, case, timeout=20) == [(sentence, [], True)] * 2


def differ_in_arguments(name: str, usual: Any, other: Any) -> str:
    return heard(on_model(with_buffer(2), **{name: other if dist.get_rank() == 1 else usual}))


@pytest.mark.parametrize(
    ("name", "usual", "other"),
    [("buffers", "broadcast", "none"), ("guard", gs.Guard(nonfinite="skip"), gs.Guard(nonfinite="raise"))],
)
def test_arguments_that_every_rank_must_share_are_compared(name: str, usual: Any, other: Any, run: Any) -> None:
    one, two = run(differ_in_arguments, name, usual, other)
    assert one == two
    assert one.startswith("Disagreement")


# Life before and after


def attach_twice() -> tuple[str, str, bool]:
    model = net()
    sync = gs.attach(model)
    second = heard(on_model(model))
    sync.detach()
    return second, heard(on_model(model)), averages()


def test_a_model_is_attached_once_and_again_after_detach(run: Any) -> None:
    sentence = "ValueError: parameter first.weight is attached already; call detach() on that GradSync first"
    assert run(attach_twice) == [(sentence, "attached", True)] * 2


def attach_twice_alone() -> list[str]:
    model = net(first=nn.Linear(3, 4).requires_grad_(False))
    models = [model, net(last=model.last), net(first=model.first), copy.deepcopy(model)]
    sync = gs.attach(model, SGD(model.parameters(), 0.1))
    said = [heard(on_model(each)) for each in models]
    sync.detach()
    again = gs.attach(model)
    said.append(heard(on_model(model)))
    again.detach()
    return [*said, heard(on_model(model))]


def test_one_rank_alone_attaches_a_model_once_too(run: Any) -> None:
    """Without a hook on its parameters; what is frozen has none on several ranks either, and may be shared."""
    twice = "ValueError: parameter last.weight is attached already; call detach() on that GradSync first"
    expected = [twice, twice, "attached", "attached", twice, "attached"]
    assert run(attach_twice_alone, ranks=1) == [expected]
    assert run(attach_twice_alone) == [expected] * 2


def attach_from_outside() -> str:
    group = dist.new_group([0])
    return heard(on_model(net(), group=group))


def test_who_is_not_in_the_group_may_not_attach(run: Any) -> None:
    sentence = "ValueError: this rank is not a member of the group given to attach; only members may call it"
    assert run(attach_from_outside) == ["attached", sentence]


def test_without_a_group_attach_says_how_to_get_one() -> None:
    with pytest.raises(ValueError, match=r"there is no process group yet; call gs.init\(\) before gs.attach\(\)"):
        gs.attach(net())


def ignore_by_name_tensor_and_tied_name() -> list[float]:
    """The first value of every parameter after an attach that leaves some alone; all begin with the rank."""
    model = net(tied=nn.Linear(4, 2))
    model.tied.weight = model.last.weight
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(dist.get_rank()))
    ignore = ["first.weight", model.first.bias, "tied.weight"]
    gs.attach(model, SGD(model.parameters()), ignore=ignore).detach()
    return [float(parameter.detach().flatten()[0]) for parameter in model.parameters()]


def test_ignored_parameters_are_left_alone_also_in_an_optimizer(run: Any) -> None:
    # first.weight, first.bias, last.weight (which is tied.weight), last.bias, tied.bias
    assert run(ignore_by_name_tensor_and_tied_name) == [[0.0] * 5, [1.0, 1.0, 1.0, 0.0, 0.0]]
