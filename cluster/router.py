"""EngineRouter: which engine replica gets a request.

Whoever sends a request asks twice. First with a Route, whose answer is the replica that the request leaves for at once,
over the line. Then for the Serve call that holds the request's place: it carries a Ticket with that choice, and goes
where it says. Both come to this router, in the caller's process; what it decides by is the Route's Balancer. Calls of
any other kind go to any replica.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cluster.balancer import Route
from cluster.messages import Destination


class EngineRouter(RequestRouter):
    """What a Route's policy says; or the replica that a ticket (a Destination) names."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica to try. For one that is gone comes another, which will say that it is not it."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # all replicas tried: the next try can wait
        about = pending_request.args[0] if pending_request is not None and pending_request.args else None
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if isinstance(about, Destination) and about.replica in replicas:
            return [[self._without_probe(replicas[about.replica])]]
        if isinstance(about, Route):
            known = {name: self._queue_length(replica) for name, replica in replicas.items()}
            return [[self._without_probe(replicas[about.balancer.choose(about, tuple(replicas), known)])]]
        return [self._any(candidate_replicas)]

    def _any(self, replicas: Sequence[RunningReplica]) -> list[RunningReplica]:
        """Two at random, the one with fewer open requests first."""
        return sorted(random.sample(replicas, min(2, len(replicas))), key=self._queue_length)

    def _without_probe(self, replica: RunningReplica) -> RunningReplica:
        """Serve asks a replica whose load it does not know, and of calls in that state it looks after a few at a time:
        one that hangs would keep those to all others waiting."""
        if self.replica_queue_len_cache.get(replica.replica_id) is None:
            self.replica_queue_len_cache.update(replica.replica_id, 0)
        return replica

    def _queue_length(self, replica: RunningReplica) -> int:
        """Serve's number: late, as it rises when a call has been taken, but it counts what others have sent."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0
