"""`sliceserve compile`: a deployment's step programs, compiled for a TPU slice on any machine, for its hosts to load.

A program's shape contains the KV cache's, so that both sides must count the same blocks: the command ends with the
options that the server needs.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cluster.cli.flags import FlagError, FlagParser, add_config_flags, given
from cluster.plan.errors import PlanError
from cluster.topology import TopologyError, TpuSlice, find_topology
from engine.backend import BackendError
from engine.config import GIB, ConfigError, EngineConfig
from engine.pools import PREFILL_OVERRIDES


def compile_command(argv: Sequence[str]) -> int:
    """Compiles as the flags say. Returns the exit code."""
    parser = _parser()
    try:
        flags = parser.parse(argv)
        options = given(flags)
        slice_name = options.pop("topology", None)
        if slice_name is None:
            raise FlagError("--topology is missing: name a slice, such as --topology=v5e:2x4")
        topology = _tpu_slice(slice_name)
        threads = _positive("threads", flags.threads)
        config = EngineConfig.from_args({**options, "backend": "tpu"})
        if config.num_hosts > 1:
            raise FlagError(f"--num_hosts={config.num_hosts}: several hosts can't load such programs; leave it out")
        for name, own in PREFILL_OVERRIDES.items():
            if getattr(config, name) is not None:
                raise FlagError(f"--{name}: pools are compiled one by one; give --{own} in a command of its own")
        if config.compilation_cache_dir is not None:
            raise FlagError("--compilation_cache_dir is the server's option; say here where to with --out")
        return _compile(config, topology, flags.out, threads)
    except (FlagError, ConfigError, TopologyError) as error:
        print(f"sliceserve compile: {error}", file=sys.stderr)
        return 2
    except (BackendError, PlanError) as error:
        print(f"sliceserve compile: {error}", file=sys.stderr)
        return 1


def _tpu_slice(name: str) -> TpuSlice:
    topology = find_topology(name)
    if not isinstance(topology, TpuSlice):
        raise FlagError(f"--topology={name}: programs are compiled for TPUs only; use a slice such as v5e:2x4")
    return topology


def _positive(flag: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise FlagError(f"--{flag}={text}: use a number from 1 on")
    return int(text)


def _compile(config: EngineConfig, topology: TpuSlice, folder: str | None, threads: int) -> int:
    from backends.jax.aot import open_deployment
    from backends.jax.compilation import (
        compile_all,
        compile_program,
        default_cache_dir,
        name_sources_alike,
        programs_dir,
    )
    from backends.jax.open_model import as_configured
    from backends.jax.program_store import ProgramStore
    from cluster.plan.models import open_model_config

    out = default_cache_dir() if folder is None else Path(folder).expanduser()
    name_sources_alike()
    model = as_configured(open_model_config(config.model), config)
    deployment = open_deployment(config, model, topology.name)
    asked = config.device_memory_gib
    plan = deployment.plan(topology.bytes_per_device if asked is None else int(asked * GIB))
    deployment = deployment.within(plan)
    shapes = deployment.step_shapes
    arguments = deployment.parameter_shapes(), deployment.state_shapes(plan.num_blocks), deployment.table_shapes()
    store = ProgramStore(programs_dir(out), deployment.mesh.devices.flat)
    print(f"compiling {len(shapes)} programs of {config.model_name} for {topology.name} …", file=sys.stderr, flush=True)
    started = time.monotonic()
    lowered = ((shape, partial(deployment.lower, shape, *arguments)) for shape in shapes)
    compile_all(lowered, len(shapes), threads, _show, lambda program: store.save(program, compile_program(program)))
    print(f"{len(shapes)} programs in {programs_dir(out)}, {time.monotonic() - started:.0f} s", file=sys.stderr)
    print(server_options(config, plan.num_blocks, plan.max_model_len, out))
    return 0


def _show(phase: str, done: int, total: int, detail: str = "") -> None:
    print(f"  {phase}: {done}/{total} {detail}".rstrip(), file=sys.stderr, flush=True)


def server_options(config: EngineConfig, num_blocks: int, max_model_len: int, out: Path) -> str:
    """The command line whose programs these are."""
    options = {name: getattr(config, name) for name in sorted(config.model_fields_set)}
    options |= {"num_blocks": num_blocks, "max_model_len": max_model_len, "compilation_cache_dir": out}
    return shlex.join(("sliceserve", "serve", *(f"--{name}={value}" for name, value in options.items())))


def _parser() -> FlagParser:
    parser = FlagParser(
        "sliceserve compile", "Compile a deployment's programs for a TPU slice on this machine; no TPU is needed."
    )
    group = parser.add_argument_group("Compiling")
    group.add_argument(
        "--out",
        metavar="text",
        help="Folder for the programs; TPU hosts get it as --compilation_cache_dir. (default: this machine's cache)",
    )
    group.add_argument("--threads", default="2", metavar="int", help="Programs at a time. (default: %(default)s)")
    add_config_flags(parser)
    return parser
