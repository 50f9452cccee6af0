"""The one error of planning."""

from __future__ import annotations


class PlanError(RuntimeError):
    """No plan. The message is one line: what is wrong, and what would work instead."""
