"""Role: what an engine replica does for the application. Replicas of one role are one Serve deployment."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    UNIFIED = "unified"  # takes requests from ingresses and computes all of them
    PREFILL = "prefill"  # computes prompts for decode replicas, and hands out their KV
    DECODE = "decode"  # takes requests from ingresses; has long prompts computed elsewhere
