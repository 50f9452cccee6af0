"""What users will do and want: request sizes, how many at a time, and limits on latency."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.plan.errors import PlanError

EXAMPLE = "in=1000,out=1000,concurrency=64"
SLO_EXAMPLE = "ttft=500ms,tpot=50ms"
_MOST = 10_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests of one size, a constant number of them in flight."""

    input_tokens: int
    output_tokens: int
    concurrency: int  # of the whole deployment

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    @property
    def mean_context(self) -> float:
        """Keys that a decoding token sees, on average over a request."""
        return self.input_tokens + (self.output_tokens + 1) / 2

    def __str__(self) -> str:
        return f"{self.input_tokens} tokens in, {self.output_tokens} out, {self.concurrency} at a time"

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Reads `in=1000,out=1000,concurrency=128`.

        Raises:
            PlanError: it is not like that.
        """
        values = _pairs("workload", text, ("in", "out", "concurrency"), EXAMPLE)
        numbers = {key: _whole(f"--workload {key}", value) for key, value in values.items()}
        missing = [key for key in ("in", "out", "concurrency") if key not in numbers]
        if missing:
            raise PlanError(f"--workload={text}: {' and '.join(missing)} missing; write it like {EXAMPLE}")
        return cls(input_tokens=numbers["in"], output_tokens=numbers["out"], concurrency=numbers["concurrency"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """Limits on latency; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Reads `ttft=500ms,tpot=50ms`; `s` works, too, and a bare number is milliseconds.

        Raises:
            PlanError: it is not like that.
        """
        values = _pairs("slo", text, ("ttft", "tpot"), SLO_EXAMPLE)
        limits = {key: _seconds(key, value) for key, value in values.items()}
        return cls(ttft_s=limits.get("ttft"), tpot_s=limits.get("tpot"))

    def met_by(self, ttft_s: float, tpot_s: float) -> bool:
        return (self.ttft_s is None or ttft_s <= self.ttft_s) and (self.tpot_s is None or tpot_s <= self.tpot_s)


def _pairs(option: str, text: str, keys: tuple[str, ...], example: str) -> Mapping[str, str]:
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise PlanError(f"--{option}={text}: {part.strip()!r} is not key=value; write it like {example}")
        if key not in keys:
            close = difflib.get_close_matches(key, keys, n=1)
            hint = f"did you mean {close[0]}?" if close else f"keys are {', '.join(keys)}"
            raise PlanError(f"--{option}={text}: unknown key {key!r}: {hint}")
        if key in values:
            raise PlanError(f"--{option}={text}: {key} is given twice")
        values[key] = value
    return values


def _whole(name: str, text: str) -> int:
    digits = text.replace("_", "")
    if not digits.isascii() or not digits.isdecimal() or not 1 <= int(digits[:12]) <= _MOST or len(digits) > 12:
        raise PlanError(f"{name}={text}: use a whole number from 1 to {_MOST}")
    return int(digits)


def _seconds(key: str, text: str) -> float:
    number, factor = (
        (text[:-2], 1e-3) if text.endswith("ms") else (text[:-1], 1.0) if text.endswith("s") else (text, 1e-3)
    )
    try:
        value = float(number) * factor
    except ValueError:
        value = -1.0
    if not 0 < value < 86400:
        raise PlanError(f"--slo {key}={text}: use a time above 0, like {SLO_EXAMPLE}")
    return value
