"""The Serve application: the ingress deployment in front of the engine deployment, and a prefill pool if there is one.

Beside a prefill pool, the engine deployment is the decode pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ray import serve

from cluster import ray_compat
from cluster.autoscaling import serve_options
from cluster.engine_server import EngineServer
from cluster.ingress_server import IngressServer
from cluster.kv_transfer.fetch import WINDOW
from cluster.prefill_server import PrefillServer
from cluster.roles import Role
from cluster.router import EngineRouter
from engine.config import ConfigError, EngineConfig
from engine.pools import Pools, prefill_config

APPLICATION = "sliceserve"
"""Name of the application where we choose it (`sliceserve serve`)."""

SPARE_CALLS = 64
"""Calls beyond requests that a replica takes: health, metrics, and requests that are about to be refused."""
SPARE_CONNECTIONS = 1024
"""HTTP requests beyond twice the engine's that an ingress holds; Serve answers more than that with its own 429."""
CALLS_PER_PROMPT = WINDOW + 2
"""Calls of a decode replica for one prompt: one for the prompt, some for its KV, one when it needs nothing more."""
DRAIN_TIMEOUT_S = 120.0
"""How long a replica that is to stop may finish its requests."""
HEALTH_CHECK_PERIOD_S = 5.0
GANG_HEALTH_CHECK_PERIOD_S = 1.0
"""A gang that has lost a host is over, and its leader knows it at once."""
HEALTH_CHECK_TIMEOUT_S = 10.0
"""An engine answers from memory, at once. After three checks that fail Serve replaces it."""
CONSTRUCTOR_TRIES = 2
"""Loading either works, or fails for a reason that another try does not change, or (rarely) the node died meanwhile."""

ENGINE_CPUS = 0.2
INGRESS_CPUS = 0.1
"""What placement counts with. Small, so that everything fits a machine with one core; processes use what there is."""
TPU_CHIPS = (1, 2, 4, 8)
"""How many chips of a host Ray gives to one process."""


def build_app(options: EngineConfig | Mapping[str, Any], *, log_level: str = "INFO") -> serve.Application:
    """Binds the deployments of one application; `log_level` is for the replicas' logs.

    Raises:
        ConfigError: an option is unknown or wrong; one line.
    """
    config = options if isinstance(options, EngineConfig) else EngineConfig.from_args(options)
    requests = config.max_decode_seqs + config.max_queued_requests
    # An access log's line per request and hop costs more than the hop; the metrics count requests.
    logging_config = {"enable_access_log": False, "log_level": log_level}
    prefill = None
    if Pools.of(config).prefill:
        own = prefill_config(config)
        pool = _engine(Role.PREFILL, own, logging_config, calls=CALLS_PER_PROMPT)
        prefill = pool(PrefillServer).bind(own, log_level)
    pool = _engine(Role.DECODE if prefill else Role.UNIFIED, config, logging_config)
    engine = pool(EngineServer).bind(config, log_level, prefill)
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=config.num_ingress_replicas,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
        # Room for probes, and for clients that are slow to send a request, beside all that the engine takes.
        max_ongoing_requests=2 * requests + SPARE_CONNECTIONS,
        max_queued_requests=requests,
        backpressure_config={"status_code": 429, "retry_after_s": 1},
        max_constructor_retry_count=CONSTRUCTOR_TRIES,
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=logging_config,
    )(ray_compat.late_bound_ingress(IngressServer))
    return ingress.bind(config, engine, log_level, prefill)


def _engine(
    role: Role, config: EngineConfig, logging_config: dict[str, Any], *, calls: int = 1
) -> Callable[[type], serve.Deployment]:
    """A deployment of engine replicas; `calls` is how many a request makes at a time."""
    requests = calls * (config.max_decode_seqs + config.max_queued_requests)
    pools = Pools.of(config)
    started = pools.prefill if role is Role.PREFILL else pools.decode
    scaling = serve_options(config, role, started)
    return serve.deployment(
        name="Prefill" if role is Role.PREFILL else "Engine",
        **({"num_replicas": started} if scaling is None else {"autoscaling_config": scaling}),
        ray_actor_options={"num_cpus": ENGINE_CPUS, "resources": _accelerators(config)},
        # The engine's own bounded queue decides who is refused; Serve's limits lie beyond it.
        max_ongoing_requests=requests + SPARE_CALLS,
        max_queued_requests=requests,
        max_constructor_retry_count=CONSTRUCTOR_TRIES,
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=GANG_HEALTH_CHECK_PERIOD_S if config.num_hosts > 1 else HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        logging_config=logging_config,
        request_router_config={"request_router_class": EngineRouter},
    )


def _accelerators(config: EngineConfig) -> dict[str, float]:
    """What an engine replica reserves. Ray shows a process the TPU chips that it reserved and no others, so several
    replicas can share a host's; a single one takes the host as it is, which also works where Ray found no chips. With
    several hosts it has no accelerator itself: it reserves a slice when it starts (cluster.gang)."""
    replicas = Pools.largest(config).replicas
    if config.backend != "tpu" or replicas == 1 or config.num_hosts > 1:
        return {}
    if config.tensor_parallel_size not in TPU_CHIPS:
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size} with {replicas} replicas "
            f"on TPU: Ray gives a replica {', '.join(map(str, TPU_CHIPS))} chips; use one of these sizes"
        )
    return {"TPU": float(config.tensor_parallel_size)}
