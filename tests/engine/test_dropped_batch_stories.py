"""What raises in odd places and at odd times: all ranks drop that batch, and no other."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from raising import BACKWARDS, BATCHES, WIDTH, Line, Loader, gradient
from torch.amp import GradScaler
from torch.autograd.variable import Variable
from torch.utils.checkpoint import checkpoint

import gradsync as gs

Ranks = Callable[..., list[Any]]
BEFORE, MIDDLE, AFTER = BACKWARDS


class Run:
    """A line in training, whose weight tells which batches were applied."""

    def __init__(self, plan: gs.Plan | None = None, num_optimizers: int = 1, **attach: Any) -> None:
        self.model, self.rank = Line(), dist.get_rank()
        groups = [[self.model.a], [self.model.b]] if num_optimizers == 2 else [list(self.model.parameters())]
        self.optimizers = [torch.optim.SGD(group, lr=1.0) for group in groups]
        self.optimizer = self.optimizers[0]
        self.sync = gs.attach(self.model, self.optimizers, plan or gs.Plan(bucket_bytes=1024), **attach)

    def x(self, batch: int) -> torch.Tensor:
        return torch.full((WIDTH,), gradient(batch, self.rank))

    def backward(self, batch: int, where: str = "") -> None:
        self.model.armed = where
        self.model(self.x(batch)).backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def good(self, *batches: int) -> None:
        for batch in batches:
            self.backward(batch)
            self.step()

    def bad(self, batch: int, where: str, ranks: Iterable[int] = (1,), steps: bool = False) -> None:
        """A batch that raises on these ranks, whose loops call step() or go on without."""
        raises = self.rank in ranks
        with self.caught():
            self.backward(batch, where if raises else "")
        if not raises or steps:
            self.step()
        self.zero_grad()
        self.model.armed = ""

    @contextlib.contextmanager
    def caught(self) -> Any:
        with contextlib.suppress(ArithmeticError):
            yield

    def end(self) -> float:
        """The weight, the same in every element and on every rank."""
        weights = torch.cat([self.model.a.detach(), self.model.b.detach()])
        assert bool((weights == weights[0]).all())
        self.sync.detach()
        return float(weights[0])


def applied(*batches: int, ranks: int = 2) -> list[float]:
    """The weights after these."""
    total = sum(gradient(batch, rank) for batch in batches for rank in range(ranks))
    return [-total / ranks] * ranks


@pytest.fixture(autouse=True)
def _few_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def quietly(fn: Callable[..., Any], *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fn(*args)


def several(bad: list[tuple[int, str, list[int]]], plan: gs.Plan | None, steps: bool) -> float:
    run = Run(plan)
    told = {batch: (where, ranks) for batch, where, ranks in bad}
    for batch in range(BATCHES):
        if batch in told:
            run.bad(batch, *told[batch], steps=steps)
        else:
            run.good(batch)
    return run.end()


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize(
    "bad",
    [
        pytest.param([(3, BEFORE, [1]), (4, MIDDLE, [1])], id="two in a row"),
        pytest.param([(3, MIDDLE, [1]), (4, "forward", [1]), (5, "forward", [1])], id="three of different kinds"),
        pytest.param([(3, "forward", [1]), (4, BEFORE, [0])], id="one rank, then the other"),
        pytest.param([(3, BEFORE, [0, 1])], id="both ranks"),
        pytest.param([(3, "forward", [0, 1])], id="both ranks in forward"),
        pytest.param([(3, "forward", [0]), (4, MIDDLE, [0, 1])], id="forward, then both"),
        pytest.param([(BATCHES - 1, BEFORE, [1])], id="the last batch"),
        pytest.param([(BATCHES - 1, "forward", [1])], id="the last forward"),
        *(
            pytest.param([(0, where, ranks)], id=f"the first ever, {where}, ranks {ranks}")
            for where in (*BACKWARDS, "forward")
            for ranks in ([0], [1], [0, 1])
        ),
    ],
)
def test_all_ranks_drop_these_batches(bad: list[tuple[int, str, list[int]]], steps: bool, run: Ranks) -> None:
    left = [batch for batch in range(BATCHES) if batch not in {batch for batch, _, _ in bad}]
    assert run(quietly, several, bad, None, steps) == applied(*left)


@pytest.mark.parametrize("where", [BEFORE, "forward"])
def test_all_of_three_ranks_drop_it(where: str, run: Ranks) -> None:
    # Sums of three ranks are not halves: the same to the bit, and the same batches up to rounding.
    found = run(quietly, several, [(3, where, [1])], None, False, ranks=3)
    assert len(set(found)) == 1
    left = [batch for batch in range(BATCHES) if batch != 3]
    assert found == pytest.approx(applied(*left, ranks=3), rel=1e-6)


def after_the_epoch(where: str) -> list[float]:
    """The last batch of an epoch raises; then comes something else than a forward."""
    values = []
    for then in ("drain", "broadcast", "state_dict"):
        run = Run()
        run.good(0, 1)
        run.bad(2, where)
        if then == "drain":
            assert not run.sync.drain()
        elif then == "broadcast":
            run.sync.broadcast()
        else:
            run.sync.state_dict(all_ranks=True)
        run.good(3)
        values.append(run.end())
    return values


@pytest.mark.parametrize("where", [BEFORE, "forward"])
def test_what_comes_next_need_not_be_a_forward(where: str, run: Ranks) -> None:
    assert run(quietly, after_the_epoch, where) == [[value] * 3 for value in applied(0, 1, 3)]


def save_at_once(where: str, pace: Any) -> float:
    """The loop goes on after an exception with a checkpoint, of the same step on every rank, and is resumed from it."""
    run = Run(gs.Plan(pace=pace, bucket_bytes=1024))
    run.good(0, 1)
    if where == "loader" and run.rank == 1:
        with run.caught():
            next(run.sync.data(Stumbles(0)))
    else:
        run.bad(2, where)
    state, model = run.sync.state_dict(), run.model.state_dict()
    values = {key: tensor.clone() for key, tensor in model.items()}
    run.sync.detach()
    again = Run(gs.Plan(pace=pace, bucket_bytes=1024))
    again.model.load_state_dict(values)
    again.sync.load_state_dict(state)
    again.good(3)
    while again.sync.drain():
        again.step()
    return again.end()


@pytest.mark.parametrize("where", [BEFORE, MIDDLE, "forward", "loader"])
@pytest.mark.parametrize("pace", [gs.every_step(), gs.accumulate(2)], ids=repr)
def test_a_checkpoint_after_an_exception_is_of_the_same_step_everywhere(where: str, pace: Any, run: Ranks) -> None:
    left = (0, 1, 3) if pace == gs.every_step() else (0, 1)
    factor = 1 if pace == gs.every_step() else 2
    assert run(quietly, save_at_once, where, pace) == [value / factor for value in applied(*left)]


# Not every exception is a batch that the others wait for


def try_again(how: str) -> float:
    run = Run()
    run.good(0)
    x = run.x(1)
    run.model.armed = "forward" if run.rank == 1 else ""
    failed = False
    try:
        loss = run.model(x)
    except ArithmeticError:
        failed, run.model.armed = True, ""
        if how == "in the except block":
            loss = run.model(run.x(1))
    if failed and how != "in the except block":
        loss = run.model(x if how == "later" else x[:WIDTH])
    loss.backward()
    run.step()
    run.good(2)
    return run.end()


@pytest.mark.parametrize("how", ["in the except block", "later", "with a part of it"])
def test_a_forward_that_is_tried_again_was_not_skipped(how: str, run: Ranks) -> None:
    assert run(quietly, try_again, how) == applied(0, 1, 2)


def load_for_two_models(steps: bool) -> list[float]:
    """A loader raises once under the data() of both."""
    runs = [Run(), Run()]
    batches = Loader([gradient(batch, runs[0].rank) for batch in range(5)], 2 if runs[0].rank == 1 else None)
    loader = runs[1].sync.data(runs[0].sync.data(batches))
    for _ in range(5):
        steps_now = steps
        with runs[0].caught():
            _, value = next(loader)
            torch.stack([run.model(torch.full((WIDTH,), value)) for run in runs]).sum().backward()
            steps_now = True
        for run in runs if steps_now else ():
            run.step()
    return [run.end() for run in runs]


@pytest.mark.parametrize("steps", [True, False])
def test_a_loader_under_both_is_heard_by_two_models(steps: bool, run: Ranks) -> None:
    expected = applied(0, 1, 3, 4)
    assert run(quietly, load_for_two_models, steps) == [[weight] * 2 for weight in expected]


class Masked(Line):
    """Gets beside each batch a tensor that is always the same, as a mask or the edges of a graph."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * mask


def skip_a_batch_beside_a_constant(how: str) -> float:
    """The next batch shares a tensor, or the storage, with the one whose forward raised and was skipped."""
    run = Run()
    data = torch.stack([run.x(batch) for batch in range(5)])
    if how == "a mask":
        run.sync.detach()
        run.model = Masked()
        run.optimizers = [torch.optim.SGD(run.model.parameters(), lr=1.0)]
        run.sync = gs.attach(run.model, run.optimizers)
    mask, batches = torch.ones(()), data.unbind()  # which keeps all of them
    for batch, x in enumerate(batches):
        run.model.armed = "forward" if run.rank == 1 and batch in (2, 3) else ""
        with run.caught():
            (run.model(x.clone(), mask) if how == "a mask" else run.model(x)).backward()
            run.step()
        run.zero_grad()
    return run.end()


@pytest.mark.parametrize("how", ["a mask", "a slice of all the data"])
def test_a_batch_that_shares_no_more_than_a_constant_is_another(how: str, run: Ranks) -> None:
    assert run(quietly, skip_a_batch_beside_a_constant, how) == applied(0, 1, 4)


def try_again_beside_a_constant(how: str) -> float:
    """Also a batch of two forwards, as SAM's, of which the second is tried again."""
    run = Run()
    run.sync.detach()
    model = Masked()
    run.model, run.optimizers = model, [torch.optim.SGD(model.parameters(), lr=1.0)]
    run.sync = gs.attach(run.model, run.optimizers)
    mask = torch.ones(())
    for batch in range(3):
        x = run.x(batch)
        if how == "the second forward":
            model(x, mask)
        model.armed = "forward" if run.rank == 1 and batch == 1 else ""
        with run.caught():
            loss = model(x, mask)
        if model.armed:
            model.armed = ""
            loss = model(x, mask)
        loss.backward()
        run.step()
    return run.end()


@pytest.mark.parametrize("how", ["the only forward", "the second forward"])
def test_the_same_batch_beside_a_constant_is_tried_again(how: str, run: Ranks) -> None:
    assert run(quietly, try_again_beside_a_constant, how) == applied(0, 1, 2)


def evaluate(mode: str) -> float:
    """What raises outside of training, on one rank only."""
    run = Run()
    run.good(0)
    if run.rank == 1:
        run.model.armed = "forward"
        run.model.train(mode != "eval")
        context = torch.no_grad() if mode == "no_grad" else contextlib.nullcontext()
        with run.caught(), context:
            run.model(run.x(7))
        run.model.train()
        run.model.armed = ""
    run.good(1)
    return run.end()


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_an_evaluation_that_raises_is_no_batch(mode: str, run: Ranks) -> None:
    assert run(quietly, evaluate, mode) == applied(0, 1)


def differentiate(plan: gs.Plan, what: str) -> float:
    """torch.autograd.grad raises on one rank, and is nothing that the others wait for."""
    run = Run(plan)
    run.good(0)
    for where in BACKWARDS:
        run.model.armed = where if run.rank == 1 else ""
        x = run.x(7).requires_grad_()
        loss = run.model(x)
        wanted = {"input": [x], "parameters": list(run.model.parameters()), "one parameter": [run.model.b]}[what]
        with run.caught():
            torch.autograd.grad(loss, wanted, allow_unused=True)
    run.model.armed = ""
    run.good(1, 2)
    run.backward(3)
    run.step()
    return run.end()


@pytest.mark.parametrize("what", ["input", "parameters", "one parameter"])
@pytest.mark.parametrize("plan", [gs.Plan(), gs.Plan(pace=gs.accumulate(2)), gs.Plan(combine="sum")], ids=repr)
def test_a_derivative_that_raises_is_no_backward(plan: gs.Plan, what: str, run: Ranks) -> None:
    factor = {1: 1.0, 2: 0.5}[getattr(plan.pace, "k", 1)] * (2 if plan.combine == "sum" else 1)
    expected = [factor * value for value in applied(0, 1, 2, 3)]
    assert run(quietly, differentiate, plan, what) == expected


class Checkpointed(Line):
    """The same, and all of it is computed again in backward."""

    reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.armed == "forward":
            return super().forward(x)
        traps = self.armed
        loss = checkpoint(super().forward, x.requires_grad_(), use_reentrant=self.reentrant)
        assert isinstance(loss, torch.Tensor)
        self.armed = traps
        return loss * 1


def checkpointed(where: str, reentrant: bool, inputs: bool) -> float:
    run = Run()
    run.sync.detach()
    run.model = Checkpointed()
    run.model.reentrant = reentrant
    run.optimizers = [torch.optim.SGD(run.model.parameters(), lr=1.0)]
    run.sync = gs.attach(run.model, run.optimizers, gs.Plan(bucket_bytes=1024))
    for batch in range(5):
        run.model.armed = where if (run.rank, batch) == (1, 2) else ""
        raised = True
        with run.caught():
            loss = run.model(run.x(batch))
            loss.backward(inputs=list(run.model.parameters()) if inputs else None)
            raised = False
        if not raised:
            run.step()
        run.zero_grad()
    return run.end()


@pytest.mark.parametrize("where", [*BACKWARDS, "forward"])
@pytest.mark.parametrize(("reentrant", "inputs"), [(True, False), (False, False), (False, True)])
def test_checkpointing_of_either_kind_and_backward_of_some_inputs(
    where: str, reentrant: bool, inputs: bool, run: Ranks
) -> None:
    if where == AFTER and inputs:  # nothing comes after it then
        where = MIDDLE
    assert run(quietly, checkpointed, where, reentrant, inputs) == applied(0, 1, 3, 4)


# Loops of other shapes


def twice_in_a_step(where: str) -> float:
    """Two backwards of one forward, each synchronizes; the first raises, the loop goes on with the second."""
    run = Run()
    for batch in range(4):
        run.model.armed = where if (run.rank, batch) == (1, 2) else ""
        first = run.model(run.x(batch))
        run.model.armed = ""
        second = run.model(run.x(batch + 4))
        with run.caught():
            first.backward()
        second.backward()
        run.step()
    return run.end()


@pytest.mark.parametrize("where", BACKWARDS)
def test_another_backward_may_follow_without_a_forward(where: str, run: Ranks) -> None:
    kept = applied(0, 4, 1, 5, 6, 3, 7)
    assert run(quietly, twice_in_a_step, where) == kept


class Parts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = Line()


def parts_alone(steps: bool) -> str | float:
    model, rank = Parts(), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = gs.attach(model, optimizer, gs.Plan(bucket_bytes=1024), guard=gs.Guard(timeout=20))
    try:
        for batch in range(4):
            model.line.armed = MIDDLE if (rank, batch) == (1, 2) else ""
            raised = False
            try:
                model.line(torch.full((WIDTH,), gradient(batch, rank))).backward()
            except ArithmeticError:
                raised = True
            if steps or not raised:
                optimizer.step()
            optimizer.zero_grad()
        return float(model.line.a.detach()[0])
    except gs.GradSyncError as error:
        return str(error)
    finally:
        sync.detach()


def test_a_model_whose_parts_are_called_needs_the_step(run: Ranks) -> None:
    assert run(quietly, parts_alone, True) == applied(0, 1, 3)
    other, raising = run(quietly, parts_alone, False)
    assert "call optimizer.step(), which applies nothing" in raising
    assert "rank 1" in other


def closures(where: str) -> float:
    run = Run()
    for batch in range(4):
        run.model.armed = where if (run.rank, batch) == (1, 2) else ""

        def closure(batch: int = batch) -> torch.Tensor:
            run.optimizer.zero_grad()
            loss = run.model(run.x(batch))
            loss.backward()
            return loss

        with run.caught():
            run.optimizer.step(closure)
    return run.end()


@pytest.mark.parametrize("where", [*BACKWARDS, "forward"])
def test_a_closure_may_raise(where: str, run: Ranks) -> None:
    assert run(quietly, closures, where) == applied(0, 1, 3)


def two_models(where: str, which: int) -> tuple[float, float]:
    first, second = Run(), Run()
    for batch in range(4):
        for index, run in enumerate((first, second)):
            run.model.armed = where if (run.rank, batch, index) == (1, 2, which) else ""
        raised = True
        with first.caught():
            (first.model(first.x(batch)) + second.model(second.x(batch))).backward()
            raised = False
        for run in (first, second):
            if not raised:
                run.step()
            run.zero_grad()
    return first.end(), second.end()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("where", BACKWARDS)
def test_two_models_of_one_backward_both_drop_it(where: str, which: int, run: Ranks) -> None:
    assert run(quietly, two_models, where, which) == [(value, value) for value in applied(0, 1, 3)]


def two_optimizers(where: str, steps: bool) -> float:
    run = Run(num_optimizers=2)
    run.good(0)
    run.bad(1, where, steps=steps)
    run.good(2)
    return run.end()


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("where", [*BACKWARDS, "forward"])
def test_several_optimizers(where: str, steps: bool, run: Ranks) -> None:
    assert run(quietly, two_optimizers, where, steps) == applied(0, 2)


def scaled(where: str, known: bool) -> tuple[float, float]:
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=3)
    run = Run(scaler=scaler if known else None)
    for batch in range(7):
        run.model.armed = where if (run.rank, batch) == (1, 2) else ""
        with run.caught():
            scaler.scale(run.model(run.x(batch))).backward()
        if known or not run.sync.dropped:
            scaler.step(run.optimizer)
            scaler.update()
        run.zero_grad()
    return run.end(), scaler.get_scale()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("where", [*BACKWARDS, "forward"])
def test_a_grad_scaler_keeps_one_scale_on_all_ranks(where: str, known: bool, run: Ranks) -> None:
    assert run(quietly, scaled, where, known) == [(value, 16.0) for value in applied(0, 1, 3, 4, 5, 6)]


def scheduled(where: str, pace: Any) -> tuple[float, list[float]]:
    """The loop of docs/failures.md: go on with step(), and with the scheduler where something was applied."""
    run = Run(gs.Plan(pace=pace, bucket_bytes=1024))
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 2, gamma=0.5)
    rates = []
    for batch in range(BATCHES):
        run.model.armed = where if (run.rank, batch) == (1, 3) else ""
        with run.caught():
            run.model(run.x(batch)).backward()
        run.optimizer.step()
        if not (run.sync.dropped or run.sync.mid_window):
            scheduler.step()
        run.optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    while run.sync.drain():
        run.step()
    return run.end(), rates


@pytest.mark.parametrize("where", [*BACKWARDS, "forward"])
@pytest.mark.parametrize("pace", [gs.every_step(), gs.accumulate(2), gs.delayed(1), gs.local_sgd(2)], ids=repr)
def test_learning_rates_stay_equal(pace: Any, where: str, run: Ranks) -> None:
    first, second = run(quietly, scheduled, where, pace)
    assert first == second


def given_up(where: str, at: int, pace: Any) -> float:
    """A window of three by hand whose rest is skipped after an exception, and step() is called."""
    run = Run(gs.Plan(pace=pace, bucket_bytes=1024))
    for window in range(2):
        with run.caught():
            for number in range(3):
                run.model.armed = where if (run.rank, window, number) == (1, 1, at) else ""
                with run.sync.no_sync() if number < 2 else contextlib.nullcontext():
                    run.model(run.x(3 * window + number)).backward()
        run.step()
    run.good(6)
    while run.sync.drain():
        run.step()
    return run.end()


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("where", [*BACKWARDS, "forward"])
@pytest.mark.parametrize("pace", [gs.every_step(), gs.delayed(1)], ids=repr)
def test_a_window_by_hand_that_is_given_up_ends_with_the_step(pace: Any, where: str, at: int, run: Ranks) -> None:
    assert run(quietly, given_up, where, at, pace) == applied(0, 1, 2, 6)


def weigh(where: str, place: str) -> float:
    """set_batch_weight() where people put it; weights 1 and 3, of which each step's mean is made."""
    run = Run()
    for batch in range(4):
        run.model.armed = where if (run.rank, batch) == (1, 2) else ""
        weight = (1.0 if run.rank == 0 else 3.0) * 2.0**batch
        raised = True
        with run.caught():
            if place == "before forward":
                run.sync.set_batch_weight(weight)
            loss = run.model(run.x(batch))
            if place == "after forward":
                run.sync.set_batch_weight(weight)
            loss.backward()
            raised = False
        if not raised:
            run.step()
        run.zero_grad()
    return run.end()


@pytest.mark.parametrize("place", ["before forward", "after forward"])
@pytest.mark.parametrize("where", [*BACKWARDS, "forward"])
def test_weights_belong_to_their_batch(where: str, place: str, run: Ranks) -> None:
    expected = -sum(gradient(batch, 0) / 4 + gradient(batch, 1) * 3 / 4 for batch in (0, 1, 3))
    assert run(quietly, weigh, where, place) == [expected] * 2


def weigh_and_save(what: str) -> float:
    """Between the weight of a batch and its forward a checkpoint is made, or what was launched comes to its end."""
    run = Run()
    batches = iter(run.sync.data(Stumbles(1 if what == "loader" and run.rank == 1 else None)))
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return run.end()
        except ArithmeticError:
            continue
        run.sync.set_batch_weight(3.0 if run.rank else 1.0)
        run.sync.state_dict()
        loss = run.model(run.x(batch))
        if what == "callback" and batch == 1:
            loss.register_hook(lambda _: Variable._execution_engine.queue_callback(fail))
        try:
            loss.backward()
        except ArithmeticError:
            continue
        run.step()
        run.zero_grad()


class Stumbles:
    """Four batches, of which one may raise."""

    def __init__(self, at: int | None) -> None:
        self.batches, self.at = iter(range(4)), at

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        batch = next(self.batches)
        if batch == self.at:
            raise ArithmeticError("a file is gone")
        return batch


def fail() -> None:
    raise ArithmeticError("a user's own exception")


@pytest.mark.parametrize("what", ["loader", "callback"])
def test_a_weight_outlives_a_checkpoint(what: str, run: Ranks) -> None:
    expected = -sum(gradient(batch, 0) / 4 + gradient(batch, 1) * 3 / 4 for batch in (0, 2, 3))
    assert run(quietly, weigh_and_save, what) == [expected] * 2


def prefetch() -> float:
    """A loop that asks for the next batch before the backward of this one; its loader raises once."""
    run = Run()

    def loader() -> Any:
        for batch in range(6):
            yield (batch, (run.rank, batch) == (1, 3))

    class Failing:
        def __init__(self) -> None:
            self.inner = loader()

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            batch, bad = next(self.inner)
            if bad:
                raise ArithmeticError("a file is gone")
            return int(batch)

    batches = iter(run.sync.data(Failing()))
    coming: list[int | None] = [next(batches)]
    while coming:
        batch, coming = coming[0], []
        loss = None if batch is None else run.model(run.x(batch))
        try:
            coming = [next(batches)]
        except StopIteration:
            pass
        except ArithmeticError:
            coming = [None]
        if loss is not None:
            loss.backward()
            run.step()
    return run.end()


def test_a_loader_that_raises_ahead_of_a_backward(run: Ranks) -> None:
    assert run(quietly, prefetch) == applied(0, 1, 2, 4, 5)


def plain_loader() -> float:
    """Nobody hears of it, but step() is called: this rank takes part without a gradient."""
    run = Run()
    run.good(0)
    if run.rank == 0:
        run.backward(1)
    run.step()
    run.good(2)
    return run.end()


def test_without_a_word_step_takes_part_without_a_gradient(run: Ranks) -> None:
    assert run(quietly, plain_loader) == [value - gradient(1, 0) / 2 for value in applied(0, 2)]


def interrupt_the_end() -> float:
    """A callback of somebody else at the end of backward raises before ours have waited."""
    run = Run()
    for batch in range(4):
        loss = run.model(run.x(batch))
        if (run.rank, batch) == (1, 2):
            loss.register_hook(lambda _: Variable._execution_engine.queue_callback(fail))
        with run.caught():
            loss.backward()
        run.step()
    return run.end()


def test_another_callback_that_raises_cuts_nothing_short(run: Ranks) -> None:
    assert run(quietly, interrupt_the_end) == applied(0, 1, 2, 3)


def said(inside: bool) -> list[str]:
    """What a rank hears of a backward that raised, where step() is called in the `except` block or after it."""
    run = Run()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in range(3):
            run.model.armed = MIDDLE if (run.rank, batch) == (1, 1) else ""
            try:
                run.model(run.x(batch)).backward()
            except ArithmeticError:
                if inside:
                    run.step()
                    continue
            run.step()
    run.sync.detach()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("inside", [True, False])
def test_all_hear_which_rank_raised_and_only_that_one_may_hear_what(inside: bool, run: Ranks) -> None:
    [first], [second] = run(said, inside)
    what = " (ArithmeticError: a user's own exception)" if inside else ""
    assert first == "[rank 0/2 step 1] backward did not finish on rank 1: the batch is skipped on every rank"
    assert second == f"[rank 1/2 step 1] backward did not finish on rank 1{what}: the batch is skipped on every rank"


# When it does not stop


def always(where: str, pace: Any) -> tuple[int, str]:
    run = Run(gs.Plan(pace=pace, bucket_bytes=1024))
    try:
        for batch in range(60):
            run.bad(batch % BATCHES, where)
    except gs.GradSyncError as error:
        return batch, str(error)
    finally:
        run.sync.detach()
    return -1, ""


@pytest.mark.parametrize(("pace", "last"), [(gs.every_step(), 9), (gs.accumulate(2), 19), (gs.delayed(1), 10)])
@pytest.mark.parametrize("where", [BEFORE, "forward"])
def test_ten_in_a_row_are_an_error_that_names_the_rank(where: str, pace: Any, last: int, run: Ranks) -> None:
    (at, first), (_, second) = run(quietly, always, where, pace)
    assert at == last
    for text in (first, second):
        assert "10 batches in a row came to nothing on every rank" in text
        assert ("forward raised" if where == "forward" else "backward did not finish") + " on rank 1" in text


def alone() -> str:
    run = Run(gs.Plan(pace=gs.local_sgd(64)))
    try:
        for batch in range(12):
            run.bad(batch % BATCHES, BEFORE)
    except gs.GradSyncError as error:
        return str(error)
    finally:
        run.sync.detach()
    return ""


def test_ten_in_a_row_of_one_rank_alone_are_its_error(run: Ranks) -> None:
    first, second = run(quietly, alone)
    assert "the 10th batch in a row" in second
    assert "10th" not in first
