"""Part 2: faults at random places; whether report, watch and doctor name the right rank and phase or parameter."""

from __future__ import annotations

import asyncio
import contextlib
import html
import io
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gradsync.cli.demo.slow_link.shaped_link import INTERFACE, Shaper, inside, shape
from gradsync.cli.main import main as command
from gradsync.launch.spawn import RankPool
from gradsync.report.live.feed import Feed, FeedReader
from gradsync.report.post_mortem.first_event import first_event
from gradsync.report.post_mortem.incident import Incident
from gradsync.report.summary import Summary, summarize
from gradsync.trace.reader import read_run
from netlab.lab import Lab, available
from signals.faulty_training import DEPTH, WIDTH, run_rank
from signals.models import stack

Truth = dict[str, Any]
_LINK, _SLOW_LINK = "200mbit", "20mbit"
_LINK_STEPS, _LINK_DEPTH = 50, 4
_LONG = 1000  # steps: nobody is blamed for a processor that was busy for a second
_COMPUTING = ("computation", "forward", "backward")


class NotRun(RuntimeError):
    """The ranks did not come as far as the fault; the message says what each did."""


class Found(NamedTuple):
    """What the trace was made to say."""

    summary: Summary
    incident: Incident | None
    doctor: str  # all that the command prints, on one line
    live: Summary  # as `gradsync watch` judges the run
    page: str  # the words on its page, on one line


class Fault(NamedTuple):
    """A kind of fault: where it strikes, and what counts as named."""

    what: str
    ranks: int
    truth: Callable[[random.Random], Truth]
    reported: Callable[[Found, Truth], bool]
    diagnosed: Callable[[Found, Truth], bool]


def run(pool: RankPool, name: str, seed: int) -> dict[str, Any]:
    """One run with one fault."""
    fault = FAULTS[name]
    truth: Truth = {"seed": seed} | fault.truth(random.Random(f"{name} {seed}"))
    with tempfile.TemporaryDirectory(prefix="gradsync-signals-") as folder:
        trace = Path(folder, "run")
        _train(pool, name, fault.ranks, truth, trace)
        found = _read(trace)
    accused = [f"rank {each.rank}, {each.phase}" for each in found.summary.blame]
    return {
        "truth": truth,
        "verdict": found.summary.verdict,
        "accused": accused + [each.text for each in found.summary.links],
        "health": sorted({f"{each.what}: {each.parameter}, ranks {each.ranks}" for each in found.summary.health})[:5],
        "first": None if found.incident is None else found.incident.text[:400],
        "report_names_it": fault.reported(found, truth),
        "watch_names_it": fault.reported(found._replace(summary=found.live), truth) and _all_on_the_page(found),
        "doctor_names_it": fault.diagnosed(found, truth),
    }


def possible(name: str) -> str | None:
    """Why a fault cannot be made here; None if it can."""
    if name == "link":
        return available()
    if name == "processor" and len(os.sched_getaffinity(0)) < 2:
        return "it needs two cores"
    return None


def _train(pool: RankPool, name: str, ranks: int, truth: Truth, trace: Path) -> None:
    if name == "link":
        with Lab(hosts=ranks, rate=None) as lab:
            for host, init in enumerate(lab.inits):
                shaper = Shaper.of(_SLOW_LINK if host == truth["rank"] else _LINK)
                inside(init, lambda kernel, shaper=shaper: shape(kernel, INTERFACE, shaper))
            lab.spawn(run_rank, 1, name, truth, str(trace), env={"OMP_NUM_THREADS": "1"}, timeout=120)
        return
    with _crowded(truth) if name == "processor" else contextlib.nullcontext():
        outcomes = pool.outcomes(run_rank, name, truth, str(trace), ranks=ranks, timeout=120)
    stopped = name in ("order", "kill")
    if any(outcome.ok is stopped for outcome in outcomes) or not trace.exists():
        raise NotRun("\n".join(f"rank {rank}: {outcome.text}" for rank, outcome in enumerate(outcomes)))


@contextlib.contextmanager
def _crowded(truth: Truth) -> Iterator[None]:
    """Somebody else's work on the core of one rank."""
    core = truth["cores"][truth["rank"]]
    busy = f"import os, time; os.sched_setaffinity(0, {{{core}}})\nend = time.monotonic() + 120\n"
    with subprocess.Popen([sys.executable, "-c", busy + "while time.monotonic() < end: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def _read(trace: Path) -> Found:
    made = read_run(trace)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        command(["doctor", str(trace)])
    page = html.unescape(re.sub("<[^>]+>", " ", asyncio.run(Feed(trace).page())))
    live = FeedReader(trace).look().summary
    return Found(summarize(made), first_event(made), _one_line(said.getvalue()), live, _one_line(page))


def _all_on_the_page(found: Found) -> bool:
    """Every sentence of the live summary; the page cuts long ones."""
    said = [*found.live.blame, *found.live.links, *found.live.health, *found.live.errors]
    return all(_one_line(each.text)[:100] in found.page for each in said)


def _one_line(text: str) -> str:
    return " ".join(text.split())


# Where faults strike, and what counts as named


def _anywhere(rng: random.Random) -> Truth:
    return {"rank": rng.randrange(4), "step": rng.randrange(5, 30), "parameter": rng.choice(_NAMES)}


def _processor(rng: random.Random) -> Truth:
    return {"rank": rng.randrange(2), "cores": sorted(os.sched_getaffinity(0))[:2], "steps": _LONG}


def _blames(phases: tuple[str, ...]) -> Callable[[Found, Truth], bool]:
    def named(found: Found, truth: Truth) -> bool:
        return [each.rank for each in found.summary.blame] == [truth["rank"]] and found.summary.blame[0].phase in phases

    return named


def _blamed_by_doctor(found: Found, truth: Truth) -> bool:
    return any(_one_line(each.text) in found.doctor for each in found.summary.blame if each.rank == truth["rank"])


def _slow_link(found: Found, truth: Truth) -> bool:
    """Connections of that host, and nobody for being late; what it acknowledges leaves by its slow link, too."""
    links = found.summary.links
    return bool(links) and all(truth["rank"] in (each.rank, each.peer) for each in links) and not found.summary.blame


def _link_by_doctor(found: Found, truth: Truth) -> bool:
    named = [each.text for each in found.summary.links if truth["rank"] in (each.rank, each.peer)]
    return any(_one_line(text) in found.doctor for text in named)


def _unhealthy(what: tuple[str, ...]) -> Callable[[Found, Truth], bool]:
    def named(found: Found, truth: Truth) -> bool:
        findings = [each for each in found.summary.health if each.what in what]
        return bool(findings) and all(
            (each.ranks, each.parameter) == ([truth["rank"]], truth["parameter"]) for each in findings
        )

    return named


def _first_is(*kinds: str) -> Callable[[Found, Truth], bool]:
    def named(found: Found, truth: Truth) -> bool:
        first = found.incident
        return first is not None and first.kind in kinds and first.ranks == [truth["rank"]]

    return named


def _first_with_parameter(kind: str) -> Callable[[Found, Truth], bool]:
    def named(found: Found, truth: Truth) -> bool:
        first = found.incident
        return _first_is(kind)(found, truth) and first is not None and truth["parameter"] in first.parameters

    return named


def _names_rank_in_errors(found: Found, truth: Truth) -> bool:
    return bool(found.summary.errors) and all(truth["rank"] in each.ranks for each in found.summary.errors)


def _names_order(found: Found, truth: Truth) -> bool:
    """Ranks that launch different buckets: that it is the order, in which step, and whose is another."""
    findings = [each for each in found.summary.health if each.what == "order"]
    return [each.step for each in findings] == [truth["step"]] and f"on rank {truth['rank']};" in findings[0].text


def _first_is_order(found: Found, truth: Truth) -> bool:
    first = found.incident
    return first is not None and first.kind in ("order", "disagreement") and first.step == truth["step"]


def _nothing(found: Found, _: Truth) -> bool:
    summary = found.summary
    return not (summary.blame or summary.links or summary.health or summary.errors)


_NAMES = [name for name, _ in stack(DEPTH, WIDTH).named_parameters()]
FAULTS = {
    "clean 2": Fault(
        "nothing, 2 ranks", 2, lambda _: {"steps": _LONG}, _nothing, lambda found, _: found.incident is None
    ),
    "clean 4": Fault(
        "nothing, 4 ranks", 4, lambda _: {"steps": _LONG // 2}, _nothing, lambda found, _: found.incident is None
    ),
    "input": Fault("a slow input pipeline on rank 1", 2, lambda _: {"rank": 1}, _blames(("input",)), _blamed_by_doctor),
    "processor": Fault("a rank shares its core", 2, _processor, _blames(_COMPUTING), _blamed_by_doctor),
    "link": Fault(
        "one link shaped to a tenth",
        3,
        lambda rng: {"rank": rng.randrange(3), "steps": _LINK_STEPS, "depth": _LINK_DEPTH},
        _slow_link,
        _link_by_doctor,
    ),
    "nan": Fault(
        "a NaN on rank 2",
        4,
        lambda rng: _anywhere(rng) | {"rank": 2},
        _unhealthy(("nonfinite",)),
        _first_with_parameter("nonfinite"),
    ),
    "flip": Fault(
        "a flipped bit in a weight",
        4,
        lambda rng: _anywhere(rng) | {"bit": rng.randrange(32)},
        _unhealthy(("drift", "repair")),
        _first_with_parameter("drift"),
    ),
    "order": Fault(
        "two buckets in swapped order",
        4,
        lambda rng: _anywhere(rng) | {"bucket": rng.randrange(2)},
        _names_order,
        _first_is_order,
    ),
    "kill": Fault(
        "a rank killed after a bucket left",
        4,
        lambda rng: _anywhere(rng) | {"bucket": rng.randrange(3)},
        _names_rank_in_errors,
        _first_is("killed"),
    ),
}
