"""`gradsync plan`: what synchronization will cost on a cluster, and what to do about it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.syntax import Syntax

from gradsync import files, units
from gradsync.cli.plan import as_json, check_run
from gradsync.cli.plan.answer import Answer, answer
from gradsync.cli.plan.candidate_rows import footnote, left_out, table
from gradsync.cli.plan.one_line import in_one_line
from gradsync.cli.plan.plan_inputs import as_bad_input, read_inputs, write
from gradsync.cli.plan.plan_page import page
from gradsync.cli.plan.saved_run import read_run
from gradsync.cli.plan.sweep import Axis, SweepPoint, parse_axis, sweep
from gradsync.cli.plan.sweep import as_json as sweep_as_json
from gradsync.cli.plan.text import EXTRAPOLATION, assumptions, calibration, sweep_table
from gradsync.cli.plan.thresholds import Thresholds, changes, find_thresholds
from gradsync.cli.plan.what_if import narrow_link
from gradsync.cli.shared import BadInput, Parser, check_writable, spoken, wide_console
from gradsync.plan.sync_plan import Plan
from gradsync.planner.candidates import ALLOWS
from gradsync.planner.snippet import as_python
from gradsync.tables import toml_lines

_HTML = b"<!DOCTYPE html>"
_CHART_BELOW, _CHART_ABOVE = 128, 8  # from and to which part of today's bandwidth the page's chart goes

_DESCRIPTION = """\
Predicts the step time of a data-parallel training run under every sensible plan: which all-reduce, which compression,
how often, in which buckets. Nothing is measured: the links are from the catalogue (docs/links.md), or from the
cluster.toml that gradsync probe wrote.
"""

_EXAMPLE = """\
example:
  gradsync plan --gpus 32 --network 100g --device a100 --params 1e9 --tokens 8192 --mfu 0.45
  gradsync plan --gpus 8 --device h100 --arch gpt2-xl              one host
  gradsync plan --cluster cluster.toml --profile profile.toml      what was measured
  gradsync plan ... --allow lossy --out plan.toml                  choose among lossy plans too, and keep the choice
  gradsync plan ... --sweep gpus=8..4096 --html plan.html          also bandwidth=1gbit..400gbit, tokens=1k..64k
  gradsync plan ... --json                                         for machines: docs/planning.md
  gradsync plan --check run/                                       a run of gs.auto(save="run") against its prediction

100g means 100 Gbit/s, a line rate; 3.2GB/s means what arrives. 1e9, 350m and 7b are numbers of parameters.
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Put `plan` among the commands."""
    parser = commands.add_parser(
        "plan", help="predict what synchronization costs, and choose a plan", description=_DESCRIPTION, epilog=_EXAMPLE
    )
    where = parser.add_argument_group("where it runs").add_argument
    where("--gpus", type=spoken(units.count), metavar="N", help="how many in all")
    where("--per-host", type=spoken(units.count), metavar="N", help="how many in each host (8, or all)")
    where("--device", metavar="NAME", help="a100, h100, h200, b200 ... (a100)")
    where("--link", metavar="NAME", help="inside a host: nvlink3, pcie4 ... or a rate (what the device usually has)")
    where("--network", metavar="NAME", help="between hosts: 100g, 100g-tcp, ndr ... or a rate, of each NIC")
    where("--nics", type=spoken(units.count), metavar="N", help="of each host (1)")
    where("--backend", choices=["nccl", "gloo"], help="of the process group (nccl for GPUs)")
    where("--cluster", type=Path, metavar="FILE", help="all of that, measured by gradsync probe")
    what = parser.add_argument_group("what it trains").add_argument
    what("--params", type=spoken(units.count), metavar="N", help="parameters of a transformer: 1e9, 350m")
    what("--arch", metavar="NAME", help="a known architecture instead: gpt2-xl ...")
    what("--dtype", metavar="TYPE", help="of the gradients: fp32, bf16, fp16 (fp32, which autocast leaves)")
    what("--tokens", type=spoken(units.count), metavar="N", help="per GPU and step (8192)")
    what("--mfu", type=float, metavar="SHARE", help="of the device's peak that the model reaches (0.45)")
    what("--flops", type=float, metavar="N", help="the device's peak, where the catalogue has none")
    what("--profile", type=Path, metavar="FILE", help="all of that, measured by gs.auto(save=...)")
    then = parser.add_argument_group("what to do with it").add_argument
    then("--allow", choices=ALLOWS, help="choose among these (all are shown, what trains the same is chosen)")
    then(
        "--sweep",
        type=spoken(parse_axis),
        action="append",
        metavar="WHAT",
        help="gpus=8..4096, bandwidth=..., tokens=...",
    )
    then("--out", type=Path, metavar="FILE", help="write the plan as TOML, for gs.Plan.load")
    then("--html", type=Path, metavar="FILE", help="write a page with timelines and charts")
    then("--json", action="store_true", help="print JSON instead of tables")
    then("--check", type=Path, metavar="FOLDER", help="compare a saved run with its prediction, and refit")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command."""
    if options.check is not None:
        return _check(options)
    check_writable("gradsync plan: --out", options.out, _is_plan)
    check_writable("gradsync plan: --html", options.html, lambda path: files.beginning(path, len(_HTML)) == _HTML)
    inputs = read_inputs(options)
    terms = (options.allow, inputs.arrives, inputs.dtype_assumed)
    answered = as_bad_input(lambda: answer(inputs.profile, inputs.cluster, *terms))
    found = as_bad_input(lambda: find_thresholds(answered))
    swept = as_bad_input(lambda: [(axis, sweep(axis, answered)) for axis in options.sweep or ()])
    html = as_bad_input(lambda: _page(answered, found, swept)) if options.html is not None else ""
    if options.out is not None:
        write("--out", options.out, answered.chosen.plan.save)
    if options.html is not None:
        write("--html", options.html, lambda path: files.write(path, html))
    if options.json:
        told = as_json.as_json(answered, found)
        if swept:
            told["sweep"] = [sweep_as_json(axis, points) for axis, points in swept]
        wide_console().out(json.dumps(told, indent=1))
    else:
        _tell(answered, found, swept, options.out)
    return 0


def _tell(
    answered: Answer, found: Thresholds, swept: Sequence[tuple[Axis, list[SweepPoint]]], out: Path | None
) -> None:
    console = wide_console()
    console.print(in_one_line(answered), style="bold", markup=False)
    console.print(calibration(answered), style="" if answered.cluster.calibrated else "yellow")
    console.print()
    for sentence in assumptions(answered):
        console.print(f"• {sentence}", markup=False)
    console.print()
    for line in table(answered, console.width):
        console.print(line, no_wrap=True)
    more = left_out(answered)
    tail = f" {more} more candidates are in --json." if more else ""
    console.print(f"\n{footnote(console.width)}{tail}", style="dim")
    for axis, points in swept:
        console.print()
        console.print(sweep_table(axis, points, console.width))
        if any(point.extrapolated for point in points):
            console.print(f"*: {EXTRAPOLATION}. goodput: the share of the time that failures leave.", style="dim")
    if told := changes(answered, found):
        console.print("\nWhat would change the answer:", style="bold")
        for sentence in told:
            console.print(f"• {sentence}", markup=False)
    console.print("\nTo use it:", style="bold")
    console.print(f"  gs.attach(model, optimizer, {as_python(answered.chosen.plan)})", markup=False)
    if out is None:
        console.print("or, with --out plan.toml, gs.Plan.load of:")
        console.print(Syntax(_toml(answered.chosen.plan), "toml", theme="ansi_dark", background_color="default"))
    else:
        console.print(f"or gs.Plan.load({str(out)!r}), which is written.", markup=False)


def _page(answered: Answer, found: Thresholds, swept: Sequence[tuple[Axis, list[SweepPoint]]]) -> str:
    """The page, with a chart by bandwidth unless another one was asked for."""
    charts = list(swept)
    if answered.cluster.world_size > 1 and not any(axis.what == "bandwidth" for axis, _ in swept):
        now = narrow_link(answered.cluster).bandwidth / answered.arrives
        axis = Axis("bandwidth", now / _CHART_BELOW, now * _CHART_ABOVE)
        charts.insert(0, (axis, sweep(axis, answered, "lossy")))
    return page(answered, changes(answered, found), charts, _toml(answered.chosen.plan))


def _check(options: argparse.Namespace) -> int:
    kept = {"check", "json", "allow", "run"}
    for name, value in vars(options).items():
        if name not in kept and value is not None:
            raise BadInput(
                f"gradsync plan: --check reads all from {options.check}: leave --{name.replace('_', '-')} out"
            )
    if not options.check.is_dir():
        raise BadInput(f"gradsync plan: --check {options.check} is no folder: name one that gs.auto(save=...) wrote")
    checked = as_bad_input(lambda: check_run.check(read_run(options.check)))
    now = as_bad_input(lambda: answer(checked.profile, checked.cluster, options.allow)).chosen
    told = check_run.sentences(checked, now)
    path = options.check / "cluster.refit.toml"
    try:
        checked.cluster.save(path)
        checked.profile.save(options.check / "profile.refit.toml")
    except OSError as error:
        raise BadInput(f"gradsync plan: {path} cannot be written: {error.strerror}; copy the folder first") from None
    console = wide_console()
    if options.json:
        table = {"command": "plan", "version": as_json.VERSION, "check": check_run.as_json(checked, now)}
        console.out(json.dumps(table, indent=1))
        return 0
    for sentence in told:
        console.print(f"• {sentence}", markup=False)
    console.print(f"Written: {path} and profile.refit.toml beside it, for --cluster and --profile.", style="dim")
    return 0


def _toml(plan: Plan) -> str:
    return "\n".join(toml_lines(plan.canonical()))


def _is_plan(path: Path) -> bool:
    try:
        Plan.load(path)
    except ValueError:
        return False
    return True
