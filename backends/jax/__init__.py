"""TPUs and CPUs through JAX: one decoder, paged attention, sampling on the device, ahead-of-time programs."""
