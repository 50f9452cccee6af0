"""Launcher: who starts the processes of a gang, reaches them for KV, which goes beside the lines, and ends them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future

from cluster.gang.kv import KVOfHosts
from cluster.sockets import LineAddress
from engine.backend import Progress
from engine.kv_blocks import KVPayload


class Launcher(KVOfHosts):
    leader_host: str
    """This process' address as the hosts reach it."""

    @abstractmethod
    def start(self, address: LineAddress, progress: Progress) -> None:
        """Starts one process for each host, each of which connects to `address` as `cluster.gang.host.Host`.

        Raises:
            BackendError: there is no place for them, or one does not start; one line.
        """

    @abstractmethod
    def deliver(
        self, keys: Sequence[int], by_host: Sequence[Sequence[KVPayload]], timeout_s: float
    ) -> Sequence[Future[None]]:
        """Has each host fetch the payloads that are meant for it, to be written by commands that name their keys.

        Does not wait. The futures end when the hosts have them or have given up, and raise KVLostError or what else
        keeps a host from it.
        """

    @abstractmethod
    def kill(self) -> None:
        """Ends all processes at once, wherever they hang, and gives their place back. May be called more than once."""
