"""The hardware-neutral core: tokens in, tokens out. Imports no ray, no jax, no torch."""
