"""gs.all_reduce of one tensor: the mean or sum, the same bits on every rank; or the same error on every rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradsync as gs

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.complex64]
FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "empty": lambda x: x[:0],
    "one": lambda x: x[:1],
    "scalar": lambda x: x[0],
    "odd": lambda x: x[:37],
    "matrix": lambda x: x.reshape(12, 10),
    "transposed": lambda x: x.reshape(12, 10).t(),
    "every third": lambda x: x[::3],
    "shifted": lambda x: x[1:],
    "channels last": lambda x: x.reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
}


def data(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's values, the same wherever they are made."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(120, dtype=torch.float64, generator=generator)
    if dtype.is_complex:
        values = torch.complex(values, values.flip(0))
    return (values * 100).to(dtype) if dtype == torch.int64 else values.to(dtype)


def bits(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def reduce_every_form(dtype: torch.dtype, op: Any) -> dict[str, tuple[int, float, bool]]:
    """For each form: the bits, how far they are from the truth, and whether it stayed in place."""
    ranks = range(dist.get_world_size())
    found = {}
    for name, form in FORMS.items():
        tensor = form(data(dist.get_rank(), dtype))
        strides, address = tensor.stride(), tensor.data_ptr()
        result = gs.all_reduce(tensor, op=op)
        truth = torch.stack([form(data(rank, dtype)).to(wide(dtype)) for rank in ranks]).sum(0)
        truth = truth / len(ranks) if op == "mean" else truth
        error = (result.to(wide(dtype)) - truth).abs().max().item() if truth.numel() else 0.0
        stayed = result is tensor and (tensor.stride(), tensor.data_ptr()) == (strides, address)
        found[name] = (bits(result), error, stayed)
    return found


def tolerance(dtype: torch.dtype, ranks: int) -> float:
    """A few roundings of values below about 4 per rank."""
    return 0.0 if dtype == torch.int64 else 4 * ranks * ranks * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("dtype", "op"), [(dtype, op) for dtype in DTYPES for op in ("mean", "sum") if (dtype, op) != (torch.int64, "mean")]
)
def test_every_rank_gets_the_same_bits_near_the_truth_in_place(dtype: torch.dtype, op: str, run: Any) -> None:
    for ranks in (1, 2, 3, 4):
        found = run(reduce_every_form, dtype, op, ranks=ranks)
        assert all(each == found[0] for each in found)
        for form, (_, error, stayed) in found[0].items():
            assert error <= tolerance(dtype, ranks), form
            assert stayed, form


def reduce_special() -> dict[str, Any]:
    rank = dist.get_rank()
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    conjugate = torch.tensor([complex(1, rank)]).conj()
    half = torch.full((4,), 60000.0, dtype=torch.float16)
    return {
        "parameter": gs.all_reduce(parameter).tolist(),
        "still a leaf": parameter.is_leaf and parameter.requires_grad and parameter.grad_fn is None,
        "conjugate": gs.all_reduce(conjugate, op="sum").tolist(),
        "half": gs.all_reduce(half).tolist(),
        "native": gs.all_reduce(torch.ones(1), algorithm=gs.native(), op="sum").tolist(),
        "subgroup": gs.all_reduce(torch.tensor([rank]), op="sum", group=pairs()[rank // 2]).tolist(),
    }


def pairs() -> list[Any]:
    return [dist.new_group([0, 1]), dist.new_group([2, 3])]


def test_parameters_conjugates_halves_and_subgroups_are_served(run: Any) -> None:
    for rank, found in enumerate(run(reduce_special, ranks=4)):
        assert found == {
            "parameter": [1.5] * 3,
            "still a leaf": True,
            "conjugate": [4 - 6j],
            "half": [60000.0] * 4,  # a sum before the division would overflow
            "native": [4.0],
            "subgroup": [1] if rank < 2 else [5],
        }


# Ranks that do not bring the same


def bring(kind: str) -> torch.Tensor:
    odd = dist.get_rank() == 1
    if kind == "shape":
        return torch.zeros(4 if odd else 3)
    if kind == "dimensions":
        return torch.zeros(2, 3) if odd else torch.zeros(3, 2)
    if kind == "dtype":
        return torch.zeros(3, dtype=torch.float64 if odd else torch.float32)
    if kind == "many dimensions":
        return torch.zeros([1] * 40 + [2 if odd else 1])
    return torch.zeros(3)


def reduce_what_differs(kind: str) -> tuple[str, float]:
    """What this rank hears; and a right call right after."""
    op: Any = "sum" if kind == "op" and dist.get_rank() == 1 else "mean"
    try:
        gs.all_reduce(bring(kind), op=op)
        said = "nothing"
    except gs.Disagreement as error:
        said = str(error)
    return said, float(gs.all_reduce(torch.tensor(float(dist.get_rank())), op="sum"))


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("shape", "float32[3] mean", "float32[4] mean"),
        ("dimensions", "float32[3, 2] mean", "float32[2, 3] mean"),
        ("dtype", "float32[3] mean", "float64[3] mean"),
        ("op", "float32[3] mean", "float32[3] sum"),
    ],
)
def test_what_differs_is_the_same_error_on_every_rank_and_harms_nothing(
    kind: str, one: str, other: str, run: Any
) -> None:
    sentence = (
        f"all_reduce was called with different tensors (rank 0: {one}; rank 1: {other}; rank 2: {one}); "
        "every rank must bring the same"
    )
    assert run(reduce_what_differs, kind, ranks=3) == [(sentence, 3.0)] * 3


def test_a_description_too_long_to_send_is_still_compared(run: Any) -> None:
    first, second = run(reduce_what_differs, "many dimensions")
    assert first == second
    assert first[0].startswith("all_reduce was called with different tensors (rank 0: ")


# What a caller does wrong


def call_wrongly() -> list[str]:
    said = []
    calls: list[Callable[[], Any]] = [
        lambda: gs.all_reduce([1.0, 2.0]),  # type: ignore[arg-type]
        lambda: gs.all_reduce(torch.eye(2).to_sparse()),
        lambda: gs.all_reduce(torch.ones(2), op="max"),  # type: ignore[arg-type]
        lambda: gs.all_reduce(torch.ones(2), algorithm="ring"),  # type: ignore[arg-type]
        lambda: gs.all_reduce(torch.ones(2, dtype=torch.int64)),
        lambda: gs.all_reduce(torch.ones(2, dtype=torch.bool), op="sum"),
    ]
    for call in calls:
        try:
            call()
        except (TypeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_bad_arguments_are_refused_before_anything_is_sent(run: Any) -> None:
    expected = [
        "TypeError: all_reduce takes a dense torch tensor, got list",
        "TypeError: all_reduce takes a dense torch tensor, got torch.sparse_coo",
        'ValueError: op must be "mean" or "sum", got \'max\'',
        "TypeError: algorithm must be None or one of gs.native(), gs.ring(), gs.tree(), gs.halving_doubling(), "
        "gs.hierarchical(), gs.shared_memory(), got 'ring' (did you mean gs.ring()?)",
        'ValueError: the mean of torch.int64 is not an integer; use op="sum" or a floating tensor',
        "ValueError: torch.bool cannot be added up; pass tensor.int() instead",
    ]
    assert run(call_wrongly) == [expected] * 2


def call_from_outside() -> str:
    group = dist.new_group([0])
    try:
        return str(gs.all_reduce(torch.ones(1), group=group).item())
    except ValueError as error:
        return str(error)


def test_who_is_not_in_the_group_is_told(run: Any) -> None:
    sentence = "this rank is not a member of the group given to all_reduce; only members may call it"
    assert run(call_from_outside) == ["1.0", sentence]


def add_what_cannot_be_added() -> list[str]:
    said = []
    for tensor, algorithm in (
        (torch.ones(2, dtype=torch.int16), gs.native()),
        (torch.ones(2).to(torch.float8_e4m3fn), None),
    ):
        try:
            gs.all_reduce(tensor, op="sum", algorithm=algorithm)
        except ValueError as error:
            said.append(str(error))
    said.append(str(gs.all_reduce(torch.ones(2, dtype=torch.int16), op="sum").tolist()))
    return said


def test_a_dtype_that_cannot_be_added_is_named_and_the_group_still_works(run: Any) -> None:
    expected = [
        "gloo cannot add int16; use int32, or gs.shared_memory() on one host",
        "torch.float8_e4m3fn cannot be added up; pass a tensor of another dtype, tensor.float() say",
        "[2, 2]",
    ]
    assert run(add_what_cannot_be_added) == [expected] * 2


def test_without_a_group_all_reduce_says_how_to_get_one() -> None:
    with pytest.raises(ValueError, match=r"there is no process group yet; call gs.init\(\) before gs.all_reduce\(\)"):
        gs.all_reduce(torch.ones(1))


@pytest.mark.parametrize("asked", [{"compress": "int8"}, {"algorithm": "ring"}, {"compress": gs.ring()}], ids=str)
def test_what_is_no_compressor_or_algorithm_is_refused_before_anything_else(asked: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(asked))):
        gs.all_reduce(torch.ones(3), **asked)
