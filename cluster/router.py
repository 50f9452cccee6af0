"""EngineRouter: which engine replica gets a request.

An ingress asks twice. First it wants a choice, with the request at hand, so that the request can leave at once over the
line to that replica (`ray_compat.choose`). Then it makes the Serve call that holds the request's place in Serve's
counts; that call carries a Ticket with the choice, and goes where it says. Both questions come to this router, in the
ingress' process. It is the place for policies that look at the request, such as the longest cached prefix.
"""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cluster.messages import Ticket


class EngineRouter(RequestRouter):
    """The replica with fewer open requests, of two drawn at random; or the one that the ticket names."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas to try, best first. A replica that is gone is replaced: the other one says that it is not it."""
        wanted = _wanted(pending_request)
        for replica in candidate_replicas if wanted else ():
            if replica.replica_id.unique_id == wanted:
                return [[replica]]
        drawn = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        return [sorted(drawn, key=self._open_requests)]

    def _open_requests(self, replica: RunningReplica) -> int:
        """As far as this process knows; Serve forgets old numbers."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


def _wanted(pending_request: PendingRequest | None) -> str | None:
    ticket = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return ticket.replica if isinstance(ticket, Ticket) else None
