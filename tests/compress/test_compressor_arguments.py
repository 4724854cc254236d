"""What makes no sense is refused when the recipe is written, by a sentence with the value and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import gradsync as gs
from gradsync.compress.recipe import SPELLINGS
from gradsync.compress.toml import MAKERS

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "block not a power of two": (
        lambda: gs.int8(block=100),
        ValueError,
        "int8: block must be a power of two from 32 to 65536 (elements), got 100",
    ),
    "block too small": (lambda: gs.int4(block=16), ValueError, "int4: block must be a power of two from 32"),
    "block too large": (lambda: gs.sign(block=1 << 17), ValueError, "sign: block must be a power of two"),
    "block a float": (lambda: gs.topk(0.1, block=64.0), ValueError, "topk: block must be a power of two"),  # type: ignore[arg-type]
    "block True": (lambda: gs.sign(block=True), ValueError, "got True"),
    "block None": (lambda: gs.sign(block=None), ValueError, "got None"),  # type: ignore[arg-type]
    "rounding in other words": (
        lambda: gs.int8(rounding="up"),  # type: ignore[arg-type]
        ValueError,
        'int8: rounding must be "nearest" or "stochastic", got \'up\'',
    ),
    "rounding a list": (lambda: gs.int8(rounding=[]), ValueError, "rounding must be"),  # type: ignore[arg-type]
    "seed negative": (lambda: gs.int8(seed=-1), ValueError, "int8: seed must be a whole number from 0 to 4294967295"),
    "seed too large": (lambda: gs.randomk(0.1, seed=1 << 32), ValueError, "randomk: seed must be a whole number"),
    "seed a float": (lambda: gs.powersgd(seed=1.5), ValueError, "powersgd: seed must be"),  # type: ignore[arg-type]
    "feedback a word": (lambda: gs.sign(feedback="yes"), TypeError, "sign: feedback must be True or False, got 'yes'"),  # type: ignore[arg-type]
    "feedback a number": (lambda: gs.int8(feedback=1), TypeError, "int8: feedback must be True or False, got 1"),  # type: ignore[arg-type]
    "density zero": (
        lambda: gs.topk(0),
        ValueError,
        "topk: density must be above 0 and at most 1, got 0 (the share that is sent: 0.01 is 1 %)",
    ),
    "density in percent": (
        lambda: gs.randomk(10),
        ValueError,
        "randomk: density must be above 0 and at most 1, got 10",
    ),
    "density negative": (lambda: gs.topk(-0.1), ValueError, "got -0.1"),
    "density NaN": (lambda: gs.topk(float("nan")), ValueError, "got nan"),
    "density True": (lambda: gs.topk(True), ValueError, "got True"),
    "density a word": (lambda: gs.topk("1%"), ValueError, "got '1%'"),  # type: ignore[arg-type]
    "rank zero": (
        lambda: gs.powersgd(0),
        ValueError,
        "powersgd: rank must be a whole number from 1 to 2147483647, got 0",
    ),
    "rank a float": (lambda: gs.powersgd(4.0), ValueError, "got 4.0"),  # type: ignore[arg-type]
    "ratio below one": (lambda: gs.powersgd(4, 0.5), ValueError, "powersgd: min_ratio must be a number of at least 1"),
    "ratio infinite": (lambda: gs.powersgd(4, float("inf")), ValueError, "got inf (a gradient that does not shrink"),
    "warm-up of nothing": (lambda: gs.warmup(None, 5), TypeError, "warmup wraps a compressor, got None"),  # type: ignore[arg-type]
    "warm-up of no steps": (lambda: gs.warmup(gs.fp16(), 0), ValueError, "warmup: steps must be a whole number from 1"),
    "warm-up of a word": (lambda: gs.warmup("int8", 5), TypeError, "got 'int8' (did you mean gs.int8()?)"),  # type: ignore[arg-type]
    "feedback of nothing": (lambda: gs.error_feedback(None), TypeError, "error_feedback wraps a compressor, got None"),  # type: ignore[arg-type]
    "feedback of a factory": (lambda: gs.error_feedback(gs.topk), TypeError, "(did you mean gs.topk(density)?)"),  # type: ignore[arg-type]
    "across of nothing": (lambda: gs.across_hosts(None), TypeError, "across_hosts wraps a compressor, got None"),  # type: ignore[arg-type]
    "across of a number": (lambda: gs.across_hosts(8), TypeError, "across_hosts wraps one of gs.fp16(), "),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_recipe_that_makes_no_sense_is_refused(case: str) -> None:
    make, kind, sentence = REFUSED[case]
    with pytest.raises(kind) as caught:
        make()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_errors_name_every_factory_there_is() -> None:
    assert set(SPELLINGS) == set(MAKERS)
    for name, (_, factory) in MAKERS.items():
        assert getattr(gs, name) is factory
