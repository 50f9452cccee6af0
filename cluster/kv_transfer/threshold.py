"""PrefillThreshold: from how many uncomputed tokens on it pays to have a prompt computed elsewhere.

Computing a prompt here takes its prefill time from all running requests; having it computed elsewhere costs calls,
waiting and copying that are added to its own time to first token. The threshold is where both are equal.
"""

from __future__ import annotations

from collections import deque
from statistics import median, quantiles

FIRST_GUESS = 256
"""Tokens, until there are measurements."""
LARGEST = 4096
"""Tokens. Longer prompts always go, so that an outdated measurement is corrected one day."""
SMALLEST = 16
WINDOW = 32
ENOUGH = 4


class PrefillThreshold:
    """Learns from each prompt that was computed elsewhere, unless it is fixed."""

    def __init__(self, fixed: int | None) -> None:
        self._fixed = fixed
        self._tokens = FIRST_GUESS if fixed is None else fixed
        self._token_s: deque[float] = deque(maxlen=WINDOW)
        self._overhead_s: deque[float] = deque(maxlen=WINDOW)

    @property
    def tokens(self) -> int:
        """Fewer uncomputed tokens are computed here."""
        return self._tokens

    def learn(self, *, num_computed: int, compute_s: float, overhead_s: float) -> None:
        """A prompt was computed elsewhere.

        Args:
            num_computed: tokens that were computed for it.
            compute_s: how long that took; includes waiting for others, of which the lower quartile knows least.
            overhead_s: what it took beyond the time at the prefill replica, until all KV was here.
        """
        self._overhead_s.append(max(0.0, overhead_s))
        if num_computed > 0:
            self._token_s.append(compute_s / num_computed)
        if self._fixed is None and len(self._token_s) >= ENOUGH:
            per_token = max(quantiles(self._token_s, n=4)[0], 1e-9)
            self._tokens = round(min(max(median(self._overhead_s) / per_token, SMALLEST), LARGEST))
