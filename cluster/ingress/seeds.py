"""Seeds of requests: the client's, or one drawn.

`EngineConfig.seed` seeds the generator that draws, so that a server restarted with the same seed and asked the same
things in the same order answers the same. Drawn seeds choose random keys for sampling; nothing secret hangs on them.
"""

from __future__ import annotations

import random

UINT64_MASK = (1 << 64) - 1


class SeedSource:
    """Draws seeds for requests that give none. `replica` keeps the draws of several ingress processes apart."""

    def __init__(self, seed: int, replica: str = "") -> None:
        self._random = random.Random(f"{seed}/{replica}")

    def resolve(self, seed: int | None) -> int:
        """The unsigned 64-bit seed of a request; negative client seeds wrap around (two's complement)."""
        return self._random.getrandbits(64) if seed is None else seed & UINT64_MASK


def choice_seed(seed: int, choice: int) -> int:
    """The seed of the i-th of n choices: each its own, the first one the request's."""
    return (seed + choice) & UINT64_MASK
