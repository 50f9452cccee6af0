"""Two engines in one process: a decode engine has its prompts computed by a prefill engine, and gets their KV."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from engine.backend import Backend
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.kv_blocks import KVPayload, LocalPayload
from engine.kv_connector import KVArrived, KVComplete, KVConnector, KVDemand, KVEvent, KVExport
from engine.request import RequestOutput

RECEIVE_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetch:
    request_id: str  # at the decode engine
    name: str  # at the prefill engine


class PrefillEngine(KVConnector):
    """An engine whose requests come from `DecodeConnector`s, and its connector."""

    def __init__(self, config: EngineConfig, backend: Backend) -> None:
        self.core = EngineCore(config, backend, self._emit, connector=self)
        self.info = self.core.load()
        self.core.start()
        self.num_exports = 0
        self._owners: dict[str, tuple[Fetch, DecodeConnector]] = {}
        self._sender = ThreadPoolExecutor(1)  # exports leave in their order
        self._numbers = itertools.count()

    def compute(self, demand: KVDemand, owner: DecodeConnector) -> Fetch:
        request = demand.request
        outputs = demand.token_ids[len(request.prompt_token_ids) :]
        fetch = Fetch(request_id=request.request_id, name=f"prefill-{next(self._numbers)}")
        self._owners[fetch.name] = fetch, owner
        self.core.submit(
            replace(
                request,
                request_id=fetch.name,
                output_token_ids=outputs,
                sampling=replace(request.sampling, max_tokens=len(outputs) + 1),
                export_from=demand.num_cached_tokens,
            )
        )
        return fetch

    def events(self) -> Sequence[KVEvent]:
        return ()

    def exported(self, export: KVExport) -> None:
        self.num_exports += 1
        self._sender.submit(self._send, export)

    def _send(self, export: KVExport) -> None:
        fetch, owner = self._owners[export.request_id]
        payload: KVPayload = LocalPayload(blocks=export.blocks.result())
        if owner.receiver is not None:
            [payload] = owner.receiver.receive_blocks([payload], RECEIVE_TIMEOUT_S)
        owner.push(
            fetch,
            KVArrived(request_id=fetch.request_id, start=export.start, end=export.end, payload=payload),
        )

    def _emit(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            fetch, owner = self._owners[output.request_id]
            event = KVComplete(
                request_id=fetch.request_id,
                next_token_id=output.token_ids[0] if output.token_ids else None,
                logprobs=output.logprobs[0] if output.logprobs else None,
                num_cached_tokens=output.num_cached_tokens,
                failure=output.error,
            )
            self._sender.submit(owner.push, fetch, event)

    def stop(self) -> None:
        self.core.stop()
        self._sender.shutdown()


class DecodeConnector(KVConnector):
    """
    Args:
        wants: which requests to have computed elsewhere.

    Attributes:
        receiver: the decode engine's backend, if KV must be brought to its hosts.
    """

    receiver: Backend | None = None

    def __init__(self, prefill: PrefillEngine, wants: Callable[[KVDemand], bool] = lambda _: True) -> None:
        self._prefill = prefill
        self._wants = wants
        self._wake: Callable[[], None] = lambda: None
        self._open: dict[str, Fetch] = {}
        self._lock = threading.Lock()
        self._events: list[tuple[Fetch, KVEvent]] = []
        self.num_fetched = 0

    def attach(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def fetch(self, demand: KVDemand) -> int | None:
        if not self._wants(demand):
            return None
        self.num_fetched += 1
        self._open[demand.request.request_id] = self._prefill.compute(demand, self)
        return len(demand.token_ids)

    def cancel(self, request_id: str) -> None:
        fetch = self._open.pop(request_id, None)
        if fetch is not None:
            self._prefill.core.abort(fetch.name)

    def push(self, fetch: Fetch, event: KVEvent) -> None:
        with self._lock:
            self._events.append((fetch, event))
        self._wake()

    def events(self) -> Sequence[KVEvent]:
        with self._lock:
            arrived, self._events = self._events, []
        current = [event for fetch, event in arrived if self._open.get(fetch.request_id) is fetch]
        for event in current:
            if isinstance(event, KVComplete):
                del self._open[event.request_id]
        return current
