"""Several processes as one: how a host joins the others, and what they agree on before their first step.

Each process has its own devices, and all of them make up one mesh. From `join_hosts` on the processes must run the same
programs in the same order. Whoever started them watches them: JAX's own watch over its peers, which ends a process
without a word, is set so that it comes last.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from backends.jax.memory import KVPlan
from engine.backend import BackendError, HostPlace
from engine.errors import first_line

JOIN_TIMEOUT_S = 120
"""How long a host waits for the others to come."""
PEER_TIMEOUT_S = 3600
"""After so long JAX ends processes whose peers are silent. Longer than any wait of those who watch."""


def join_hosts(place: HostPlace) -> None:
    """Makes this process one of `place.num_hosts`; to be called before JAX starts its devices.

    Raises:
        BackendError: the others don't come.
    """
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    jax.config.update("jax_check_proxy_envs", False)  # takes every variable with _proxy in its name for one
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # between CPUs; TPUs have their own network
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.num_hosts,
            place.rank,
            initialization_timeout=JOIN_TIMEOUT_S,
            heartbeat_timeout_seconds=PEER_TIMEOUT_S,
            shutdown_timeout_seconds=1,
        )
    except (RuntimeError, ValueError) as error:
        raise BackendError(
            f"host {place.rank} can't join the other {place.num_hosts - 1} at {place.coordinator} "
            f"within {JOIN_TIMEOUT_S} s: {first_line(error)}"
        ) from error


def engine_devices(count: int, num_hosts: int) -> list[jax.Device]:
    """The engine's `count` devices: the first ones of each host, host after host."""
    if num_hosts == 1:
        return list(jax.local_devices()[:count])
    each = count // num_hosts
    return [device for host in range(num_hosts) for device in jax.local_devices(process_index=host)[:each]]


def agree_on_plan(plan: KVPlan, num_hosts: int) -> KVPlan:
    """The KV cache that fits on every host; all of them call this together."""
    if num_hosts == 1:
        return plan
    mine = np.array([plan.num_blocks, plan.max_model_len], np.int32)
    blocks, tokens = np.min(multihost_utils.process_allgather(mine), axis=0).tolist()
    return KVPlan(num_blocks=blocks, max_model_len=tokens)


def cache_place(devices: Sequence[jax.Device]) -> str:
    """Names the set of devices, and this host's part in it, for caches of compiled programs."""
    if not devices:
        return "any"
    hosts = {device.process_index for device in devices}
    names = [devices[0].platform, *(str(device.id) for device in devices)]
    if len(hosts) > 1 and devices[0].platform == "cpu":
        names.append(f"host{jax.process_index()}")
    return "-".join(names)
