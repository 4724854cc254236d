"""DiLoCo: outer steps computed by hand, its place between synchronous and local SGD, and few bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from lines import Run, assert_equal_on_all_ranks, gathered

import gradsync as gs
from gradsync.pace.fragments import cut

Ranks = Callable[..., list[Any]]
OUTER = gs.nesterov(0.5, 0.5)
PLAIN = gs.nesterov(1.0, 0.0)


def history(pace: Any, num: int, drains: bool = False) -> list[list[float]]:
    run = Run(gs.Plan(pace=pace))
    values = run.steps(num) + ([run.drain()] if drains else [])
    run.sync.detach()
    return values


def of_a(histories: list[list[list[float]]]) -> list[list[float]]:
    return [[a for a, _ in each] for each in histories]


# By hand. Gradients of a: 1 on rank 0, 3 on rank 1; of b: 2 and 4. Both begin at 1.


def test_one_inner_step(run: Ranks) -> None:
    # Δ = 2: b = 2, w = 1 − ½(2 + 1) = −½.   Δ = 2: b = 3, w = −½ − ½(2 + 1½) = −2¼.
    assert of_a(run(history, gs.diloco(1, OUTER), 2)) == [[-0.5, -2.25]] * 2


def test_momentum_over_two_outer_steps(run: Ranks) -> None:
    # p = −1 and −5: Δ = 4, b = 4, w = 1 − ½(4 + 2) = −2.   p = −4 and −8: Δ = 4, b = 6, w = −2 − ½(4 + 3) = −5½.
    assert of_a(run(history, gs.diloco(2, OUTER), 4)) == [[0, -2, -3, -5.5], [-2, -2, -5, -5.5]]


def test_fragments_take_turns(run: Ranks) -> None:
    first, second = run(history, gs.diloco(2, OUTER, fragments=2), 4)
    # a after steps 1 and 3: Δ = 2, b = 2, w = −½;   then p = −2½ and −6½: Δ = 4, b = 5, w = −½ − ½(4 + 2½) = −3¾.
    # b after steps 2 and 4: Δ = 6, b = 6, w = −3½;  then p = −7½ and −11½: Δ = 6, b = 9, w = −3½ − ½(6 + 4½) = −8¾.
    assert first == [[-0.5, -1], [-1.5, -3.5], [-3.75, -5.5], [-4.75, -8.75]]
    assert second == [[-0.5, -3], [-3.5, -3.5], [-3.75, -7.5], [-6.75, -8.75]]


def test_a_delayed_exchange_is_mixed_with_the_parameters_of_then(run: Ranks) -> None:
    first, second = of_a(run(history, gs.diloco(2, OUTER, delay=1, mixing=0.5), 5, True))
    # Step 2 sends Δ = 4, from −1 and −5. Step 3 makes −2 and −8 of them, w = −2, p = ½p − 1.
    # Step 4 sends Δ = 3½, from −3 and −8. Step 5: −4 and −11, b = 5½, w = −2 − ½(3½ + 2¾) = −5⅛, p = ½p − 2 9/16.
    assert first[:-1] == [0, -1, -2, -3, -4.5625]
    assert second[:-1] == [-2, -5, -5, -8, -8.0625]
    # drain(): Δ = 1 3/16, b = 3 15/16, w = −5⅛ − ½(1 3/16 + 1 31/32).
    assert first[-1] == second[-1] == -6.703125


def test_without_mixing_the_steps_taken_meanwhile_are_lost(run: Ranks) -> None:
    # As before, but after step 3 both are w = −2, so that step 4 sends Δ = 2: b = 4, w = −2 − ½(2 + 2) = −4.
    assert of_a(run(history, gs.diloco(2, OUTER, delay=1), 5)) == [[0, -1, -2, -3, -4], [-2, -5, -2, -5, -4]]


def test_all_mixing_keeps_every_rank_to_itself_until_drain(run: Ranks) -> None:
    # The sent Δ = 4 moves w to −2; drain() sends Δ = mean of (−2 + 2, −2 + 8) = 3: b = 5, w = −2 − ½(3 + 2½).
    assert of_a(run(history, gs.diloco(2, OUTER, mixing=1), 3, True)) == [[0, -1, -2, -4.75], [-2, -5, -8, -4.75]]


# Its place among the paces


def check_relations() -> None:
    pairs = [(gs.diloco(1, PLAIN), gs.every_step()), (gs.diloco(3, PLAIN), gs.local_sgd(3))]
    pairs.append((gs.diloco(1, PLAIN), gs.local_sgd(1)))
    for left, right in pairs:
        runs = [Run(gs.Plan(pace=pace), width=5) for pace in (left, right)]
        for t in range(7):
            for each in runs:
                each.random_step(t)
            assert torch.equal(runs[0].parameters(), runs[1].parameters()), f"{left} and {right} after step {t}"
        for each in runs:
            each.sync.detach()


def test_a_plain_outer_step_is_local_sgd_and_with_one_inner_step_synchronous(run: Ranks) -> None:
    run(check_relations)


def check_alone() -> None:
    runs = [Run(gs.Plan(pace=gs.diloco(3, PLAIN, fragments=3), compress=gs.int8())), Run(gs.Plan())]
    for each in runs:
        for t in range(10):
            each.step(0.1 * t, 0.3)
        each.sync.detach()
    torch.testing.assert_close(runs[0].parameters(), runs[1].parameters())


def test_one_rank_alone_trains_as_without_us(run: Ranks) -> None:
    run(check_alone, ranks=1)


def check_outer_optimizer() -> None:
    run = Run(gs.Plan(pace=gs.diloco(2, gs.nesterov(0.7, 0.9))), width=7)
    w = run.parameters().requires_grad_()
    outer = torch.optim.SGD([w], lr=0.7, momentum=0.9, nesterov=True)
    for t in range(0, 8, 2):
        data = [torch.Generator().manual_seed(100 * step + run.rank) for step in (t, t + 1)]
        w.grad = sum(torch.randint(-8, 9, (2, 7), generator=each).float() for each in data).flatten()
        dist.all_reduce(w.grad)
        w.grad /= 2
        outer.step()
        run.random_step(t)
        run.random_step(t + 1)
        torch.testing.assert_close(run.parameters(), w.detach())
    run.sync.detach()


def test_the_outer_step_is_that_of_torch(run: Ranks) -> None:
    run(check_outer_optimizer)


# Compressed


def check_compressed(compress: Any) -> None:
    run = Run(gs.Plan(pace=gs.diloco(2, PLAIN), compress=compress), width=40)
    before, owed = run.parameters(), torch.zeros(80)
    for t in range(6):
        data = torch.Generator().manual_seed(1000 * t + run.rank)
        change = torch.randn(2, 40, generator=data)
        run.step(*change)
        owed += sum(gathered(change.flatten())) / 2
        if t % 2:
            assert run.sync.replicas_equal
            assert_equal_on_all_ranks(run)
            residuals = run.sync.residuals()
            kept = sum(gathered(torch.cat([residuals["a"], residuals["b"]])))
            assert kept.abs().max() > 0
            torch.testing.assert_close(before - run.parameters() + kept, owed)
    run.sync.detach()


@pytest.mark.parametrize("compress", [gs.int4(block=32), gs.int8(), gs.sign()], ids=["int4", "int8", "sign"])
def test_what_is_owed_is_sent_or_kept(compress: Any, run: Ranks) -> None:
    run(check_compressed, compress)


def check_convergence() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    pace = gs.diloco(4, gs.nesterov(0.7, 0.6), fragments=2, delay=1, mixing=0.5)
    sync, losses = gs.attach(model, optimizer, gs.Plan(pace=pace, compress=gs.int4(block=32))), []
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(80):
        x = torch.randn(32, 4, generator=data)
        loss = torch.nn.functional.mse_loss(model(x.bfloat16()).float(), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert not sync.drain()
    first, second = gathered(torch.cat([param.detach().flatten() for param in model.parameters()]))
    assert torch.equal(first, second)
    assert sync.replicas_equal
    assert sum(losses[-5:]) < sum(losses[:5]) / 4, losses
    state = sync.state_dict()
    assert {state[f"gradsync.pace.diloco.{key}.0.weight"].dtype for key in ("global", "momentum")} == {torch.float32}
    sync.detach()


def test_half_precision_in_fragments_with_four_bits_converges(run: Ranks) -> None:
    run(check_convergence)


# Fragments


@given(nbytes=st.lists(st.integers(0, 99), max_size=12), num_parts=st.integers(1, 6))
def test_fragments_follow_each_other_and_none_is_empty_without_need(nbytes: list[int], num_parts: int) -> None:
    parts = cut(nbytes, num_parts)
    assert len(parts) == num_parts
    assert [index for part in parts for index in part] == list(range(len(nbytes)))
    assert sum(map(bool, parts)) == min(num_parts, len(nbytes))
