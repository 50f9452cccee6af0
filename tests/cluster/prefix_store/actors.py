"""Actors of prefix stores on the session's Ray."""

from __future__ import annotations

import ray

from cluster.prefix_store.actor import NAMESPACE, actor_name


def store_exists(application: str) -> bool:
    try:
        ray.get_actor(actor_name(application), namespace=NAMESPACE)
    except ValueError:
        return False
    return True
