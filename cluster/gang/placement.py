"""Placement: where the hosts of one gang are. All of them get a place together, on one slice, or none does.

A TPU slice is reserved as a whole at run time, by whoever leads the gang: Serve's own gang scheduling knows nothing of
slices and would mix them. Ranks follow the slice's own numbers of its hosts, on which the network is built.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster import ray_compat
from cluster.topology import NeuronInstance, TopologyError, TpuSlice, find_topology, tpu_slices
from engine.backend import BackendError, Progress
from engine.config import EngineConfig
from engine.errors import first_line

TIMEOUT_S = 900.0
"""How long an autoscaler may take to bring the machines."""
LOOK_INTERVAL_S = 5.0
WORKER_CPUS = 0.1
"""What placement counts with, as for replicas (cluster.app): everything fits a small machine."""

SLICE_NAME, WORKER_ID, TOPOLOGY, ACCELERATOR = (
    "ray.io/tpu-slice-name",
    "ray.io/tpu-worker-id",
    "ray.io/tpu-topology",
    "ray.io/accelerator-type",
)
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
NEURON = "aws-neuron-core"


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Where one host's process goes."""

    rank: int
    bundle: int  # of the placement group
    node_id: str
    node_ip: str
    environment: Mapping[str, str]


class Reservation(ABC):
    """A place for all hosts. Ends with the process that made it."""

    seats: tuple[Seat, ...]  # in the order of ranks
    resources: Mapping[str, float]  # of each host

    @property
    @abstractmethod
    def group(self) -> Any:
        """Ray's placement group."""

    @abstractmethod
    def release(self) -> None:
        """Gives the place back; what still runs there is killed. May be called more than once."""


class _Group(Reservation):
    def __init__(self, group: Any, resources: Mapping[str, float]) -> None:
        self._group = group
        self.resources = resources
        self.seats = ()

    @property
    def group(self) -> Any:
        return self._group

    def release(self) -> None:
        ray_compat.remove_group(self._group)


class _Slice(Reservation):
    """Keeps the slice's head, too, so that no other gang chooses a slice that is taken."""

    def __init__(self, reserved: Any, resources: Mapping[str, float]) -> None:
        self._reserved = reserved
        self.resources = resources
        self.seats = ()

    @property
    def group(self) -> Any:
        return self._reserved.placement_group

    def release(self) -> None:
        self._reserved.shutdown()


def platform(config: EngineConfig) -> str:
    """ "tpu" | "cpu" | "mock": what the hosts of a gang have, where the leader has nothing itself.

    Raises:
        BackendError: the options name hosts that nothing can run on yet.
    """
    if config.backend != "auto":
        return config.backend
    if config.topology is not None:
        if isinstance(_named(config.topology), NeuronInstance):
            raise BackendError(f"topology={config.topology}: the Neuron backend is not available yet")
        return "tpu"
    return "tpu" if any(node.resources.get("TPU") for node in ray_compat.nodes()) else "cpu"


def reserve(config: EngineConfig, kind: str, progress: Progress, timeout_s: float = TIMEOUT_S) -> Reservation:
    """Reserves a place for all hosts of a gang and waits for it.

    Args:
        kind: as `platform` says, or "neuron".

    Raises:
        BackendError: there is none; one line.
    """
    deadline = time.monotonic() + timeout_s
    if kind == "tpu":
        reservation = _reserve_slice(config, _choose_slice(config), progress, timeout_s)
    else:
        reservation = _reserve_neuron(config) if kind == "neuron" else _reserve_cpus(config)
    try:
        _wait(reservation, config, progress, deadline)
        nodes = _nodes_of(reservation)
        if kind == "tpu":
            reservation.seats = _slice_seats(nodes)
        else:
            reservation.seats = _seats(nodes, {} if kind == "neuron" else _cpu_environment(config))
    except BaseException:
        reservation.release()
        raise
    return reservation


def _wait(reservation: Reservation, config: EngineConfig, progress: Progress, deadline: float) -> None:
    resources = ", ".join(f"{amount:g} {name}" for name, amount in reservation.resources.items())
    wanted = f"{config.num_hosts} hosts with {resources} each"
    while True:
        left = deadline - time.monotonic()
        if ray_compat.wait_for_group(reservation.group, max(0.1, min(LOOK_INTERVAL_S, left))):
            progress("placing hosts", config.num_hosts, config.num_hosts, wanted)
            return
        if left <= 0:
            raise BackendError(f"the cluster had no place for {wanted} within the deadline; add nodes or free some")
        progress("placing hosts", 0, config.num_hosts, f"waiting for {wanted}")


# -- TPU slices


def _choose_slice(config: EngineConfig) -> TpuSlice:
    """The slice that the options name, or the one kind in the cluster that has the right size."""
    devices, hosts = config.tensor_parallel_size, config.num_hosts
    if config.topology is not None:
        named = _named(config.topology)
        if not isinstance(named, TpuSlice):
            raise BackendError(f"topology={config.topology} is no TPU slice; name one, such as v6e:4x4")
        if named.num_devices != devices or named.num_chips % hosts:
            raise BackendError(
                f"topology={config.topology} has {named.num_devices} devices, which tensor_parallel_size={devices} on "
                f"num_hosts={hosts} hosts does not match; use all devices of a slice"
            )
        return named
    known = {(s.ray_labels[ACCELERATOR], s.shape): s for s in tpu_slices()}
    found: dict[str, TpuSlice] = {}
    for node in ray_compat.nodes():
        candidate = known.get((node.labels.get(ACCELERATOR, ""), node.labels.get(TOPOLOGY, "")))
        if candidate is not None:
            found[candidate.name] = candidate
    fitting = [s for s in found.values() if s.num_devices == devices and s.num_chips % hosts == 0]
    if len(fitting) == 1:
        return fitting[0]
    there = f"it has {', '.join(found)}" if found else "it has none now; name the one that is to be started: topology"
    which = "several kinds of slices" if fitting else "no slice"
    raise BackendError(
        f"{which} of this cluster with {devices} devices for num_hosts={hosts} tensor_parallel_size={devices}: {there}"
    )


def _named(name: str) -> TpuSlice | NeuronInstance:
    try:
        return find_topology(name)
    except TopologyError as error:
        raise BackendError(f"topology={name}: {error}") from None


def _reserve_slice(config: EngineConfig, wanted: TpuSlice, progress: Progress, timeout_s: float) -> Reservation:
    chips = wanted.num_chips // config.num_hosts
    resources = {"TPU": float(chips), "CPU": WORKER_CPUS}
    progress("placing hosts", 0, config.num_hosts, f"waiting for a TPU slice {wanted.name}")
    try:
        reserved = ray_compat.tpu_slice(
            wanted.shape, wanted.generation.ray_version, resources, chips_per_host=chips, timeout_s=timeout_s
        )
    except TimeoutError as error:
        raise BackendError(
            f"no TPU slice {wanted.name} with {config.num_hosts} hosts was free within {timeout_s:g} s; "
            "add a slice or free one"
        ) from error
    except (RuntimeError, ValueError) as error:
        raise BackendError(f"TPU slice {wanted.name} can't be reserved: {first_line(error)}") from error
    return _Slice(reserved, resources)


def _slice_seats(nodes: Sequence[ray_compat.Node]) -> tuple[Seat, ...]:
    """Seats in the order of the slice's own host numbers.

    Raises:
        BackendError: these are not 0, 1, 2, …
    """
    by_id: dict[int, tuple[int, ray_compat.Node]] = {}
    for bundle, node in enumerate(nodes):
        label = node.labels.get(WORKER_ID, "")
        if not label.isdecimal():
            raise BackendError(f"node {node.ip} of a TPU slice has no TPU_WORKER_ID: its label {WORKER_ID} is missing")
        if int(label) in by_id:
            other, name = by_id[int(label)][1], node.labels.get(SLICE_NAME, "without a name")
            raise BackendError(
                f"nodes {other.ip} and {node.ip} of TPU slice {name} both have TPU_WORKER_ID={label}; "
                "give each host of a slice a number of its own"
            )
        by_id[int(label)] = bundle, node
    if sorted(by_id) != list(range(len(nodes))):
        raise BackendError(f"the hosts of a TPU slice are numbered {sorted(by_id)}, not 0 to {len(nodes) - 1}")
    ordered = [by_id[rank] for rank in range(len(nodes))]
    names = ",".join(node.ip for _, node in ordered)
    return tuple(
        Seat(
            rank=rank,
            bundle=bundle,
            node_id=node.id,
            node_ip=node.ip,
            environment={"TPU_WORKER_ID": str(rank), "TPU_WORKER_HOSTNAMES": names},
        )
        for rank, (bundle, node) in enumerate(ordered)
    )


# -- Neuron hosts and CPUs


def _reserve_neuron(config: EngineConfig) -> Reservation:
    cores = config.tensor_parallel_size // config.num_hosts
    labels = {ACCELERATOR: NEURON}
    if config.topology is not None:
        named = _named(config.topology)
        if not isinstance(named, NeuronInstance):
            raise BackendError(f"topology={config.topology} is no Neuron instance; name one, such as trn1.32xlarge")
        if cores > named.num_devices:
            raise BackendError(
                f"topology={config.topology} has {named.num_devices} NeuronCores; tensor_parallel_size="
                f"{config.tensor_parallel_size} on num_hosts={config.num_hosts} asks for {cores} of each host"
            )
        labels[INSTANCE_TYPE] = named.name
    resources = {"neuron_cores": float(cores), "CPU": WORKER_CPUS}
    bundles = [dict(resources) for _ in range(config.num_hosts)]
    group = ray_compat.placement_group(bundles, strategy="STRICT_SPREAD", labels=[labels] * config.num_hosts)
    return _Group(group, resources)


def _reserve_cpus(config: EngineConfig) -> Reservation:
    bundles = [{"CPU": WORKER_CPUS} for _ in range(config.num_hosts)]
    return _Group(ray_compat.placement_group(bundles, strategy="SPREAD"), bundles[0])


def _cpu_environment(config: EngineConfig) -> dict[str, str]:
    """XLA's CPU client has as many threads as it thinks there are processors. Simulated devices wait for each other in
    collectives and each need some, however few processors there are."""
    return {"NPROC": str(max(8, 4 * config.tensor_parallel_size // config.num_hosts))}


def _seats(nodes: Sequence[ray_compat.Node], environment: Mapping[str, str]) -> tuple[Seat, ...]:
    return tuple(
        Seat(rank=bundle, bundle=bundle, node_id=node.id, node_ip=node.ip, environment=environment)
        for bundle, node in enumerate(nodes)
    )


def _nodes_of(reservation: Reservation) -> list[ray_compat.Node]:
    """The node of each bundle."""
    nodes = {node.id: node for node in ray_compat.nodes()}
    try:
        return [nodes[node_id] for node_id in ray_compat.nodes_of_group(reservation.group)]
    except KeyError:
        raise BackendError("a node was lost while the hosts of an engine were placed") from None
