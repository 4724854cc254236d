"""Models that people know by name, with the shapes of their parameters as published.

The parameters of published networks, in the order of their forward pass, under the names that their code gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import NamedTuple

from gradsync.planner.from_size import Machine, WeightCost, matrix, step, vector
from gradsync.planner.profile import ModelProfile


def gpt2(layers: int, width: int, vocabulary: int = 50_257, context: int = 1024) -> list[WeightCost]:
    """GPT-2; the head is the embedding.

    >>> sum(weight.numel for weight in gpt2(12, 768))
    124439808
    """
    weights = [vector("wte.weight", vocabulary, width), vector("wpe.weight", context, width)]
    for index in range(layers):
        block = f"h.{index}"
        weights += [
            *_norm(f"{block}.ln_1", width),
            *_turned(f"{block}.attn.c_attn", width, 3 * width),
            *_turned(f"{block}.attn.c_proj", width, width),
            *_norm(f"{block}.ln_2", width),
            *_turned(f"{block}.mlp.c_fc", width, 4 * width),
            *_turned(f"{block}.mlp.c_proj", 4 * width, width),
        ]
    return [*weights, *_norm("ln_f", width)]


def llama(layers: int, width: int, hidden: int, keys: int, vocabulary: int) -> list[WeightCost]:
    """Llama 2, Llama 3 and Mistral: no biases, and a head of its own; `keys` is the width of keys and of values.

    >>> sum(weight.numel for weight in llama(32, 4096, 14336, 1024, 128_256))
    8030261248
    """
    weights = [vector("embed_tokens.weight", vocabulary, width)]
    for index in range(layers):
        block = f"layers.{index}"
        weights += [
            vector(f"{block}.input_layernorm.weight", width),
            matrix(f"{block}.self_attn.q_proj.weight", width, width),
            matrix(f"{block}.self_attn.k_proj.weight", keys, width),
            matrix(f"{block}.self_attn.v_proj.weight", keys, width),
            matrix(f"{block}.self_attn.o_proj.weight", width, width),
            vector(f"{block}.post_attention_layernorm.weight", width),
            matrix(f"{block}.mlp.gate_proj.weight", hidden, width),
            matrix(f"{block}.mlp.up_proj.weight", hidden, width),
            matrix(f"{block}.mlp.down_proj.weight", width, hidden),
        ]
    return [*weights, vector("norm.weight", width), matrix("lm_head.weight", vocabulary, width)]


def bert(layers: int, width: int, vocabulary: int = 30_522) -> list[WeightCost]:
    """BERT, uncased, with its pooler and without a head for a task.

    >>> sum(weight.numel for weight in bert(12, 768))
    109482240
    """
    weights = [
        vector("embeddings.word_embeddings.weight", vocabulary, width),
        vector("embeddings.position_embeddings.weight", 512, width),
        vector("embeddings.token_type_embeddings.weight", 2, width),
        *_norm("embeddings.LayerNorm", width),
    ]
    for index in range(layers):
        block = f"encoder.layer.{index}"
        for part in ("query", "key", "value"):
            weights += _linear(f"{block}.attention.self.{part}", width, width)
        weights += [
            *_linear(f"{block}.attention.output.dense", width, width),
            *_norm(f"{block}.attention.output.LayerNorm", width),
            *_linear(f"{block}.intermediate.dense", 4 * width, width),
            *_linear(f"{block}.output.dense", width, 4 * width),
            *_norm(f"{block}.output.LayerNorm", width),
        ]
    return [*weights, *_linear("pooler.dense", width, width)]


def vit_b16() -> list[WeightCost]:
    """ViT-B/16 for images of 224 x 224 and 1000 classes: 196 patches and a class token.

    >>> sum(weight.numel for weight in vit_b16())
    86567656
    """
    width, places = 768, 197
    weights = [
        vector("class_token", 1, 1, width),
        *_convolution("conv_proj", width, 3, 16, side=14),
        vector("conv_proj.bias", width),
        vector("encoder.pos_embedding", 1, places, width),
    ]
    for index in range(12):
        block = f"encoder.layers.{index}"
        weights += [
            *_norm(f"{block}.ln_1", width),
            *_linear(f"{block}.self_attention.in_proj", 3 * width, width, places),
            *_linear(f"{block}.self_attention.out_proj", width, width, places),
            *_norm(f"{block}.ln_2", width),
            *_linear(f"{block}.mlp.0", 4 * width, width, places),
            *_linear(f"{block}.mlp.3", width, 4 * width, places),
        ]
    return [*weights, *_norm("encoder.ln", width), *_linear("heads.head", 1000, width)]


def resnet50() -> list[WeightCost]:
    """ResNet-50 for images of 224 x 224 and 1000 classes; stride in the 3 x 3 convolutions, as torchvision has it.

    >>> sum(weight.numel for weight in resnet50())
    25557032
    """
    weights = [*_convolution("conv1", 64, 3, 7, side=112), *_norm("bn1", 64)]
    came, side = 64, 56
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], start=1):
        for index in range(blocks):
            block, narrows = f"layer{stage}.{index}", stage > 1 and index == 0
            before, side = side, side // 2 if narrows else side
            weights += [*_convolution(f"{block}.conv1", width, came, 1, before), *_norm(f"{block}.bn1", width)]
            weights += [*_convolution(f"{block}.conv2", width, width, 3, side), *_norm(f"{block}.bn2", width)]
            weights += [*_convolution(f"{block}.conv3", 4 * width, width, 1, side), *_norm(f"{block}.bn3", 4 * width)]
            if index == 0:
                weights += _convolution(f"{block}.downsample.0", 4 * width, came, 1, side)
                weights += _norm(f"{block}.downsample.1", 4 * width)
            came = 4 * width
    return [*weights, *_linear("fc", 1000, came)]


def _norm(name: str, width: int) -> Iterator[WeightCost]:
    yield vector(f"{name}.weight", width)
    yield vector(f"{name}.bias", width)


def _linear(name: str, out: int, into: int, places: int = 1) -> Iterator[WeightCost]:
    """A layer with bias, applied at so many places of a sample."""
    yield WeightCost(f"{name}.weight", (out, into), float(out * into * places))
    yield vector(f"{name}.bias", out)


def _turned(name: str, into: int, out: int) -> Iterator[WeightCost]:
    """A layer with bias, stored the other way round, as GPT-2 does."""
    yield matrix(f"{name}.weight", into, out)
    yield vector(f"{name}.bias", out)


def _convolution(name: str, out: int, into: int, kernel: int, side: int) -> Iterator[WeightCost]:
    """A convolution without bias; `side` is that of the image that comes out."""
    yield WeightCost(f"{name}.weight", (out, into, kernel, kernel), float(out * into * kernel**2 * side**2))


_TOKENS, _IMAGES = 8192, 64  # of one rank in one step, unless told


class Architecture(NamedTuple):
    """The architecture of a model."""

    weights: Callable[[], list[WeightCost]]
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
