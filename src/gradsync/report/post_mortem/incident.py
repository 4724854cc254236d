"""An incident: what happened and where, in a paragraph, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradsync.errors import listed
from gradsync.report.post_mortem.last_seen import parameters_of
from gradsync.report.wording import printable, source_of
from gradsync.trace.reader import RunTrace

_MAX_WORLD = 1 << 16  # a header may claim any number of ranks
_SAID = 400  # letters of somebody's own sentence
_FEW = 8
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,79}")  # a name that no shell takes for something else
_MOST_PROCESSES = 16

# With the host and the pids of the processes, where their files say them.
ADVICE = {
    "killed": "See why it was killed: sudo dmesg -T | grep -i -e oom -e 'killed process' on {host}, its scheduler's "
    "log, its own standard error. Then restart all ranks from the last checkpoint (torchrun --max-restarts=3).",
    "vanished": "See whether its process is stopped, swapping or stuck in C code ({ps_wchan}), and whether its host "
    "can be reached (ping {name}).",
    "left": "Look at the end of its own log: an exception of its own, or a shorter data set. Uneven inputs need "
    "`with {join}:` around the loop, or equally many batches on every rank.",
    "raised": "The traceback is in that rank's own log; the other ranks only followed.",
    "hang": "See what it does there: {py_spy}. If it only needs longer, allow that with {timeout}.",
    "network": "Measure the links: gradsync doctor, under the same launcher; and see whether a firewall or a changed "
    "address is between the hosts.",
    "nonfinite": "Look at that rank's batch in that step; lower the learning rate or clip gradients; with fp16 use a "
    "GradScaler. {skip}",
    "loss_scale": "{scaler} and update it on every rank in every step.",
    "drift": "Bad memory, or code that changes weights on one rank only. {repair} copies the majority's; test that "
    "host's memory (sudo memtester 1G 1; a GPU's: dcgmi diag -r 3).",
    "replaced": "Wrap the model again after parameters are replaced, or copy values into the old ones (load_state_dict "
    "without assign=True).",
    "order": "Ranks must come to the same synchronizations in the same order: look for code around forward and "
    "backward that branches on the rank or on the data.",
    "disagreement": "Make the ranks hold the same: the sentence says what differs, and where.",
    "stopped": "See whether the processes live ({ps}), and what the suspect does ({py_spy}). If all are gone at once, "
    "look into the scheduler's log and sudo dmesg -T.",
    "missing": "Copy rank-*.jsonl and rank-*.flight of all hosts into one folder, or trace into one that all share.",
}
# What a user of gradsync would write, and of stock DDP.
_OURS = {
    "join": "sync.join()",
    "timeout": "gs.Guard(timeout=seconds)",
    "skip": "gs.Guard(nonfinite='skip') drops such steps on all ranks.",
    "repair": "gs.Guard(drift='repair')",
    "scaler": "Give the scaler to gs.attach(scaler=...),",
}
_OF_DDP = {
    "join": "ddp.join()",
    "timeout": "init_process_group(timeout=...)",
    "skip": "gs.attach in DDP's place, with gs.Guard(nonfinite='skip'), drops such steps on all ranks.",
    "repair": "gs.attach in DDP's place, with gs.Guard(drift='repair'),",
    "scaler": "Make one GradScaler with the same settings on every rank,",
}


@dataclass(frozen=True)
class Incident:
    """The incident that came first; `ranks`, `step`, `bucket` and `parameters` say where."""

    kind: str  # a key of ADVICE
    ranks: list[int]
    step: int | None
    bucket: int | None
    parameters: list[str]
    text: str  # a paragraph; it holds names from files that anybody may have written
    advice: str
    stopped: bool = True  # whether the run ended by it


class IncidentLocation:
    """The place where something happened, and the run from which an `Incident` of that place is made."""

    def __init__(self, run: RunTrace, ranks: Sequence[int], step: int | None, bucket: int | None = None) -> None:
        self.run, self.ranks, self.step, self.bucket = run, list(ranks), step, bucket

    def incident(self, kind: str, *sentences: str, parameter: str | None = None, stopped: bool = True) -> Incident:
        """The incident of that kind, in these sentences."""
        names = [parameter] if parameter is not None else self._parameters()
        text = " ".join([*sentences, *_not_here(self.run)])
        return Incident(kind, self.ranks, self.step, self.bucket, names, text, self._advice(kind), stopped)

    def _advice(self, kind: str) -> str:
        """The advice with the pids of the processes that it is about: of all ranks where nobody says more."""
        source = source_of(self.run)
        own = processes(self.run, self.ranks)
        everybody = processes(self.run, list(self.run.ranks)[:_MOST_PROCESSES])
        here = own or everybody
        first = here[0] if here else None
        known = {
            "host": "its host" if not own else own[0].host,
            "name": own[0].host if own and _PLAIN.fullmatch(own[0].host) else "HOST",  # it is there to be copied
            "ps": _each_host("ps -p {pids}", everybody),
            "ps_wchan": _each_host("ps -o stat,wchan:20,cmd -p {pids}", own) or "by ps, its pid is in its log",
            "py_spy": f"py-spy dump --pid {first.pid} on {first.host}" if first else "py-spy dump",
        }
        if self.ranks and not own:  # its file is not here
            known["py_spy"] = "py-spy dump --pid, with its pid from its log, on its host"
        known |= _OF_DDP if source == "ddp" else _OURS
        if self._was_dropped():
            known["skip"] = "The step was dropped on all ranks."
        return ADVICE[kind].format_map(known)

    def _was_dropped(self) -> bool:
        """Return whether the step came to nothing, as far as it was written."""
        steps = (step for trace in self.run.ranks.values() for step in trace.steps)
        return any(step.step == self.step and not step.counts for step in steps)

    def _parameters(self) -> list[str]:
        if self.bucket is None:
            return []
        rank = next((rank for rank in self.ranks if rank in self.run.ranks), min(self.run.ranks))
        return parameters_of(self.run.ranks[rank], self.step, self.bucket)


class RankProcess(NamedTuple):
    """The host and process where a rank ran."""

    host: str
    pid: int


def processes(run: RunTrace, ranks: Sequence[int]) -> list[RankProcess]:
    """The processes of those ranks whose files are here."""
    found = [run.ranks[rank].run for rank in ranks if rank in run.ranks]
    return [RankProcess(printable(each.host), each.pid) for each in found]


def _each_host(command: str, some: Sequence[RankProcess]) -> str:
    """The command for each host.

    >>> _each_host("ps -p {pids}", [RankProcess("a", 1), RankProcess("b", 2), RankProcess("a", 3)])
    'ps -p 1,3 on a, ps -p 2 on b'
    """
    hosts: dict[str, list[int]] = {}
    for each in some:
        hosts.setdefault(each.host, []).append(each.pid)
    parts = [f"{command.format(pids=','.join(map(str, pids)))} on {host}" for host, pids in hosts.items()]
    return ", ".join(parts)


def absent(run: RunTrace) -> list[int]:
    """Ranks whose files are not here."""
    return [rank for rank in run.members[:_MAX_WORLD] if rank not in run.ranks]


def sentence(text: str) -> str:
    """Return what somebody said, on one line, bounded, with its full stop.

    >>> sentence("it broke\\n  here"), sentence("")
    ('it broke here.', 'without a word.')
    """
    short = " ".join(text.split())[:_SAID] or "without a word"
    return short if short.endswith((".", "!", "?")) else f"{short}."


def upper_first(text: str) -> str:
    """The text as the head of a sentence.

    >>> upper_first("ranks 1 and 2")
    'Ranks 1 and 2'
    """
    return text[:1].upper() + text[1:]


def _not_here(run: RunTrace) -> list[str]:
    """Say what of the run cannot be read."""
    told = []
    if missing := [rank for rank in absent(run) if rank not in run.refused]:
        who = listed(missing) if len(missing) <= _FEW else f"{len(missing)} ranks"
        told.append(f"Not in this folder: the {'files' if len(missing) > 1 else 'file'} of {who}.")
    for rank, why in list(run.refused.items())[:_FEW]:
        told.append(f"The file of rank {rank} could not be read: {printable(why)}.")
    return told
