"""ReplicaView: what is known of one replica's load, from its own reports and from this router's own requests."""

from __future__ import annotations

from engine.news import EngineLoad

HALF_LIFE_S = 5.0
"""A report counts for half when it is so old. A busy engine reports at least every second."""


class ReplicaView:
    """One replica as a router sees it. Times are those of the fleet's clock."""

    __slots__ = (
        "_open",
        "_open_tokens",
        "_report",
        "_reported_at",
        "_sent_requests",
        "_sent_tokens",
        "bit",
        "known",
        "name",
    )

    def __init__(self, name: str, bit: int) -> None:
        self.name = name
        self.bit = bit  # in the fleet's PrefixIndex
        self.known = 0  # open requests, by somebody else's count: a floor
        self._open: dict[str, int] = {}  # of this router: request id -> tokens to prefill, 0 once it has a token
        self._open_tokens = 0
        self._report: EngineLoad | None = None
        self._reported_at = 0.0
        self._sent_requests = 0  # since the last report, which therefore does not count them
        self._sent_tokens = 0

    def requests(self, now: float) -> float:
        """Requests that run and wait at the replica."""
        own = max(len(self._open), self.known)
        if self._report is None:
            return own
        reported = self._report.running + self._report.waiting + self._sent_requests
        return max(own, own + self._freshness(now) * (reported - own))

    def queued_tokens(self, now: float) -> float:
        """Tokens that it has to prefill before it comes to those of a new request."""
        own = self._open_tokens
        if self._report is None:
            return own
        return own + self._freshness(now) * (self._report.queued_tokens + self._sent_tokens - own)

    def free_blocks(self, now: float, block_size: int) -> float:
        """KV blocks for a new request; infinite where nothing is known."""
        if self._report is None or self._freshness(now) < 0.5:
            return float("inf")
        return self._report.free_blocks - self._sent_tokens / block_size

    def load_is(self, load: EngineLoad, now: float) -> None:
        self._report, self._reported_at = load, now
        self._sent_requests = self._sent_tokens = 0

    def sent(self, request_id: str, prefill_tokens: int) -> None:
        self._open[request_id] = prefill_tokens
        self._open_tokens += prefill_tokens
        self._sent_requests += 1
        self._sent_tokens += prefill_tokens

    def prefilled(self, request_id: str) -> None:
        if request_id in self._open:
            self._open_tokens -= self._open[request_id]
            self._open[request_id] = 0

    def ended(self, request_id: str) -> None:
        self._open_tokens -= self._open.pop(request_id, 0)

    def silent(self) -> None:
        """No reports come any more."""
        self._report = None

    @property
    def is_idle(self) -> bool:
        """Whether this router has no request there."""
        return not self._open

    def _freshness(self, now: float) -> float:
        return float(0.5 ** ((now - self._reported_at) / HALF_LIFE_S))
