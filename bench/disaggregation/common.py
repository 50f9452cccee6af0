"""Ray, Serve and a decode replica's part of a transfer, for the benchmarks. Imported after the environment is set."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
from engine.kv_blocks import KVFormat, KVPayload, LocalPayload
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


class Decoder:
    """A decode replica's part of transfers, in this process. Create one: Serve's handles stay with their event loop."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._transport = ObjectStoreTransport.of(config)
        self._receivers = ThreadPoolExecutor(8)
        self._pools: dict[str, ServePrefillPool] = {}
        self._numbers = itertools.count()
        self._rng = np.random.default_rng()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def fetch(self, application_name: str, num_tokens: int, kv_format: KVFormat) -> FetchRecord:
        """Has the deployment Prefill compute so many random tokens, and fetches their KV."""
        fetched = self._fetch(application_name, num_tokens, num_tokens * kv_format.bytes_per_token)
        return asyncio.run_coroutine_threadsafe(fetched, self._loop).result()

    async def _fetch(self, application_name: str, num_tokens: int, num_bytes: int) -> FetchRecord:
        if application_name not in self._pools:
            handle: Any = serve.get_deployment_handle("Prefill", application_name)
            balancer = Balancer.of(self._config, hears_news=False)
            self._pools[application_name] = ServePrefillPool(handle, balancer)
        name = f"bench-{next(self._numbers)}"
        tokens = tuple(self._rng.integers(1000, 40000, num_tokens).tolist())
        request = EngineRequest(
            request_id=name, prompt_token_ids=tokens, sampling=SamplingParams(max_tokens=2, temperature=0)
        )
        fetch = Fetch(
            name,
            KVDemand(request=request, token_ids=tokens, num_cached_tokens=0, block_hashes=()),
            self._pools[application_name],
            self._transport,
            _receive,
            self._receivers,
            described=False,
            timeout_s=60,
            deliver=_look_at,
            count_chunk=lambda _: None,
        )
        return await fetch.run(num_bytes)


def _receive(payloads: Sequence[KVPayload], timeout_s: float) -> Sequence[KVPayload]:
    return [LocalPayload(blocks=payload.fetch(timeout_s)) for payload in payloads]


def _look_at(event: KVEvent) -> None:
    """What has arrived is in this process' memory, in order; and let go."""
    if isinstance(event, KVArrived):
        for share in event.payload.shares():
            assert share.data.flags.c_contiguous
