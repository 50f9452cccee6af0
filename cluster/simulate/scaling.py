"""ScalingLoop: what Serve's controller does with the autoscaling policy, in virtual time."""

from __future__ import annotations

from collections.abc import Callable

from cluster.autoscaling import Autoscaler, PoolState, ScalingOptions
from cluster.scaling_signals import SignalWindow
from cluster.simulate.replicas import Pool, Replica
from cluster.simulate.timeline import Timeline

INTERVAL_S = 1.0
"""Between two decisions, as replicas report to Serve once a second."""


class ScalingLoop:
    def __init__(self, pool: Pool, options: ScalingOptions, timeline: Timeline) -> None:
        self._pool = pool
        self._autoscaler = Autoscaler(options)
        self._timeline = timeline
        self._windows: dict[Replica, SignalWindow] = {}

    def start(self) -> None:
        self._timeline.after(INTERVAL_S, self._tick)

    def _tick(self) -> None:
        pool, now = self._pool, self._timeline.now
        ready = list(pool.ready)
        windows: dict[Replica, SignalWindow] = {}
        for replica in ready:
            windows[replica] = self._windows.get(replica) or SignalWindow(pool.model.limits)
        self._windows = windows
        state = PoolState(
            target=pool.target,
            ready=len(ready),
            open_requests=pool.num_open,
            signals=[windows[replica].signals(replica.engine.snapshot(), now) for replica in ready],
        )
        wanted = self._autoscaler.decide(state, now)
        if wanted != pool.target:
            pool.scale_to(wanted)
        self._timeline.after(INTERVAL_S, self._tick)


def repeat_failures(
    pool: Pool, timeline: Timeline, next_gap_s: Callable[[], float], pick: Callable[[int], int]
) -> None:
    """Lets replicas of a pool fail, again and again.

    Args:
        next_gap_s: seconds until one replica fails, drawn anew each time, for a pool of one.
        pick: draws one of so many replicas.
    """

    def fail() -> None:
        ready = list(pool.ready)
        if ready:
            pool.fail(ready[pick(len(ready))])
        plan()

    def plan() -> None:
        timeline.after(next_gap_s() / max(1, pool.num_ready), fail)

    plan()
