"""The walk in docs/how-it-works.md is that of the code."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext

import pytest
import walk

from gradsync.kernels.library import load


@pytest.mark.skipif(load() is None, reason="without the C library gradients take another way")
def test_the_page_shows_the_walk_of_a_step(warm: ForkServerContext) -> None:
    changes = walk.difference(walk.told(walk.walks(context=warm)))
    assert not changes, "\n".join(["run `python docs/walk.py` and look at what has changed:", *changes])


def test_hops_are_calls_from_another_module() -> None:
    calls = [
        walk.Call("forward", 0, "a.py", "a"),
        walk.Call("forward", 1, "a.py", "inner"),
        walk.Call("forward", 2, "b.py", "b"),
        walk.Call("forward", 2, "b.py", "b"),
        walk.Call("forward", 1, "c.py", "c"),
    ]
    assert list(walk.lines(walk.hops(calls))) == ["a.py: a", "  b.py: b  × 2", "  c.py: c"]
