"""Which way the bytes travel: all-reduce algorithms as data, pure and without communication.

A recipe (`ring.ring()`, `tree.tree()`, …) makes a `schedule.Schedule` for any ranks and hosts;
`proof.check` proves that it adds every contribution once, `pricing.price` costs it, `drawing.draw` shows it.
"""

import sys
from types import ModuleType
from typing import NoReturn


class _Folder(ModuleType):
    """Tells who calls it as if it were the function."""

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("gs.allreduce is a folder of algorithms; the function is gs.all_reduce(tensor)")


sys.modules[__name__].__class__ = _Folder
