"""`sliceserve plan`: what a deployment takes, can reach and costs, without hardware and without weights."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cli.flags import FlagError, FlagParser
from cluster.plan.errors import PlanError
from cluster.plan.workload import EXAMPLE, SLO_EXAMPLE, Slo, Workload
from cluster.topology import GENERATIONS, NeuronInstance, TopologyError, TpuSlice, find_topology, tpu_slices
from engine.config import ConfigError, EngineConfig

if TYPE_CHECKING:  # what needs JAX is imported once the flags are found to be right
    from backends.jax.model_config import ModelConfig
    from cluster.plan.programs import Programs
    from cluster.plan.request import PlanRequest
    from cluster.plan.search import Candidate, Rank

DESCRIPTION = """Find out what a model needs on a TPU slice and what it can reach there: memory and KV capacity, the
roofline of its steps, bounds for throughput and latency, cost. Compiles the real programs; needs neither TPU nor
weights. docs/plan.md explains the numbers."""
SHOWN = 10  # candidates of a search
RANK: Rank = "cost"
MAX_CHIPS = 64
COMPILED = 2  # of them are compiled
_ENGINE_OPTIONS = (
    *("max_model_len", "hbm_utilization_factor", "max_decode_seqs", "max_num_batched_tokens", "block_size"),
    "sliding_window",
)


def plan(argv: Sequence[str]) -> int:
    """Prints a plan, a search or the comparison. Returns 0, 1 where nothing works, 2 for a wrong command line."""
    try:
        flags = _parser().parse(argv)
        task = _task(flags)
    except (FlagError, ConfigError, TopologyError, PlanError) as error:
        return _complain(error, 2)
    try:
        return task.run()
    except PlanError as error:
        return _complain(error, 1)


def _complain(error: Exception, code: int) -> int:
    print(f"sliceserve plan: {error}", file=sys.stderr)
    return code


class _Comparison:
    """--compare."""

    def __init__(self, flags: argparse.Namespace) -> None:
        for name in ("model", "topology", "search", "json", "chart"):
            if getattr(flags, name):
                raise FlagError(f"--compare prints one fixed table; leave --{name} out")

    def run(self) -> int:
        from cluster.plan.calibration import EXPECTED
        from cluster.plan.published import compare
        from cluster.plan.published_table import comparison_table
        from cluster.plan.table import LEGEND

        print("output tokens/s, published and planned (fit: the efficiencies were fitted to it)\n")
        print(comparison_table(compare(EXPECTED)))
        print("", *LEGEND, sep="\n")
        return 0


class _Task:
    """What --search and a single plan share: everything that the flags say, checked."""

    def __init__(self, flags: argparse.Namespace) -> None:
        from cluster.plan.chart import check_chart
        from cluster.plan.prices import load_prices

        if not flags.model:
            raise FlagError("--model is missing: a folder, a config.json, a .gguf file or a hub id")
        self.flags = flags
        self.engine = EngineConfig.from_args(
            {name: value for name in _ENGINE_OPTIONS if (value := getattr(flags, name)) is not None}
        )
        self.workload = Workload.parse(flags.workload)
        self.prices = load_prices(flags.prices)
        if flags.chart is not None:
            check_chart(flags.chart)

    def request(
        self, topology: TpuSlice | NeuronInstance, tensor_parallel: int, data_parallel: int, model: ModelConfig
    ) -> PlanRequest:
        from cluster.plan.request import PlanRequest, default_step_tokens

        prefill, decode = self.flags.disagg_topo or (0, 0)
        window = self.engine.sliding_window
        return PlanRequest(
            model_name=self.flags.model,
            model=model if window is None else replace(model, sliding_window=window),
            topology=topology,
            tensor_parallel=tensor_parallel,
            data_parallel=data_parallel,
            quantization=self.flags.quantization,
            max_model_len=self.engine.max_model_len,
            utilization=self.engine.hbm_utilization_factor,
            max_rows=self.engine.max_decode_seqs,
            step_tokens=self.engine.max_num_batched_tokens or default_step_tokens(self.engine.max_decode_seqs),
            block_size=self.engine.block_size,
            workload=self.workload,
            prefill_slices=prefill,
            decode_slices=decode,
            sliding_window=window,
        )


class _Plan(_Task):
    """One deployment."""

    def __init__(self, flags: argparse.Namespace) -> None:
        super().__init__(flags)
        if not flags.topology:
            raise FlagError("--topology is missing (v5e:2x4, v6e-8, inf2.48xlarge, ...), or let --search choose")
        self.topology = find_topology(flags.topology)
        if flags.chart is not None and isinstance(self.topology, NeuronInstance):
            raise FlagError("--chart draws TPU plans; Neuron instances are planned for memory only")

    def run(self) -> int:
        from cluster.plan.models import open_model_config
        from cluster.plan.planner import check_fits, make_plan
        from cluster.plan.report import to_json
        from cluster.plan.request import choose_parallelism
        from cluster.plan.table import plan_text

        model = open_model_config(self.flags.model)
        sizes = choose_parallelism(model, self.topology, self.flags.tensor_parallel_size, self.flags.data_parallel_size)
        request = self.request(self.topology, *sizes, model)
        result = make_plan(request, self.prices)
        if self.flags.compile and isinstance(self.topology, TpuSlice) and result.memory.fits:
            result = make_plan(request, self.prices, _compile(request))
        if self.flags.json:
            print(json.dumps(to_json(result, self.prices), indent=2))
        check_fits(result)
        if not self.flags.json:
            print(plan_text(result, self.prices))
        if self.flags.chart is not None:
            from cluster.plan.chart import write_chart
            from cluster.plan.table import heading

            write_chart(self.flags.chart, result, self.prices, heading(result))
        return 0


class _Search(_Task):
    """The best deployments for a workload."""

    def __init__(self, flags: argparse.Namespace) -> None:
        super().__init__(flags)
        for name in ("tensor_parallel_size", "data_parallel_size", "disagg_topo", "chart"):
            if getattr(flags, name) is not None:
                raise FlagError(f"--{name} belongs to one plan; --search varies it: leave one of them out")
        self.slo = Slo() if flags.slo is None else Slo.parse(flags.slo)
        self.rank: Rank = flags.rank or RANK
        self.max_chips: int = flags.max_chips or MAX_CHIPS
        if flags.topology == "":
            raise FlagError("--topology= is empty: name slices or generations, or leave it out for all")
        self.slices = _slices(flags.topology, self.max_chips)

    def run(self) -> int:
        from cluster.plan.models import open_model_config
        from cluster.plan.search import SearchSpace, ranked, search
        from cluster.plan.search_report import search_json, search_text

        model = open_model_config(self.flags.model)
        space = SearchSpace(
            request=self.request(self.slices[0], 1, 1, model),
            slices=self.slices,
            quantizations=(None, "int8") if self.flags.quantization is None else (self.flags.quantization,),
            max_chips=self.max_chips,
        )
        found = search(space, self.slo, self.prices, self.rank)[:SHOWN]
        if self.flags.compile:
            found = ranked([*map(self._compiled, found[:COMPILED]), *found[COMPILED:]], self.rank)
        if self.flags.json:
            print(json.dumps(search_json(found, self.prices), indent=2))
        else:
            print(search_text(found, self.workload, self.prices))
        return 0

    def _compiled(self, candidate: Candidate) -> Candidate:
        """The candidate with measured programs; as it is where they can't be compiled."""
        from cluster.plan.planner import make_plan

        try:
            measured = make_plan(candidate.plan.request, self.prices, _compile(candidate.plan.request))
        except PlanError as error:
            print(f"note: {candidate.plan.request.topology.name} stays by formula: {error}", file=sys.stderr)
            return candidate
        return replace(candidate, plan=measured) if measured.performance is not None else candidate


def _compile(request: PlanRequest) -> Programs:
    from cluster.plan.compiled import compile_programs

    print(f"compiling for {request.topology.name} …", file=sys.stderr, flush=True)
    return compile_programs(request)


def _task(flags: argparse.Namespace) -> _Comparison | _Plan | _Search:
    if flags.compare:
        return _Comparison(flags)
    if flags.search:
        return _Search(flags)
    for name in ("slo", "rank", "max_chips"):
        if getattr(flags, name) is not None:
            raise FlagError(f"--{name} is for --search; add it, or leave --{name} out")
    return _Plan(flags)


def _slices(names: str | None, max_chips: int) -> tuple[TpuSlice, ...]:
    """The slices to search: all, or those of a list of generations and slices."""
    chosen: list[TpuSlice] = []
    for name in (names or ",".join(GENERATIONS)).split(","):
        if name in GENERATIONS:
            chosen += tpu_slices(name)
            continue
        topology = find_topology(name)
        if not isinstance(topology, TpuSlice):
            raise FlagError(f"--topology={name}: --search ranks TPU slices; Neuron is planned for memory only")
        chosen.append(topology)
    small = tuple(topology for topology in chosen if topology.num_chips <= max_chips)
    if not small:
        raise FlagError(f"--max_chips={max_chips} is less than every slice of --topology={names} has")
    return small


def _parser() -> FlagParser:
    parser = FlagParser("sliceserve plan", DESCRIPTION)
    what = parser.add_argument_group("What to plan")
    what.add_argument("--model", help="folder, config.json, .gguf file or hub id; weights are not needed")
    what.add_argument(
        "--topology", help="slice (v5e:4x4, v5e-16) or Neuron instance; with --search a list, generations too"
    )
    what.add_argument("--workload", default=EXAMPLE, help="requests and how many at a time (default: %(default)s)")
    _add_options(parser)
    search = parser.add_argument_group("Search")
    search.add_argument("--search", action="store_true", help="rank slices, quantization, TP, DP and disaggregation")
    search.add_argument("--slo", help=f"keep what is expected to meet it: {SLO_EXAMPLE}")
    search.add_argument("--rank", choices=["cost", "throughput"], help=f"what is best (default: {RANK})")
    search.add_argument("--max_chips", type=_positive, help=f"of the deployment (default: {MAX_CHIPS})")
    output = parser.add_argument_group("Report")
    output.add_argument("--prices", type=Path, help="JSON or YAML with dollars per chip-hour: {'v6e': 1.9}")
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")
    output.add_argument("--chart", type=Path, help="also draw memory, roofline and throughput into this .png")
    output.add_argument(
        "--no_compile",
        dest="compile",
        action="store_false",
        help="by formula: no libtpu needed, seconds instead of half a minute",
    )
    output.add_argument("--compare", action="store_true", help="how the planner does against published figures")
    return parser


def _add_options(parser: FlagParser) -> None:
    options = parser.add_argument_group("Options of the server (docs/configuration.md)")
    options.add_argument("--tensor_parallel_size", type=_positive, help="default: all devices, or one per head")
    options.add_argument("--data_parallel_size", type=_positive, help="default: what tensor parallelism leaves")
    options.add_argument("--quantization", choices=["int8"], help="of the weights (default: bfloat16)")
    options.add_argument("--disagg_topo", type=_two_counts, help="P,D: slices that only prefill, and only decode")
    for name in _ENGINE_OPTIONS:
        spellings = [f"--{name}"] + (["--max_running_seqs"] if name == "max_decode_seqs" else [])
        options.add_argument(*spellings, dest=name, metavar="N", help=EngineConfig.model_fields[name].description)


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def _two_counts(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"{text} is not like 1,2")
    return _positive(parts[0]), _positive(parts[1])
