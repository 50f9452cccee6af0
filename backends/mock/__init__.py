"""A backend without a model: deterministic tokens at a set speed, so that everything above it can be tested."""

from backends.mock.backend import MockBackend
from backends.mock.device import mock_tokens

__all__ = ["MockBackend", "mock_tokens"]
