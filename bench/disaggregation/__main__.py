"""Chooses the benchmark; see the package."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import bench.disaggregation
from cluster.ray_environment import set_environment


def main() -> None:
    parser = argparse.ArgumentParser(
        description=bench.disaggregation.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speed", "trace", "tpot"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--file", type=Path, help="trace: where to write it, for chrome://tracing")
    parser.add_argument(
        "--cases",
        type=int,
        nargs="+",
        default=[0, 1, 2, 3],
        help="tpot: unified on one core, on all; pools where decode, and where prefill has a core of its own",
    )
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="sliceserve-bench-"))
    set_environment(folder, haproxy=False)  # before the first import of Ray
    if arguments.what == "speed":
        from bench.disaggregation.speed import speed

        speed(folder, arguments.rounds)
    elif arguments.what == "trace":
        from bench.disaggregation.trace import trace

        trace(folder, arguments.rounds, arguments.file)
    else:
        from bench.disaggregation.tpot import tpot

        tpot(folder, arguments.cases)


if __name__ == "__main__":
    main()
