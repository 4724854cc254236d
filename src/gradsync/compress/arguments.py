"""What recipes accept. A refusal is one sentence with the value and the way out."""

from __future__ import annotations

import math
from typing import TypeGuard

from gradsync.compress.choice import Compressor

SPELLINGS = {
    "fp16": "gs.fp16()",
    "bf16": "gs.bf16()",
    "int8": "gs.int8()",
    "int4": "gs.int4()",
    "sign": "gs.sign()",
    "topk": "gs.topk(density)",
    "randomk": "gs.randomk(density)",
    "powersgd": "gs.powersgd(rank)",
    "error_feedback": "gs.error_feedback(c)",
    "warmup": "gs.warmup(c, steps)",
    "by_parameter": "gs.by_parameter(rules)",
    "across_hosts": "gs.across_hosts(c)",
}
MAX_WHOLE = (1 << 31) - 1
MAX_SEED = (1 << 32) - 1


def check_whole(what: str, value: object, low: int, high: int = MAX_WHOLE) -> None:
    """Refuse what is not a whole number from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{what} must be a whole number from {low} to {high}, got {value!r}")


def check_block(what: str, value: object, low: int, high: int) -> None:
    """Refuse what is not a power of two from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high or value & (value - 1):
        raise ValueError(f"{what}: block must be a power of two from {low} to {high} (elements), got {value!r}")


def check_density(what: str, value: object) -> None:
    """Refuse what is not a share."""
    if not is_number(value) or not 0 < float(value) <= 1:
        raise ValueError(
            f"{what}: density must be above 0 and at most 1, got {value!r} (the share that is sent: 0.01 is 1 %)"
        )


def check_compressor(what: str, value: object) -> None:
    """Refuse what is no compressor, with the call that was probably meant."""
    if isinstance(value, Compressor) and not isinstance(value, type):
        return
    meant = value if isinstance(value, str) else getattr(value, "__name__", None)
    hint = f" (did you mean {SPELLINGS[meant]}?)" if isinstance(meant, str) and meant in SPELLINGS else ""
    raise TypeError(f"{what} one of {', '.join(SPELLINGS.values())}, got {value!r}{hint}")


def check_inner(what: str, value: object) -> None:
    """Refuse a wrapper around nothing."""
    if value is None:
        raise TypeError(f"{what} wraps a compressor, got None: what travels as it is has nothing to wrap")
    check_compressor(f"{what} wraps", value)


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
