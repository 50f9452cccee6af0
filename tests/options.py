"""What the test suite's command line says (see conftest.py), for helpers that are no fixtures."""

from __future__ import annotations

tensor_parallel_size = 1
"""Devices of the JAX engines that tests start."""
