"""Several waits at once: nobody's stands behind another's, and none outlives the main thread."""

from __future__ import annotations

import threading
from functools import partial

from gradsync.engine.shared_backward import side_by_side


def nothing() -> None: ...


def test_each_of_several_waits_may_wait_for_all_others() -> None:
    together, after = threading.Barrier(3, timeout=60), list[int]()

    def wait() -> None:
        together.wait()

    side_by_side([(wait, partial(after.append, number)) for number in range(3)])
    assert after == [0, 1, 2]


def test_a_wait_on_a_thread_of_its_own_does_not_keep_the_process() -> None:
    threads = list[threading.Thread]()

    def wait() -> None:
        threads.append(threading.current_thread())

    side_by_side([(wait, nothing)] * 3)
    assert len(threads) == 3
    assert all(thread.daemon for thread in threads if thread is not threading.current_thread())
