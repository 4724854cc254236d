"""The user's question: the options become a cluster and a model's profile, or one sentence on what is wrong."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from gradsync.cli.plan.figures import printable
from gradsync.cli.shared import BadInput
from gradsync.cluster import Cluster, Device
from gradsync.planner.catalogue import cluster
from gradsync.planner.catalogue.networks import wire
from gradsync.planner.from_size import describe
from gradsync.planner.known_models import architecture
from gradsync.planner.profile import ModelProfile

T = TypeVar("T")

_PARTS = ("gpus", "per_host", "link", "network", "nics", "device", "backend")
_MOST_PARAMS = 10**12  # more than anybody trains as replicas that each hold the whole model
_DESCRIPTION = ("params", "arch", "dtype", "tokens", "mfu", "flops")


@dataclass(frozen=True)
class PlanInputs:
    """A cluster, a model's step on it, and two things that `Answer` has too."""

    cluster: Cluster
    profile: ModelProfile
    arrives: float = 1.0
    dtype_assumed: bool = False


def read_inputs(options: argparse.Namespace) -> PlanInputs:
    """The inputs that the options of the command line describe."""
    made = _cluster(options)
    profile = _profile(options, made.device)
    arrives = _arrives(options, made)
    device = replace(made.device, name=printable(made.device.name))
    return PlanInputs(
        replace(made, name=printable(made.name), device=device),
        replace(
            profile,
            name=printable(profile.name),
            gradients=tuple(gradient._replace(name=printable(gradient.name)) for gradient in profile.gradients),
        ),
        arrives,
        options.dtype is None and options.profile is None,
    )


def as_bad_input(make: Callable[[], T]) -> T:
    """Return what `make` returns; raise its ValueError as the command's one sentence."""
    try:
        return make()
    except ValueError as error:
        raise BadInput(f"gradsync plan: {printable(str(error))}") from None
    except OverflowError as error:
        raise BadInput(f"gradsync plan: these numbers are too large to reckon with: {error}") from None


def write(option: str, path: Path, put: Callable[[Path], object]) -> None:
    """Let `put` write the file; a sentence if it cannot."""
    try:
        put(path)
    except OSError as error:
        raise BadInput(
            f"gradsync plan: {option} {path} cannot be written: {error.strerror or error}; name another file"
        ) from None


def load(option: str, path: Path, read: Callable[[Path], T]) -> T:
    """Return what a file holds; raise BadInput, a sentence, if it cannot be read."""
    try:
        return as_bad_input(lambda: read(path))
    except OSError as error:
        raise BadInput(f"gradsync plan: {option} {path} cannot be read: {error.strerror}") from None


def _cluster(options: argparse.Namespace) -> Cluster:
    if options.cluster is not None:
        _refuse(options, _PARTS, f"--cluster {options.cluster} says what the machines are")
        return load("--cluster", options.cluster, Cluster.load)
    if options.gpus is None:
        raise BadInput(
            "gradsync plan: how many GPUs? Say --gpus 32 (and --network 100g between hosts), "
            "or --cluster FILE with what gradsync probe measured"
        )
    given = {name: getattr(options, name) for name in _PARTS if getattr(options, name) is not None}
    return as_bad_input(lambda: cluster(**given))


def _profile(options: argparse.Namespace, device: Device) -> ModelProfile:
    if options.profile is not None:
        _refuse(options, _DESCRIPTION, f"--profile {options.profile} says what the model is")
        return load("--profile", options.profile, ModelProfile.load)
    if options.arch is not None:
        _refuse(options, ("params",), f"--arch {options.arch} says how many parameters there are")
    elif options.params is None:
        raise BadInput("gradsync plan: which model? Say --params 1e9, or --arch gpt2-xl, or --profile FILE")
    elif options.params > _MOST_PARAMS:
        raise BadInput(f"gradsync plan: a model has at most {_MOST_PARAMS:,} parameters, got {options.params:,}")
    flops = device.flops if options.flops is None else options.flops
    if options.flops is None and not flops:
        raise BadInput(
            f"gradsync plan: how fast {device.name} computes is not known: say --flops 1e12 (operations per second), "
            "or measure the model and pass --profile FILE"
        )
    given = {name: getattr(options, name) for name in ("dtype", "tokens", "mfu") if getattr(options, name) is not None}
    if options.arch is not None:
        return as_bad_input(lambda: architecture(options.arch, flops=flops, **given))
    return as_bad_input(lambda: describe(options.params, flops=flops, **given))


def _arrives(options: argparse.Namespace, made: Cluster) -> float:
    """People name a network by the line rate of one NIC, the planner counts what arrives over all that are shared."""
    if options.network is None or len(made.hosts) == 1:
        return 1.0
    line_rate = wire(options.network, "across").line_rate
    return made.across.bandwidth / line_rate if line_rate else 1.0


def _refuse(options: argparse.Namespace, names: tuple[str, ...], because: str) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise BadInput(f"gradsync plan: {because}: leave --{name.replace('_', '-')} out")
