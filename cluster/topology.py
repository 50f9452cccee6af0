"""Catalog of the accelerators that a deployment can be placed on: TPU slices by generation, AWS Neuron instances.

One record says what planning wants (memory, bandwidth, peaks, links, price) and what placement wants (hosts, chips per
host, Ray's and GKE's names). A slice is named as its compiler names it, `v5e:4x4`; Google's other name, `v5e-16`, is
understood. Sources are next to the data. Prices change: each is an assumption of its date, to be checked or overridden.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass

from backends.jax.slices import OTHER_NAMES, THREE_DIMENSIONAL, TWO_DIMENSIONAL
from engine.config import GIB

PRICES_AS_OF = "2025-12"


class TopologyError(ValueError):
    """No such slice or instance. The message is one line and names those that come nearest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TpuGeneration:
    """One generation's chip, its network, and the slices that are sold."""

    name: str  # as libtpu calls it
    hbm_gib: float  # per chip, as sold
    usable_hbm_gib: float  # per chip, what the compiler gives to a program
    hbm_gb_per_s: float  # per chip
    bf16_tflops: float  # per chip
    ici_links: int  # per chip
    ici_gb_per_s_per_link: float  # one way
    wrap_multiple: int  # a dimension that is a multiple of this is a ring, others are lines
    devices_per_chip: int  # that JAX sees
    cores_per_chip: int  # that Google's slice names count
    max_chips_per_host: int
    ray_version: str  # of ray.util.tpu
    gke_accelerator: str  # node label cloud.google.com/gke-tpu-accelerator
    machine_prefix: str
    usd_per_chip_hour: float | None  # on demand; None: no public list price
    shapes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TpuSlice:
    """A slice: chips in a grid, joined by the inter-chip network, on one or more hosts."""

    generation: TpuGeneration
    shape: str  # "4x4"

    @property
    def name(self) -> str:
        return f"{self.generation.name}:{self.shape}"

    @property
    def dimensions(self) -> tuple[int, ...]:
        return tuple(int(size) for size in self.shape.split("x"))

    @property
    def num_chips(self) -> int:
        return math.prod(self.dimensions)

    @property
    def num_devices(self) -> int:
        return self.num_chips * self.generation.devices_per_chip

    @property
    def bytes_per_device(self) -> int:
        """Memory of one JAX device that programs can use."""
        return int(self.generation.usable_hbm_gib * GIB / self.generation.devices_per_chip)

    @property
    def chips_per_host(self) -> int:
        """Small slices have one host where a host can carry them; larger ones have hosts of four chips."""
        most = self.generation.max_chips_per_host
        return self.num_chips if self.num_chips <= most else min(4, most)

    @property
    def num_hosts(self) -> int:
        return self.num_chips // self.chips_per_host

    @property
    def links_per_chip(self) -> int:
        """Links that every chip has, those in a corner included: what bounds a collective over the whole slice."""
        return sum(self._links_along(size) for size in self.dimensions)

    def _links_along(self, size: int) -> int:
        if size == 1:
            return 0
        return 2 if size > 2 and size % self.generation.wrap_multiple == 0 else 1

    @property
    def usd_per_hour(self) -> float | None:
        price = self.generation.usd_per_chip_hour
        return None if price is None else price * self.num_chips

    @property
    def google_name(self) -> str:
        """`v5e-16`, `v5p-8`: Google's names count chips or cores."""
        return f"{self.generation.name}-{self.num_chips * self.generation.cores_per_chip}"

    @property
    def ray_pod_type(self) -> str:
        """Value of Ray's node label ray.io/tpu-pod-type."""
        return f"{self.generation.ray_version}-{self.num_chips * self.generation.cores_per_chip}"

    @property
    def ray_resources_per_host(self) -> dict[str, float]:
        return {"TPU": float(self.chips_per_host)}

    @property
    def ray_labels(self) -> dict[str, str]:
        return {
            "ray.io/accelerator-type": f"TPU-{self.generation.ray_version.upper()}",
            "ray.io/tpu-topology": self.shape,
            "ray.io/tpu-pod-type": self.ray_pod_type,
        }

    @property
    def gke_node_selector(self) -> dict[str, str]:
        return {
            "cloud.google.com/gke-tpu-accelerator": self.generation.gke_accelerator,
            "cloud.google.com/gke-tpu-topology": self.shape,
        }

    @property
    def gke_machine_type(self) -> str:
        return f"{self.generation.machine_prefix}-{self.chips_per_host}t"


@dataclass(frozen=True, kw_only=True, slots=True)
class NeuronInstance:
    """An EC2 instance with Inferentia or Trainium chips. Planning knows its memory only."""

    name: str
    chips: int
    cores_per_chip: int  # NeuronCores as the runtime numbers them
    hbm_gib_per_chip: float
    usd_per_hour: float | None

    @property
    def num_devices(self) -> int:
        return self.chips * self.cores_per_chip

    @property
    def bytes_per_device(self) -> int:
        """Memory of one NeuronCore."""
        return int(self.hbm_gib_per_chip * GIB / self.cores_per_chip)

    @property
    def ray_resources_per_host(self) -> dict[str, float]:
        return {"neuron_cores": float(self.num_devices)}


_RENTED_3D = tuple(shape for shape in THREE_DIMENSIONAL if shape != "1x1x1")  # of v4 and v5p

# Memory, bandwidth, peaks, links and shapes: Google's Cloud TPU documentation, the page of each generation (it gives
# both directions of all links of a chip in one number; here it is one direction of one link). v4's links: Jouppi et
# al. 2023, "TPU v4". Usable memory: libtpu's own limit, from its out-of-memory message (v4 and tpu7x have two halves).
# Names: Google Kubernetes Engine's "Plan TPUs in GKE", ray/_private/accelerators/tpu.py.
# Prices: Google's Cloud TPU price list, on demand, the cheapest region in the United States.
GENERATIONS: dict[str, TpuGeneration] = {
    "v4": TpuGeneration(
        name="v4",
        hbm_gib=32,
        usable_hbm_gib=30.5,
        hbm_gb_per_s=1228,
        bf16_tflops=275,
        ici_links=6,
        ici_gb_per_s_per_link=50,
        wrap_multiple=4,
        devices_per_chip=1,
        cores_per_chip=2,
        max_chips_per_host=4,
        ray_version="v4",
        gke_accelerator="tpu-v4-podslice",
        machine_prefix="ct4p-hightpu",
        usd_per_chip_hour=3.22,
        shapes=_RENTED_3D,
    ),
    "v5e": TpuGeneration(
        name="v5e",
        hbm_gib=16,
        usable_hbm_gib=15.75,
        hbm_gb_per_s=819,
        bf16_tflops=197,
        ici_links=4,
        ici_gb_per_s_per_link=50,
        wrap_multiple=16,
        devices_per_chip=1,
        cores_per_chip=1,
        max_chips_per_host=8,
        ray_version="v5litepod",
        gke_accelerator="tpu-v5-lite-podslice",
        machine_prefix="ct5lp-hightpu",
        usd_per_chip_hour=1.20,
        shapes=TWO_DIMENSIONAL,
    ),
    "v5p": TpuGeneration(
        name="v5p",
        hbm_gib=95,
        usable_hbm_gib=95.74,
        hbm_gb_per_s=2765,
        bf16_tflops=459,
        ici_links=6,
        ici_gb_per_s_per_link=100,
        wrap_multiple=4,
        devices_per_chip=1,
        cores_per_chip=2,
        max_chips_per_host=4,
        ray_version="v5p",
        gke_accelerator="tpu-v5p-slice",
        machine_prefix="ct5p-hightpu",
        usd_per_chip_hour=4.20,
        shapes=_RENTED_3D,
    ),
    "v6e": TpuGeneration(
        name="v6e",
        hbm_gib=32,
        usable_hbm_gib=31.25,
        hbm_gb_per_s=1640,
        bf16_tflops=918,
        ici_links=4,
        ici_gb_per_s_per_link=100,
        wrap_multiple=16,
        devices_per_chip=1,
        cores_per_chip=1,
        max_chips_per_host=8,
        ray_version="v6e",
        gke_accelerator="tpu-v6e-slice",
        machine_prefix="ct6e-standard",
        usd_per_chip_hour=2.70,
        shapes=TWO_DIMENSIONAL,
    ),
    "tpu7x": TpuGeneration(
        name="tpu7x",
        hbm_gib=192,
        usable_hbm_gib=189.5,
        hbm_gb_per_s=7380,
        bf16_tflops=2307,
        ici_links=6,
        ici_gb_per_s_per_link=100,
        wrap_multiple=4,
        devices_per_chip=2,
        cores_per_chip=2,
        max_chips_per_host=4,
        ray_version="v7x",
        gke_accelerator="tpu7x",
        machine_prefix="tpu7x-standard",
        usd_per_chip_hour=None,
        shapes=THREE_DIMENSIONAL,
    ),
}

# AWS Neuron documentation, the architecture page of each instance family. trn2 with its default pairs of cores (LNC 2).
# Prices: Amazon EC2's list, on demand, us-east-1; trn2.48xlarge is sold in capacity blocks at changing prices.
NEURON_INSTANCES: dict[str, NeuronInstance] = {
    name: NeuronInstance(
        name=name, chips=chips, cores_per_chip=cores, hbm_gib_per_chip=memory, usd_per_hour=usd_per_hour
    )
    for name, chips, cores, memory, usd_per_hour in (
        ("inf2.xlarge", 1, 2, 32.0, 0.7582),
        ("inf2.8xlarge", 1, 2, 32.0, 1.9679),
        ("inf2.24xlarge", 6, 2, 32.0, 6.4906),
        ("inf2.48xlarge", 12, 2, 32.0, 12.9813),
        ("trn1.2xlarge", 1, 2, 32.0, 1.3438),
        ("trn1.32xlarge", 16, 2, 32.0, 21.5),
        ("trn1n.32xlarge", 16, 2, 32.0, 24.78),
        ("trn2.48xlarge", 16, 4, 96.0, None),
    )
}


def tpu_slices(generation: str | None = None) -> Iterator[TpuSlice]:
    """All slices of the catalog, or one generation's, small ones first."""
    for chosen in GENERATIONS.values() if generation is None else [GENERATIONS[generation]]:
        yield from (TpuSlice(generation=chosen, shape=shape) for shape in chosen.shapes)


def find_topology(name: str) -> TpuSlice | NeuronInstance:
    """The slice or instance of that name: `v5e:4x4`, `v5e-16`, `inf2.48xlarge`.

    Raises:
        TopologyError: the catalog has none.
    """
    wanted = name.strip().lower()
    if wanted in NEURON_INSTANCES:
        return NEURON_INSTANCES[wanted]
    for alias, real in OTHER_NAMES.items():
        if wanted.startswith((f"{alias}:", f"{alias}-")):
            wanted = real + wanted[len(alias) :]
    for candidate in tpu_slices():
        if wanted in (candidate.name, candidate.google_name):
            return candidate
    raise TopologyError(f"no topology {name!r}; {_nearest(wanted)}")


def _nearest(wanted: str) -> str:
    generation, _, shape = wanted.replace("-", ":").partition(":")
    if generation in GENERATIONS:
        return f"{generation} has {', '.join(f'{generation}:{size}' for size in _near_shapes(generation, shape))}"
    names = [*NEURON_INSTANCES, *(candidate.name for candidate in tpu_slices())]
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"use GENERATION:SHAPE (v5e:2x4; generations {', '.join(GENERATIONS)}) or {', '.join(NEURON_INSTANCES)}"


def _near_shapes(generation: str, shape: str) -> list[str]:
    """The shapes that come nearest in size, or all where there is no size in the name."""
    shapes = GENERATIONS[generation].shapes
    parts = shape.split("x")
    if not all(part.isdecimal() and int(part) for part in parts):
        return list(shapes)
    chips = math.prod(int(part) for part in parts)

    def distance(candidate: str) -> float:
        return abs(math.log(math.prod(int(size) for size in candidate.split("x")) / chips))

    return sorted(sorted(shapes, key=distance)[:4], key=shapes.index)
