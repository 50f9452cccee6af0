"""Gangs: one engine on several hosts. The engine's replica leads, a worker on each host runs its share of the model."""
