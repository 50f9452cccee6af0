"""Compiling ahead: every step shape before the first request, in parallel, with a cache on disk, and a counter after.

Programs are lowered in the calling thread (tracing is Python) and compiled in a pool (XLA releases the GIL).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax

from backends.jax.hosts import cache_place
from engine.backend import BackendError, Progress
from engine.config import EngineConfig
from engine.errors import first_line

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"
PHASE = "compiling buckets"


def default_cache_dir() -> Path:
    """Where compiled programs and kernels are kept unless the configuration says otherwise."""
    return Path.home() / ".cache" / "sliceserve"


def cache_dir(config: EngineConfig) -> Path | None:
    """The folder for compiled programs; None when the cache is off."""
    if config.compilation_cache_dir == "none":
        return None
    return Path(config.compilation_cache_dir).expanduser() if config.compilation_cache_dir else default_cache_dir()


def programs_dir(folder: Path) -> Path:
    """Where `sliceserve compile` puts programs and servers look for them."""
    return folder / "programs"


def name_sources_alike() -> None:
    """Leaves the folder of the installation out of programs.

    Kernels carry the paths of their sources for error messages; with them, the same program would have another cache
    key in another installation. To be called before anything is traced.
    """
    jax.config.update("jax_hlo_source_file_canonicalization_regex", r"^.*/(?=backends/jax/)|^.*/site-packages/")


def enable_persistent_cache(folder: Path | None, devices: Sequence[jax.Device] = ()) -> None:
    """Makes XLA keep its programs in `folder`, small and quick ones too.

    Each set of devices has a folder of its own there: JAX's keys don't tell them apart well enough, and reading a
    program of other devices has crashed (jax issue 38004).
    """
    name_sources_alike()
    jax.config.update("jax_compilation_cache_dir", str(folder / "xla" / cache_place(devices)) if folder else None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def compiler_options(device: jax.Device) -> dict[str, bool | str]:
    """Options of XLA that programs for this kind of device need."""
    if device.platform == "tpu" and "7x" in device.device_kind.lower():
        # Else the compiler prefers tiles of 16 rows for bfloat16 weights, which come in tiles of 8 as all arrays do,
        # and every step begins with a copy of all weights into the other tiles (seen in programs of libtpu 0.0.42).
        return {"xla_tpu_control_large_2nd_minor_layout_for_x16": False}
    return {}


class CompilationCounter:
    """Counts XLA compilations in this process from the moment it is armed, and before it what the cache spared."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed = False
        self._count = 0
        self._cached = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        jax.monitoring.register_event_listener(self._on_cache_event)

    def arm(self) -> None:
        self._armed = True

    @property
    def count(self) -> int:
        return self._count

    @property
    def cached(self) -> int:
        """Programs that came from the persistent cache so far."""
        return self._cached

    def close(self) -> None:
        self._armed = False

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:  # noqa: ARG002
        if self._armed and event == COMPILE_EVENT:
            with self._lock:
                self._count += 1

    def _on_cache_event(self, event: str, **_: str | int) -> None:
        if event == CACHE_HIT_EVENT:
            with self._lock:
                self._cached += 1


def compile_program(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles one program.

    Raises:
        BackendError: the compiler refuses it, for lack of memory or otherwise; one line.
    """
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        raise BackendError(_compile_problem(error)) from error


def compile_all(
    lowered: Iterable[tuple[Any, Callable[[], jax.stages.Lowered]]],
    total: int,
    threads: int,
    progress: Progress,
    obtain: Callable[[jax.stages.Lowered], Any] = compile_program,
) -> Mapping[Any, Any]:
    """Lowers each (key, lower()) here and compiles in a pool of threads.

    Args:
        obtain: makes the program from what was lowered.

    Returns:
        What `obtain` returned, by key.
    """
    programs: dict[Any, Any] = {}
    with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
        futures = {}
        for key, lower in lowered:
            futures[pool.submit(obtain, lower())] = key
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                programs[futures[future]] = future.result()
                progress(PHASE, done, total)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # a failure is told before minutes of other programs
            raise
    return programs


def _compile_problem(error: Exception) -> str:
    """The compiler's refusal in one line."""
    text = str(error)
    size = r"([\d.]+[KMGT])"
    used = re.search(rf"Used {size} of {size} hbm|required .*\({size}\) exceeds available HBM \({size}\)", text)
    if used:
        needed, available = filter(None, used.groups())
        return (
            f"the program needs {needed}iB of {available}iB HBM per chip; "
            "use fewer KV blocks, more chips or int8 weights"
        )
    return f"the compiler refuses the program: {first_line(error)}"
