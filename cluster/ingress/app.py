"""build_api: the HTTP application, whatever carries its messages to the engine."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from cluster.client import EngineClient
from cluster.ingress.errors import RETRY_AFTER_S, ApiError, install_error_handlers
from cluster.ingress.openai_routes import openai_router
from cluster.ingress.playground import playground_router
from cluster.ingress.service import Service
from cluster.ingress.vertex_routes import vertex_router
from engine.config import EngineConfig
from engine.text.tokenizer import Tokenizer

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def build_api(config: EngineConfig, client: EngineClient, tokenizer: Tokenizer, *, replica: str = "") -> FastAPI:
    """The application of one ingress process.

    Args:
        replica: tells ingress processes of one server apart, so that they don't draw the same seeds.
    """
    service = Service(config, client, tokenizer, replica)
    # FastAPI's documentation pages load scripts from elsewhere; docs/api.md documents the routes instead.
    app = FastAPI(title="SliceServe", openapi_url=None, docs_url=None, redoc_url=None)
    install_error_handlers(app)
    app.include_router(openai_router(service))
    app.include_router(vertex_router(service))
    app.include_router(playground_router())

    @app.api_route("/health", methods=["GET", "HEAD"])
    @app.api_route("/ping", methods=["GET", "HEAD"])
    async def health() -> Response:
        state = await client.health()
        if not state.healthy:
            raise ApiError(
                state.reason,
                status=503,
                kind="service_unavailable_error",
                code="unhealthy",
                headers={"Retry-After": RETRY_AFTER_S},
            )
        return JSONResponse({"status": "degraded", "reason": state.reason} if state.degraded else {"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await client.metrics_text(), media_type=METRICS_TYPE)

    return app
