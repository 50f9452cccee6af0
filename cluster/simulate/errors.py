"""SimulationError: what is asked for can't be simulated."""

from __future__ import annotations


class SimulationError(ValueError):
    """An option, or a line of a trace, is wrong. The message is one line: what, where, what to do."""
