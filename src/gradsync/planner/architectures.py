"""Models that people know by name, with the shapes of their parameters as published."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import NamedTuple

from gradsync.planner.arithmetic import Machine, Weight, step
from gradsync.planner.networks import bert, gpt2, llama, resnet50, vit_b16
from gradsync.planner.profile import ModelProfile

_TOKENS, _IMAGES = 8192, 64  # of one rank in one step, unless told


class Architecture(NamedTuple):
    """How a model is made."""

    weights: Callable[[], list[Weight]]
    images: bool = False  # samples are images of 224 x 224, not tokens
    head: str | None = None  # the weight that is also the head's, if one is
    extra_work: float = 0.0  # multiply-adds of an image with no parameter in them: attention


ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(lambda: gpt2(12, 768), head="wte.weight"),
    "gpt2-medium": Architecture(lambda: gpt2(24, 1024), head="wte.weight"),
    "gpt2-large": Architecture(lambda: gpt2(36, 1280), head="wte.weight"),
    "gpt2-xl": Architecture(lambda: gpt2(48, 1600), head="wte.weight"),
    "llama2-7b": Architecture(lambda: llama(32, 4096, 11008, 4096, 32_000)),
    "llama3-8b": Architecture(lambda: llama(32, 4096, 14336, 1024, 128_256)),
    "llama3-70b": Architecture(lambda: llama(80, 8192, 28672, 1024, 128_256)),
    "mistral-7b": Architecture(lambda: llama(32, 4096, 14336, 1024, 32_000)),
    "bert-base": Architecture(lambda: bert(12, 768)),
    "bert-large": Architecture(lambda: bert(24, 1024)),
    "resnet50": Architecture(resnet50, images=True),
    # 12 blocks, scores and sums over 197 places each way, 768 wide.
    "vit-b16": Architecture(vit_b16, images=True, extra_work=12 * 2 * 197**2 * 768),
}


def architecture(
    name: str,
    dtype: str = "fp32",
    tokens: float | None = None,
    flops: float = 312e12,
    mfu: float = 0.45,
    memory_bandwidth: float = 0.0,
) -> ModelProfile:
    """The step of a known model.

    Args:
        name: One of `ARCHITECTURES`: gpt2, llama3-8b, bert-large, resnet50 ...
        dtype: Of the gradients: "fp32", which is what autocast leaves; "bf16" or "fp16" if the parameters are.
        tokens: Of one rank in one step; for resnet50 and vit-b16, images of 224 x 224. None: 8192 tokens, or 64 images.
        flops: The most operations per second of the device, in what it computes in; by default an A100's in 16 bits.
        mfu: The share of these that the model gets.
        memory_bandwidth: Bytes per second of the device's memory, for the time of Adam's step; 0: leave it out.

    A token costs 6 operations per parameter, as in `describe`. An image costs what the layers multiply and add, twice
    for the forward pass and four times for the backward pass: 6 x 4.09 billion in a ResNet-50, 6 x 17.6 in a ViT-B/16,
    the figures that torchvision publishes for one forward pass.

    >>> profile = architecture("gpt2")
    >>> profile.num_params, profile.gradients[0].name, profile.gradients[-1].name
    (124439808, 'ln_f.bias', 'wte.weight')
    """
    made = find(name)
    weights = made.weights()
    numel = sum(weight.numel for weight in weights)
    work = made.extra_work + sum(weight.work for weight in weights)
    return step(
        weights,
        operations=6 * (work if made.images else numel),
        machine=Machine(flops, mfu, memory_bandwidth),
        dtype=dtype,
        tokens=tokens if tokens is not None else _IMAGES if made.images else _TOKENS,
        tied_work=next((weight.numel for weight in weights if weight.name == made.head), 0),
        name=name,
    )


def find(name: str) -> Architecture:
    """An architecture by its name; for an unknown one, a sentence with the near names.

    >>> find("resnet50").images
    True
    """
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    near = get_close_matches(str(name).lower()[:40], list(ARCHITECTURES), n=2, cutoff=0.6)
    guess = f", did you mean {' or '.join(near)}? There are" if near else ": there are"
    shown = repr(name) if len(repr(name)) <= 42 else f"{repr(name)[:40]}..."
    raise ValueError(
        f"there is no architecture {shown}{guess} {', '.join(ARCHITECTURES)}; "
        "any other: describe it by its number of parameters"
    )
