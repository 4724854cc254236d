"""The state of a run as a flat dict of tensors, which every saver takes as it is. Pure.

    gradsync.format, .step, .world_size, .unit, .backwards    one number each
    gradsync.order, .held, .learned                           the buckets; `held` beside each name of the order
    gradsync.recipe                                           which compressor, with its seeds
    gradsync.factor.<param>                                   PowerSGD's Q
    gradsync.pace.<key>                                       what the pace stores, as its file says
    gradsync.auto                                             the plan that gs.auto() chose: see `saved_choice`
    gradsync.rank<R>.residual.<param>                         what rank R has not sent yet
    gradsync.rank<R>.hidden.<param>                           its gradients of an open window of accumulate(k)
    gradsync.rank<R>.num_hidden, .num_residuals, .weight      how many those are; its batch weights
    gradsync.rank<R>.step                                     again, to tell files of different steps apart
    gradsync.rank<R>.pace.<key>                               what the pace stores for this rank alone

What stands above the ranks' lines is equal on all of them. The number in the key keeps the ranks' own tensors
apart, so states of several ranks become one by uniting the dicts.

Note [Shapes say nothing of values]
    torch.distributed.checkpoint fills a template, the state of a fresh run, so every shape follows from the model
    and the plan alone: the text of the order is equally long for every order, and residuals and Q are there before
    the first compressed step. Only the hidden gradients are not: outside of a window there are none, and a copy of
    zeros would make every checkpoint larger. `num_hidden` tells whether a saver has left them out.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

FORMAT = 2
State = dict[str, torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]

_OWN = re.compile(r"gradsync\.rank(\d+)\.(\w+)(?:\.(.+))?", re.DOTALL)
_FACTOR, _PACE = "gradsync.factor.", "gradsync.pace."
_RECIPE_LENGTH = 512


class Arrangement(NamedTuple):
    """The buckets as they were learned, by parameter name."""

    order: list[str]  # every parameter, as gradients arrive
    held: list[str]  # those that arrive more than once in a backward, sorted
    learned: bool  # whether the order is that of arrival


class SharedState(NamedTuple):
    """The state that is equal on all ranks."""

    step: int
    world_size: int
    unit: float  # see `weighting`
    backwards: int  # since the open window began
    recipe: str  # the compressor as text in ASCII, as `shorten` leaves it
    arrangement: Arrangement

    @property
    def digest(self) -> str:
        return hashlib.blake2b(json.dumps(self).encode(), digest_size=16).hexdigest()


def shorten(recipe: str) -> str:
    """The recipe in as many characters as every state has for it: of a long one the beginning, and a digest."""
    if len(recipe) <= _RECIPE_LENGTH:
        return recipe
    digest = hashlib.blake2b(recipe.encode(), digest_size=16).hexdigest()
    return f"{recipe[: _RECIPE_LENGTH - 36]}... {digest}"


class OwnState(NamedTuple):
    """The state that one rank alone has."""

    residuals: State
    hidden: State
    num_hidden: int
    weight: tuple[float, ...] | None = None  # as `weighting` keeps it
    pace: State = {}  # noqa: RUF012 (never changed)  # what the pace stores for this rank alone
    aborted: int = 0  # flags: what raised in the open window, which all ranks will drop

    @property
    def torn(self) -> bool:
        """True if a saver has left out the gradients of an open window."""
        return len(self.hidden) != self.num_hidden


class SavedRunState(NamedTuple):
    """The state of a run: of one rank, of several, or of all."""

    shared: SharedState
    factors: State
    parts: dict[int, OwnState]
    pace: State = {}  # noqa: RUF012  # what the pace stores, equal on all ranks


def flatten(saved: SavedRunState) -> State:
    """The state as savers take it.

    >>> shared = SharedState(41, 2, 1.0, 0, "int8", Arrangement(["bias", "weight"], [], True))
    >>> state = flatten(SavedRunState(shared, {}, {1: OwnState({"weight": torch.zeros(2, 3)}, {}, 0)}))
    >>> [key.removeprefix("gradsync.rank1.") for key in state if "rank" in key]
    ['step', 'num_hidden', 'num_residuals', 'weight', 'residual.weight']
    """
    state = flatten_shared(saved)
    for rank, part in saved.parts.items():
        state |= flatten_part(rank, part, saved.shared.step)
    return state


def flatten_shared(saved: SavedRunState) -> State:
    """Return what is equal on all ranks, as a flat dict."""
    shared = saved.shared
    order, held, learned = shared.arrangement
    return {
        "gradsync.format": torch.tensor(FORMAT, device="cpu"),
        "gradsync.step": torch.tensor(shared.step, device="cpu"),
        "gradsync.world_size": torch.tensor(shared.world_size, device="cpu"),
        "gradsync.unit": torch.tensor(shared.unit, dtype=torch.float64, device="cpu"),
        "gradsync.backwards": torch.tensor(shared.backwards, device="cpu"),
        "gradsync.recipe": _from_text(shared.recipe.ljust(_RECIPE_LENGTH)),
        "gradsync.order": _from_text(json.dumps(order)),
        "gradsync.held": torch.tensor([name in held for name in order], dtype=torch.bool, device="cpu"),
        "gradsync.learned": torch.tensor(learned, device="cpu"),
        **{_FACTOR + name: factor for name, factor in saved.factors.items()},
        **{_PACE + key: tensor for key, tensor in saved.pace.items()},
    }


def flatten_part(rank: int, part: OwnState, step: int) -> State:
    """Return what this rank alone has, as a flat dict."""
    state = {
        "step": torch.tensor(step, device="cpu"),
        "num_hidden": torch.tensor(part.num_hidden, device="cpu"),
        "num_residuals": torch.tensor(len(part.residuals), device="cpu"),
        "weight": torch.tensor(part.weight or (math.nan, math.nan, 0.0, 0.0), dtype=torch.float64, device="cpu"),
    }
    if part.aborted:  # else every state of a run has the same keys
        state["aborted"] = torch.tensor(part.aborted, device="cpu")
    state |= {f"residual.{name}": residual for name, residual in part.residuals.items()}
    state |= {f"pace.{key}": tensor for key, tensor in part.pace.items()}
    for name, grad in part.hidden.items():
        if grad.is_sparse:  # no saver but torch.save takes it whole
            state |= {f"indices.{name}": grad._indices(), f"values.{name}": grad._values()}
        else:
            state[f"hidden.{name}"] = grad.contiguous()
    return {f"gradsync.rank{rank}.{key}": tensor for key, tensor in state.items()}


def read(state: Mapping[str, torch.Tensor], shapes: Shapes) -> SavedRunState | None:
    """Return what a flat dict says, for a model of these parameters; None if it says nothing. Other keys are let be."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"a state is a dict of tensors, got {type(state).__name__}; pass what sync.state_dict() returned"
        )
    if not state:
        return None
    for key, value in state.items():
        if str(key).startswith("gradsync.") and not isinstance(value, torch.Tensor):
            raise TypeError(f"{key} must be a tensor, got {value!r:.80}; pass what sync.state_dict() returned")
    found = state.get("gradsync.format", state.get("format"))
    if found is None or int(found) != FORMAT:
        was = "no format" if found is None else f"format {int(found)}"
        raise ValueError(f"this state has {was}, this gradsync reads {FORMAT}; pass what sync.state_dict() returned")
    try:
        shared = _read_shared(state)
    except KeyError as error:
        raise ValueError(f"this state is not whole: {error} is not in it; pass all of sync.state_dict()") from None
    strange = sorted(set(shared.arrangement.order) ^ set(shapes))[:3]
    if strange:
        raise ValueError(f"this state is of another model: it does not agree about the parameters {strange}")
    _check_steps(state, shared)
    return SavedRunState(shared, _below(state, _FACTOR), read_parts(state, shapes), _below(state, _PACE))


def _check_steps(state: Mapping[str, torch.Tensor], shared: SharedState) -> None:
    """Files that a larger run has left behind have the names of files of this one."""
    found = {key: _OWN.fullmatch(key) for key in state}
    steps = {int(match[1]): int(state[key]) for key, match in found.items() if match and match[2] == "step"}
    strange = {rank: step for rank, step in sorted(steps.items()) if step != shared.step}
    if strange:
        told = ", ".join(f"rank {rank}'s of step {step}" for rank, step in strange.items())
        raise ValueError(
            f"this state is made of files of different steps: {told}, the rest of step {shared.step}, when "
            f"{shared.world_size} ranks saved; load the files of as many ranks, others are left of another run"
        )


def _below(state: Mapping[str, torch.Tensor], prefix: str) -> State:
    return {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}


def _read_shared(state: Mapping[str, torch.Tensor]) -> SharedState:
    order = json.loads(_to_text(state["gradsync.order"]))
    held = sorted(name for name, is_held in zip(order, state["gradsync.held"].tolist(), strict=True) if is_held)
    return SharedState(
        int(state["gradsync.step"]),
        int(state["gradsync.world_size"]),
        float(state["gradsync.unit"]),
        int(state["gradsync.backwards"]),
        _to_text(state["gradsync.recipe"]).rstrip(),
        Arrangement(order, held, bool(state["gradsync.learned"])),
    )


def read_parts(state: Mapping[str, torch.Tensor], shapes: Shapes) -> dict[int, OwnState]:
    """Return what each rank alone has, of those in this dict."""
    found: dict[int, dict[str, State]] = {}
    for key, tensor in state.items():
        if match := _OWN.fullmatch(key):
            rank, kind, name = int(match[1]), match[2], match[3]
            found.setdefault(rank, {}).setdefault(kind, {})[name or ""] = tensor
    return {rank: _read_part(found[rank], shapes) for rank in sorted(found)}


def _read_part(kinds: dict[str, State], shapes: Shapes) -> OwnState:
    residuals, hidden = kinds.get("residual", {}), dict(kinds.get("hidden", {}))
    for name, residual in residuals.items():
        if tuple(residual.shape) != tuple(shapes.get(name, ())):
            raise ValueError(
                f"this state is of another model: it has a residual of shape {tuple(residual.shape)} for parameter "
                f"{name}, which has shape {shapes.get(name)} here"
            )
    whole = int(kinds["num_residuals"][""]) if "num_residuals" in kinds else -1
    if len(residuals) != whole:
        raise ValueError(
            f"this state is not whole: a rank saved {max(whole, 0)} residuals, and {len(residuals)} are here; load it "
            "as it was saved"
        )
    for name, indices in kinds.get("indices", {}).items():
        values = kinds["values"][name]
        hidden[name] = torch.sparse_coo_tensor(
            indices, values, tuple(shapes[name]), device=values.device, check_invariants=False
        )
    weight = tuple(kinds["weight"][""].reshape(-1).tolist()) if "weight" in kinds else None
    num_hidden = int(kinds["num_hidden"][""]) if "num_hidden" in kinds else 0
    aborted = int(kinds["aborted"][""]) if "aborted" in kinds else 0
    return OwnState(residuals, hidden, num_hidden, weight, kinds.get("pace", {}), aborted)


def add_up(parts: Iterable[OwnState]) -> State:
    """The residuals of several ranks as those of one, which then answers for all of them.

    Nothing is scaled, whatever the number of ranks was and is: a bucket carries a rank's share of the mean,
    w·g/(n·k·u), so a residual was divided by the old n when it was a gradient. What the mean is still owed is the sum
    of residuals, over however many ranks. With combine="sum" nothing was divided, and the same holds.

    >>> one = OwnState({"weight": torch.ones(2)}, {}, 0)
    >>> add_up([one, OwnState({"weight": torch.ones(2), "bias": torch.ones(1)}, {}, 0)])
    {'weight': tensor([2., 2.]), 'bias': tensor([1.])}
    """
    total: State = {}
    for part in parts:
        for name, residual in part.residuals.items():
            total[name] = total[name] + residual.to(total[name].device) if name in total else residual
    return total


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).clone()


def _to_text(tensor: torch.Tensor) -> str:
    return bytes(tensor.cpu().numpy()).decode()
