"""A batch whose backward raised is tried again: what is computed of it is discarded, and the batch stays dropped."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from raising import BACKWARDS, BATCHES, CELLS, PACES, WIDTH, Cell, Line, Training, expected, gradient

import gradsync as gs
from gradsync.plan.paces import Accumulate

Ranks = Callable[..., list[Any]]
WAYS = ("halves", "copies", "twice", "no forward")
AGAIN = "was tried again"


class Stubborn(Training):
    """It tries a batch whose backward raised again, inside of the `except` block, in one way or another."""

    way = "halves"

    def backward(self, number: int, value: float, is_last: bool) -> None:
        x = torch.full((2, WIDTH), value / 2)
        self.model.armed = self.cell.where if number == self.raises_at else ""
        self._weigh()
        loss = torch.zeros(())
        pace = PACES[self.cell.pace]
        try:
            for _ in range(pace.backwards if isinstance(pace, Accumulate) else 1):
                with contextlib.nullcontext() if is_last else self.sync.no_sync():
                    loss = self.model(x)
                    loss.backward(retain_graph=self.way == "no forward")
        except ArithmeticError:
            self.model.armed = ""
            self._again(x, loss, is_last)
            raise

    def _weigh(self) -> None:
        if self.cell.mode == "weighted" and self.sync._steps.pace.backwards == 0:
            self.sync.set_batch_weight(1.0 if self.rank == 0 else 3.0)

    def _again(self, x: torch.Tensor, loss: torch.Tensor, is_last: bool) -> None:
        parts = {"halves": x.chunk(2), "copies": x.clone().chunk(2), "twice": (x, x), "no forward": (None,)}
        if self.way != "no forward":
            self.optimizer.zero_grad()
        for part in parts[self.way]:
            if self.cell.mode == "weighted":
                self.sync.set_batch_weight(0.25)
            with contextlib.nullcontext() if is_last else self.sync.no_sync():
                if part is None:
                    with contextlib.suppress(ArithmeticError):
                        loss.backward()
                else:
                    self.model.armed = "in the middle" if self.way == "twice" and part is x and not is_last else ""
                    with contextlib.suppress(ArithmeticError):
                        self.model(part).backward()
                    self.model.armed = ""


def play(cell: Cell, way: str) -> tuple[torch.Tensor, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training = Stubborn(cell, [1])
        training.way = way
        with training.sync.join() if cell.mode == "join" else contextlib.nullcontext():
            training.run(BATCHES - (2 if cell.mode == "join" and training.rank else 0))
        training.finish()
        weights = torch.stack([training.model.a.detach(), training.model.b.detach()])
        training.sync.detach()
    return weights, [str(each.message) for each in caught if AGAIN in str(each.message)]


def play_all(cells: list[Cell], way: str) -> list[tuple[torch.Tensor, list[str]]]:
    told = []
    for cell in cells:
        try:
            told.append(play(cell, way))
        except BaseException as error:
            error.add_note(f"in the cell {cell}, {way}")
            raise
    return told


TABLE = [
    *itertools.product(PACES, BACKWARDS, WAYS[:1]),
    *itertools.product(("every_step", "accumulate backwards", "delayed", "local_sgd"), BACKWARDS[1:2], WAYS[1:]),
]


@pytest.mark.parametrize(("pace", "where", "way"), TABLE)
def test_a_batch_that_is_tried_again_stays_dropped(pace: str, where: str, way: str, run: Ranks) -> None:
    cells = [cell for cell in CELLS if cell.pace == pace and cell.where == where and not cell.refused]
    for cell, ranks in zip(cells, zip(*run(play_all, cells, way), strict=True), strict=True):
        weights = [each for each, _ in ranks]
        assert torch.equal(*weights), cell
        if pace != "diloco streaming":
            assert torch.equal(weights[0], torch.full_like(weights[0], expected(cell, 2, [1]))), cell
        assert [len(said) for _, said in ranks] == [0, 1], cell


# Loops of other shapes


class Run:
    """A line in training, with one optimizer or two."""

    def __init__(self, num_optimizers: int = 1) -> None:
        self.model, self.rank = Line(), dist.get_rank()
        groups = [[self.model.a], [self.model.b]] if num_optimizers == 2 else [list(self.model.parameters())]
        self.optimizers = [torch.optim.SGD(group, lr=1.0) for group in groups]
        self.sync = gs.attach(self.model, self.optimizers, gs.Plan(bucket_bytes=1024), guard=gs.Guard(timeout=20))

    def x(self, batch: int) -> torch.Tensor:
        return torch.full((WIDTH,), gradient(batch, self.rank))

    def backward(self, x: torch.Tensor, raises: bool = False) -> None:
        self.model.armed = BACKWARDS[1] if raises and self.rank == 1 else ""
        self.model(x).backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def good(self, *batches: int) -> None:
        for batch in batches:
            self.backward(self.x(batch))
            self.step()

    def end(self) -> float:
        weights = torch.cat([self.model.a.detach(), self.model.b.detach()])
        assert bool((weights == weights[0]).all())
        self.sync.detach()
        return float(weights[0])


def applied(*batches: int) -> list[float]:
    return [-sum(gradient(batch, rank) for batch in batches for rank in range(2)) / 2] * 2


@pytest.fixture(autouse=True)
def _few_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def quietly(fn: Callable[..., Any], *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fn(*args)


def two_optimizers(steps: str) -> float:
    run = Run(2)
    run.good(0)
    try:
        run.backward(run.x(1), raises=True)
    except ArithmeticError:
        for _ in range(3):
            run.backward(run.x(1))
        if steps == "inside":
            run.step()
    if run.rank == 0 or steps == "outside":
        run.step()
    run.good(2, 3)
    return run.end()


@pytest.mark.parametrize("steps", ["inside", "outside", "skipped"])
def test_two_optimizers_may_step_after_it_or_not(steps: str, run: Ranks) -> None:
    assert run(quietly, two_optimizers, steps) == applied(0, 2, 3)


def roll_back(inside: bool) -> float:
    """After an exception all ranks go back to a checkpoint, and do its batch again, with the very same tensor."""
    run = Run()
    run.good(0)
    state, x = run.sync.state_dict(), run.x(1)
    try:
        run.backward(x, raises=True)
        run.step()
    except ArithmeticError:
        if inside:
            run.sync.load_state_dict(state)
            run.backward(x)
            run.step()
    if not inside or run.rank == 0:
        run.sync.load_state_dict(state)
        run.backward(x)
        run.step()
    run.good(2)
    return run.end()


@pytest.mark.parametrize("inside", [True, False])
def test_from_a_checkpoint_its_batch_is_another_one(inside: bool, run: Ranks) -> None:
    assert run(quietly, roll_back, inside) == applied(0, 1, 2)


def later(what: str) -> str | float:
    """The batch is tried again when the `except` block has been left."""
    run = Run()
    try:
        run.good(0)
        x = run.x(1)
        with contextlib.suppress(ArithmeticError):
            run.backward(x, raises=True)
        if what == "after step()":
            run.step()
            run.backward(x)
        elif run.rank == 1:
            run.backward(x)
        run.step()
        run.good(2)
        return run.end()
    except gs.GradSyncError as error:
        run.sync.detach()
        return str(error)


def test_outside_of_the_except_block_it_is_refused_at_once(run: Ranks) -> None:
    other, again = run(quietly, later, "the same")
    for words in ("with the same input", "`except` block", "optimizer.step()"):
        assert words in again
    assert "rank 1" in other


def test_after_step_the_same_input_is_another_pass(run: Ranks) -> None:
    assert run(quietly, later, "after step()") == applied(0, 1, 2)


def loop_inside(loader: bool) -> str | float:
    """The rest of the training runs inside of the `except` block."""
    run = Run()

    def train(batches: Any, raises_at: int | None) -> None:
        for batch in batches:
            run.backward(run.x(batch), raises=batch == raises_at)
            run.step()

    batches = run.sync.data(range(5)) if loader else iter(range(5))
    try:
        try:
            train(batches, 2)
        except ArithmeticError:
            train(batches, None)
        return run.end()
    except gs.GradSyncError as error:
        run.sync.detach()
        return str(error)


def test_training_goes_on_inside_of_the_except_block_with_a_loader(run: Ranks) -> None:
    assert run(quietly, loop_inside, True) == applied(0, 1, 3, 4)


def test_without_one_the_second_batch_in_there_is_refused(run: Ranks) -> None:
    other, inside = run(quietly, loop_inside, False)
    assert "leave the `except` block" in inside
    assert "rank 1" in other


def another_error(heard: bool, steps: bool) -> tuple[float, list[str]]:
    """The next batch comes while another error is handled, which may lie where that of the backward lay."""
    run = Run()
    run.good(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run.backward(run.x(1), raises=True)
        except ArithmeticError:
            if heard:
                run.sync.set_batch_weight(1.0)
        if run.rank == 0 or steps:
            run.step()
        try:
            raise KeyError("not in the cache")
        except KeyError:
            run.backward(run.x(2))
        run.step()
    run.good(3)
    return run.end(), [str(each.message) for each in caught]


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("heard", [True, False])
def test_in_the_except_block_of_another_error_it_is_another_batch(heard: bool, steps: bool, run: Ranks) -> None:
    (first, _), (second, said) = run(another_error, heard, steps)
    assert [first, second] == applied(0, 2, 3)
    assert not any(AGAIN in each or "KeyError" in each for each in said)


def closure() -> float:
    run = Run()
    for batch in range(4):
        raises = [batch == 2]

        def compute(batch: int = batch, raises: list[bool] = raises) -> torch.Tensor:
            run.optimizers[0].zero_grad()
            run.model.armed = BACKWARDS[1] if raises.pop() and run.rank == 1 else ""
            loss = run.model(run.x(batch))
            raises.append(False)
            loss.backward()
            return loss.detach()

        try:
            run.optimizers[0].step(compute)
        except ArithmeticError:
            run.optimizers[0].step(compute)
    return run.end()


def test_a_closure_may_be_tried_again(run: Ranks) -> None:
    assert run(quietly, closure) == applied(0, 1, 3)


def two_models() -> list[float]:
    """One backward of both raises, and is tried again."""
    runs = [Run(), Run()]
    for batch in range(4):
        for armed in (True, False):
            try:
                runs[1].model.armed = BACKWARDS[1] if armed and (runs[0].rank, batch) == (1, 2) else ""
                torch.stack([run.model(run.x(batch)) for run in runs]).sum().backward()
                break
            except ArithmeticError:
                runs[1].model.armed = ""
                torch.stack([run.model(run.x(batch)) for run in reversed(runs)]).sum().backward()
                break
        for run in runs:
            run.step()
    return [run.end() for run in runs]


def test_two_models_of_one_backward_are_tried_again(run: Ranks) -> None:
    assert run(quietly, two_models) == [[weight] * 2 for weight in applied(0, 1, 3)]


class Maker(torch.nn.Module):
    """The generator of a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a * x


def discriminate() -> torch.Tensor:
    """The discriminator's part of a GAN raises and is left; the generator's part shows it the same images."""
    judge, maker = Run(), Maker()
    optimizer = torch.optim.SGD(maker.parameters(), lr=0.1)
    sync = gs.attach(maker, optimizer, guard=gs.Guard(timeout=20))
    for batch in range(4):
        fake = maker(judge.x(batch))
        with contextlib.suppress(ArithmeticError):
            judge.backward(fake.detach(), raises=batch == 2)
            judge.step()
        judge.backward(fake)
        judge.step()
        optimizer.step()
        optimizer.zero_grad()
    sync.detach()
    judge.sync.detach()
    return torch.cat([judge.model.a.detach(), judge.model.b.detach(), maker.a.detach()])


def test_the_images_of_a_generator_are_another_batch_with_their_graph(run: Ranks) -> None:
    assert torch.equal(*run(quietly, discriminate))
