"""The answer in words: whether to believe it, what was assumed, and the tables of sweeps."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from gradsync.algorithms.control_tree import subgroup_sizes
from gradsync.cli.plan.answer import Answer
from gradsync.cli.plan.figures import samples, show_share
from gradsync.cli.plan.sweep import FAR, Axis, SweepPoint
from gradsync.cluster import Cluster, Link
from gradsync.planner.collective import Collectives
from gradsync.planner.prediction import Prediction
from gradsync.planner.profile import ModelProfile
from gradsync.planner.snippet import in_words
from gradsync.units import show_bits, show_count, show_nbytes, show_rate, show_seconds

CALIBRATED = "Calibrated by a probe of these links."
CATALOGUE = "From the catalogue, not validated: gradsync probe measures your links."
EXTRAPOLATION = (
    f"An extrapolation: beyond {FAR} GPUs, or beyond those that were probed, nothing was compared with a run"
)
_WHOLE_CORE = 0.97  # what the probe finds of one that is a rank's own
_TINY_S = 1e-3
_TINY = " So short a step is spent on launching kernels, which is not reckoned with: measure it, and say --profile."
_WIDE = 110  # letters from which on each value of a sweep takes one line
_BAR = 12  # letters of the whole step


def calibration(answer: Answer) -> str:
    """Say how far to believe the figures."""
    basis = CALIBRATED if answer.cluster.calibrated else CATALOGUE
    return f"{basis} {EXTRAPOLATION}." if answer.cluster.world_size > FAR else basis


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
        told.append(_control(cluster))
    return [*told, _model(profile), *_dtype(answer), *_sharing(profile, cluster)]


def _control(cluster: Cluster) -> str:
    """Say what it costs that ranks agree on every step, which grows with the logarithm of the hosts."""
    levels = len(subgroup_sizes(len(cluster.hosts)))
    tree = "in one subgroup of hosts" if levels == 1 else f"up and down {levels} levels of hosts"
    seconds = show_seconds(Collectives(cluster).header().seconds)
    return f"In every step ranks agree by a header, {tree}: {seconds}, counted in with all of ours; DDP has none."


def _dtype(answer: Answer) -> list[str]:
    """A sentence on the dtype where nobody said it: half the bytes or twice as many."""
    if not answer.dtype_assumed:
        return []
    return [
        "float32 gradients are assumed, as under autocast; if the parameters are in 16 bits, say --dtype bf16: "
        "half the bytes."
    ]


def _sharing(profile: ModelProfile, cluster: Cluster) -> list[str]:
    """Say why a step computes for longer than its profile: where that is so, all figures rest on it."""
    cores = cluster.device.cores
    if cores > _WHOLE_CORE or cluster.world_size == 1:
        return []
    alone, shared = show_seconds(profile.compute_s), show_seconds(profile.compute_s / cores)
    return [
        f"While all ranks compute, each gets {cores:.2f} of a core: the {alone} of a step become {shared}, with any "
        "plan. If something else ran during the probe, probe again."
    ]


def _model(profile: ModelProfile) -> str:
    dtypes = "/".join(sorted({str(gradient.dtype).removeprefix("torch.") for gradient in profile.gradients}))
    name = f"{profile.name}: " if profile.name and not profile.name.endswith("parameters") else ""
    parts = ("input", "forward", "backward", "optimizer")
    times = [(part, getattr(profile, f"{part}_s")) for part in parts]
    split = ", ".join(f"{part} {show_seconds(seconds)}" for part, seconds in times if seconds)
    # A measured profile may not know its tokens.
    batch = (
        "a step" if profile.tokens == 1 else f"a step of {show_count(profile.tokens)} {samples(profile)} on each GPU"
    )
    return (
        f"{name}{show_count(profile.num_params)} parameters, {show_nbytes(profile.nbytes)} of {dtypes} gradients; "
        f"{batch} computes for {show_seconds(profile.compute_s)}, {profile.source} ({split})."
        + (_TINY if profile.source == "described" and profile.compute_s < _TINY_S else "")
    )


def sweep_table(axis: Axis, points: Sequence[SweepPoint], width: int) -> Table:
    """One line per value; two on a terminal that is narrow."""
    wide = width >= _WIDE
    grid = Table(title=f"by {axis.what}", title_justify="left", title_style="bold", pad_edge=False, box=None)
    grid.add_column(axis.what, justify="right", no_wrap=True)
    grid.add_column("default", justify="right", no_wrap=True)
    if wide:
        grid.add_column("", no_wrap=True, style="cyan")
    for name in ("trains the same", "fastest lossy", "fastest of all"):
        grid.add_column(name)
    if axis.what == "gpus":
        grid.add_column("goodput", justify="right", no_wrap=True)
        grid.add_column("", no_wrap=True)
    for point in points:
        cells = [show_value(axis, point.value), show_share(point.usual.overhead)]
        cells += ["█" * round(_BAR * point.usual.overhead)] if wide else []
        cells += [_cell(it) for it in (point.same, point.lossy, point.best)]
        if point.goodput is not None:
            cells += [show_share(point.goodput.share), "*" if point.extrapolated else ""]
        grid.add_row(*cells)
    return grid


def show_value(axis: Axis, value: float) -> str:
    """
    >>> show_value(Axis("bandwidth", 1.0, 2.0), 125e6), show_value(Axis("gpus", 1.0, 2.0), 4096)
    ('1 Gbit/s', '4,096')
    """
    return show_bits(value) if axis.what == "bandwidth" else show_count(value)


def _cell(prediction: Prediction | None) -> str:
    return "-" if prediction is None else f"{show_share(prediction.overhead)}  {in_words(prediction.plan)}"


def _link(link: Link) -> str:
    return f"{show_rate(link.bandwidth)} after {show_seconds(link.latency_s)}"
