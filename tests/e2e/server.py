"""The real command line as a process of its own, serving the demo model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import options as test_options
from tests.conftest import free_port

START_S = 600.0
STOP_S = 60.0


@contextmanager
def demo_server(log: Path, *options: str) -> Iterator[str]:
    """Runs `sliceserve serve` with these options until the end; gives its address once it is ready."""
    port = free_port()
    size = f"--tensor_parallel_size={test_options.tensor_parallel_size}"
    command = [str(Path(sys.executable).parent / "sliceserve"), "serve", f"--port={port}", size, *options]
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while "ready at" not in log.read_text():
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
        assert server.poll() is None, "the server died during the tests"
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            raise
