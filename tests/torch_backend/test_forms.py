"""Tensors of odd forms: refused by every rank where gloo would leave their memory, else as gloo takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sides import assert_alike, gradsync_group

Run = Callable[..., list[Any]]
Make = Callable[[], torch.Tensor]

OVERLAPPING: dict[str, Make] = {
    "expanded": lambda: torch.ones(1, 4).expand(500_000, 4),
    "a little": lambda: torch.ones(1).expand(8),
    "inside": lambda: torch.ones(2, 1, 3).expand(2, 4, 3),
    "windows": lambda: torch.arange(8.0).as_strided((4, 4), (1, 1)),
}
SOUND: dict[str, Make] = {
    "transposed": lambda: torch.arange(8.0).view(4, 2).t(),
    "one of a kind": lambda: torch.ones(1, 4).expand(1, 4),
    "nothing": lambda: torch.zeros(0, 4),
    "expanded nothing": lambda: torch.ones(1, 0).expand(9, 0),
    "no dimensions": lambda: torch.tensor(3.0),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "complex": lambda: torch.ones(2, 4, dtype=torch.complex64),
    "conjugate": lambda: torch.ones(2, 4, dtype=torch.complex64).conj(),
    "bool": lambda: torch.ones(2, 4, dtype=torch.bool),
    "not a leaf": lambda: torch.ones(2, 4, requires_grad=True) * 2,
    "eight bits": lambda: torch.ones(2, 4).to(torch.float8_e4m3fn),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "nowhere": lambda: torch.ones(2, 4, device="meta"),
}


def two_like(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [torch.ones(tensor.shape, dtype=tensor.dtype) for _ in range(2)]


def mine_first(first: list[torch.Tensor]) -> list[torch.Tensor] | None:
    return first if dist.get_rank() == 0 else None


CALLS: dict[str, Callable[[torch.Tensor, Any], object]] = {
    "all_reduce": lambda tensor, group: dist.all_reduce(tensor, group=group),
    "maximum": lambda tensor, group: dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group),
    "coalesced": lambda tensor, group: dist.all_reduce_coalesced([tensor], group=group),
    "broadcast": lambda tensor, group: dist.broadcast(tensor, 0, group=group),
    "reduce": lambda tensor, group: dist.reduce(tensor, 0, group=group),
}
MORE_CALLS: dict[str, Callable[[torch.Tensor, Any], object]] = {
    "scatter": lambda tensor, group: dist.scatter(tensor, mine_first(two_like(tensor)), src=0, group=group),
    "all_to_all": lambda tensor, group: dist.all_to_all_single(tensor, two_like(tensor)[0], group=group),
}


def overlapping(make: Make, name: str) -> None:
    call, group = {**CALLS, **MORE_CALLS}[name], gradsync_group()
    with pytest.raises(ValueError, match=r"share memory: clone\(\) it first"):
        call(make(), group)
    good = torch.ones(5)
    dist.all_reduce(good, group=group)  # nobody is left behind
    assert good.tolist() == [2.0] * 5


def sound(make: Make, name: str) -> None:
    def call(group: Any) -> Any:
        tensor = make()
        CALLS[name](tensor, group)
        if dist.get_rank() != 0 and name == "reduce":
            return None
        return tensor.detach().to_dense().resolve_conj() if not tensor.is_meta else tensor.shape

    assert_alike(call, dist.group.WORLD, gradsync_group())


def overlapping_by_name(kind: str, name: str) -> None:
    overlapping(OVERLAPPING[kind], name)


def sound_by_name(kind: str, name: str) -> None:
    sound(SOUND[kind], name)


@pytest.mark.parametrize("name", [*CALLS, *MORE_CALLS])
@pytest.mark.parametrize("kind", OVERLAPPING)
def test_a_tensor_whose_elements_share_memory_is_refused_on_every_rank(run: Run, kind: str, name: str) -> None:
    run(overlapping_by_name, kind, name)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", SOUND)
def test_every_other_form_is_taken_as_gloo_takes_it(run: Run, kind: str, name: str) -> None:
    run(sound_by_name, kind, name)


def without_dimensions() -> None:
    group = gradsync_group()
    with pytest.raises(ValueError, match="without dimensions"):
        dist.reduce_scatter_tensor(torch.zeros(0), torch.tensor(3.0), group=group)


def test_what_has_no_dimension_is_not_cut(run: Run) -> None:
    run(without_dimensions)
