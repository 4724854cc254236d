"""Numbers that all ranks know without asking: of parameters, and for what is drawn at random."""

from __future__ import annotations

from zlib import crc32


def number_of(name: str) -> int:
    """A parameter's number, 32 bits: the same on every rank and in every layout.

    >>> number_of("weight")
    130897217
    """
    return crc32(name.encode())


def key_of(seed: int, step: int, salt: int = 0) -> int:
    """32 bits for `kernels.block_codes.dither`, others in every step; `salt` tells phases or ranks apart.

    >>> key_of(0, step=1) == key_of(0, step=1), key_of(0, step=1) == key_of(0, step=2)
    (True, False)
    """
    return crc32(f"{seed} {step} {salt}".encode())
