"""The digest: C and torch agree on every bit, and nothing that changes inside of a word goes unnoticed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsync.kernels.digest import digest, joined, launch, reference, words_of
from gradsync.kernels.library import load

LEVELS = ("portable", "avx2", "avx512")
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
)
_ALL = (1 << 64) - 1


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each level in turn; the widest again afterwards."""
    library = load()
    if library is None:
        pytest.skip("the C library was not built")
    if not library.gradsync_use_level(request.param.encode()):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    library.gradsync_use_level(b"")


def by_hand(raw: bytes) -> int:
    """Note [Digest], word by word."""
    total = len(raw)
    for i in range(0, len(raw), 8):
        x = int.from_bytes(raw[i : i + 8], "little") ^ (i // 8 + 1) * 0x9E3779B97F4A7C15 & _ALL
        x = (x ^ x >> 32) * 0xBF58476D1CE4E5B9 & _ALL
        x = (x ^ x >> 29) * 0x94D049BB133111EB & _ALL
        total += x ^ x >> 32
    return total & _ALL


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_every_length_and_alignment_gives_the_numbers_of_the_note(level: str) -> None:
    for nbytes in (*range(20), 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4099):
        for shift in (0, 1, 2, 3, 7):
            raw = random_bytes(nbytes + shift, seed=nbytes)[shift:]
            expected = by_hand(bytes(raw.tolist()))
            assert digest(raw) == expected, (nbytes, shift)
            assert int(reference(raw)) & _ALL == expected, (nbytes, shift)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_counts_by_its_bytes(dtype: torch.dtype) -> None:
    raw = random_bytes(16 * 33) % 2
    tensor = raw.view(dtype)
    assert digest(tensor) == digest(raw) == int(reference(tensor)) & _ALL == int(launch(tensor)) & _ALL


def test_long_tensors_are_digested_in_parts_and_give_the_same() -> None:
    tensor = torch.arange((1 << 21) + 77)
    assert int(reference(tensor)) & _ALL == digest(tensor)


def test_the_order_is_the_logical_one_however_a_tensor_lies_in_memory() -> None:
    tensor = torch.randn(2, 3, 4, 5)
    for other in (
        tensor.to(memory_format=torch.channels_last),
        tensor.mT.contiguous().mT,
        torch.nn.Parameter(tensor),
        (-torch._neg_view(tensor)).clone(),
    ):
        assert digest(other) == digest(tensor) == int(reference(other)) & _ALL
    number = torch.randn(7, dtype=torch.complex64)
    assert digest(number.conj()) == digest(number.conj().resolve_conj()) != digest(number)
    assert digest(torch.tensor(3.0)) == digest(torch.tensor([3.0]))


def test_every_flipped_bit_changes_it() -> None:
    raw = random_bytes(203)
    usual = digest(raw)
    for place in range(203):
        for bit in range(8):
            raw[place] ^= 1 << bit
            assert digest(raw) != usual, (place, bit)
            raw[place] ^= 1 << bit
    assert digest(raw) == usual


@given(st.integers(0, 2**32), st.integers(0, 12))
def test_several_flips_and_exchanged_elements_change_it(seed: int, num_flips: int) -> None:
    rng = random.Random(seed)
    tensor = torch.randn(300, generator=torch.Generator().manual_seed(seed)).to(rng.choice([torch.float32, torch.half]))
    usual = digest(tensor)
    a, b = rng.sample(range(300), 2)
    swapped = tensor.clone()
    swapped[a], swapped[b] = tensor[b], tensor[a]
    assert (digest(swapped) != usual) == (tensor[a].item() != tensor[b].item())
    flipped = tensor.clone()
    for place in rng.sample(range(300), num_flips):
        flipped[place] = -flipped[place]
    assert (digest(flipped) != usual) == (num_flips > 0)


def test_zeros_of_different_lengths_differ() -> None:
    digests = {digest(torch.zeros(nbytes, dtype=torch.uint8)) for nbytes in range(100)}
    assert len(digests) == 100


def test_words_are_the_bytes_from_the_lowest_on() -> None:
    assert words_of(torch.tensor([1, 2, 0, 0, 0, 0, 0, 0, 3], dtype=torch.uint8)).tolist() == [513, 3]


@given(st.lists(st.integers(0, _ALL), min_size=1, max_size=6), st.integers(0, 5), st.integers(0, _ALL))
def test_a_joined_digest_changes_with_each_of_its_parts(digests: list[int], at: int, other: int) -> None:
    at %= len(digests)
    changed = [*digests[:at], other, *digests[at + 1 :]]
    assert (joined(changed) == joined(digests)) == (changed == digests)
