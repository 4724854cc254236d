"""The walk: every hop of one real step, as how-it-works.md shows it.

    python docs/walk.py             write the walks of four plans into docs/how-it-works.md
    python docs/walk.py --check     exit with 1, and a diff, where that page tells of other walks
    python docs/walk.py --count     only the first plan: its numbers, its modules, and its changes of folder

Real ranks train on this machine. Rank 0 records its twelfth step, in which everything is learned, from before
forward until `optimizer.step()` has returned, with the profiler that Python has for this (`sys.setprofile`).

    module      a file under src/gradsync in which a function ran on the training thread
    call        a function of ours that ran there; comprehensions are part of the function in which they stand, and a
                generator that goes on is not called anew: it is shown, and not counted
    change      between two calls after each other, the folder under src/gradsync is another one
    hop         a call from one module into another: what the page shows, indented by who called

The walk is the same on every machine, however busy, as nothing in it is left to time:

    waits       each wait finds nothing at first, and all there is in its first slice; so it is always on the walk
    threads     what threads of the exchange do beside the training thread stands in a list of its own, and is not
                counted; threads that work by the clock (heartbeats) are not recorded
    completion  what a backend calls when it has finished runs on any thread, ours or its own: not recorded
    collector   it does not run during the step, and what is called at an object's end is not recorded

In the first plan's step 654e046 has 35 modules, 270 calls and 62 changes, counted so.
"""

from __future__ import annotations

import argparse
import difflib
import dis
import gc
import os
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby, pairwise
from multiprocessing.context import ForkServerContext
from pathlib import Path, PurePosixPath
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.launch.spawn import RankPool
from gradsync.transport.host_meeting import declare_host
from gradsync.transport.pending import Pending

PAGE = Path(__file__).with_name("how-it-works.md")
BEGIN, END = "<!-- walk: begins -->\n", "<!-- walk: ends -->\n"
_SOURCE = f"{Path(gs.__file__).parent}{os.sep}"
_STEP = 12
_IDLE_S = 0.3  # nothing more comes from a thread that has been still for so long
_LONG_S = 60.0
_PARTS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
_NOT_CALLS = (*_PARTS, "_completed", "__del__")  # what a backend or the collector calls comes when it comes
_CALLED_BACK = "_ended"  # a work of the control tree has ended: what follows runs in whichever thread sees it first
_BESIDE = "gradsync-lane"  # the name of the exchange's threads


class Scene(NamedTuple):
    """A plan whose step is recorded, and where."""

    title: str
    plan: gs.Plan
    ranks: int
    hosts: int


SCENES = (
    Scene("exact, one host", gs.Plan(), ranks=2, hosts=1),
    Scene("int8 across two hosts", gs.Plan(compress=gs.across_hosts(gs.int8())), ranks=4, hosts=2),
    Scene("PowerSGD on gloo", gs.Plan(compress=gs.powersgd(rank=2), algorithm=gs.native()), ranks=2, hosts=1),
    Scene("DiLoCo, a step that exchanges", gs.Plan(pace=gs.diloco(k=4)), ranks=2, hosts=1),
)


class Call(NamedTuple):
    """A function of ours that ran."""

    phase: str
    depth: int  # how many functions of ours were under way
    module: str
    function: str
    begins: bool = True  # False: a generator goes on, which is shown but not counted


class Walk(NamedTuple):
    """What a step ran."""

    calls: list[Call]  # on the training thread
    beside: list[list[Call]]  # on each thread of the exchange


# Recording, in a rank


class Recorder:
    """Keeps the calls of each thread while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.phase = ""
        self._calls: defaultdict[int, list[Call]] = defaultdict(list)  # by thread
        self._begins: dict[CodeType, int] = {}

    def listen(self) -> None:
        """Hear of this thread, and of every one that starts from now on."""
        threading.setprofile(self._heard)
        sys.setprofile(self._heard)

    def leave(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def walk(self) -> Walk:
        """What was recorded, when all threads are still."""
        # In the order in which they were started.
        beside = [self._calls[each.ident or 0] for each in threading.enumerate() if each.name == _BESIDE]
        before = -1
        while (now := sum(map(len, beside))) != before:
            before = now
            time.sleep(_IDLE_S)
        self.on = False
        return Walk(self._calls[threading.get_ident()], [calls for calls in beside if calls])

    def _heard(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.on or event != "call" or not self._counts(frame):
            return
        if any(each.f_code.co_name == _CALLED_BACK for each in (frame, *_callers(frame))):
            return
        code, begins = frame.f_code, self._is_begun(frame)
        caller = next((each for each in _callers(frame) if self._counts(each)), frame)
        goes_on = caller.f_code.co_filename != code.co_filename and not code.co_name.startswith("_")
        if begins or goes_on:
            depth = sum(map(self._counts, _callers(frame)))
            self._calls[threading.get_ident()].append(Call(self.phase, depth, _module(code), code.co_qualname, begins))

    def _counts(self, frame: FrameType) -> bool:
        code = frame.f_code
        return code.co_filename.startswith(_SOURCE) and code.co_name not in _NOT_CALLS

    def _is_begun(self, frame: FrameType) -> bool:
        """Whether the function has just begun: a generator that goes on is heard of as a call too."""
        code = frame.f_code
        if code not in self._begins:
            resumes = (each.offset for each in dis.get_instructions(code) if each.opname == "RESUME")
            self._begins[code] = next(resumes, 0)
        return frame.f_lasti <= self._begins[code]


def _callers(frame: FrameType) -> Iterator[FrameType]:
    while (back := frame.f_back) is not None:
        yield back
        frame = back


def _module(code: CodeType) -> str:
    return PurePosixPath(code.co_filename.removeprefix(_SOURCE)).as_posix()


def record(scene: Scene) -> Walk | None:
    """In each rank: train, and on rank 0 record the last step."""
    rank = dist.get_rank()
    if scene.hosts > 1:
        declare_host(f"host {rank * scene.hosts // scene.ranks}")
    recorder = Recorder()
    if rank == 0:
        recorder.listen()
    try:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = gs.attach(model, optimizer, plan=scene.plan)
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
        for _ in range(_STEP - 1):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        walk = None
        if rank == 0:
            time.sleep(_IDLE_S)  # until threads of the exchange have ended the step before
            with _waits_alike(), _no_collector():
                walk = _recorded(recorder, model, optimizer, x)
        else:
            model(x).sum().backward()
            optimizer.step()
        dist.barrier()
        sync.detach()
    finally:
        recorder.leave()
        declare_host(None)
    return walk


def _recorded(recorder: Recorder, model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Walk:
    recorder.on, recorder.phase = True, "forward"
    loss = model(x).sum()
    recorder.phase = "backward"
    loss.backward()
    recorder.phase = "optimizer.step()"
    optimizer.step()
    recorder.phase = ""
    return recorder.walk()


@contextmanager
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _waits_alike() -> Iterator[None]:
    """Let each wait of this thread find nothing at first, then everything; other threads' find everything."""
    thread, since = threading.get_ident(), time.perf_counter()
    with ExitStack() as stack:
        for kind in _kinds(Pending):
            if "landed" in vars(kind):
                stack.enter_context(patch.object(kind, "landed", _late(kind.landed, thread, since)))
        yield


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    for each in kind.__subclasses__():
        yield each
        yield from _kinds(each)


def _late(landed: Callable[[Any, float], bool], thread: int, since: float) -> Callable[[Any, float], bool]:
    looked: list[Pending] = []

    def late(pending: Pending, slice_s: float) -> bool:
        if threading.get_ident() == thread and pending.launched_at > since and pending not in looked:
            looked.append(pending)
            return False
        return landed(pending, _LONG_S)

    return late


# Telling


class Numbers(NamedTuple):
    """How far a step walks."""

    modules: int
    calls: int
    changes: int


def numbers(walk: Walk) -> Numbers:
    """What the page's table says of the training thread."""
    calls = [call for call in walk.calls if call.begins]
    return Numbers(len({call.module for call in calls}), len(calls), len(changes(walk)))


def changes(walk: Walk) -> list[str]:
    """From which folder to which, wherever two calls after each other lie in different ones."""
    calls = [call for call in walk.calls if call.begins]
    folders = [PurePosixPath("gradsync", call.module).parent.parts[:2][-1] for call in calls]
    return [f"{before} → {after}" for before, after in pairwise(folders) if before != after]


class Hop(NamedTuple):
    """A call from another module, and where that went on to."""

    text: str
    hops: tuple[Hop, ...]


def hops(calls: Iterable[Call]) -> tuple[Hop, ...]:
    """Calls as a tree of hops; calls within a module are not among them, but what those call elsewhere is."""
    left = deque(calls)

    def below(depth: int, module: str) -> tuple[Hop, ...]:
        found: list[Hop] = []
        while left and left[0].depth >= depth:
            call = left.popleft()
            inside = below(call.depth + 1, call.module)
            text = f"{call.module}: {call.function}" + ("" if call.begins else ", which goes on")
            found += inside if call.module == module else [Hop(text, inside)]
        return tuple(found)

    return below(0, "")


def lines(found: tuple[Hop, ...], indent: int = 0) -> Iterator[str]:
    """One for each hop; hops that repeat, with all that follows from them, stand there once."""
    for hop, same in groupby(found):
        times = len(list(same))
        yield "  " * indent + hop.text + (f"  × {times}" if times > 1 else "")
        yield from lines(hop.hops, indent + 1)


def told(walks: list[Walk]) -> str:
    """What stands in the page between the marks."""
    text = ["| a step of | ranks | modules | calls | changes of folder |", "|---|---|---|---|---|"]
    for scene, walk in zip(SCENES, walks, strict=True):
        found = numbers(walk)
        text.append(f"| {scene.title} | {scene.ranks} | {found.modules} | {found.calls} | {found.changes} |")
    for scene, walk in zip(SCENES, walks, strict=True):
        text += ["", f"<details markdown><summary>{scene.title}</summary>", ""]
        parts = [(phase, list(calls)) for phase, calls in groupby(walk.calls, key=lambda call: call.phase)]
        parts += [("beside, on a thread of the exchange", calls) for calls in walk.beside]
        for heading, calls in parts:
            text += [f"**{heading}**", "", "```text", *lines(hops(calls)), "```", ""]
        text.append("</details>")
    return "\n".join(text) + "\n"


def walks(scenes: Sequence[Scene] = SCENES, context: ForkServerContext | None = None) -> list[Walk]:
    """One of each, by ranks that are started for this."""
    with RankPool(max(scene.ranks for scene in scenes), threads=1, context=context) as pool:
        return [pool.run(record, scene, ranks=scene.ranks, timeout=120)[0] for scene in scenes]


def count(walk: Walk) -> str:
    """Numbers, then the calls in each module, and how often each change is made."""
    found = numbers(walk)
    by_module = Counter(call.module for call in walk.calls if call.begins)
    text = [f"{found.modules} modules, {found.calls} calls, {found.changes} changes of folder"]
    for counted in (by_module, Counter(changes(walk))):
        text += ["", *(f"{times:5d}  {what}" for what, times in counted.most_common())]
    return "\n".join(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--count", action="store_true", help="print the first plan's numbers")
    asked = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("GRADSYNC_")]:
        del os.environ[name]  # a trace, say, would be on the walk
    if asked.count:
        print(count(walks(SCENES[:1])[0]))
        return 0
    now = told(walks())
    if asked.check:
        diff = difference(now)
        print("\n".join(diff))
        return bool(diff)
    before, _, after = _on_page()
    PAGE.write_text(before + BEGIN + now + END + after, encoding="utf-8")
    return 0


def difference(now: str) -> list[str]:
    """What the page would have to change, as a diff; empty if it tells of this walk."""
    _, there, _ = _on_page()
    return list(difflib.unified_diff(there.splitlines(), now.splitlines(), PAGE.name, "the walk now", lineterm=""))


def _on_page() -> tuple[str, str, str]:
    """What stands before, between and after the marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    there, _, after = rest.partition(END)
    return before, there, after


if __name__ == "__main__":
    sys.exit(main())
