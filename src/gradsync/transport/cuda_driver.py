"""The two functions of NVIDIA's driver for a thread that only looks on.

Torch asks an event while it holds the interpreter, and CUDA may keep it waiting there: behind another thread that waits
for the whole device, say. Then nobody could abort anything. By ctypes the interpreter stays free.
"""

from __future__ import annotations

import contextlib
import ctypes
from functools import lru_cache

_SUCCESS = 0
_RELAXED = 2  # calls of this thread do not spoil a graph that another one captures


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuEventQuery.argtypes = (ctypes.c_void_p,)
        driver.cuThreadExchangeStreamCaptureMode.argtypes = (ctypes.POINTER(ctypes.c_int),)
    except (OSError, AttributeError):
        return None
    return driver


def has_happened(event: int) -> bool:
    """Return whether a CUDA event is over; False too where that cannot be told any more."""
    driver = _driver()
    return driver is not None and driver.cuEventQuery(event) == _SUCCESS


def only_look_on() -> None:
    """This thread does not count where another one captures a CUDA graph."""
    if (driver := _driver()) is not None:
        with contextlib.suppress(AttributeError):
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
