"""Distributions of lengths, as they are written on the command line."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal, Self

from cluster.simulate.errors import SimulationError

EXAMPLE = "512, uniform:100-1000, exponential:512 or lognormal:512,0.8"
_MOST = 10_000_000


@dataclass(frozen=True, slots=True)
class Distribution:
    """Whole numbers from 1 on."""

    kind: Literal["constant", "uniform", "exponential", "lognormal"]
    first: float  # constant: the value; uniform: the least; else the mean
    second: float = 0.0  # uniform: the most; lognormal: sigma of the logarithm

    @classmethod
    def parse(cls, name: str, text: str) -> Self:
        """Reads `512`, `uniform:100-1000`, `exponential:512` (mean) or `lognormal:512,0.8` (mean, sigma).

        Raises:
            SimulationError: it is none of these.
        """
        kind, colon, values = text.strip().partition(":")
        if not colon:
            return cls("constant", _number(name, text, kind, least=1))
        if kind == "exponential":
            return cls("exponential", _number(name, text, values, least=1))
        separators: dict[str, str] = {"uniform": "-", "lognormal": ","}
        if kind not in separators:
            raise _wrong(name, text)
        first, separator, second = values.partition(separators[kind])
        if not separator:
            raise _wrong(name, text)
        if kind == "lognormal":
            return cls("lognormal", _number(name, text, first, least=1), _number(name, text, second, least=0, most=5))
        low, high = _number(name, text, first, least=1), _number(name, text, second, least=1)
        if high < low:
            raise _wrong(name, text)
        return cls("uniform", low, high)

    @property
    def mean(self) -> float:
        return (self.first + self.second) / 2 if self.kind == "uniform" else self.first

    def draw(self, rng: random.Random) -> int:
        match self.kind:
            case "constant":
                return int(self.first)
            case "uniform":
                return rng.randint(int(self.first), int(self.second))
            case "exponential":
                value = rng.expovariate(1 / self.first)
            case "lognormal":
                value = rng.lognormvariate(math.log(self.first) - self.second**2 / 2, self.second)
        return max(1, min(round(value), _MOST))


def _number(name: str, text: str, part: str, *, least: float, most: float = _MOST) -> float:
    try:
        value = float(part)
    except ValueError:
        raise _wrong(name, text) from None
    if not least <= value <= most:
        raise _wrong(name, text)
    return value


def _wrong(name: str, text: str) -> SimulationError:
    return SimulationError(f"--{name}={text}: write it like {EXAMPLE}")
