"""What two ranks do for `test_accelerate`: the same training with Accelerate's own DDP and with gradsync."""

from __future__ import annotations

import copy
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from torch import nn
from torch.utils.data import DataLoader

import gradsync as gs
from global_state import changes, snapshot
from gradsync.integrations.accelerate import prepare, sync_of
from gradsync.plan.auto import Auto

SEQUENCE, WORDS = 16, 128
Weights = dict[str, torch.Tensor]


def laws(folder: Path) -> dict[str, Any]:
    """Everything in one launch; at the end rank 1 dies, and rank 0 says what it saw."""
    as_launched()
    return {
        "traces": traces(),
        "fp32": differing(train("no", stock=True), train("no")),
        "bf16": differing(train("bf16", stock=True), train("bf16")),
        # Rank 0's: DDP leaves the others' BatchNorm statistics apart until the next forward, we do not.
        "two models": differing(from_rank_0(train_two(stock=True)), from_rank_0(train_two())),
        "compressed": train_compressed(folder / "compressed"),
        "from stock": resume_from_stock(folder / "stock"),
        "local_sgd": train_locally(folder / "local"),
        "shape": look_at_the_model(),
        "refused": refusals(),
        "killed": be_killed(),
    }


def as_launched() -> None:
    """The environment that torchrun makes; the process group exists already."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def differing(one: Weights, other: Weights) -> list[str]:
    """The names of what is not equal to the bit, here or on the other rank."""
    assert one.keys() == other.keys()
    mine = torch.tensor([not torch.equal(one[name], other[name]) for name in one], dtype=torch.int64)
    dist.all_reduce(mine)
    return [name for name, differs in zip(one, mine.tolist(), strict=True) if differs]


def from_rank_0(weights: Weights) -> Weights:
    """The other replica, as this rank's own should be."""
    theirs = {name: weight.clone() for name, weight in weights.items()}
    for weight in theirs.values():
        dist.broadcast(weight, 0)
    return theirs


def accelerator(precision: str = "no", micro_batches: int = 1, **options: Any) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    set_seed(7)
    made = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=micro_batches, **options)
    assert made.num_processes == 2
    return made


def tiny() -> nn.Module:
    """A transformer from a config, with dropout; its embedding and its head are one parameter."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(dist.get_rank())  # replicas must begin as rank 0's
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": WORDS, "n_positions": SEQUENCE}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def sentences(count: int) -> list[torch.Tensor]:
    """Words that follow from the one before, so that there is something to learn."""
    start = torch.randint(WORDS, (count, 1), generator=torch.Generator().manual_seed(3))
    return list((start + 5 * torch.arange(SEQUENCE)) % WORDS)


class Run:
    """A training loop as users of Accelerate write it."""

    def __init__(
        self, precision: str = "no", micro_batches: int = 2, stock: bool = False, plan: gs.Plan | Auto | None = None
    ) -> None:
        self.accelerator = accelerator(precision, micro_batches)
        model = tiny()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
        loader = DataLoader(sentences(48), batch_size=3)  # in order: Accelerate does not keep where a shuffle was
        objects = (loader, model, optimizer, scheduler)
        prepared = self.accelerator.prepare(*objects) if stock else prepare(self.accelerator, *objects, plan=plan)
        self.loader, self.model, self.optimizer, self.scheduler = prepared
        self.losses: list[float] = []

    def epoch(self) -> None:
        for words in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=words, labels=words).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(float(loss.detach()))

    def weights(self) -> Weights:
        model = self.accelerator.unwrap_model(self.model)
        return {name: weight.clone() for name, weight in model.state_dict().items()}

    def end(self) -> Weights:
        sync_of(self.model).detach()
        return self.weights()


def train(precision: str, stock: bool = False) -> Weights:
    """Eight batches of an epoch in windows of three: the last one is short."""
    run = Run(precision, micro_batches=3, stock=stock)
    run.epoch()
    return run.weights() if stock else run.end()


def traces() -> list[str]:
    """What of the process is otherwise after a training with ours, under the model's dropout."""
    train("no", stock=True)
    theirs = snapshot()
    found = []
    for plan in (None, gs.auto(allow="exact", steps=1)):
        run = Run("no", micro_batches=3, plan=plan)
        run.epoch()
        run.end()
        found += changes(theirs, snapshot())
    return found


def train_two(stock: bool = False) -> Weights:
    """Two models with an optimizer each; the loss is through both, and one BatchNorm has buffers."""
    made = accelerator()
    torch.manual_seed(11)
    models = [nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), nn.Linear(8, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    objects = [models[0], optimizers[0], models[1], optimizers[1]]
    first, one, second, other = made.prepare(*objects) if stock else prepare(made, *objects)
    for step in range(3):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        made.backward(second(first(x)).square().mean())
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()
    if not stock:
        for model in (first, second):
            sync_of(model).detach()
    return models[0].state_dict() | {f"head.{name}": weight for name, weight in models[1].state_dict().items()}


def train_compressed(folder: Path) -> dict[str, Any]:
    """Two epochs in 8 bits; then the second one again, from the checkpoint between them."""
    plan = gs.Plan(compress=gs.int8())
    straight = Run(plan=plan)
    straight.epoch()
    straight.accelerator.save_state(str(folder))
    dist.barrier()
    owed = sync_of(straight.model).residuals()
    straight.epoch()
    whole = straight.end()
    again = Run(plan=plan)
    again.accelerator.load_state(str(folder))
    taken = sync_of(again.model).residuals()
    again.epoch()
    resumed = again.end()
    return {
        "losses": straight.losses,
        "resumed": differing(whole, resumed),
        "replicas": differing(whole, from_rank_0(whole)),
        "residuals": differing(owed, taken),
        "residuals of ranks": differing(owed, from_rank_0(owed)),
        "files": sorted(file.name for file in folder.glob("gradsync*")),
    }


def resume_from_stock(folder: Path) -> list[str]:
    """A checkpoint that Accelerate wrote with DDP."""
    before = Run(stock=True)
    before.epoch()
    before.accelerator.save_state(str(folder))
    dist.barrier()
    after = Run()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        after.accelerator.load_state(str(folder))
    for name, weight in before.weights().items():
        assert torch.equal(weight, after.weights()[name]), name
    after.epoch()
    after.end()
    return [str(each.message) for each in caught]


def train_locally(folder: Path) -> dict[str, Any]:
    """Replicas differ between two averages: nothing is saved then."""
    run = Run(plan=gs.Plan(pace=gs.local_sgd(100)))
    run.epoch()
    refused = refusal(lambda: run.accelerator.save_state(str(folder)))
    sync_of(run.model).drain()
    run.accelerator.save_state(str(folder))
    run.end()
    return {"refused": refused, "losses": run.losses}


def look_at_the_model() -> dict[str, Any]:
    made = accelerator()
    model, teacher = tiny(), tiny().requires_grad_(False)
    names = list(model.state_dict())
    attached, frozen = prepare(made, model, teacher)
    twin = copy.deepcopy(attached)
    with made.no_sync(twin):
        pass
    sync = sync_of(attached)
    with made.no_sync(attached):
        inside = sync._steps.no_sync_depth
    twice = made.prepare(attached)
    sync.detach()
    return {
        "same object": made.unwrap_model(attached) is model is twice,
        "names": list(attached.state_dict()) == names,
        "no_sync": (inside, sync._steps.no_sync_depth),
        "teacher": refusal(lambda: sync_of(frozen)),
    }


def refusals() -> dict[str, str]:
    linear = nn.Linear(2, 2)
    hooked = accelerator(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="bf16")])
    said = {"hook": refusal(lambda: prepare(hooked, linear))}
    made = accelerator(micro_batches=4)
    wrapped = made.prepare(linear)
    said["wrapped"] = refusal(lambda: prepare(made, wrapped))
    said["twice"] = refusal(lambda: prepare(made, nn.Linear(2, 2), plan=gs.Plan(pace=gs.accumulate(2))))
    attached = nn.Linear(2, 2)
    sync = gs.attach(attached)
    said["attached"] = refusal(lambda: made.prepare(attached))
    sync.detach()
    said["guard"] = refusal(lambda: prepare(made, nn.Linear(2, 2), guard=5))  # type: ignore[arg-type]
    return said


def refusal(call: Any) -> str:
    try:
        call()
    except (TypeError, ValueError, gs.GradSyncError) as error:
        return str(error)
    return "nothing was refused"


def be_killed() -> str:
    """Rank 1 dies between its forward and its backward."""
    run = Run(micro_batches=1)
    try:
        for step, words in enumerate(run.loader):
            loss = run.model(input_ids=words, labels=words).loss
            if step == 2 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            run.accelerator.backward(loss)
            run.optimizer.step()
            run.optimizer.zero_grad()
    except gs.PeerLost as error:
        return f"{error.ranks} {error}"
    return "nobody was missed"
