"""A gang whose hosts are processes of this machine, without Ray. Run as a program, this is one of its hosts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from cluster.gang.backend import Launcher
from cluster.gang.host import Host
from cluster.gang.wire import GangAddress
from engine.backend import HostPlace, Progress
from engine.config import EngineConfig
from tests.conftest import free_port


class ProcessLauncher(Launcher):
    leader_host = "127.0.0.1"

    def __init__(self, config: EngineConfig, log: Path) -> None:
        self._config = config
        self._log = log
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, address: GangAddress, progress: Progress) -> None:
        progress("placing hosts", self._config.num_hosts, self._config.num_hosts, "processes")
        coordinator = f"127.0.0.1:{free_port()}"
        for rank in range(self._config.num_hosts):
            words = [address.host, str(address.port), address.secret, coordinator, str(rank)]
            command = [sys.executable, "-m", __name__, *words, self._config.model_dump_json()]
            with (self._log.with_suffix(f".{rank}")).open("wb") as log:
                environment = {**os.environ, "NPROC": "8"}
                self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)


def main(words: list[str]) -> None:
    from backends import create_backend
    from cluster.gang.worker import end_process

    host, port, secret, coordinator, rank, options = words
    config = EngineConfig.model_validate_json(options)
    place = HostPlace(rank=int(rank), num_hosts=config.num_hosts, coordinator=coordinator)
    address = GangAddress(host=host, port=int(port), secret=secret)
    Host(address, place.rank, create_backend(config, place), end_process)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
