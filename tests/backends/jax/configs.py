"""Architectures of well-known models, for tests that need no weights."""

from __future__ import annotations

from cluster.plan.models import open_model_config

LLAMA_8B = open_model_config("meta-llama/Llama-3.1-8B")
