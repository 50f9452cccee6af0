"""Vertex AI's prediction protocol, as Hex-LLM's container answers it.

`POST /generate` takes `{"instances": [{"prompt", "max_tokens", …}], "parameters": {…}}` and gives
`{"predictions": ["Prompt:\\n…\\nOutput:\\n…"]}` in the instances' order (`raw_response` leaves the output alone).
`parameters` are defaults for every instance. An instance with `"@requestFormat": "chatCompletions"` is an OpenAI chat
request and its prediction the chat completion; so is a whole body with it, answered as `/v1/chat/completions` would.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from cluster.ingress.body import Body, read_body, validate
from cluster.ingress.disconnect import unless_disconnected
from cluster.ingress.errors import ApiError, invalid, to_api_error
from cluster.ingress.plan import MAX_SEQUENCES, Job
from cluster.ingress.protocol.chat import ChatRequest, parse_chat
from cluster.ingress.protocol.completion import CompletionRequest
from cluster.ingress.protocol.vertex import VertexInstance
from cluster.ingress.sampling import Limits
from cluster.ingress.service import Service
from cluster.ingress.style import CHAT, COMPLETION
from engine.validation import InvalidRequestError

FORMAT = "@requestFormat"
MAX_INSTANCES = 256
MAX_PARAMETERS = 256
"""More than there are: each instance gets a copy of all."""
PER_INSTANCE = ("prompt", "messages", "chat_template_kwargs")
"""Can't be defaults: a long one would be read anew for each instance."""


def vertex_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/generate")
    async def generate(request: Request) -> Response:
        body = await read_body(request, _parse, service.workers)
        if isinstance(body.content, ChatRequest):
            chat = Body(content=body.content, size=body.size, session=body.session)
            job = await service.chat_job(chat)
            return await service.respond(request.receive, job, CHAT, stream=chat.content.stream)
        instances = Body(content=body.content, size=body.size, session=body.session)
        predictions = await unless_disconnected(request.receive, _predict_all(service, instances))
        return JSONResponse({"predictions": predictions})

    return router


def _parse(body: dict[str, Any]) -> ChatRequest | list[dict[str, Any]]:
    return parse_chat(_chat_body(body)) if FORMAT in body else parse_instances(body)


def parse_instances(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The instances with the common parameters filled in."""
    unknown = next((name for name in body if name not in ("instances", "parameters")), None)
    if unknown is not None:
        raise invalid(unknown, "unknown parameter; a prediction request has instances and parameters")
    instances, parameters = body.get("instances"), body.get("parameters")
    if not isinstance(instances, list) or not instances or not all(isinstance(item, dict) for item in instances):
        raise invalid("instances", 'must be a list of objects such as {"prompt": "…"}, and not empty')
    if len(instances) > MAX_INSTANCES:
        raise invalid("instances", f"has {len(instances)} entries; {MAX_INSTANCES} is the most")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid("parameters", "must be an object")
    if parameters is not None and len(parameters) > MAX_PARAMETERS:
        raise invalid("parameters", f"has {len(parameters)} entries; {MAX_PARAMETERS} is the most")
    for name in PER_INSTANCE:
        if name in (parameters or {}):
            raise invalid(f"parameters.{name}", "belongs into each instance")
    return [{**(parameters or {}), **instance} for instance in instances]


async def _predict_all(service: Service, body: Body[list[dict[str, Any]]]) -> list[Any]:
    """All predictions, side by side; if one fails, the others are aborted."""
    limits = await service.limits()
    size = body.size * len(body.content)  # each may repeat all of the parameters
    planned = await service.workers.run(size, lambda: _plan_all(service, body.content, limits))
    jobs = [(service.in_session(job, body.session), instance) for job, instance in planned]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_predict(service, job, instance)) for job, instance in jobs]
    except BaseExceptionGroup as errors:
        raise to_api_error(errors.exceptions[0]) from None
    return [task.result() for task in tasks]


def _plan_all(
    service: Service, instances: list[dict[str, Any]], limits: Limits
) -> list[tuple[Job, VertexInstance | None]]:
    planned, sequences = [], 0
    for index, instance in enumerate(instances):
        job, text = _plan(service, instance, index, limits)
        sequences += len(job.choices)
        if sequences > MAX_SEQUENCES:
            raise invalid("instances", f"ask for more than {MAX_SEQUENCES} sequences (choices of all) in one request")
        planned.append((job, text))
    return planned


def _plan(service: Service, instance: dict[str, Any], index: int, limits: Limits) -> tuple[Job, VertexInstance | None]:
    try:
        if FORMAT in instance:
            parsed = parse_chat(_chat_body(instance))
            if parsed.stream:
                raise invalid("stream", "predictions can't be streamed; use /v1/chat/completions")
            return service.plan_chat(parsed, limits), None
        return _plan_text(service, validate(VertexInstance, instance), limits)
    except (ApiError, InvalidRequestError) as raised:
        error = to_api_error(raised)
        if error.param is not None:
            error.param = f"instances[{index}].{error.param}"
        raise error from None


def _plan_text(service: Service, instance: VertexInstance, limits: Limits) -> tuple[Job, VertexInstance]:
    sampling = instance.model_dump(exclude={"raw_response"}, exclude_unset=True)
    return service.plan_completion(CompletionRequest.model_validate(sampling), limits), instance


async def _predict(service: Service, job: Job, instance: VertexInstance | None) -> Any:
    if instance is None:
        return await service.complete(job, CHAT)
    answer = await service.complete(job, COMPLETION)
    output: str = answer["choices"][0]["text"]
    if instance.raw_response:
        return output
    return "Prompt:\n" + instance.prompt.strip() + "\nOutput:\n" + output.strip("\n")


def _chat_body(body: dict[str, Any]) -> dict[str, Any]:
    if body[FORMAT] != "chatCompletions":
        raise invalid(FORMAT, "the only format is chatCompletions; leave it out for plain prompts")
    return {name: value for name, value in body.items() if name != FORMAT}
