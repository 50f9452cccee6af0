"""The catalog agrees with itself, with Ray, and with the compiler's names."""

from __future__ import annotations

import pytest
from ray._private.accelerators import neuron as ray_neuron
from ray._private.accelerators import tpu as ray_tpu

from backends.jax.slices import parse_topology
from cluster.topology import (
    GENERATIONS,
    NEURON_INSTANCES,
    NeuronInstance,
    TopologyError,
    TpuSlice,
    find_topology,
    tpu_slices,
)

SLICES = list(tpu_slices())


@pytest.mark.parametrize("chosen", SLICES, ids=lambda s: s.name)
def test_a_slice_is_found_by_both_of_its_names_and_its_hosts_add_up(chosen: TpuSlice) -> None:
    assert find_topology(chosen.name) == chosen
    assert find_topology(chosen.google_name).num_devices == chosen.num_devices
    assert chosen.num_hosts * chosen.chips_per_host == chosen.num_chips
    assert chosen.links_per_chip <= chosen.generation.ici_links


@pytest.mark.parametrize("chosen", SLICES, ids=lambda s: s.name)
def test_ray_and_the_compiler_know_every_slice(chosen: TpuSlice) -> None:
    version = chosen.generation.ray_version
    assert str(parse_topology(chosen.name)) == chosen.name
    if chosen.name == "tpu7x:1x1x1":  # GKE sells it, Ray 2.60 doesn't list it
        return
    assert chosen.shape in ray_tpu.VALID_TPU_TOPOLOGY[version]
    assert chosen.ray_pod_type == ray_tpu.infer_tpu_pod_type_from_topology(chosen.shape, f"TPU-{version}")
    assert chosen.chips_per_host == ray_tpu.get_chips_per_host(chosen.shape, version)


def test_ray_knows_the_cores_of_neuron_instances() -> None:
    for name, cores in ray_neuron.AWS_NEURON_INSTANCE_MAP.items():
        assert NEURON_INSTANCES[name].num_devices == cores


@pytest.mark.parametrize("name", list(GENERATIONS))
def test_later_numbers_follow_from_earlier_ones(name: str) -> None:
    chip = GENERATIONS[name]
    assert chip.name == name
    assert abs(chip.usable_hbm_gib / chip.hbm_gib - 1) < 0.06
    assert chip.ici_links == 2 * len(chip.shapes[0].split("x"))
    sizes = [TpuSlice(generation=chip, shape=shape).num_chips for shape in chip.shapes]
    assert sizes == sorted(set(sizes))


def test_links_are_counted_where_the_torus_closes() -> None:
    def links(name: str) -> int:
        found = find_topology(name)
        assert isinstance(found, TpuSlice)
        return found.links_per_chip

    assert [links(f"v5e:{shape}") for shape in ("1x1", "2x2", "4x4", "8x16", "16x16")] == [0, 2, 2, 3, 4]
    assert [links(f"v5p:{shape}") for shape in ("2x2x1", "2x2x2", "2x2x4", "4x4x4")] == [2, 3, 4, 6]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("v5litepod-16", "v5e:4x4"), ("V6E-8", "v6e:2x4"), ("v5p-8", "v5p:2x2x1"), ("v7x-16", "tpu7x:2x2x2")],
)
def test_other_names(name: str, expected: str) -> None:
    assert find_topology(name).name == expected


def test_neuron_instances() -> None:
    found = find_topology("trn2.48xlarge")
    assert isinstance(found, NeuronInstance)
    assert (found.num_devices, found.bytes_per_device) == (64, 24 << 30)
    assert found.ray_resources_per_host == {"neuron_cores": 64}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("v5e:3x3", "v5e:2x4"),
        ("v5e:", "v5e:16x16"),
        ("v6e-9", "v6e:2x4"),
        ("inf2.49xlarge", "inf2.48xlarge"),
        ("v5x:4x4", "v5e:4x4"),
        ("v5e:0x4", "v5e:1x1"),
        ("h100", "generations v4, v5e, v5p, v6e, tpu7x"),
    ],
)
def test_a_wrong_name_is_answered_with_near_ones(name: str, near: str) -> None:
    with pytest.raises(TopologyError) as caught:
        find_topology(name)
    assert near in str(caught.value)
    assert "\n" not in str(caught.value)
