"""Programs, measured: the deployment's own step programs, compiled for its slice by the compiler that TPU hosts run.

Two of them stand for all: the decode step of the workload's bucket and the largest step with prompts. What attention
reads of the KV cache depends on the requests and comes from the formula; everything else is read off the programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.plan.costs import AnalyticCosts, StepCost, sent_bytes
from cluster.plan.errors import PlanError
from cluster.plan.fitting import memory_of
from cluster.plan.programs import Programs
from cluster.plan.request import PlanRequest
from engine.backend import BackendError
from engine.config import ConfigError, EngineConfig
from engine.errors import first_line

if TYPE_CHECKING:
    from backends.jax.aot import ProgramReport
    from backends.jax.deployment import Deployment
    from backends.jax.step import StepShape


def engine_config(request: PlanRequest) -> EngineConfig:
    """The options that a server of this deployment gets.

    Raises:
        PlanError: the server does not take them.
    """
    options = {
        "model": request.model_name,
        "backend": "tpu",
        "tensor_parallel_size": request.tensor_parallel,
        "max_model_len": request.max_model_len,
        "hbm_utilization_factor": request.utilization,
        "max_decode_seqs": request.max_rows,
        "max_num_batched_tokens": request.step_tokens,
        "block_size": request.block_size,
        "quantization": request.quantization,
    }
    try:
        return EngineConfig.from_args({name: value for name, value in options.items() if value is not None})
    except ConfigError as error:
        raise PlanError(f"{error} (or plan it by formula, with --no-compile)") from None


def compile_programs(request: PlanRequest) -> Programs:
    """Compiles the deployment's programs and reads their costs.

    Raises:
        PlanError: libtpu is missing, or the compiler refuses a program; one line.
    """
    config = engine_config(request)
    try:
        return _compile(request, config)
    except BackendError as error:
        raise PlanError(f"{error}; --no-compile plans by formula") from None
    except Exception as error:  # tracing raises what it likes where a kernel does not take a shape
        raise PlanError(
            f"the step programs of {request.model_name} can't be made for {request.topology.name}: "
            f"{first_line(error)}; --no-compile plans by formula"
        ) from error


def _compile(request: PlanRequest, config: EngineConfig) -> Programs:
    from backends.jax.aot import compile_step, open_deployment

    deployment = open_deployment(config, request.model, request.topology.name)
    sizes = _sizes(request, deployment)
    memory = memory_of(request, sizes)
    if not memory.fits:
        return sizes
    wanted = min(request.max_rows, -(-request.workload.concurrency // request.data_parallel))
    shapes = [_decode_shape(deployment, wanted), _prefill_shape(deployment)]
    # One after the other: two at a time crashed libtpu's compiler once, which ends the process without a word.
    decode, prefill = [compile_step(deployment, shape, memory.num_blocks) for shape in shapes]
    return Programs(
        source="compiled",
        weight_bytes=sizes.weight_bytes,
        other_bytes=sizes.other_bytes,
        kv_bytes_per_block=sizes.kv_bytes_per_block,
        temporary_bytes=max(_temporary_bytes(report) for report in (decode, prefill)),
        costs=CompiledCosts(
            formula=AnalyticCosts(shard=request.shard, devices_per_chip=request.devices_per_chip),
            kv_bytes_per_token=sizes.kv_bytes_per_block / request.block_size,
            decode_step=_measured(decode, shapes[0].rows, request.devices_per_chip),
            prefill_step=_measured(prefill, shapes[1].tokens, request.devices_per_chip),
        ),
        num_programs=len(shapes),
        compile_seconds=decode.compile_seconds + prefill.compile_seconds,
        unknown_loops=decode.unknown_loops + prefill.unknown_loops,
    )


def _sizes(request: PlanRequest, deployment: Deployment) -> Programs:
    """What is known before anything is compiled; temporaries by formula."""
    return Programs(
        source="compiled",
        weight_bytes=deployment.weight_bytes_per_device,
        other_bytes=deployment.other_bytes_per_device,
        kv_bytes_per_block=deployment.kv_bytes_per_block_per_device,
        temporary_bytes=request.shard.temporary_bytes(request.step_tokens, request.max_rows),
        costs=AnalyticCosts(shard=request.shard, devices_per_chip=request.devices_per_chip),
    )


def _decode_shape(deployment: Deployment, rows: int) -> StepShape:
    """The widest-table decode bucket for so many rows."""
    fitting = [shape for shape in deployment.step_shapes if shape.decode_only and shape.rows >= rows]
    fewest = min(shape.rows for shape in fitting)
    return max(shape for shape in fitting if shape.rows == fewest)


def _prefill_shape(deployment: Deployment) -> StepShape:
    """The step with most tokens and rows, which needs most temporaries."""
    return max(shape for shape in deployment.step_shapes if not shape.decode_only)


def _temporary_bytes(report: ProgramReport) -> int:
    return report.temp_bytes + report.code_bytes + report.output_bytes - report.alias_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """A compiled program: its work without what attention reads of the KV cache, and its tokens."""

    tokens: int
    hbm_bytes: float
    ici_bytes: float
    collectives: float


def _measured(report: ProgramReport, tokens: int, devices_per_chip: int) -> MeasuredStep:
    sent = sum(c.count * sent_bytes(c.kind, c.bytes, c.group_size, devices_per_chip) for c in report.collectives)
    return MeasuredStep(
        tokens=tokens,
        hbm_bytes=report.hbm_bytes,
        ici_bytes=sent,
        collectives=sum(c.count for c in report.collectives),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledCosts:
    """StepCosts from two compiled programs. Between their sizes, what is not weights grows with the tokens.

    Products are counted by formula: the compiler neither adds any nor leaves any out, and attention's depend on the
    requests.
    """

    formula: AnalyticCosts
    kv_bytes_per_token: float
    decode_step: MeasuredStep
    prefill_step: MeasuredStep

    def decode(self, rows: float, context: float) -> StepCost:
        step, formula = self.decode_step, self.formula.decode(rows, context)
        share = rows / step.tokens
        window = self.formula.shard.config.sliding_window
        seen = context if window is None else min(context, window)
        return StepCost(
            hbm_bytes=self._weights + self._rest(step) * share + rows * (seen + 1) * self.kv_bytes_per_token,
            flops=formula.flops,
            ici_bytes=step.ici_bytes * share,
            collectives=step.collectives,
        )

    def prefill(self, tokens: float, context: float) -> StepCost:
        step = self.prefill_step
        share = tokens / step.tokens
        return StepCost(
            hbm_bytes=self._rest(step) * share + tokens * self.kv_bytes_per_token,
            flops=self.formula.prefill(tokens, context).flops,
            ici_bytes=step.ici_bytes * share,
            collectives=0,
        )

    @property
    def _weights(self) -> float:
        """Read by every step, however small; never more than the smaller program moves."""
        return min(self.formula.weight_reads, self.decode_step.hbm_bytes, self.prefill_step.hbm_bytes)

    def _rest(self, step: MeasuredStep) -> float:
        return step.hbm_bytes - self._weights
