"""A compressor says its rounds once: who runs them and who prices them read the same, and nobody asks for its class."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest
import torch
from samples import LEAVES

import gradsync as gs
from gradsync.compress.param import Param
from gradsync.compress.recipe import Codec, Compressor
from gradsync.compress.rounds import BucketForm, Compute, Gather, NoRound, Payload, Sum, Trade, absences
from gradsync.exchange.bucket_route import RoutedBucket, prepared_rounds
from gradsync.exchange.flat import FlatBucket, Form, Item, lay_out

SHAPES = ((64, 48), (64, 48), (128, 33))
leaves = pytest.mark.parametrize("compressor", LEAVES, ids=repr)


class Members:
    """The memory of a rank among `size`."""

    def __init__(self, size: int, in_memory: bool) -> None:
        self.size, self.rank, self.in_memory = size, size - 1, in_memory

    def for_sums(self, form: Form) -> torch.Tensor:
        return form.zeros()

    def for_gathering(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=device)


def codec_of(compressor: Compressor) -> Codec:
    codec = compressor.choose(Param("weight", SHAPES[0])).codec
    assert codec is not None
    return codec


def payloads(stage: object) -> list[Payload]:
    return list(stage) if isinstance(stage, Sum | Gather | Trade) else []  # type: ignore[arg-type]


@leaves
@pytest.mark.parametrize(("size", "in_memory"), [(1, False), (2, False), (2, True), (3, False), (3, True), (8, False)])
def test_a_planner_reads_the_rounds_that_are_run(compressor: Compressor, size: int, in_memory: bool) -> None:
    codec = codec_of(compressor)
    items, form = lay_out([Item.like(f"{i}", torch.empty(shape)) for i, shape in enumerate(SHAPES)], align_nbytes=1)
    flat_bucket = FlatBucket(0, form.zeros(), items, compressor.choose(items[0].param))
    flat_bucket.begin_keeping()
    run = list(codec.rounds(RoutedBucket(flat_bucket, Members(size, in_memory), form.device)))
    priced = list(codec.rounds(BucketForm([item.param for item in items], size, in_memory)))
    assert [type(stage) for stage in run] == [type(stage) for stage in priced]
    for ours, theirs in zip(run, priced, strict=True):
        if isinstance(ours, Compute) and isinstance(theirs, Compute):
            assert ours[1:] == theirs[1:], "as much work"
        for mine, form_of_mine in zip(payloads(ours), payloads(theirs), strict=True):
            assert mine.nbytes == form_of_mine.nbytes
            if isinstance(ours, Gather):  # what is claimed is rounded up by parameter; owners' parts are not all alike
                assert mine.tensor[0].nbytes <= form_of_mine.nbytes or size > 2


@leaves
def test_what_is_computed_is_before_between_and_after_the_rounds(compressor: Compressor) -> None:
    prepared = prepared_rounds(codec_of(compressor).rounds(BucketForm([Param("weight", SHAPES[0])], 3)), rank=0)
    assert [each.what for each in prepared] == ["encode_s"] * (len(prepared) - 1) + ["decode_s"]
    assert all(each.computing for each in prepared)


@leaves
@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("in_memory", [False, True])
def test_every_element_is_encoded_once_before_the_first_round_and_what_arrives_decoded(
    compressor: Compressor, size: int, in_memory: bool
) -> None:
    """In what a probe measures: the whole bucket, one payload of it; a low rank's work depends on the rank."""
    stages = list(codec_of(compressor).rounds(BucketForm([Param("weight", SHAPES[0])], size, in_memory)))
    first = next(number for number, stage in enumerate(stages) if not isinstance(stage, Compute))
    before = sum(stage.encode for stage in stages[:first] if isinstance(stage, Compute))
    after = [stage for stage in stages[first:] if isinstance(stage, Compute)]
    if any(stage.between for stage in after):
        assert before == after[-1].decode == after[0].between
        return
    assert before == 1
    gathered = [stage for stage in stages if isinstance(stage, Gather | Trade)]
    assert sum(stage.decode for stage in after) == (size if len(gathered) == 1 else max(1, len(gathered)))
    assert sum(stage.encode for stage in after) == (1 / size if len(gathered) == 2 else 0)


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_bucket_goes_in_two_phases_where_fewer_bytes_cross_a_network_so(size: int, in_memory: bool) -> None:
    stages = codec_of(gs.int8()).rounds(BucketForm([Param("weight", SHAPES[0])], size, in_memory))
    in_one, in_two = size - 1, 2 * (size - 1) / size  # payloads that a rank sends
    assert any(isinstance(stage, Trade) for stage in stages) == (not in_memory and in_two < in_one)


@leaves
def test_who_is_absent_counts_the_same_rounds(compressor: Compressor) -> None:
    stages = list(codec_of(compressor).rounds(BucketForm([Param("weight", SHAPES[0])], 3)))
    num_rounds = sum(not isinstance(stage, Compute) for stage in stages)
    assert list(absences(stages)) == [NoRound()] * num_rounds
    assert num_rounds >= 1


def test_only_compress_knows_the_classes_of_compressors() -> None:
    source = Path(gs.__file__).parent
    modules = [import_module(f"gradsync.compress.{path.stem}") for path in (source / "compress").glob("[a-z]*.py")]
    classes = {name for module in modules for name, it in vars(module).items() if isinstance(it, type)}
    recipes = {name for name in classes if any(hasattr(vars(m).get(name), "choose") for m in modules)}
    assert {"PowerSGD", "RandomK", "BlockCodec", "Cast", "ErrorFeedback", "AcrossHosts", "ByParameter"} <= recipes
    found = [
        f"{path.relative_to(source)}:{node.lineno} {alias.name}"
        for path in sorted(source.rglob("*.py"))
        if path.parent.name != "compress"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gradsync.compress")
        for alias in node.names
        if alias.name in recipes - {"Codec", "Compressor"}
    ]
    assert not found, f"ask the codec instead: {found}"
