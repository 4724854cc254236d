"""`lab`: hosts joined by slow links, for every test folder.

`netlab` is one name for two folders, benchmarks/netlab (the lab) and this one: a package without `__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from netlab.fork_server import ForkServer
from netlab.lab import Lab, available

MakeLab = Callable[..., Lab]


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """One process for the session that has torch imported; ranks are its forks."""
    if reason := available():
        pytest.skip(f"no network lab: {reason}")
    with ForkServer() as made:
        yield made


@pytest.fixture
def lab(fork_server: ForkServer) -> Iterator[MakeLab]:
    """`lab(hosts=2, rate="100mbit")`: a lab that ends with the test; skipped where there can be none."""
    with ExitStack() as stack:

        def make(**settings: Any) -> Lab:
            return stack.enter_context(Lab(fork_server=fork_server, **settings))

        yield make
