"""Environment: the variables that are read, in the one module that reads any."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Self

from pydantic import BaseModel, ConfigDict

from engine.options import ConfigError


class Environment(BaseModel):
    """What the environment says."""

    model_config = ConfigDict(frozen=True)

    log_level: str = "INFO"
    verbose: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Reads SLICESERVE_LOG_LEVEL, or Hex-LLM's HEX_LLM_LOG_LEVEL and HEX_LLM_VERBOSE_LOG.

        Raises:
            ConfigError: the level is not one of Python's.
        """
        env = os.environ if environ is None else environ
        level = (env.get("SLICESERVE_LOG_LEVEL") or env.get("HEX_LLM_LOG_LEVEL") or "INFO").upper()
        if level not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
            raise ConfigError(f"SLICESERVE_LOG_LEVEL={level}: use DEBUG, INFO, WARNING, ERROR or CRITICAL")
        verbose = (env.get("HEX_LLM_VERBOSE_LOG") or "").lower() in ("1", "true", "yes", "on")
        return cls(log_level="DEBUG" if verbose else level, verbose=verbose)
