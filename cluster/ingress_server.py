"""IngressServer: the Serve deployment around the HTTP application. No accelerator, any number of replicas."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster import ray_compat
from cluster.balancer import Balancer
from cluster.ingress.app import build_api
from cluster.ingress.errors import stopping
from cluster.logs import configure_logging
from cluster.metrics_text import IngressReport, ReplicaLabels
from cluster.progress import ProgressReporter
from cluster.ray_client import RayEngineClient
from engine.config import EngineConfig
from engine.text.tokenizer import load_tokenizer


class IngressServer:
    """What Serve runs; `cluster.app` makes it an ingress deployment."""

    def __init__(
        self,
        config: EngineConfig,
        engine: DeploymentHandle[Any],
        log_level: str,
        prefill: DeploymentHandle[Any] | None = None,
    ) -> None:
        """Loads the tokenizer.

        Args:
            prefill: the replicas that compute prompts for the engine's, asked for their health and metrics.

        Raises:
            Exception: it can't be loaded. Whoever waits for the replica has been told already.
        """
        configure_logging(log_level)
        context = serve.get_replica_context()
        replica = context.replica_id.unique_id
        self._rank = str(ray_compat.replica_rank())  # not the id, which is random: drawn seeds must be reproducible
        self._labels = ReplicaLabels(
            model_name=config.model_name, application=context.app_name, replica=replica, role="ingress"
        )
        self._config = config
        siblings = serve.get_deployment_handle(context.deployment, context.app_name)
        self._client = RayEngineClient(
            engine,
            siblings,
            Balancer.of(config),
            resume_timeout_s=config.resume_timeout_s,
            prefill=prefill,
            wake_timeout_s=config.wake_timeout_s if config.min_replicas == 0 else None,
        )
        with ProgressReporter(context.app_name, replica, None).reporting_errors():
            self._tokenizer = load_tokenizer(config)
        self._counts = ResponseCounts()
        self._door = Door()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Serve once the constructor is done."""
        api = build_api(self._config, self._client, self._tokenizer, replica=self._rank)
        return self._counts.around(self._door.around(api))

    async def __del__(self) -> None:
        """Serve awaits this when the replica has drained."""
        if hasattr(self, "_client"):
            self._client.close()

    async def close_door(self) -> int:
        """Takes no further requests: they are told to come back. Returns how many are still open."""
        self._door.is_open = False
        return self._counts.open_requests

    async def report(self) -> IngressReport:
        return IngressReport(
            labels=self._labels,
            responses=dict(self._counts.responses),
            open_requests=self._counts.open_requests,
            resumptions=asdict(self._client.resumptions),
        )


class Door:
    """Lets HTTP requests in while it is open, and tells others to come back."""

    def __init__(self) -> None:
        self.is_open = True

    def around(self, app: ASGIApp) -> ASGIApp:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            is_refused = scope["type"] == "http" and not self.is_open
            await (stopping().response() if is_refused else app)(scope, receive, send)

        return guarded


class ResponseCounts:
    """Counts HTTP responses by route and status code, and those that are still open."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, str]] = Counter()
        self.open_requests = 0

    def around(self, app: ASGIApp) -> ASGIApp:
        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            status = "none"  # the client went away before there was a response

            async def watched(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = str(message["status"])
                await send(message)

            self.open_requests += 1
            try:
                await app(scope, receive, watched)
            finally:
                self.open_requests -= 1
                route = getattr(scope.get("route"), "path", "unknown")  # never the raw path: clients choose it
                self.responses[(route, status)] += 1

        return counted
