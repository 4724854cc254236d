"""The answer in words: what was assumed, the table of candidates, and what would change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.table import Table
from rich.text import Text

from gradsync.cli.planning.answer import Answer, saving
from gradsync.cli.planning.memory import shortage
from gradsync.cli.planning.sweep import FAR, Axis, Point
from gradsync.cli.planning.verdict import bolder
from gradsync.cli.planning.wording import show_interval, show_ms, show_saving, show_share
from gradsync.links import Link
from gradsync.plan import Plan
from gradsync.planner.prediction import Prediction
from gradsync.planner.profile import ModelProfile
from gradsync.planner.snippet import in_words
from gradsync.units import show_bits, show_count, show_nbytes, show_rate, show_seconds

CALIBRATED = "Calibrated by a probe of these links."
CATALOGUE = "From the catalogue, not validated: gradsync probe measures your links."
EXTRAPOLATION = (
    f"An extrapolation: beyond {FAR} GPUs, or beyond those that were probed, nothing was compared with a run"
)
FOOTNOTE = (
    "step: nine in ten steps should lie in the interval. overhead: the share of the step that synchronization takes. "
    "exposed: by how much it makes a step longer. sent: by each rank to others, per step. memory: on each rank, "
    "for buckets, residuals and copies. Steps of accumulate(k) are micro-batches. saves: of the chosen plan's step."
)

_SHOWN = 4  # of each group
_BAR = 12  # letters of the whole step


def calibration(answer: Answer) -> str:
    """Whether to believe it."""
    said = CALIBRATED if answer.cluster.calibrated else CATALOGUE
    return f"{said} {EXTRAPOLATION}." if answer.cluster.world_size > FAR else said


def assumptions(answer: Answer) -> list[str]:
    """Everything the numbers rest on, in people's units."""
    cluster, profile = answer.cluster, answer.profile
    hosts, per_host = len(cluster.hosts), max(map(len, cluster.hosts))
    told = [
        f"{cluster.world_size} × {cluster.device.name} on {hosts} {'host' if hosts == 1 else f'hosts of {per_host}'}, "
        f"{cluster.backend}. Inside a host: {_link(cluster.inside)}"
        + ("" if cluster.memory is None else f"; shared memory: {_link(cluster.memory)}")
        + "."
    ]
    if hosts > 1:
        shared = "shared by the ranks of a host" if cluster.shared_nic else "for each rank"
        line = cluster.across.bandwidth / answer.arrives
        named = "" if answer.arrives == 1.0 else f"line rate {show_bits(line)} = {show_rate(line)}, of which "
        told.append(f"Between hosts: {named}{_link(cluster.across)}, {shared}.")
    return [*told, _model(profile), *shortage(profile, cluster)]


def _model(profile: ModelProfile) -> str:
    dtypes = "/".join(sorted({str(gradient.dtype).removeprefix("torch.") for gradient in profile.gradients}))
    name = f"{profile.name}: " if profile.name and not profile.name.endswith("parameters") else ""
    parts = ("input", "forward", "backward", "optimizer")
    times = [(part, getattr(profile, f"{part}_s")) for part in parts]
    split = ", ".join(f"{part} {show_seconds(seconds)}" for part, seconds in times if seconds)
    # A measured profile may not know its tokens.
    batch = "a step" if profile.tokens == 1 else f"a step of {show_count(profile.tokens)} tokens on each GPU"
    return (
        f"{name}{show_count(profile.num_params)} parameters, {show_nbytes(profile.nbytes)} of {dtypes} gradients; "
        f"{batch} computes for {show_seconds(profile.compute_s)}, {profile.source} ({split})."
    )


def table(answer: Answer) -> Table:
    """The best of each group, the chosen plan on top; the default is always among them."""
    grid = Table(title_justify="left", show_lines=False, pad_edge=False)
    grid.add_column("plan")
    for name in ("step ms", "overhead", "exposed\nms", "sent", "memory", "saves"):
        grid.add_column(name, justify="right", no_wrap=True)
    for title, group in groups(answer):
        grid.add_row(Text(title, style="bold"))
        for candidate in _shown(group, answer):
            grid.add_row(*_row(candidate, answer))
        grid.add_section()
    return grid


def groups(answer: Answer) -> list[tuple[str, tuple[Prediction, ...]]]:
    """Candidates by what they do to training, with a title each; empty groups are left out."""
    named = [
        ("trains the same: exact, or rounded to 16 bits", answer.same),
        ("lossy: gradients lose something on the way", answer.lossy),
        ("trains differently: seldom, late or from larger batches", answer.other),
    ]
    named.sort(key=lambda group: answer.chosen not in group[1])
    return [(title, group) for title, group in named if group]


def left_out(answer: Answer) -> int:
    """How many candidates the table does not show."""
    return len(answer.candidates) - sum(len(_shown(group, answer)) for _, group in groups(answer))


def sweep_table(axis: Axis, points: Sequence[Point]) -> Table:
    """One line per value."""
    grid = Table(title=f"by {axis.what}", title_justify="left", title_style="bold", pad_edge=False)
    grid.add_column(axis.what, justify="right", no_wrap=True)
    grid.add_column("default", justify="right", no_wrap=True)
    grid.add_column("", no_wrap=True, style="cyan")
    for name in ("best that trains the same", "best lossy", "best of all"):
        grid.add_column(name)
    if axis.what == "gpus":
        grid.add_column("goodput", justify="right")
        grid.add_column("")
    for point in points:
        cells = [show_value(axis, point.value), show_share(point.usual.overhead), _bar(point.usual.overhead)]
        cells += [_cell(it) for it in (point.same, point.lossy, point.best)]
        if point.goodput is not None:
            cells += [show_share(point.goodput.share), "extrapolation" if point.extrapolated else ""]
        grid.add_row(*cells)
    return grid


def show_value(axis: Axis, value: float) -> str:
    """
    >>> show_value(Axis("bandwidth", 1.0, 2.0), 125e6), show_value(Axis("gpus", 1.0, 2.0), 4096)
    ('1 Gbit/s', '4,096')
    """
    return show_bits(value) if axis.what == "bandwidth" else show_count(value)


def _shown(group: Sequence[Prediction], answer: Answer) -> list[Prediction]:
    """The first few, each with its best bucket size only; also those that are spoken of."""
    kinds: dict[Plan, Prediction] = {}
    for it in group:
        kinds.setdefault(replace(it.plan, bucket_bytes=None), it)
    spoken_of = (answer.usual, bolder(answer))
    first = {id(it) for it in [*list(kinds.values())[:_SHOWN], *spoken_of]}
    return [it for it in group if id(it) in first]


def _row(candidate: Prediction, answer: Answer) -> list[Text | str]:
    name = Text(in_words(candidate.plan), style="bold" if candidate is answer.chosen else "")
    if candidate is answer.usual:
        name.append(" (the default)")
    if candidate.reason:
        name.append(f"\n{candidate.reason}", style="dim")
    return [
        name,
        f"{show_ms(candidate.step_s)} ({show_interval(candidate.low_s, candidate.high_s)})",
        show_share(candidate.overhead),
        show_ms(candidate.exposed_s),
        show_nbytes(candidate.nbytes),
        show_nbytes(candidate.memory_nbytes),
        "" if candidate is answer.chosen else show_saving(saving(candidate, answer.chosen)),
    ]


def _bar(share: float) -> str:
    return "█" * round(_BAR * share)


def _cell(prediction: Prediction | None) -> str:
    return "-" if prediction is None else f"{show_share(prediction.overhead)}  {in_words(prediction.plan)}"


def _link(link: Link) -> str:
    return f"{show_rate(link.bandwidth)} after {show_seconds(link.latency_s)}"
