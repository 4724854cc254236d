"""Everything of a process that a library could change behind its user's back, and who changed it."""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

_CATCHABLE = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
_LIMITS = ("RLIMIT_NOFILE", "RLIMIT_CORE", "RLIMIT_MEMLOCK", "RLIMIT_STACK", "RLIMIT_AS")


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]


def _numpy_random() -> Any:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return (kind, _digest(np.asarray(keys).tobytes()), *rest)


def _autocast() -> Any:
    devices = ("cpu", "cuda")
    states = [(torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in devices]
    return states, torch.is_autocast_cache_enabled()


def _backends() -> Any:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    attention = torch.backends.cuda
    return (
        [cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, cudnn.benchmark_limit],
        [matmul.allow_tf32, matmul.allow_fp16_reduced_precision_reduction],
        [attention.flash_sdp_enabled(), attention.math_sdp_enabled(), attention.mem_efficient_sdp_enabled()],
        torch.get_float32_matmul_precision(),
        torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
    )


def _rounding() -> Any:
    """Whether numbers too small to be normal become 0; there is no other way to ask."""
    return bool((torch.tensor([1e-39]) * 1.0).item() == 0.0)


def _hooks() -> Any:
    return sys.excepthook, sys.unraisablehook, threading.excepthook, sys.gettrace(), sys.getprofile(), sys.displayhook


def _umask() -> Any:
    """From the kernel: os.umask() can only ask by changing it."""
    return next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask"))


def _logging() -> Any:
    names = ["", "torch", "torch.distributed", "gradsync"]
    loggers = [logging.getLogger(name) for name in names]
    return [(each.level, list(each.handlers), each.propagate, each.disabled) for each in loggers]


# What it is, by how one asks for it.
READERS: dict[str, Callable[[], Any]] = {
    "torch's random state": lambda: _digest(torch.get_rng_state().numpy().tobytes()),
    "CUDA's random state": lambda: (
        [_digest(each.numpy().tobytes()) for each in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else None
    ),
    "numpy's random state": _numpy_random,
    "Python's random state": lambda: _digest(repr(random.getstate()).encode()),
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "current GPU": lambda: torch.cuda.current_device() if torch.cuda.is_available() else None,
    "number of threads": lambda: (torch.get_num_threads(), torch.get_num_interop_threads()),
    "grad mode": lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    "anomaly mode": lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    "deterministic mode": lambda: (
        torch.get_deterministic_debug_mode(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    ),
    "autocast": _autocast,
    "torch.backends": _backends,
    "how tiny numbers are rounded": _rounding,
    "numpy's errors": np.geterr,
    "warnings": lambda: (list(warnings.filters), warnings.showwarning),
    "signal handlers": lambda: [signal.getsignal(number) for number in _CATCHABLE],
    "blocked signals": lambda: sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "timers": lambda: signal.getitimer(signal.ITIMER_REAL),
    "locale": lambda: (locale.setlocale(locale.LC_ALL), time.tzname),
    "environment": lambda: dict(os.environ),
    "working directory": os.getcwd,
    "umask": _umask,
    "module path": lambda: list(sys.path),
    "interpreter": lambda: (sys.getswitchinterval(), sys.getrecursionlimit(), faulthandler.is_enabled()),
    "hooks": _hooks,
    "standard streams": lambda: (sys.stdin, sys.stdout, sys.stderr),
    # Whether anything is frozen: how much becomes less by itself, where a process began so, as objects die.
    "garbage collection": lambda: (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0, list(gc.callbacks)),
    "limits": lambda: [resource.getrlimit(getattr(resource, name)) for name in _LIMITS],
    "cores": lambda: (os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)),
    "logging": _logging,
    "how processes start": lambda: (
        multiprocessing.get_start_method(allow_none=True),
        torch.multiprocessing.get_sharing_strategy(),
    ),
}


def snapshot() -> dict[str, Any]:
    return {what: read() for what, read in READERS.items()}


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs between two snapshots."""
    return [what for what in READERS if before[what] != after[what]]


@contextmanager
def unchanged(doing: str, but: Collection[str] = ()) -> Iterator[None]:
    """What happens inside leaves all of it as it was, except `but`."""
    before = snapshot()
    yield
    after = snapshot()
    changed = {what: (before[what], after[what]) for what in changes(before, after) if what not in but}
    assert not changed, f"{doing} changed {', '.join(changed)}: {changed}"


@contextmanager
def unusual() -> Iterator[None]:
    """As a user may have set it, and nothing of ours does: who puts back a usual value is found out."""
    threads, matmul = torch.get_num_threads(), torch.get_float32_matmul_precision()
    dtype, autocast = torch.get_default_dtype(), torch.get_autocast_dtype("cpu")
    handler = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    torch.set_num_threads(3)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    torch.set_default_dtype(torch.float64)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="nothing that anybody says")
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(matmul)
        torch.set_default_dtype(dtype)
        torch.set_autocast_dtype("cpu", autocast)
        signal.signal(signal.SIGUSR2, handler)


@contextmanager
def thawed() -> Iterator[None]:
    """The collector looks through everything. What is frozen dies at times, which changes their number."""
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        yield
    finally:
        gc.collect()
        if frozen:
            gc.freeze()
