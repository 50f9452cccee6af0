"""Starts a server, puts `sliceserve bench` on it, stops it: what the measurements in this folder share.

In a comparison every server gets the same prompts in the same order from the same client, one server at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LEVELS = (1, 8, 32, 64)
STOP_DEADLINE_S = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A server to measure: its name in the table and how to start it on `port`."""

    name: str
    command: Sequence[str]
    port: int
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def serving(port: int, *flags: str) -> Peer:
    """Ours, as a user starts it."""
    command = [sys.executable, "-m", "cluster.cli.main", "serve", f"--port={port}", *flags]
    return Peer(name="sliceserve", command=command, port=port)


def sliceserve(model: Path, port: int, extra: Sequence[str] = ()) -> Peer:
    """Ours with a model that it is compared by."""
    return serving(port, f"--model={model}", "--dtype=bfloat16", "--max_model_len=2048", *extra)


@contextlib.contextmanager
def running(peer: Peer, *, start_deadline_s: float) -> Iterator[None]:
    """Starts the peer's server and stops it afterwards.

    Raises:
        SystemExit: it died or was not ready in time; the log's end is in the message.
    """
    with tempfile.NamedTemporaryFile(prefix=f"{peer.name}-", suffix=".log", delete=False) as log:
        environment = {**os.environ, **peer.env}
        process = subprocess.Popen(peer.command, stdout=log, stderr=log, env=environment, start_new_session=True)
    print(f"{peer.name}: starting on port {peer.port} (log: {log.name})", flush=True)
    try:
        _wait_ready(peer, process, Path(log.name), time.monotonic() + start_deadline_s)
        yield
    finally:
        _stop(process)


def measure(
    peer: Peer, levels: Sequence[int], *, prompt_tokens: int, output_tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Runs the bench and returns one record per level (see cluster.cli.bench.report.LevelReport)."""
    reports: list[dict[str, Any]] = []
    for level in levels:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            command = [sys.executable, "-m", "cluster.cli.main", "bench", f"--url={peer.url}", "--ignore_eos"]
            command += [f"--concurrency={level}", f"--requests={max(rounds * level, 4)}", f"--seed={level}"]
            command += [f"--prompt_tokens={prompt_tokens}", f"--output_tokens={output_tokens}", f"--json={result}"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=3600)
            reports += json.loads(result.read_text())["levels"]
        print(
            f"{peer.name}: {level:3d} at a time: {reports[-1]['output_tokens_per_s']:8.1f} output tokens/s", flush=True
        )
    return reports


def _wait_ready(peer: Peer, process: subprocess.Popen[bytes], log: Path, deadline: float) -> None:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{peer.name} ended while starting:\n{_tail(log)}")
        if _lists_a_model(peer):
            return
        time.sleep(1)
    raise SystemExit(f"{peer.name} was not ready in time:\n{_tail(log)}")


def _lists_a_model(peer: Peer) -> bool:
    try:
        with urllib.request.urlopen(f"{peer.url}/v1/models", timeout=5) as response:
            return bool(json.load(response).get("data"))
    except (OSError, ValueError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asks politely, then ends the whole process group: some servers leave workers behind."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_DEADLINE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_DEADLINE_S)


def _tail(log: Path, lines: int = 8) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
