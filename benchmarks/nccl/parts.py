"""The questions, each as launches: which ranks are started where, what they do, and how long they may take."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nccl import arms
from nccl.launch import Job
from nccl.turns import Course
from slow_link import store

GPT = "GPT 124 M batch 4"
GPT_48 = "GPT 124 M batch 48"
LOOPBACK = "loopback"
Arms = list[tuple[str, str]]  # an arm's name, and what of the model is compiled


class Start(NamedTuple):
    """One launch. `rate` None: on loopback."""

    title: str
    job: Job
    ranks: int
    rate: str | None
    limit_s: float


class Part(NamedTuple):
    """A question: its launches, and the seconds of device time that they have together."""

    starts: Callable[[argparse.Namespace], Iterator[Start]]
    limit_s: float


def _plain(*names: str) -> Arms:
    return [(name, "") for name in names]


def _train(cells: dict[str, str], chosen: Arms, course: Course, options: argparse.Namespace, **more: Any) -> Job:
    if options.dry:
        course = course._replace(rounds=2, window=1, warm_up=1)
    if options.rounds:
        course = course._replace(rounds=options.rounds)
    course = course._replace(each_turn=options.each_turn)
    return {"work": ["train"], "dry": options.dry, "cells": cells, "arms": chosen, "course": course._asdict(), **more}


def _loopback(options: argparse.Namespace) -> Iterator[Start]:
    compared = _plain(
        *(arms.NO_SYNC, arms.DDP, arms.DDP_BF16, arms.EXACT, arms.BF16, arms.INT8, arms.INT4),
        *(arms.POWERSGD, arms.SIGN),
    )
    for ranks in options.ranks or (2, 4):
        job = _train({GPT: f"{ranks} ranks"}, compared, Course(6, 3, 3), options, scan=True)
        yield Start(f"{ranks} ranks", job, ranks, None, 100)


def _hosts(options: argparse.Namespace) -> Iterator[Start]:
    compared = _plain(arms.NO_SYNC, arms.DDP, arms.DDP_BF16, *arms.PLANS)
    settings = {
        ("10gbit", GPT): (Course(4, 2, 2), {"scan": True}),
        ("10gbit", GPT_48): (Course(3, 1, 2), {}),
        ("1gbit", GPT): (Course(2, 1, 1), {}),
    }
    for (rate, workload), (course, more) in settings.items():
        if options.rate and rate not in options.rate:
            continue
        cell = f"{rate} | {workload}"
        if not more:  # the size that was best at 10 Gbit/s; a scan at 1 Gbit/s takes longer than everything else
            more = {"bucket_mb": _found_bucket(options.out)}
        job = _train({workload: cell}, compared, course, options, probe="brief", **more)
        yield Start(cell, job, 2, rate, 100 if rate == "1gbit" else 80)


def _found_bucket(path: Path) -> int | None:
    found = store.load(path).get("hosts", {}).get(f"10gbit | {GPT}", {})
    bucket_mb = found.get("bucket_mb")
    return int(bucket_mb) if bucket_mb is not None else None


PLANNED = (arms.EXACT, arms.BF16, arms.INT8, arms.POWERSGD)
PLANNED_MODELS = ("GPT 30 M batch 8", "wide batch 4096")
PLANNED_LINKS = ((LOOPBACK, 2), (LOOPBACK, 3), ("10gbit", 2), ("10gbit", 3), ("2gbit", 2))


def _planner(options: argparse.Namespace) -> Iterator[Start]:
    for link, ranks in PLANNED_LINKS:
        if (options.rate and link not in options.rate) or (options.ranks and ranks not in options.ranks):
            continue
        where = f"{link} | {ranks} ranks"
        cells = {model: f"{where} | {model.partition(' batch')[0]}" for model in PLANNED_MODELS}
        chosen = _plain(arms.NO_SYNC, *PLANNED)
        course = Course(4, 1, 2) if link == "2gbit" else Course(4, 3, 2)
        job = _train(cells, chosen, course, options, probe="full" if options.full else "brief")
        yield Start(where, job, ranks, None if link == LOOPBACK else link, 60 if link == "2gbit" else 50)


def _host(options: argparse.Namespace) -> Iterator[Start]:
    cells = {"few large batch 1": "few large", "1000 small batch 1": "1000 small"}
    job = _train(cells, _plain(arms.NO_SYNC, arms.DDP, arms.EXACT), Course(9, 20, 10), options)
    job["work"] = ["train", "profile"] if options.profile else ["train"]
    yield Start("2 ranks", job, 2, None, 90)


def _p2p(options: argparse.Namespace) -> Iterator[Start]:
    ranks = max(options.ranks or (4,))
    yield Start(f"2 to {ranks} ranks", {"work": ["p2p"], "dry": options.dry, "cells": {}}, ranks, None, 55)


def _compile(options: argparse.Namespace) -> Iterator[Start]:
    # Two launches, so that what is quick to compile is kept if the rest takes too long.
    blocks = [(name, "blocks") for name in (arms.DDP, arms.EXACT)]
    first = [*_plain(arms.DDP, arms.EXACT), (arms.NO_SYNC, "blocks"), *blocks]
    second = [*blocks, (arms.EXACT, "whole"), (arms.DDP, "whole")]
    for cell, chosen, limit_s in (("2 ranks | blocks", first, 60), ("2 ranks | whole", second, 110)):
        yield Start(cell, _train({GPT: cell}, chosen, Course(6, 3, 3), options), 2, None, limit_s)


PARTS = {
    "loopback": Part(_loopback, 200),
    "hosts": Part(_hosts, 260),
    "planner": Part(_planner, 260),
    "host": Part(_host, 90),
    "p2p": Part(_p2p, 55),
    "compile": Part(_compile, 150),
}
