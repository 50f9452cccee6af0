"""Simulation: a workload, a pool of replicas, and an account of what each request got."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cluster.simulate.replicas import Pool, Replica
from cluster.simulate.timeline import START, Timeline
from cluster.simulate.workload import Job
from engine.request import EngineRequest, RequestOutput, SamplingParams


@dataclass(slots=True)
class RequestRecord:
    """What became of one request. Times in seconds on the timeline; 0: not yet."""

    arrived_at: float
    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    is_done: bool = False
    is_refused: bool = False

    @property
    def ttft_s(self) -> float:
        return self.first_token_at - self.arrived_at

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first one; 0 where there is none."""
        return (self.last_token_at - self.first_token_at) / max(1, self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.last_token_at - self.arrived_at


class Simulation:
    """Runs jobs to their end. Ask `records` and the pools afterwards."""

    def __init__(self, timeline: Timeline, jobs: Iterable[Job], num_requests: int) -> None:
        self.timeline = timeline
        self.records: list[RequestRecord] = []
        self._num_requests = num_requests
        self._jobs: Iterator[Job] = iter(jobs)
        self._open: dict[str, tuple[RequestRecord, Job]] = {}
        self._num_planned = 0
        self._pool: Pool | None = None

    def serve_with(self, pool: Pool) -> None:
        """Requests go to this pool."""
        self._pool = pool

    @property
    def is_over(self) -> bool:
        """Whether everything that was to be sent has been sent and has ended."""
        return not self._open and len(self.records) == self._num_planned and self._num_planned > 0

    def run(self) -> None:
        self._plan_next()
        self.timeline.run(lambda: self.is_over)

    # -- requests come

    def _plan_next(self) -> None:
        job = next(self._jobs, None)
        if job is not None:
            self._plan(job, then_next=True)

    def _plan(self, job: Job, *, then_next: bool = False) -> None:
        if self._num_planned >= self._num_requests:
            return
        self._num_planned += 1
        self.timeline.at(START + job.time_s, lambda: self._arrive(job, then_next))

    def _arrive(self, job: Job, then_next: bool) -> None:
        now = self.timeline.now
        record = RequestRecord(arrived_at=now, prompt_tokens=len(job.prompt))
        name = f"r{len(self.records)}"
        self.records.append(record)
        self._open[name] = (record, job)
        if then_next:
            self._plan_next()
        request = EngineRequest(
            request_id=name,
            prompt_token_ids=job.prompt,
            sampling=SamplingParams(max_tokens=job.output_tokens, temperature=0.0, ignore_eos=True),
            arrival_time=now,
        )
        assert self._pool is not None
        self._pool.submit(request, job.session)

    # -- what becomes of them

    def refused(self, request_id: str) -> None:
        record, _ = self._open.pop(request_id)
        record.is_refused = True

    def yielded(self, replica: Replica, output: RequestOutput) -> None:  # noqa: ARG002
        record, job = self._open[output.request_id]
        now = self.timeline.now
        if output.token_ids:
            if not record.output_tokens:
                record.first_token_at = now
                record.cached_tokens = output.num_cached_tokens
            record.output_tokens += len(output.token_ids)
            record.last_token_at = now
        if output.finish_reason is not None:
            del self._open[output.request_id]
            record.is_done = True
            if job.follow_up is not None:
                following = job.follow_up(now - START)
                if following is not None:
                    self._plan(following)
