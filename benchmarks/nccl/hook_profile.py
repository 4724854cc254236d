"""In a rank: which functions take the host's time in a step, thread by thread.

Autograd runs backward on a thread of its own where there is a GPU, so gradsync's hooks run there, and a profiler of the
main thread does not see them. This one listens in every thread that it is told of. It slows each call down by about a
microsecond, so its shares count, not its seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from nccl.arms import EXACT, Arm, Replica
from nccl.crew import Crew
from nccl.models import workload

_STEPS, _WARM_UP, _TOP, _SLOWDOWN = 50, 10, 40, 5


class Row(NamedTuple):
    """A function in a thread, by the step."""

    thread: str
    function: str
    calls: float
    own_us: float
    total_us: float


class CallTimes:
    """Own and total seconds of functions, by thread; a function in C counts by its name."""

    def __init__(self) -> None:
        self._stacks: dict[int, list[list[float]]] = defaultdict(list)  # of each open call: begun, in callees
        self._found: dict[tuple[int, object], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])

    def listen(self) -> None:
        """From now on, in this thread."""
        if sys.getprofile() is None:
            sys.setprofile(self._event)

    def listen_everywhere(self) -> None:
        """In all threads that run Python, where this Python can; else in this one."""
        self.listen()
        if sys.version_info >= (3, 12):
            threading.setprofile_all_threads(self._event)

    def stop(self) -> None:
        if sys.version_info >= (3, 12):
            threading.setprofile_all_threads(None)
        threading.setprofile(None)
        sys.setprofile(None)

    def rows(self, steps: int) -> list[Row]:
        named = [thread for thread in threading.enumerate() if not thread.name.startswith("Dummy")]
        names = {thread.ident: thread.name for thread in named}  # autograd's threads have no name in Python
        rows = [
            Row(
                names.get(thread, "autograd"),
                _name(what),
                calls / steps,
                1e6 * own / steps,
                1e6 * total / steps,
            )
            for (thread, what), (calls, own, total) in self._found.items()
        ]
        return sorted(rows, key=lambda row: -row.own_us)

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        now, thread = time.perf_counter(), threading.get_ident()
        stack = self._stacks[thread]
        if event in ("call", "c_call"):
            stack.append([now, 0.0])
        elif stack:  # else it began before anybody listened
            begun, inside = stack.pop()
            taken = now - begun
            counted = self._found[thread, frame.f_code if event == "return" else getattr(arg, "__qualname__", arg)]
            counted[0] += 1
            counted[1] += taken - inside
            counted[2] += taken
            if stack:
                stack[-1][1] += taken


def _name(what: object) -> str:
    if not isinstance(what, CodeType):
        return f"C {what}"
    path = Path(what.co_filename)
    return f"{'/'.join(path.parts[-2:])}:{what.co_firstlineno} {what.co_qualname}"


def profile_hooks(crew: Crew, job: dict[str, Any]) -> None:
    """Every rank calls this; rank 0 says what took its time."""
    for kind, cell in job["cells"].items():
        if crew.over():
            crew.note(f"{cell}: no time is left for a profile")
            continue
        replica = Replica(crew, workload(kind, crew.dry), Arm(EXACT))
        replica.begin()
        times = CallTimes()
        step_s = crew.timed(replica.step, _WARM_UP).wall_s
        # With the profiler a step takes several times as long. All ranks agree on the number.
        steps = 5 if crew.dry else max(3, min(_STEPS, int(crew.left_s() / (_SLOWDOWN * step_s))))
        hook = replica.model.blocks[-1].weight.register_hook(lambda grad, times=times: times.listen())  # type: ignore[union-attr,operator,index]
        crew.meet()
        times.listen_everywhere()
        for _ in range(steps):
            replica.step()
        crew.settle()
        times.stop()
        hook.remove()
        rows = times.rows(steps)[:_TOP]
        crew.note(f"{cell}: by the step, in microseconds\n{'own':>8} {'total':>8} {'calls':>7}  thread, function")
        for row in rows:
            crew.note(f"{row.own_us:8.1f} {row.total_us:8.1f} {row.calls:7.1f}  {row.thread}, {row.function}")
        crew.say(f"{cell} | profile", ranks=crew.size, complete=True, profiled_steps=steps, rows=rows)
        crew.meet()
        replica.end()
