"""Programs for slices that are not here: names, errors, one whole model, and programs that travel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from backends.jax.aot import report_on
from backends.jax.backend import JaxBackend
from backends.jax.compilation import programs_dir
from backends.jax.program_store import ProgramStore
from backends.jax.topology import is_harmless, open_topology, parse_topology, take_devices
from bench.compile_matrix import Case, prove
from cluster.topology import TpuSlice, tpu_slices
from engine.backend import BackendError
from engine.config import EngineConfig
from tests.backends.models import tiny_llama

needs_libtpu = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import libtpu"], capture_output=True, check=False).returncode != 0,
    reason="compiling for TPUs needs libtpu: pip install 'jax[tpu]'",
)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9:2x2", r"no TPU generation 'v9'; use v4, v5e, v5p, v6e, tpu7x"),
        ("v5e:3x3", r"no v5e slice '3x3'; use one of 1x1, 2x2"),
        ("v5e", r"no v5e slice '\(none\)'"),
        ("v5p:2x2", r"no v5p slice '2x2'; use one of .*2x2x1"),
    ],
)
def test_wrong_slices_are_refused_with_those_there_are(name: str, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        open_topology(name)


def test_other_names_of_generations_are_understood() -> None:
    assert [str(parse_topology(name)) for name in ("v5litepod:2x4", "V7X:2x2x1")] == ["v5e:2x4", "tpu7x:2x2x1"]


@needs_libtpu
@pytest.mark.parametrize(
    "topology", [slice_ for slice_ in tpu_slices() if slice_.num_chips <= 16], ids=lambda s: s.name
)
def test_the_compiler_knows_the_catalog(topology: TpuSlice) -> None:
    assert len(open_topology(topology.name)) == topology.num_devices


@needs_libtpu
def test_a_machine_without_tpu_hears_nothing_of_it() -> None:
    code = "from backends.jax.topology import open_topology; print(len(open_topology('v5e:2x2')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")


def test_other_words_on_stderr_stay() -> None:
    assert is_harmless("WARNING: could not determine TPU worker hostnames or IP addresses, please set env var")
    assert not is_harmless("E0000 internal: the compiler crashed")


@needs_libtpu
def test_a_program_beyond_the_chips_memory_is_refused_in_one_line() -> None:
    mesh = Mesh(take_devices(open_topology("v5e:1x1"), 1), ("model",))
    shape = jax.ShapeDtypeStruct((20 << 28,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    with pytest.raises(BackendError, match=r"^the program needs [\d.]+GiB of 15.75GiB HBM per chip; use fewer"):
        report_on(jax.jit(lambda x: x.sum()).lower(shape))


@needs_libtpu
def test_llama_8b_decodes_on_four_chips_near_the_minimum() -> None:
    """One case of the table in docs/tpu.md; `make test-tpu-compile` has all."""
    proof = prove(Case(model="Llama-3.1-8B", topology="v5e:2x2", tensor_parallel=4), prefill=False)
    assert proof.peak_bytes < proof.hbm_bytes
    assert 0 <= proof.over_minimum < 0.02
    assert proof.decode.temp_bytes < 0.02 * proof.hbm_bytes
    assert proof.decode.output_bytes - proof.decode.alias_bytes < 1 << 20
    assert {c.kind for c in proof.decode.collectives} == {"all-reduce"}


def lowered_sum(devices: list[jax.Device]) -> tuple[jax.stages.Lowered, NamedSharding]:
    placed = NamedSharding(Mesh(np.array(devices), ("model",)), PartitionSpec("model"))
    shape = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=placed)

    def program(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return state + x, x.sum()

    return jax.jit(program, donate_argnums=0).lower(shape, shape), placed


def test_a_stored_program_runs_on_the_devices_it_was_made_for(tmp_path: Path) -> None:
    lowered, placed = lowered_sum(jax.devices()[1:3])
    assert ProgramStore(tmp_path, jax.devices()[1:3]).load(lowered) is None
    ProgramStore(tmp_path, jax.devices()[1:3]).save(lowered, lowered.compile())
    store = ProgramStore(tmp_path, jax.devices()[1:3])
    program = store.load(lowered)
    assert program is not None
    assert store.loaded == 1
    state, x = (jax.device_put(np.full((8, 16), value, np.float32), placed) for value in (1, 2))
    total, added = program(state, x)
    assert (float(total[0, 0]), float(added)) == (3, 256)
    assert state.is_deleted()
    assert ProgramStore(tmp_path, jax.devices()[2:4]).load(lowered_sum(jax.devices()[2:4])[0]) is None


def test_a_damaged_program_is_compiled_instead(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lowered, placed = lowered_sum(jax.devices()[:2])
    store = ProgramStore(tmp_path, jax.devices()[:2])
    store.save(lowered, lowered.compile()).write_bytes(b"not a program")
    x = jax.device_put(np.ones((8, 16), np.float32), placed)
    assert float(store.load_or_compile(lowered)(x + 1, x)[1]) == 128
    assert "can't be loaded here and is compiled instead" in caplog.text
    assert store.loaded == 0


def test_a_server_finds_what_was_compiled_from_shapes_alone(tmp_path: Path) -> None:
    """What `sliceserve compile` does with a topology's devices, with this machine's."""
    options: dict[str, Any] = {"num_blocks": 16, "block_size": 8, "max_model_len": 64, "max_decode_seqs": 8}
    config = EngineConfig(
        model=str(tiny_llama(tmp_path / "model")),
        backend="cpu",
        tensor_parallel_size=2,
        attention="xla",
        compilation_cache_dir=str(tmp_path),
        **options,
    )
    backend = JaxBackend(config)
    backend.load()
    deployment = backend._deployment
    shape = deployment.step_shapes[0]
    arguments = deployment.parameter_shapes(), deployment.state_shapes(16), deployment.table_shapes()
    lowered = deployment.lower(shape, *arguments)
    ProgramStore(programs_dir(tmp_path), deployment.mesh.devices.flat).save(lowered, lowered.compile())
    store = backend._program_store()
    assert store is not None
    assert store.load(backend._lower(shape)) is not None
    backend.close()


LOWER_ONE = """
import hashlib
import jax
from backends.jax.deployment import Deployment
from backends.jax.sharding import create_mesh
from engine.config import EngineConfig
from tests.backends.jax.configs import LLAMA_8B

jax.config.update("jax_platforms", "cpu")
config = EngineConfig(max_model_len=64, max_decode_seqs=8)
deployment = Deployment(config, LLAMA_8B, create_mesh(jax.devices()), kernels="xla")
arguments = deployment.parameter_shapes(), deployment.state_shapes(16), deployment.table_shapes()
text = deployment.lower(deployment.step_shapes[0], *arguments).as_text()
print(hashlib.sha256(text.encode()).hexdigest())
"""


def test_step_programs_are_the_same_in_every_process() -> None:
    """Or a warm start would find none of them: sets of strings have another order in each process."""
    texts = [
        subprocess.run(
            [sys.executable, "-c", LOWER_ONE],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert texts[0] == texts[1] != ""
