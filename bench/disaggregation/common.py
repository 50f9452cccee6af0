"""Ray, Serve and a decode replica's part of a transfer, for the benchmarks. Imported after the environment is set."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from ray import serve
from ray.serve.config import HTTPOptions

from cluster import ray_compat
from cluster.balancer import Balancer
from cluster.kv_transfer.fetch import Fetch, FetchRecord
from cluster.kv_transfer.object_store import ObjectStoreTransport
from cluster.kv_transfer.prefill_pool import ServePrefillPool
from cluster.local_ray import LocalRay
from engine.config import EngineConfig
from engine.kv_blocks import KVFormat
from engine.kv_connector import KVArrived, KVDemand, KVEvent
from engine.request import EngineRequest, SamplingParams

PORT = 8210
START_TIMEOUT_S = 200.0


@contextmanager
def ray_with_serve(folder: Path) -> Iterator[None]:
    ray = LocalRay(folder)
    try:
        serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host="127.0.0.1", port=PORT))
        yield
    finally:
        ray.stop()


@contextmanager
def application(app: serve.Application, name: str) -> Iterator[None]:
    ray_compat.deploy(app, name=name)
    deadline = time.monotonic() + START_TIMEOUT_S
    while serve.status().applications[name].status != "RUNNING":
        assert time.monotonic() < deadline, serve.status()
        time.sleep(0.2)
    try:
        yield
    finally:
        serve.delete(name)


@asynccontextmanager
async def fetching(config: EngineConfig, application_name: str) -> AsyncIterator[Any]:
    """Gives a function that fetches the KV of so many random tokens from the deployment Prefill, in this process."""
    handle: Any = serve.get_deployment_handle("Prefill", application_name)
    pool = ServePrefillPool(handle, Balancer.of(config, hears_news=False))
    transport = ObjectStoreTransport.of(config)
    rng = np.random.default_rng()
    count = 0

    async def fetch(num_tokens: int, kv_format: KVFormat) -> FetchRecord:
        nonlocal count
        count += 1
        tokens = tuple(rng.integers(1000, 40000, num_tokens).tolist())
        request = EngineRequest(
            request_id=f"r{count}", prompt_token_ids=tokens, sampling=SamplingParams(max_tokens=2, temperature=0)
        )
        demand = KVDemand(request=request, token_ids=tokens, num_cached_tokens=0, block_hashes=())
        subject = Fetch(
            f"bench-{count}",
            demand,
            pool,
            transport,
            timeout_s=60,
            deliver=_drop,
            count_chunk=lambda _: None,
        )
        return await subject.run(num_tokens * kv_format.bytes_per_token)

    yield fetch
    await asyncio.sleep(0.2)  # the last transfer is closed


def _drop(event: KVEvent) -> None:
    """Looks at what has arrived, as the device would, and lets it go."""
    if isinstance(event, KVArrived):
        for share in event.payload.shares():
            assert share.data.flags.c_contiguous
