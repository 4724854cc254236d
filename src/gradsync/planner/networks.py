"""The parameters of published networks, in the order of their forward pass, under the names that their code gives."""

from __future__ import annotations

from collections.abc import Iterator

from gradsync.planner.arithmetic import Weight, matrix, vector


def gpt2(layers: int, width: int, vocabulary: int = 50_257, context: int = 1024) -> list[Weight]:
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


def llama(layers: int, width: int, hidden: int, keys: int, vocabulary: int) -> list[Weight]:
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


def bert(layers: int, width: int, vocabulary: int = 30_522) -> list[Weight]:
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


def vit_b16() -> list[Weight]:
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


def resnet50() -> list[Weight]:
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


def _norm(name: str, width: int) -> Iterator[Weight]:
    yield vector(f"{name}.weight", width)
    yield vector(f"{name}.bias", width)


def _linear(name: str, out: int, into: int, places: int = 1) -> Iterator[Weight]:
    """With bias; applied at so many places of a sample."""
    yield Weight(f"{name}.weight", (out, into), float(out * into * places))
    yield vector(f"{name}.bias", out)


def _turned(name: str, into: int, out: int) -> Iterator[Weight]:
    """With bias, and stored the other way round, as GPT-2 does."""
    yield matrix(f"{name}.weight", into, out)
    yield vector(f"{name}.bias", out)


def _convolution(name: str, out: int, into: int, kernel: int, side: int) -> Iterator[Weight]:
    """Without bias; `side` is that of the image that comes out."""
    yield Weight(f"{name}.weight", (out, into, kernel, kernel), float(out * into * kernel**2 * side**2))
