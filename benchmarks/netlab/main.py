"""How does my training run over a slow network? Runs a command as ranks on hosts that this machine plays.

Needs root (network namespaces); leaves nothing behind.

example:
  python benchmarks/netlab/main.py --hosts 2 --ranks 2 --rate 100mbit -- python train.py
  python benchmarks/netlab/main.py --rate 1gbit --measure
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
# Not this folder itself, which Python puts first: its files are of the package `netlab`.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from netlab.lab import Lab, LabError, available, payload  # noqa: E402


class Parser(argparse.ArgumentParser):
    """Answers bad input with one sentence and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.command and not options.measure:
        parser.error("name a command after --, or --measure")
    if not (math.isfinite(options.timeout) and options.timeout > 0):
        parser.error(f"--timeout needs a positive number of seconds, got {options.timeout:g}")
    if options.ranks < 1:
        parser.error(f"--ranks needs a number of at least 1, got {options.ranks}")
    try:
        lab = Lab(options.hosts, None if options.rate == "none" else options.rate, options.burst)
    except ValueError as error:
        parser.error(str(error))
    if reason := available():
        parser.error(f"there can be no lab here, {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of every `finally`
    try:
        with lab:
            return _measure(lab, options) if options.measure else _train(lab, options)
    except LabError as error:
        print(f"{parser.prog}: {str(error).splitlines()[0]}", file=sys.stderr)  # the output was shown as it came
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> Parser:
    description, epilog = (__doc__ or "").split("\n\nexample:")
    parser = Parser(
        prog="netlab",
        usage="%(prog)s [options] -- COMMAND ...",
        description=description,
        epilog=f"example:{epilog}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", type=int, default=2, help="how many; with more than 2 there is a switch (2)")
    parser.add_argument("--ranks", type=int, default=1, help="processes on each host (1)")
    parser.add_argument("--rate", default="1gbit", help="of each link, each way: 100mbit, 2.5gbit, none (1gbit)")
    parser.add_argument(
        "--burst", type=int, help="bytes that leave at full speed after a pause (1 ms, at least 131072)"
    )
    parser.add_argument(
        "--share-gpus", action="store_true", help="ranks on GPUs over NCCL, several on one where there are more ranks"
    )
    parser.add_argument("--timeout", type=float, default=3600, help="seconds until the ranks are ended (3600)")
    parser.add_argument("--measure", action="store_true", help="no command: print the latency and bandwidth of a link")
    parser.add_argument("--out", type=Path, help="with --measure: a JSON file that also takes the samples")
    parser.add_argument("--commit", help="what is measured, outside of a clone")
    parser.add_argument("command", nargs="*", help=argparse.SUPPRESS)
    return parser


def _train(lab: Lab, options: argparse.Namespace) -> int:
    try:
        lab.run(
            options.command,
            ranks_per_host=options.ranks,
            timeout=options.timeout,
            share_gpus=options.share_gpus,
            echo=lambda rank, line: print(f"[host{rank // options.ranks} rank {rank}] {line}", flush=True),
        )
    finally:
        for host, sent in enumerate(lab.counters()):
            net = payload(sent.nbytes, sent.packets)
            print(f"host{host} sent {sent.nbytes / 1e6:.2f} MB over its link, {net / 1e6:.2f} MB without headers")
    return 0


def _measure(lab: Lab, options: argparse.Namespace) -> int:
    import bench_harness  # late: it takes seconds to import torch
    from netlab.link import as_link, sample_link

    trips, transfers = sample_link(lab, messages=5, timeout=options.timeout)
    link = as_link(trips, transfers)
    bits = 8 * link.bandwidth
    print(f"latency {1e6 * link.latency_s:.0f} us, bandwidth {link.bandwidth / 1e6:.2f} MB/s ({bits / 1e6:.0f} Mbit/s)")
    if options.out is not None:
        cell = {
            "machine": bench_harness.machine(),
            "commit": options.commit or bench_harness.commit(HERE),
            "hosts": lab.hosts,
            "latency_s": round(link.latency_s, 7),
            "bandwidth": round(link.bandwidth),
            "samples": {"ping_pong_s": [round(s, 7) for s in trips], "32MB_s": [round(s, 6) for s in transfers]},
        }
        bench_harness.save(options.out, {options.rate: cell})
    return 0


if __name__ == "__main__":
    sys.exit(main())
