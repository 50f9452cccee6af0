"""Routes of the OpenAI protocol: chat and text completions, models."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from cluster.ingress.body import read_body
from cluster.ingress.protocol.chat import parse_chat
from cluster.ingress.protocol.completion import parse_completion
from cluster.ingress.service import Service
from cluster.ingress.style import CHAT, COMPLETION


def openai_router(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v1")
    started = int(time.time())

    async def model_card() -> dict[str, object]:
        info = await service.client.info()
        return {
            "id": service.model_name,
            "object": "model",
            "created": started,
            "owned_by": "sliceserve",
            "max_model_len": info.max_model_len,
        }

    @router.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, parse_chat, service.workers)
        job = await service.chat_job(body)
        return await service.respond(request.receive, job, CHAT, stream=body.content.stream)

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        body = await read_body(request, parse_completion, service.workers)
        job = await service.completion_job(body)
        return await service.respond(request.receive, job, COMPLETION, stream=body.content.stream)

    @router.get("/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [await model_card()]})

    @router.get("/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(await model_card())

    return router
