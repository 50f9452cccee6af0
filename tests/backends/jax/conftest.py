"""Eight simulated devices for all tests of the JAX backend: JAX can't add any once it runs."""

from __future__ import annotations

import jax

jax.config.update("jax_platforms", "cpu")  # libtpu may be installed, as a compiler
jax.config.update("jax_num_cpu_devices", 8)
jax.devices()
