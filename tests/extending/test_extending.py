"""A compressor, an algorithm and a pace that gradsync has never heard of: trained, priced, saved and continued."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import meet
import pytest
import torch
import torch.distributed as dist
from every_other import EveryOther
from meet import Meet
from star import Star

import gradsync as gs
from gradsync.algorithms.check import check
from gradsync.algorithms.schedule import Schedule, Transfer
from gradsync.cluster import Cluster, CodecSpeed, Link
from gradsync.plan import paces
from gradsync.plan.pace_recipe import BetweenSteps, DuringNextStep, Exchange, PaceRecipe
from gradsync.planner.predict import predict
from gradsync.planner.profile import Gradient, ModelProfile
from gradsync.planner.recommend import recommend
from gradsync.planner.snippet import as_python, in_words
from gradsync.probe.codecs import codec_speed
from gradsync.probe.probe_group import open_probe_group
from gradsync.transport.host_meeting import declare_host

PLANS = {
    "a compressor": gs.Plan(compress=gs.error_feedback(EveryOther()), bucket_bytes=1024),
    "a compressor, by parameter": gs.Plan(compress=gs.by_parameter({"0.*": EveryOther()}, default=gs.bf16())),
    "an algorithm": gs.Plan(algorithm=Star()),
    "a pace": gs.Plan(pace=Meet(steps=2)),
    "a compressor and an algorithm": gs.Plan(algorithm=Star(), compress=gs.warmup(EveryOther(), 3)),
    "a pace and an algorithm": gs.Plan(algorithm=Star(), pace=Meet(steps=3)),
}
FOLDER = Path(__file__).parent
TOYS = ("every_other.py", "star.py", "meet.py")
every_plan = pytest.mark.parametrize("name", PLANS)
Run = Callable[..., Any]


class Training:
    """A small model on data of this rank's own."""

    def __init__(self, plan: gs.Plan) -> None:
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)
        self.sync = gs.attach(self.model, self.optimizer, plan)

    def train(self, steps: range) -> torch.Tensor:
        for step in steps:
            data = torch.randn(16, 6, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
            (self.model(data) - data[:, :3]).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    def save(self) -> bytes:
        file = io.BytesIO()
        torch.save([each.state_dict() for each in (self.model, self.optimizer, self.sync)], file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        states = torch.load(io.BytesIO(saved), weights_only=True)
        for each, state in zip((self.model, self.optimizer, self.sync), states, strict=True):
            each.load_state_dict(state)


def trained(plan: gs.Plan, steps: int = 12) -> torch.Tensor:
    training = Training(plan)
    weights = training.train(range(steps))
    training.sync.detach()
    return weights


def trained_by_name(name: str) -> torch.Tensor:
    return trained(PLANS[name])


@every_plan
def test_it_trains_and_ranks_stay_equal(name: str, run: Run) -> None:
    one, other = run(trained_by_name, name)
    assert torch.equal(one, other)
    assert one.isfinite().all()


def continue_from(name: str) -> None:
    whole = Training(PLANS[name])
    whole.train(range(6))
    saved = whole.save()
    expected = whole.train(range(6, 12))
    whole.sync.detach()
    resumed = Training(PLANS[name])
    resumed.load(saved)
    assert torch.equal(resumed.train(range(6, 12)), expected)
    resumed.sync.detach()


@every_plan
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(name: str, run: Run) -> None:
    run(continue_from, name)


def check_every_other() -> None:
    model = torch.nn.Linear(7, 1, bias=False)
    weight = model.weight
    sync = gs.attach(model, plan=gs.Plan(compress=gs.error_feedback(EveryOther())))
    given = torch.arange(1.0, 8.0) * (1 + 2 * dist.get_rank())  # it is the gradient too
    mean, waiting = torch.arange(1.0, 8.0) * 2, torch.zeros(7)
    for step in range(6):
        weight.grad = None
        model(given).sum().backward()
        assert weight.grad is not None
        if step == 0:  # as it is: buckets are not laid out for good yet
            assert torch.equal(weight.grad[0], mean)
            continue
        waiting += mean
        expected = torch.zeros(7)
        expected[step % 2 :: 2] = waiting[step % 2 :: 2]
        waiting[step % 2 :: 2] = 0
        assert torch.equal(weight.grad[0], expected), step
    left = sync.residuals()["weight"][0]
    dist.all_reduce(left)
    assert torch.equal(left, waiting)
    assert sync.stats()["every_other.ratio"] == pytest.approx(7 / 4)
    sync.detach()


def test_the_compressor_sends_half_and_keeps_the_other_half(run: Run) -> None:
    run(check_every_other)


def trained_on_two_hosts(plan: gs.Plan) -> torch.Tensor:
    declare_host("aab"[dist.get_rank()])
    try:
        return trained(plan)
    finally:
        declare_host(None)


def test_the_compressor_works_between_hosts_only(run: Run) -> None:
    first, *others = run(trained_on_two_hosts, gs.Plan(compress=gs.across_hosts(EveryOther())), ranks=3)
    assert all(torch.equal(first, other) for other in others)


def test_the_algorithm_adds_up_every_rank_once_and_as_ddp_does(run: Run) -> None:
    for size in range(1, 6):
        check(Star().schedule(size))
    assert torch.equal(run(trained_by_name, "an algorithm")[0], run(trained, gs.Plan(algorithm=gs.native()))[0])


def test_the_pace_is_local_sgd_to_the_bit(run: Run) -> None:
    assert torch.equal(run(trained_by_name, "a pace")[0], run(trained, gs.Plan(pace=gs.local_sgd(2)))[0])


@dataclass(frozen=True)
class MeetInside(PaceRecipe):
    """`Meet` as a pace of the package: it says its exchange, and its name in `pace/`."""

    at_work = "meet_now_and_then:MeetPace"

    steps: int

    def exchange(self) -> Exchange:
        return BetweenSteps(self.steps)


@contextmanager
def meet_inside() -> Iterator[None]:
    """What docs/extending.md says that it takes: one file in `pace/`, and one line in the table."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "gradsync.pace.meet_now_and_then", meet)
        patched.setitem(paces.KINDS, "meet", MeetInside)
        yield


def trained_inside(path: str) -> torch.Tensor:
    with meet_inside():
        return trained(gs.Plan.load(path))


def test_a_pace_of_the_package_is_one_file_and_one_line_in_a_table(run: Run, tmp_path: Path) -> None:
    plan, path = gs.Plan(pace=MeetInside(2)), tmp_path / "plan.toml"
    with meet_inside():
        plan.save(path)
        assert gs.Plan.load(path) == plan
        assert in_words(plan) == "exact · meet(steps=2)"
        with pytest.raises(ValueError, match='combine="sum" adds gradients up, but meet keeps parameters'):
            gs.Plan(pace=plan.pace, combine="sum")
        inside, outside = (predict(PROFILE, CLUSTER, gs.Plan(pace=pace)) for pace in (plan.pace, Meet(2)))
        assert replace(inside, plan=outside.plan) == outside
    assert torch.equal(run(trained_inside, str(path))[0], run(trained_by_name, "a pace")[0])


@dataclass(frozen=True)
class Beside(PaceRecipe):
    """From outside, and it says more than its steps."""

    def exchange(self) -> Exchange:
        return DuringNextStep(2)

    def open(self, context: Any) -> Any:
        return None


def test_a_pace_from_outside_may_say_what_it_exchanges() -> None:
    beside, delayed = (predict(PROFILE, CLUSTER, gs.Plan(pace=pace)) for pace in (Beside(), gs.delayed(2)))
    assert replace(beside, plan=delayed.plan) == delayed
    assert gs.Plan(pace=Beside(), combine="sum").canonical()["pace"] == {"kind": "Beside"}


def all_reduced() -> torch.Tensor:
    return gs.all_reduce(torch.arange(4.0), algorithm=Star(), compress=EveryOther())


def test_a_single_tensor_takes_them_too(run: Run) -> None:
    found = run(all_reduced)[0].tolist()
    assert found in ([0.0, 0.0, 2.0, 0.0], [0.0, 1.0, 0.0, 3.0])


def disagree() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(gs.Disagreement, match="pace"):
        gs.attach(model, torch.optim.SGD(model.parameters()), gs.Plan(pace=Meet(steps=2 + dist.get_rank())))


def test_ranks_compare_their_fields(run: Run) -> None:
    run(disagree)


# What a planner makes of them

PROFILE = ModelProfile(
    tuple(Gradient(f"w{i}", (512, 512), torch.float32, 0.01 * i) for i in range(8)), 0.04, 0.08, 0.01
)
CLUSTER = Cluster(((0,), (1,)), Link(5e-6, 5e9), Link(100e-6, 1e8))


def test_each_has_a_price() -> None:
    exact = predict(PROFILE, CLUSTER, gs.Plan(algorithm=gs.ring()))
    half = predict(PROFILE, CLUSTER, gs.Plan(algorithm=gs.ring(), compress=EveryOther()))
    assert half.nbytes == exact.nbytes / 2
    assert half.step_s < exact.step_s
    assert half.quality == "lossy"
    star = predict(PROFILE, CLUSTER, gs.Plan(algorithm=Star()))
    assert star.step_s > exact.step_s
    meet = predict(PROFILE, CLUSTER, gs.Plan(pace=Meet(steps=4)))
    assert meet.nbytes == pytest.approx(predict(PROFILE, CLUSTER, gs.Plan()).nbytes / 4, abs=1)
    assert meet.step_s == predict(PROFILE, CLUSTER, gs.Plan(pace=gs.local_sgd(4))).step_s
    assert recommend(PROFILE, CLUSTER)  # and nothing of theirs is in the way of the others


def probed() -> CodecSpeed:
    world = dist.group.WORLD
    assert world is not None
    with open_probe_group(world, brief=True) as crew:
        return codec_speed(crew, EveryOther())


def test_a_probe_times_the_compressor_and_a_planner_believes_it(run: Run) -> None:
    speed, other = run(probed)
    assert speed == other
    assert speed.encode_s > 0
    assert speed.decode_s > 0
    plan, device = gs.Plan(compress=EveryOther()), CLUSTER.device
    slow = replace(device, codecs=(speed._replace(encode_s=1e-6),))
    assert speed.kind == "every_other"
    assert predict(PROFILE, replace(CLUSTER, device=slow), plan).step_s > predict(PROFILE, CLUSTER, plan).step_s


def test_they_are_named_by_their_classes() -> None:
    plan = gs.Plan(algorithm=Star(), compress=gs.warmup(EveryOther(), 2), pace=Meet(steps=3))
    assert plan.canonical()["compress"] == {"kind": "warmup", "steps": 2, "inner": {"kind": "EveryOther"}}
    assert in_words(plan) == "Star · warmup(EveryOther(), steps=2) · Meet(steps=3)"
    assert as_python(plan) == (
        "gs.Plan(algorithm=Star(), compress=gs.warmup(EveryOther(), steps=2), pace=Meet(steps=3))"
    )


@every_plan
def test_no_file_holds_what_it_cannot_make_again(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"(EveryOther|Star|Meet)\b.* from outside of gradsync.* keep the plan in Python"
    ):
        PLANS[name].save(tmp_path / "plan.toml")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"needs a kind, one of .*got \{'kind': 'Star'\}"):
        gs.Plan.from_canonical({"algorithm": {"kind": "Star"}})


class Loose:
    """Neither frozen nor a dataclass."""

    steps = 2

    def open(self, site: object) -> None: ...
    def schedule(self, hosts: object) -> None: ...


def test_what_ranks_could_not_compare_is_refused() -> None:
    with pytest.raises(TypeError, match="pace must be one of"):
        gs.Plan(pace=Loose())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="algorithm must be None or one of"):
        gs.Plan(algorithm=Loose())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='combine="sum" adds gradients up, but Meet keeps parameters'):
        gs.Plan(pace=Meet(2), combine="sum")


@pytest.mark.parametrize("toy", TOYS)
def test_a_toy_is_short(toy: str) -> None:
    assert len((FOLDER / toy).read_text().splitlines()) <= 40


def test_the_page_shows_them_as_they_are() -> None:
    page = (FOLDER.parents[1] / "docs" / "extending.md").read_text()
    for toy in TOYS:
        assert f"```python\n{(FOLDER / toy).read_text()}```" in page, f"docs/extending.md shows another {toy}"


@dataclass(frozen=True)
class OneWay:
    """Only the second rank hears of the first."""

    ranks: int = 2

    def schedule(self, hosts: Any) -> Any:
        return Schedule(self.ranks, 1, ((Transfer(0, 1, chunk=0, add=True),),))


@dataclass(frozen=True)
class Nothing:
    def schedule(self, hosts: Any) -> Any:
        return None


@dataclass(frozen=True)
class Spoken(EveryOther):
    def rounds(self, bucket: Any) -> Any:
        yield "sum"


@dataclass(frozen=True)
class Silent(EveryOther):
    def rounds(self, bucket: Any) -> Any:
        return None


@dataclass(frozen=True)
class Closed:
    steps: int = 2

    def open(self, context: Any) -> Any:
        return None


def refused(plan: gs.Plan) -> str:
    """What a run with this plan raises in its first two steps."""
    try:
        Training(plan).train(range(2))
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"algorithm": OneWay()}, "ValueError: OneWay.schedule does not make every rank's sum: "),
        ({"algorithm": OneWay(3)}, "ValueError: OneWay.schedule is for 3 ranks, but the group has 2"),
        (
            {"algorithm": Nothing()},
            "TypeError: Nothing.schedule must return a gradsync.algorithms.schedule.Schedule, got",
        ),
        ({"compress": Spoken()}, "TypeError: the rounds of a compressor are made of Compute, Sum, Gather, "),
        ({"compress": Silent()}, "TypeError: the rounds of a compressor are what a generator yields, got None"),
        ({"pace": Closed()}, "TypeError: Closed.open must return a gradsync.pace.contract.Pace, got None"),
    ],
)
def test_a_mistake_in_ones_own_is_told_in_a_sentence(fields: dict[str, Any], sentence: str, run: Run) -> None:
    assert all(text.startswith(sentence) for text in run(refused, gs.Plan(**fields))), sentence


def test_a_codec_has_a_name_and_a_pace_what_it_needs() -> None:
    class Anonymous(EveryOther):
        name = None

    with pytest.raises(TypeError, match="Anonymous needs a name for reports"):
        gs.Plan(compress=Anonymous())
    with pytest.raises(TypeError, match="a pace of your own is a frozen dataclass with steps and open"):
        gs.Plan(pace=type("Endless", (), {"open": lambda self, context: None})())
