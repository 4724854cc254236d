"""Shard, optimizer copy, payload and compensation, each by itself."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsync.errors import GradSyncError
from gradsync.pace.async_sgd.mail import Mail
from gradsync.pace.async_sgd.messages import (
    REQUEST_TAG,
    Inbox,
    MessageKind,
    OwnerAnswer,
    ShardMessage,
    pack,
    payload_tag,
    read,
    unpack,
    write,
)
from gradsync.pace.async_sgd.owner import Owner
from gradsync.pace.async_sgd.shard import Shard, partition
from gradsync.pace.async_sgd.staleness import Histogram
from gradsync.plan.paces import AsyncSGD


class Scaled(torch.optim.SGD):
    """A user's class with an __init__ and an attribute of its own."""

    def __init__(self, factor: float, *, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, lr=1.0)
        self.factor = factor

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    parameter.data -= self.factor * group["lr"] * parameter.grad


def one(value: float = 1.0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor([value]))


@given(nbytes=st.lists(st.integers(0, 100), max_size=30), num_shards=st.integers(1, 6))
def test_shards_hold_every_parameter_once_and_are_balanced(nbytes: list[int], num_shards: int) -> None:
    shards = partition(nbytes, num_shards)
    assert sorted(index for shard in shards for index in shard) == list(range(len(nbytes)))
    sizes = [sum(nbytes[index] for index in shard) for shard in shards]
    assert max(sizes) - min(sizes) <= max(nbytes, default=0)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e5m2]
)
def test_tensors_come_back_from_a_freight_as_they_were(dtype: torch.dtype) -> None:
    tensors = [torch.randn(3, 2).to(dtype), None, torch.randn(4, 6).to(dtype).t(), torch.zeros(0, 3).to(dtype)]
    like = [torch.empty(shape, dtype=dtype) for shape in ((3, 2), (5,), (6, 4), (0, 3))]
    back = unpack(pack(tensors), like)
    assert back[1] is None
    for index in (0, 2, 3):
        there, was = back[index], tensors[index]
        assert there is not None
        assert was is not None
        assert torch.equal(there.contiguous().view(torch.uint8), was.contiguous().view(torch.uint8))


@given(
    kind=st.sampled_from([MessageKind.PUSH, MessageKind.PARAMETERS]),
    shard=st.integers(0, 4095),
    version=st.integers(0, 65535),
    rounds=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_a_tag_says_kind_shard_and_version_and_fits_a_c_int(
    kind: MessageKind, shard: int, version: int, rounds: tuple[int, int]
) -> None:
    """Beyond 4096 shards and 65536 versions it begins anew, and never reaches into another part of the tag."""
    tag = payload_tag(kind, shard + 4096 * rounds[0], version + 65536 * rounds[1])
    assert (tag >> 28, tag >> 16 & 4095, tag & 65535) == (kind, shard, version)
    assert REQUEST_TAG < tag < 1 << 31


def test_a_twin_has_the_users_class_state_and_present_hyper_parameters() -> None:
    parameter, other = one(), one()
    optimizer = Scaled(2.0, params=[parameter, other])
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("the user's hooks are for the user's steps"))
    optimizer.state[parameter]["count"] = 5
    shard = Shard([("w", parameter)], [optimizer])
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # wraps the user's step
    optimizer.param_groups[0]["lr"] = 0.25
    shard.note()
    shard.update([torch.tensor([1.0])])
    assert shard.masters[0].item() == 0.5
    assert shard.optimizer_copies[0].state_of(shard.masters[0]) == {"count": 6}
    assert (parameter.item(), optimizer.state[parameter]["count"]) == (1.0, 5)


def test_after_a_restart_it_goes_on_from_the_parameters_and_the_optimizers_state() -> None:
    parameter = one()
    optimizer = Scaled(2.0, params=[parameter])
    shard = Shard([("w", parameter)], [optimizer])
    shard.update([torch.tensor([1.0])])
    with torch.no_grad():
        parameter.fill_(5.0)
    optimizer.state[parameter]["count"] = 7
    shard.restart([parameter], [optimizer])
    shard.update([torch.tensor([1.0])])
    assert shard.masters[0].item() == 3.0
    assert shard.optimizer_copies[0].state_of(shard.masters[0]) == {"count": 8}
    assert shard.version == 2


def test_the_learning_rate_is_scaled_for_one_update_only() -> None:
    parameter = one()
    shard = Shard([("w", parameter)], [torch.optim.SGD([parameter], lr=1.0)])
    shard.update([torch.tensor([1.0])], lr_scale=0.25)
    assert shard.masters[0].item() == 0.75
    shard.update([torch.tensor([1.0])])
    assert shard.masters[0].item() == -0.25


def test_a_parameter_without_a_gradient_or_an_optimizer_stays() -> None:
    used, unused, free = one(), one(), one()
    optimizer = torch.optim.SGD([used, unused], lr=1.0, weight_decay=0.5)
    shard = Shard([("used", used), ("unused", unused), ("free", free)], [optimizer])
    shard.update([torch.tensor([1.0]), None, torch.tensor([1.0])])
    assert [master.item() for master in shard.masters] == [-0.5, 1.0, 1.0]


def test_a_shard_without_parameters_counts_updates() -> None:
    shard = Shard([], [torch.optim.AdamW([one()])])
    shard.update([])
    assert (shard.version, shard.packed().numel(), set(shard.state(1))) == (1, 0, {"version", "clock"})


def owner_of(settings: AsyncSGD, workers: int = 2, start: float = 1.0) -> tuple[Owner, dict[int, list[float]]]:
    parameter = one(start)
    reads: dict[int, list[float]] = {worker: [] for worker in range(workers)}

    def answer(worker: int, reply: OwnerAnswer) -> None:
        value = unpack(reply.payload, [parameter])[0]
        assert value is not None
        reads[worker].append(value.item())

    return Owner(Shard([("w", parameter)], [torch.optim.SGD([parameter], lr=1.0)]), workers, settings, answer), reads


def gradient(value: float) -> torch.Tensor:
    return pack([torch.tensor([value])])


def test_compensation_is_that_of_dc_asgd() -> None:
    owner, reads = owner_of(AsyncSGD(None, compensate=0.5))
    owner.push(0, 1, 0, gradient(4.0))  # nothing happened since it read: 1 − 4/2
    owner.push(1, 1, 0, gradient(2.0))  # read 1, now −1: g = 2 + 0.5·2·2·(−1 − 1) = −2, and −1 + 2/2
    owner.pull(0, 1)
    assert reads[0] == [0.0]
    assert owner.stats()["staleness_max"] == 1


def test_scale_divides_the_rate_by_the_staleness() -> None:
    owner, reads = owner_of(AsyncSGD(None, scale="1/staleness"))
    for clock in (1, 2):
        owner.push(0, clock, clock - 1, gradient(1.0))  # each moves by 1/2
    owner.push(1, 1, 0, gradient(1.0))  # two versions late: by 1/4
    owner.pull(1, 1)
    assert reads[1] == [-0.25]


def test_a_mean_is_of_those_who_came() -> None:
    owner, reads = owner_of(AsyncSGD(0), workers=3)
    owner.push(0, 1, 0, gradient(3.0))
    owner.push(2, 1, 0, gradient(1.0))
    owner.pull(0, 1)
    assert reads[0] == []
    assert owner.stragglers() == [1]
    owner.leave(1)
    assert reads[0] == [-1.0]


@pytest.mark.parametrize("s", [0, 1, None])
def test_nan_reaches_the_parameters(s: int | None) -> None:
    owner, reads = owner_of(AsyncSGD(s, compensate=None if s == 0 else 0.1), workers=1)
    owner.push(0, 1, 0, gradient(float("nan")))
    owner.pull(0, 1)
    assert str(reads[0]) == "[nan]"


def test_what_another_shard_saved_is_refused() -> None:
    parameter = one()
    shard = Shard([("w", parameter)], [torch.optim.SGD([parameter], lr=1.0)])
    with pytest.raises(GradSyncError, match="differ in 'w'"):
        shard.load(Shard([], []).state(0))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Rprop])
def test_a_shard_goes_on_from_what_it_saved(kind: type[torch.optim.Optimizer]) -> None:
    shards = []
    for _ in range(2):
        named = [("a", one(1.0)), ("a.b", one(2.0))]
        shards.append(Shard(named, [kind([p for _, p in named], lr=0.1)]))  # type: ignore[call-arg]
    first, second = shards
    gradients = [torch.tensor([0.3]), torch.tensor([-0.7])]
    for _ in range(2):
        first.update(gradients)
    assert second.load(first.state(clock=2)) == 2
    for shard in shards:
        shard.update(gradients)
    assert second.version == 3
    assert [m.item() for m in first.masters] == [m.item() for m in second.masters]


@given(st.lists(st.integers(0, 1000), min_size=1))
def test_a_histogram_counts_every_number_in_its_class(numbers: list[int]) -> None:
    seen = Histogram()
    for number in numbers:
        seen.add(number)
    for name, count in seen.counts().items():
        low, *rest = map(int, name.split("_"))
        assert count == sum(low <= number <= (rest or [low])[0] for number in numbers)
    assert (seen.mean, seen.highest) == (sum(numbers) / len(numbers), max(numbers))


class Wire:
    """A channel to a peer that has said goodbye, and over which ours has not left yet."""

    def __init__(self) -> None:
        self.left = threading.Event()

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Wire:
        return self

    def wait(self) -> None:
        self.left.wait()

    def recv_any(self, request: torch.Tensor, tag: int) -> Received:
        request.copy_(write(ShardMessage(MessageKind.BYE)))
        return Received()


class Received:
    def wait(self) -> None: ...

    def _source_rank(self) -> int:
        return 1


def test_the_threads_end_when_the_farewell_has_left() -> None:
    wire: Any = Wire()
    mail = Mail(wire, rank=0, size=2, period_s=60, sockets=set())
    mail.start(lambda source, message, payload: None)
    mail.say_goodbye()
    assert not mail.all_gone(0.2)
    wire.left.set()
    assert mail.all_gone(60)
    assert mail.failure is None


class InterruptedWire(Wire):
    """A channel at which Ctrl-C comes with the first message."""

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Wire:
        raise KeyboardInterrupt


def test_the_threads_end_when_a_farewell_is_interrupted() -> None:
    wire: Any = InterruptedWire()
    mail = Mail(wire, rank=0, size=2, period_s=60, sockets=set())
    mail.start(lambda source, message, payload: None)
    with pytest.raises(KeyboardInterrupt):
        mail.say_goodbye()
    assert mail.all_gone(60)


class Post:
    """Channels between ranks of one process: what is sent waits until it is received, and is not copied before."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.waiting: list[tuple[int, int, int, torch.Tensor]] = []  # from, to, tag
        self.tags: list[tuple[int, int, int]] = []  # of all that was ever sent
        self.kinds: list[tuple[int, int, MessageKind]] = []
        self.waited = 0  # how often somebody waited for what it had sent
        self.channels: list[Any] = [Channel(self, rank) for rank in range(size)]

    def take(self, to: int, tag: int, source: int | None) -> tuple[int, torch.Tensor]:
        def found() -> int | None:
            places = (i for i, (src, dst, its, _) in enumerate(self.waiting) if (dst, its) == (to, tag))
            return next((i for i in places if source in (None, self.waiting[i][0])), None)

        with self.changed:
            assert self.changed.wait_for(lambda: found() is not None, 60), f"nothing comes to {to} with tag {tag}"
            place = found()
            assert place is not None
            src, _, _, tensor = self.waiting.pop(place)
            return src, tensor


class Channel:
    """One rank's."""

    def __init__(self, post: Post, rank: int) -> None:
        self.post, self.rank = post, rank

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Channel:
        with self.post.changed:
            self.post.waiting.append((self.rank, to, tag, tensor))
            self.post.tags.append((self.rank, to, tag))
            if tag == REQUEST_TAG and tensor[0] in iter(MessageKind):
                self.post.kinds.append((self.rank, to, read(tensor).kind))
            self.post.changed.notify_all()
        return self

    def wait(self) -> None:
        """What was sent has left."""
        with self.post.changed:
            self.post.waited += 1
            self.post.changed.notify_all()

    def recv_any(self, request: torch.Tensor, tag: int) -> Arriving:
        return Arriving(self, request, tag, None)

    def recv(self, payload: torch.Tensor, source: int, tag: int) -> Arriving:
        return Arriving(self, payload, tag, source)


class Arriving:
    """A receive: it is done when it is waited for."""

    def __init__(self, channel: Channel, into: torch.Tensor, tag: int, source: int | None) -> None:
        self._channel, self._into, self._tag, self._source = channel, into, tag, source
        self._came_from = -1

    def wait(self) -> None:
        self._came_from, tensor = self._channel.post.take(self._channel.rank, self._tag, self._source)
        self._into.copy_(tensor)

    def _source_rank(self) -> int:
        return self._came_from


class Heard:
    """What a rank was handed, in order."""

    def __init__(self, post: Post) -> None:
        self.messages: list[tuple[int, ShardMessage, list[int] | None]] = []
        self._post = post

    def __call__(self, source: int, message: ShardMessage, payload: torch.Tensor | None) -> None:
        with self._post.changed:
            self.messages.append((source, message, None if payload is None else payload.tolist()))
            self._post.changed.notify_all()


def until(post: Post, holds: Any) -> None:
    with post.changed:
        assert post.changed.wait_for(holds, 60)


def mails_of(size: int, period_s: float = 60.0) -> tuple[Post, list[Mail], list[Heard]]:
    post = Post(size)
    mails = [Mail(post.channels[rank], rank, size, period_s, set()) for rank in range(size)]
    heard = [Heard(post) for _ in range(size)]
    for mail, handle in zip(mails, heard, strict=True):
        mail.start(handle)
    return post, mails, heard


def end(mails: list[Mail]) -> None:
    for mail in mails:
        mail.say_goodbye()
    for mail in mails:
        assert mail.all_gone(60)
        assert mail.failure is None


def test_every_message_comes_once_in_its_order_with_its_payload() -> None:
    post, mails, heard = mails_of(3)
    payload = torch.arange(5, dtype=torch.uint8)
    mails[0].send(2, ShardMessage(MessageKind.PUSH, 1, 7), payload)
    mails[0].send(2, ShardMessage(MessageKind.PULL, 1))
    mails[0].send(2, ShardMessage(MessageKind.ALIVE))
    mails[2].send(0, ShardMessage(MessageKind.PARAMETERS, 0, 8, 3), payload + 1)
    mails[0].send(2, ShardMessage(MessageKind.PUSH, 2, 8), payload[:0])
    mails[1].send(0, ShardMessage(MessageKind.LEAVE, 4))
    until(post, lambda: (len(heard[0].messages), len(heard[2].messages)) == (2, 3))
    end(mails)
    from_0 = [(source, message._replace(heard=0), payload) for source, message, payload in heard[2].messages]
    assert from_0 == [
        (0, ShardMessage(MessageKind.PUSH, 1, 7, nbytes=5), [0, 1, 2, 3, 4]),
        (0, ShardMessage(MessageKind.PULL, 1), None),
        (0, ShardMessage(MessageKind.PUSH, 2, 8), None),
    ]
    to_0 = {source: (message._replace(heard=0), payload) for source, message, payload in heard[0].messages}
    assert to_0 == {
        1: (ShardMessage(MessageKind.LEAVE, 4), None),
        2: (ShardMessage(MessageKind.PARAMETERS, 0, 8, 3, nbytes=5), [1, 2, 3, 4, 5]),
    }
    assert not heard[1].messages
    assert not post.waiting
    # A payload is marked with the shard that it is for, or of: that of the owner.
    assert [tag for _, _, tag in post.tags if tag != REQUEST_TAG] == [
        payload_tag(MessageKind.PUSH, 2, 7),
        payload_tag(MessageKind.PARAMETERS, 2, 8),
    ]


def test_what_was_heard_is_told_and_then_let_go_of() -> None:
    post, mails, heard = mails_of(2)
    payload = torch.arange(5, dtype=torch.uint8)
    for clock in (1, 2):
        mails[0].send(1, ShardMessage(MessageKind.PUSH, clock), payload)
    until(post, lambda: len(heard[1].messages) == 2)
    assert post.waited == 0, "it may not have left yet"
    assert [message.heard for _, message, _ in heard[1].messages] == [0, 0]
    mails[1].send(0, ShardMessage(MessageKind.PARAMETERS))  # says that both were heard
    until(post, lambda: post.waited == 4)  # two requests and two payloads
    mails[0].send(1, ShardMessage(MessageKind.PULL))
    until(post, lambda: len(heard[1].messages) == 3)
    assert [message.heard for _, message, _ in heard[0].messages] == [2]
    assert heard[1].messages[2][1].heard == 1
    end(mails)
    assert post.waited == len(post.tags), "each is waited for once, the farewells too"


def test_both_neighbours_are_kept_awake_but_not_while_they_stand_still() -> None:
    post, mails, _ = mails_of(4, period_s=0.001)
    pairs = {(rank, (rank + step) % 4) for rank in range(4) for step in (1, 3)}

    def kept_awake() -> list[tuple[int, int]]:
        return [(source, to) for source, to, kind in post.kinds if kind is MessageKind.ALIVE]

    until(post, lambda: set(kept_awake()) == pairs and len(kept_awake()) > 40)
    end(mails)
    assert set(kept_awake()) == pairs, "and nobody else"
    assert not post.waiting


class Periods:
    """Ends a keeper after so many periods, without waiting for any."""

    def __init__(self, count: int) -> None:
        self.left = count

    def wait(self, seconds: float) -> bool:
        self.left -= 1
        return self.left < 0

    def is_set(self) -> bool:
        return False


def test_who_does_not_hear_is_sent_one_message_and_no_more() -> None:
    post, stop = Post(2), Periods(5)
    mail = Mail(post.channels[0], 0, 2, 1.0, set())
    mail._stop = stop  # type: ignore[assignment]
    mail._farewell_said.set()
    mail._keep()
    assert [kind for _, _, kind in post.kinds] == [MessageKind.ALIVE]
    assert post.waited == 1, "and is seen to leave in the end"
    post.channels[1].send(write(ShardMessage(MessageKind.PULL, heard=1)), 0, REQUEST_TAG)
    mail._next()
    stop.left = 5
    mail._keep()
    assert [(source, kind) for source, _, kind in post.kinds[2:]] == [(0, MessageKind.ALIVE)], "for it has heard"


@pytest.mark.parametrize("ours", [True, False])
def test_what_ends_the_receiver_is_kept_with_whose_it_is(ours: bool) -> None:
    post = Post(2)

    def handle(source: int, message: ShardMessage, payload: torch.Tensor | None) -> None:
        raise ArithmeticError("no such update")

    mail = Mail(post.channels[0], 0, 2, 60, set())
    mail.start(handle)
    kind = 2 if ours else 77  # no kind of message has this number
    request = write(ShardMessage(MessageKind.ALIVE))
    request[0] = kind
    post.channels[1].send(request, 0, REQUEST_TAG)
    mail._threads[0].join(60)
    mail.say_goodbye()
    assert mail.all_gone(60)
    assert mail.failure is not None
    assert mail.failure.ours is ours
    assert isinstance(mail.failure.error, ArithmeticError if ours else ValueError)


def test_who_is_alone_needs_no_thread() -> None:
    mail = Mail(Post(1).channels[0], 0, 1, 60, set())
    mail.start(lambda source, message, payload: None)
    assert mail.all_gone(0)
    mail.abandon()


def test_a_state_is_flat_tensors_and_numbers_by_name() -> None:
    first, second = one(1.0), one(2.0)
    optimizer = Scaled(2.0, params=[first, second])
    shard = Shard([("a", first), ("a.b", second)], [torch.optim.SGD([second], lr=1.0), optimizer])
    shard.update([torch.tensor([1.0]), None])
    master, other = shard.masters
    optimizer_copy = shard.optimizer_copies[1]
    optimizer_copy.state_of(master).update(rate=0.5, on=True, mean=torch.tensor([3.0, 4.0]), unset=None)
    state = shard.state(7)
    assert {key: value.tolist() for key, value in state.items()} == {
        "version": 1,
        "clock": 7,
        "master.a": [-1.0],
        "master.a.b": [2.0],
        "number.1.a.count": 1,
        "number.1.a.rate": 0.5,
        "number.1.a.on": True,
        "optimizer.1.a.mean": [3.0, 4.0],
    }
    assert {state[f"number.1.a.{key}"].dtype for key in ("count", "rate", "on")} == {
        torch.int64,
        torch.float64,
        torch.bool,
    }
    kept = {key: value.clone() for key, value in state.items()}
    shard.update([torch.tensor([1.0]), torch.tensor([1.0])])
    optimizer_copy.state_of(master)["mean"].zero_()
    assert shard.load(state) == 7
    assert (shard.version, [each.item() for each in shard.masters]) == (1, [-1.0, 2.0])
    assert optimizer_copy.state_of(other) == {}
    found = optimizer_copy.state_of(master)
    assert {key: value for key, value in found.items() if key != "mean"} == {"count": 1, "rate": 0.5, "on": True}
    found["mean"].zero_()
    assert all(torch.equal(state[key], kept[key]) for key in kept), "what was saved stays as it was"


def test_a_state_that_no_file_can_hold_is_refused_with_its_name() -> None:
    parameter = one()
    shard = Shard([("w", parameter)], [Scaled(1.0, params=[parameter])])
    shard.optimizer_copies[0].set_state(shard.masters[0], {"history": [1, 2]})
    with pytest.raises(GradSyncError, match="cannot save the optimizer's 'history' of 'w': it is a list"):
        shard.state(0)


def test_packed_masters_are_made_once_and_anew_after_every_change() -> None:
    parameter = one()
    shard = Shard([("w", parameter)], [torch.optim.SGD([parameter], lr=1.0)])
    first = shard.packed()
    assert shard.packed() is first
    shard.update([torch.tensor([1.0])])
    second = shard.packed()
    shard.put([torch.tensor([9.0])], version=5)
    values = [unpack(each, shard.masters)[0] for each in (first, second, shard.packed())]
    assert [None if value is None else value.item() for value in values] == [1.0, 0.0, 9.0]
    assert shard.version == 5
    assert shard.masters[0].grad is None


def test_answers_are_full_when_every_owner_has_answered_this_question() -> None:
    inbox = Inbox(3)
    answers = [OwnerAnswer(version, 0, torch.empty(0)) for version in range(3)]
    for owner in (2, 0):
        inbox.put(owner, answers[owner])
    assert not inbox.full(0.0)
    assert inbox.missing() == [1]
    inbox.put(1, answers[1])
    assert inbox.full(0.0)
    assert inbox.missing() == []
    assert inbox.answers() == answers
    inbox.empty()
    assert not inbox.full(0.0)
    assert inbox.missing() == [0, 1, 2]


def test_an_answer_wakes_who_waits_for_it() -> None:
    inbox = Inbox(1)
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(inbox.full(60)))
    waiting.start()
    inbox.put(0, OwnerAnswer(0, 0, torch.empty(0)))
    waiting.join(60)
    assert found == [True]


def test_a_drain_applies_what_came_and_levels_all_clocks() -> None:
    owner, reads = owner_of(AsyncSGD(0), workers=3)
    owner.push(0, 1, 0, gradient(3.0))
    owner.drain(0, 1, True)
    owner.drain(1, 0, True)
    assert owner.stragglers() == [2]
    assert reads == {0: [], 1: [], 2: []}
    owner.drain(2, 0, False)
    assert reads == {0: [-2.0], 1: [-2.0], 2: [-2.0]}, "of one push one mean: 1 − 3"
    owner.push(0, 2, 1, gradient(1.0))
    owner.pull(0, 2)
    assert reads[0] == [-2.0], "it waits for the other one"
    assert owner.stragglers() == [1]
    owner.push(1, 2, 1, gradient(3.0))
    assert reads[0] == [-2.0, -4.0], "who left is not waited for"
    assert owner.stats()["version"] == 2


def test_an_owner_goes_on_from_new_parameters_and_corrects_from_there() -> None:
    owner, reads = owner_of(AsyncSGD(None, compensate=1.0), workers=1)
    owner.push(0, 1, 0, gradient(1.0))
    owner.restart([one(10.0)], [])
    owner.push(0, 2, 1, gradient(2.0))
    owner.pull(0, 2)
    assert reads[0] == [10.0], "no optimizer steps it, and nothing lies between what was read and now"
    saved = owner.state(2)
    assert owner.load(saved | {"master.w": torch.tensor([4.0]), "clock": torch.tensor(2)}) == 2
    owner.pull(0, 2)
    assert reads[0] == [10.0, 4.0]


@pytest.mark.parametrize(
    ("settings", "bound"), [(AsyncSGD(0), 0), (AsyncSGD(2), 10), (AsyncSGD(None), None)], ids=["0", "2", "none"]
)
def test_an_owner_says_how_stale_updates_were_and_may_be(settings: AsyncSGD, bound: int | None) -> None:
    owner, _ = owner_of(settings, workers=3)
    assert owner.stats() == {"version": 0, "staleness_mean": 0.0, "staleness_max": 0, "staleness_bound": bound}
    for worker in range(3):
        owner.push(worker, 1, 0, gradient(1.0))
    found = owner.stats()
    numbers = [0, 0, 0] if bound == 0 else [0, 1, 2]
    assert found["version"] == (1 if bound == 0 else 3)
    assert (found["staleness_mean"], found["staleness_max"]) == (sum(numbers) / 3, max(numbers))
    assert found["staleness_histogram_0"] == numbers.count(0)
