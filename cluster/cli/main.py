"""`sliceserve`: the command line. Each command is imported when it is called, so that `--help` answers at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

USAGE = """\
usage: sliceserve COMMAND [--flag=value ...]

Serve open language models on TPUs, AWS Neuron and CPUs.

commands:
  serve     start a server on this machine
  chat      talk to a running server in the terminal
  bench     put load on a server and measure it
  plan      find out what a model needs and can reach on TPU slices, without one
  compile   compile a deployment's programs for a TPU slice, without one
  simulate  find out what a cluster would do under some load, in virtual time

sliceserve COMMAND --help lists a command's flags; sliceserve --version prints the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit code: 0, 1 for a failure, 2 for a wrong command line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"sliceserve {metadata.version('sliceserve')}")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        print(f"sliceserve: unknown command {arguments[0]!r}: use one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return command(arguments[1:])
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _serve(argv: Sequence[str]) -> int:
    from cluster.cli.serve_flags import serve

    return serve(argv)


def _chat(argv: Sequence[str]) -> int:
    from cluster.cli.chat import chat

    return chat(argv)


def _bench(argv: Sequence[str]) -> int:
    from cluster.cli.bench.command import bench

    return bench(argv)


def _plan(argv: Sequence[str]) -> int:
    from cluster.cli.plan import plan

    return plan(argv)


def _compile(argv: Sequence[str]) -> int:
    from cluster.cli.compile import compile_command

    return compile_command(argv)


def _simulate(argv: Sequence[str]) -> int:
    from cluster.cli.simulate import simulate_command

    return simulate_command(argv)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "serve": _serve,
    "chat": _chat,
    "bench": _bench,
    "plan": _plan,
    "compile": _compile,
    "simulate": _simulate,
}


if __name__ == "__main__":
    sys.exit(main())
