"""EngineRouter: which engine replica gets a request.

An ingress asks twice. First with a Question, whose answer is the replica that the request leaves for at once, over the
line. Then for the Serve call that holds the request's place: it carries a Ticket with that choice, and goes where it
says. Both come to this router, in the ingress' process. It is the place for policies that look at the request, such as
the longest cached prefix.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cluster.messages import Destination
from engine.request import EngineRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What the router may look at when it chooses a replica."""

    request: EngineRequest
    open_requests: Mapping[str, int]  # of this ingress, by replica
    suspects: Collection[str] = ()  # replicas that have just failed this ingress: only if there is no other


class EngineRouter(RequestRouter):
    """The replica with fewer open requests, of two drawn at random; or the one that a ticket (a Destination) names."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas to try, best first. For one that is gone comes another, which will say that it is not it."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # all replicas tried: the next try can wait
        about = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if isinstance(about, Destination):
            for replica in candidate_replicas:
                if replica.replica_id.unique_id == about.replica:
                    return [[replica]]
        question = about if isinstance(about, Question) else None
        if question is not None and question.suspects:
            good = [r for r in candidate_replicas if r.replica_id.unique_id not in question.suspects]
            candidate_replicas = good or candidate_replicas
        drawn = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        return [sorted(drawn, key=lambda replica: self._open_requests(replica, question))]

    def _open_requests(self, replica: RunningReplica, question: Question | None) -> int:
        """Serve's number has those of other ingresses too, but is late: it rises when a call has been taken."""
        own = question.open_requests.get(replica.replica_id.unique_id, 0) if question else 0
        return max(own, self.replica_queue_len_cache.get(replica.replica_id) or 0)
