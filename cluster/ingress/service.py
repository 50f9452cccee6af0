"""The OpenAI protocol: from a validated request to a Job, and from the Job's deltas to one document or a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive

from cluster.client import EngineClient
from cluster.ingress.body import Body
from cluster.ingress.choice import Delta
from cluster.ingress.disconnect import unless_disconnected
from cluster.ingress.errors import ApiError
from cluster.ingress.generation import Runner, collect
from cluster.ingress.plan import Job, Prompt, TextOptions, new_id, plan_choices, resolve_max_tokens
from cluster.ingress.prompts import read_chat, read_completion
from cluster.ingress.protocol.base import CompletionFields
from cluster.ingress.protocol.chat import ChatRequest
from cluster.ingress.protocol.completion import CompletionRequest
from cluster.ingress.sampling import Limits, sampling_params
from cluster.ingress.seeds import SeedSource
from cluster.ingress.sse import ChunkWriter, EventStream, event_stream
from cluster.ingress.style import CHAT, COMPLETION, Style, document
from cluster.ingress.workers import Workers
from engine.config import EngineConfig
from engine.request import SamplingParams
from engine.text.tokenizer import Tokenizer


class Service:
    """Answers requests with one engine client and one tokenizer. Holds no request's state."""

    def __init__(self, config: EngineConfig, client: EngineClient, tokenizer: Tokenizer, replica: str = "") -> None:
        self.client = client
        self.model_name = config.model_name
        self._timeout_s = config.request_timeout_s
        self._sticky = config.sticky_sessions
        self._tokenizer = tokenizer
        _ = tokenizer.table  # built now, so that the first request does not wait for it
        self._runner = Runner(client=client, tokenizer=tokenizer)
        self.workers = Workers()
        self.seeds = SeedSource(config.seed, replica)

    async def limits(self) -> Limits:
        return Limits(info=await self.client.info(), tokenizer=self._tokenizer)

    def check_model(self, name: str) -> None:
        """Raises ApiError (404) unless `name` is the served model or empty."""
        if name and name != self.model_name:
            message = f"the model {name!r} does not exist; this server has {self.model_name!r}"
            raise ApiError(message, status=404, param="model", code="model_not_found")

    async def chat_job(self, body: Body[ChatRequest]) -> Job:
        limits = await self.limits()
        job = await self.workers.run(body.size, lambda: self.plan_chat(body.content, limits))
        return self.in_session(job, body.session)

    async def completion_job(self, body: Body[CompletionRequest]) -> Job:
        limits = await self.limits()
        job = await self.workers.run(body.size, lambda: self.plan_completion(body.content, limits))
        return self.in_session(job, body.session)

    def in_session(self, job: Job, session: str) -> Job:
        """The job in the session that the request's header names, if that means anything here."""
        return replace(job, session=session) if session and self._sticky else job

    def plan_chat(self, request: ChatRequest, limits: Limits) -> Job:
        """May take long: see Workers."""
        self.check_model(request.model)
        prompt = read_chat(request, limits)
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        text = TextOptions(continues_text=request.continue_final_message)
        return self._job(request, CHAT, [prompt], request.output_limit, logprobs, limits, text)

    def plan_completion(self, request: CompletionRequest, limits: Limits) -> Job:
        """May take long: see Workers."""
        self.check_model(request.model)
        prompts = read_completion(request, limits)
        scores_only = request.max_tokens == 0
        text = TextOptions(echo=request.echo, continues_text=True, scores_only=scores_only)
        max_tokens = max(request.max_tokens, 1)
        if "max_tokens" not in request.model_fields_set:
            max_tokens = min(max_tokens, *(limits.max_model_len - len(p.token_ids) for p in prompts))
        return self._job(request, COMPLETION, prompts, max_tokens, request.logprobs, limits, text)

    def _job(
        self,
        request: CompletionFields,
        style: Style,
        prompts: list[Prompt],
        max_tokens: int | None,
        logprobs: int | None,
        limits: Limits,
        text: TextOptions,
    ) -> Job:
        job_id = new_id(style.id_prefix)
        samplings = self._samplings(request, prompts, max_tokens, logprobs, limits, echo=text.echo)
        options = request.stream_options
        return Job(
            id=job_id,
            model=self.model_name,
            choices=plan_choices(job_id, prompts, samplings, request.n, request.cache_salt, limits),
            choices_per_prompt=request.n,
            text=replace(
                text,
                stop=tuple(request.stop),
                include_stop=request.include_stop_str_in_output,
                skip_special_tokens=request.skip_special_tokens,
            ),
            session=(request.prompt_cache_key or request.user or "") if self._sticky else "",
            prompt_logprobs=request.prompt_logprobs,
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.continuous_usage_stats,
        )

    def _samplings(
        self,
        request: CompletionFields,
        prompts: list[Prompt],
        max_tokens: int | None,
        logprobs: int | None,
        limits: Limits,
        *,
        echo: bool,
    ) -> list[SamplingParams]:
        """One per prompt; they differ in max_tokens only, where that is what the context leaves."""
        room = [resolve_max_tokens(max_tokens, len(prompt.token_ids), limits) for prompt in prompts]
        prompt_logprobs = request.prompt_logprobs
        if echo and logprobs is not None:
            prompt_logprobs = max(logprobs, prompt_logprobs or 0)
        sampling = sampling_params(
            request,
            limits,
            max_tokens=min(room),
            seed=self.seeds.resolve(request.seed),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        return [replace(sampling, max_tokens=most) for most in room]

    async def complete(self, job: Job, style: Style) -> dict[str, Any]:
        """The whole answer."""
        async with asyncio.timeout(self._timeout_s), aclosing(self._runner.run(job)) as deltas:
            answers, usage = await collect(deltas, job)
        return document(job, style, self._tokenizer, answers, usage)

    async def respond(self, receive: Receive, job: Job, style: Style, *, stream: bool) -> Response:
        """The answer as one document or as server-sent events.

        Errors before the first token are raised, so that they get their status.
        """
        headers = {"X-Request-Id": job.id}
        if not stream:
            return JSONResponse(await unless_disconnected(receive, self.complete(job, style)), headers=headers)
        deltas = self._runner.run(job)
        try:
            first = await unless_disconnected(receive, self._first(deltas))
        except BaseException:
            await deltas.aclose()
            raise
        writer = ChunkWriter(job, style, self._tokenizer)
        return EventStream(event_stream(first, deltas, writer), headers, self._timeout_s)

    async def _first(self, deltas: AsyncGenerator[Delta, None]) -> Delta:
        async with asyncio.timeout(self._timeout_s):
            return await anext(deltas)
