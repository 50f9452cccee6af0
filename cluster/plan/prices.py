"""Prices: the catalog's, which are assumptions of a date, or a file of the user's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.plan.errors import PlanError
from cluster.topology import GENERATIONS, NEURON_INSTANCES, PRICES_AS_OF, NeuronInstance, TpuSlice
from engine.errors import first_line


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """US dollars per chip and hour of a TPU generation, per hour of a Neuron instance."""

    usd_per_hour: Mapping[str, float]
    source: str

    def of(self, chosen: TpuSlice | NeuronInstance) -> float | None:
        """Per hour, of a whole slice or instance; None if the price is unknown."""
        if isinstance(chosen, NeuronInstance):
            return self.usd_per_hour.get(chosen.name)
        price = self.usd_per_hour.get(chosen.generation.name)
        return None if price is None else price * chosen.num_chips


def load_prices(path: Path | None) -> Prices:
    """The catalog's prices, with those of a JSON or YAML file in their place: `v6e: 1.9` or `{"inf2.48xlarge": 8}`.

    Raises:
        PlanError: the file can't be read, or names something that has no price.
    """
    prices = {name: chip.usd_per_chip_hour for name, chip in GENERATIONS.items()}
    prices |= {name: instance.usd_per_hour for name, instance in NEURON_INSTANCES.items()}
    source = f"assumed on-demand list prices of {PRICES_AS_OF}; check them, or give yours with --prices"
    if path is not None:
        prices |= _read(path, known=list(prices))
        source = f"{path.name}, and assumed list prices of {PRICES_AS_OF} for what it leaves out"
    return Prices(usd_per_hour={name: price for name, price in prices.items() if price is not None}, source=source)


def _read(path: Path, known: list[str]) -> dict[str, float]:
    values = _parse(path)
    if not isinstance(values, dict):
        raise PlanError(f"--prices={path}: not a mapping; write it like {{'v6e': 2.7, 'inf2.48xlarge': 12.98}}")
    for name, price in values.items():
        if name not in known:
            raise PlanError(f"--prices={path}: {name!r} has no price here; use {', '.join(known)}")
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < 1e6:
            raise PlanError(f"--prices={path}: {name} costs {price!r}; use dollars per chip-hour (or instance-hour)")
    return {str(name): float(price) for name, price in values.items()}


def _parse(path: Path) -> Any:
    import yaml  # comes with Ray and huggingface_hub; reads JSON as well

    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise PlanError(f"--prices={path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # YAML's dates raise ValueError, too
        raise PlanError(f"--prices={path} can't be read: {first_line(error)}") from None
