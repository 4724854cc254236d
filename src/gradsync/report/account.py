"""An account of what happened: where, in a paragraph, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradsync.errors import listed
from gradsync.report.last_seen import parameters_of
from gradsync.trace.reader import RunTrace

_MAX_WORLD = 1 << 16  # a header may claim any number of ranks
_SAID = 400  # letters of somebody's own sentence
_FEW = 8

ADVICE = {
    "killed": "See why it was killed: sudo dmesg -T | grep -i -e oom -e 'killed process' on its host, its scheduler's "
    "log, its own standard error. Then restart all ranks from the last checkpoint (torchrun --max-restarts=3).",
    "vanished": "See whether its process is stopped, swapping or stuck in C code (ps -o stat,wchan:20,cmd -p PID), and "
    "whether its host can be reached (ping HOST).",
    "left": "Look at the end of its own log: an exception of its own, or a shorter data set. Uneven inputs need "
    "`with sync.join():`.",
    "raised": "The traceback is in that rank's own log; the other ranks only followed.",
    "hang": "See what it does there: py-spy dump --pid PID on its host. If it only needs longer, allow that with "
    "gs.Guard(timeout=seconds).",
    "network": "Measure the links: gradsync doctor, under the same launcher; and see whether a firewall or a changed "
    "address is between the hosts.",
    "nonfinite": "Look at that rank's batch in that step; lower the learning rate or clip gradients; with fp16 use a "
    "GradScaler. gs.Guard(nonfinite='skip') drops such steps on all ranks.",
    "loss_scale": "Give the scaler to gs.attach(scaler=...), and update it on every rank in every step.",
    "drift": "Bad memory, or code that changes weights on one rank only. gs.Guard(drift='repair') copies the "
    "majority's; test that host's memory (sudo memtester 1G 1; a GPU's: dcgmi diag -r 3).",
    "order": "Ranks must come to the same synchronizations in the same order: look for code around forward and "
    "backward that branches on the rank or on the data.",
    "disagreement": "Make the ranks hold the same: the sentence says what differs, and where.",
    "stopped": "See whether the processes live (ps -p PID on each host), and what the suspect does (py-spy dump --pid "
    "PID). If all are gone at once, look into the scheduler's log and sudo dmesg -T.",
}


@dataclass(frozen=True)
class Account:
    """What happened first; `ranks`, `step`, `bucket` and `parameters` say where."""

    kind: str  # a key of ADVICE
    ranks: list[int]
    step: int | None
    bucket: int | None
    parameters: list[str]
    text: str  # a paragraph; it holds names from files that anybody may have written
    advice: str
    stopped: bool = True  # whether the run ended by it


class Place:
    """Where something happened; by it an account is written."""

    def __init__(self, run: RunTrace, ranks: Sequence[int], step: int | None, bucket: int | None = None) -> None:
        self.run, self.ranks, self.step, self.bucket = run, list(ranks), step, bucket

    def account(self, kind: str, *sentences: str, parameter: str | None = None, stopped: bool = True) -> Account:
        """Of that kind, in these sentences."""
        names = [parameter] if parameter is not None else self._parameters()
        text = " ".join([*sentences, *_not_here(self.run)])
        return Account(kind, self.ranks, self.step, self.bucket, names, text, ADVICE[kind], stopped)

    def _parameters(self) -> list[str]:
        if self.bucket is None:
            return []
        rank = next((rank for rank in self.ranks if rank in self.run.ranks), min(self.run.ranks))
        return parameters_of(self.run.ranks[rank], self.step, self.bucket)


def absent(run: RunTrace) -> list[int]:
    """Ranks whose files are not here."""
    return [rank for rank in run.members[:_MAX_WORLD] if rank not in run.ranks]


def sentence(text: str) -> str:
    """What somebody said, on one line, bounded, with its full stop.

    >>> sentence("it broke\\n  here"), sentence("")
    ('it broke here.', 'without a word.')
    """
    short = " ".join(text.split())[:_SAID] or "without a word"
    return short if short.endswith((".", "!", "?")) else f"{short}."


def upper_first(text: str) -> str:
    """At the head of a sentence.

    >>> upper_first("ranks 1 and 2")
    'Ranks 1 and 2'
    """
    return text[:1].upper() + text[1:]


def _not_here(run: RunTrace) -> list[str]:
    missing = absent(run)
    if not missing:
        return []
    who = listed(missing) if len(missing) <= _FEW else f"{len(missing)} ranks"
    return [f"Not in this folder: the {'files' if len(missing) > 1 else 'file'} of {who}."]
